"""`suture data` and `suture vocab`: check or simulate a site's data, or make a vocabulary of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from suture.cli.common import Device, JobName, Sets, Trust, console, job_with, print_line
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.escaping import number_of
from suture.core.files import atomic_write

Tokeniser = Literal["unicode", "pmfl"]
"""As `suture.data.text.Tokeniser`, without the time that its import takes."""

data_app = typer.Typer(name="data", help="Check a site's data, or simulate some.", no_args_is_help=True)


@data_app.command()
def simulate(
    job: JobName,
    out: Annotated[Path, typer.Option(help="Folder to write the sites into.")],
    settings: Sets = None,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Write the sites of a job's simulation as hospital folders, for a POC on this machine.

    `hospitals` in place of a job writes three hospitals with tables as real ones have them, for the tutorial.
    """
    from suture.execution.run import claim
    from suture.execution.sites import compute_on
    from suture.execution.study import StudySites

    compute_on(device)
    if job == "hospitals":
        from suture_synthetic.untidy_hospitals import write_untidy_hospitals

        claim(out)
        write_untidy_hospitals(out)
        return
    chosen = job_with(job, settings, trust)
    if chosen.simulation is None or isinstance(chosen.simulation, StudySites):
        raise ConfigError(f"{chosen.name} does not simulate its sites; use the folders of its study")
    out = out.resolve()
    claim(out)
    names = chosen.simulation.prepare(out, out, chosen.seed, chosen.method)
    for name in [*names, "server"]:
        print_line(f"{out / name / 'suture.toml'}")


@data_app.command()
def check(config: Annotated[Path, typer.Argument(help="A site's suture.toml.")]) -> None:
    """Check a site's configuration and data: counts, unreadable images, empty classes, split leaks."""
    from suture.data.config import load_site_config
    from suture.execution.exact_figures import forecast
    from suture_prepare.quality import check as check_data
    from suture_prepare.quality import render

    site = load_site_config(config)
    findings = check_data(site)
    console.print(render(findings))
    for line in forecast(site):
        print_line(f"in a federation it would send of {line}")
    if findings.problems:
        problems = number_of(len(findings.problems), "problem")
        raise SutureError(f"{config}: {problems}; correct the data before you take part")


def vocab(
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, one word a line.")],
    data: Annotated[Path | None, typer.Option(help="A suture.toml whose data are text.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="With --data: validation and test documents too.")
    ] = False,
    texts: Annotated[Path | None, typer.Option(help="A file of documents, one a line.")] = None,
    minimum: Annotated[int, typer.Option(min=1, help="Minimum number of occurrences of a word.")] = 1,
    patients: Annotated[
        int,
        typer.Option(min=1, help="Minimum number of patients that have a word; of --texts, of documents."),
    ] = 5,
    tokeniser: Annotated[Tokeniser, typer.Option(help="model.tokeniser of the job.")] = "unicode",
    order: Annotated[
        Literal["appearance", "frequency"], typer.Option(help="Order of the words in the file.")
    ] = "appearance",
) -> None:
    """Make a vocabulary from documents. Use public documents: every party receives the words."""
    from suture.data.text import EVERYBODY, OWN, build_vocabulary, count_words, coverage

    documents, whose, own = _documents(data, every, texts)
    words = build_vocabulary(documents, minimum, order, tokeniser, whose, patients)
    atomic_write(out, "".join(f"{word}\n" for word in [*([OWN] if own else []), *words.words]).encode())
    counts = count_words(documents, tokeniser)
    print_line(
        f"{len(words.words):,} of {len(counts):,} words; they are "
        f"{coverage(set(words.words).__contains__, counts):.2%} of the words of {len(documents):,} documents"
    )
    print_line(f"written: {out}")
    if own:
        print_line(f"of a site's own data: {EVERYBODY}", style="yellow")


def _documents(
    data: Path | None, every: bool, texts: Path | None
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the documents of a site, or those of a file; their patients; and whether they are a site's own.

    Raises:
        ConfigError: neither of the two is given, or both are.
        DataError: they cannot be read, or there is no document.
    """
    from suture.data.config import load_site_config
    from suture.data.readers import load_table
    from suture.data.readers.hospital import HospitalConfig
    from suture.data.reading import read_text

    if (data is None) == (texts is None):
        raise ConfigError("give the documents with either --data or --texts")
    whose, own = tuple[str, ...](), False
    if texts is not None:
        found = tuple(line for line in read_text(texts).splitlines() if line.strip())
    elif data is not None:
        config = load_site_config(data).data
        table = load_table(config)
        table = table if every else table.of("train")
        if table.texts is None:
            raise DataError(f"{data}: the data are images; a vocabulary needs text")
        found, whose, own = table.texts, table.patients, isinstance(config, HospitalConfig)
    if not found:
        raise DataError(f"{texts or data} contains no documents")
    return found, whose, own
