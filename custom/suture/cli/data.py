"""`suture data` and `suture vocab`: check, plot or simulate a site's data, or make a vocabulary of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from suture.cli.common import (
    Device,
    JobName,
    Sets,
    Trust,
    console,
    job_with,
    load_sources,
    print_line,
    renamed,
)
from suture.core.errors import ConfigError, DataError, SutureError

data_app = typer.Typer(help="A site's own data.", no_args_is_help=True)


class Per(StrEnum):
    """The unit in which classes are counted."""

    patient = "patient"
    image = "image"


@data_app.command()
def simulate(
    job: JobName,
    out: Annotated[Path, typer.Option(help="Folder to write the sites into.")],
    settings: Sets = None,
    device: Device = None,
    trust: Trust = False,
) -> None:
    """Write the sites of a job's simulation as ordinary hospital folders, for a POC on this machine."""
    from suture.simulation import StudySites
    from suture.simulation.run_files import claim
    from suture.simulation.sites import compute_on

    compute_on(device)
    chosen = job_with(job, settings, trust)
    if chosen.simulation is None or isinstance(chosen.simulation, StudySites):
        raise ConfigError(f"{chosen.name} simulates no sites; those of a study are folders already")
    out = out.resolve()
    claim(out)
    names = chosen.simulation.prepare(out, out, chosen.seed, chosen.method)
    for name in [*names, "server"]:
        print_line(f"{out / name / 'suture.toml'}")


@data_app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A site's suture.toml.")],
) -> None:
    """Check a site's configuration and data: counts, unreadable images, empty classes, split leaks."""
    from suture.core.printable import number_of
    from suture.data.config import load_site_config
    from suture.data.quality import check as check_data
    from suture.data.quality import render

    findings = check_data(load_site_config(config))
    console.print(render(findings))
    if findings.problems:
        problems = number_of(len(findings.problems), "problem")
        raise SutureError(f"{config}: {problems}; correct the data before you take part")


@data_app.command()
def plot(
    configs: Annotated[
        list[Path],
        typer.Argument(help="The suture.toml of each data set, or a file of its own name: nih.toml."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    per: Annotated[Per, typer.Option(help="Unit in which classes occur together.")] = Per.patient,
) -> None:
    """Plot how often each class occurs in some data sets, and which classes occur together in each."""
    from suture.core.files import atomic_write, make_folder
    from suture.data.readers import load_table
    from suture.reports.cooccurrence import Unit, cooccurrence, frequencies, unit_of
    from suture.reports.plots import plot_cooccurrence, plot_frequencies

    tables = {name: load_table(config.data) for name, config in load_sources(configs).items()}
    make_folder(out)
    plots = {"frequencies.svg": plot_frequencies({name: frequencies(t) for name, t in tables.items()})}
    for name, table in tables.items():
        unit: Unit = "image" if per is Per.image else unit_of(table)
        shares = cooccurrence(table, per=unit)
        plots[f"cooccurrence-{name}.svg"] = plot_cooccurrence(table.labels.names, shares, name, unit)
    for file, content in plots.items():
        atomic_write(out / file, content)
        print_line(f"written: {out / file}")


renamed(data_app, "draw", "data plot")


def vocab(
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, one word a line.")],
    data: Annotated[Path | None, typer.Option(help="A suture.toml whose data are text.")] = None,
    every: Annotated[bool, typer.Option("--every", help="With --data: its test documents too.")] = False,
    texts: Annotated[Path | None, typer.Option(help="A file of documents, one a line.")] = None,
    minimum: Annotated[int, typer.Option(min=1, help="Least number of occurrences of a word.")] = 1,
    order: Annotated[
        Literal["appearance", "frequency"], typer.Option(help="Order of the words in the file.")
    ] = "appearance",
) -> None:
    """Make a vocabulary from documents. Use public documents: every party receives it."""
    from suture.core.files import atomic_write, make_folder
    from suture.data.text import build_vocabulary, counted, coverage

    documents = _documents(data, every, texts)
    words = build_vocabulary(documents, minimum, order)
    make_folder(out.parent)
    atomic_write(out, "".join(f"{word}\n" for word in words.words).encode())
    counts = counted(documents)
    print_line(
        f"{len(words.words)} words of {len(counts)}; they are {coverage(words, counts):.2%} of the "
        f"{counts.total()} tokens of {len(documents)} documents"
    )
    print_line(f"written: {out}")


def _documents(data: Path | None, every: bool, texts: Path | None) -> tuple[str, ...]:
    """Return the documents of a site, or those of a file.

    Raises:
        ConfigError: neither of the two is given, or both are.
        DataError: they cannot be read, or there is no document.
    """
    from suture.data.config import load_site_config
    from suture.data.readers import load_table
    from suture.data.reading import read_text

    if (data is None) == (texts is None):
        raise ConfigError("give the documents as --data or as --texts, one of the two")
    if texts is not None:
        found = tuple(line for line in read_text(texts).splitlines() if line.strip())
    elif data is not None:
        table = load_table(load_site_config(data).data)
        read = (table if every else table.of("train")).texts
        if read is None:
            raise DataError(f"{data}: its data are images; a vocabulary is made of text")
        found = read
    if not found:
        raise DataError(f"{texts or data} holds no document to make a vocabulary of")
    return found
