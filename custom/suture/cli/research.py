"""Commands on saved models and tables of papers: predict, evaluate, compare, relate, latent, experiment."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from suture.cli.machine import Amp, Device, ModelDevice, SiteThreads, device_of

console = Console()


class Part(StrEnum):
    """A split of a data set."""

    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    model: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    data: Annotated[Path, typer.Argument(help="A suture.toml that describes the labelled data.")],
    split: Annotated[Part, typer.Option(help="Which images.")] = Part.test,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="JSON to write.")] = None,
    scores: Annotated[Path | None, typer.Option(help="CSV to write: labels and probabilities.")] = None,
    device: ModelDevice = None,
) -> None:
    """Measure a saved model on labelled data: AUROC of every class, with its interval."""
    from suture.core.files import write_json
    from suture.data.config import load_site_config
    from suture.learning.saved_models import as_metrics, write_scores
    from suture.learning.saved_models import evaluate as evaluate_model
    from suture.reports.formatting import area, count, interval

    where = device_of(device)
    done = evaluate_model(model, load_site_config(data), split.value, where)
    table = Table(title=f"{count(len(done.patients))} images", title_justify="left", show_edge=False)
    table.add_column("Class")
    for head in ("AUROC", "95 % CI", "Positives"):
        table.add_column(head, justify="right")
    for name, score in done.classes.items():
        bounds = None if score.low is None or score.high is None else (score.low, score.high)
        table.add_row(name, area(score.auroc), interval(bounds), count(score.positives))
    of_mean = interval(done.interval) if done.interval else ""
    table.add_row("[bold]Mean ± SD", f"[bold]{area(done.mean)} ± {area(done.spread)}", of_mean, "")
    table.add_row("[bold]Loss (cross-entropy)", f"[bold]{area(done.loss)}", "", "")
    console.print(table)
    if done.unlearned:
        console.print(f"the mean is undefined: the model has not learned {', '.join(done.unlearned)}")
    if out:
        write_json(out, as_metrics(done))
    if scores:
        write_scores(done, scores)


def compare(
    first: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    second: Annotated[Path, typer.Argument(help="That of another.")],
    data: Annotated[Path, typer.Argument(help="A suture.toml that describes the labelled data.")],
    split: Annotated[Part, typer.Option(help="Which images.")] = Part.test,
    device: ModelDevice = None,
) -> None:
    """Compare two saved models on the same images: AUROC of every class, with p of a paired bootstrap."""
    from suture.data.config import load_site_config
    from suture.learning.comparison import compare as compare_models
    from suture.reports.formatting import area

    title = "AUROC (95 % CI), difference first - second, p"
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("Class")
    for head in ("first", "second", "difference (95 % CI)", "p"):
        table.add_column(head, justify="right")
    where, config = device_of(device), load_site_config(data)
    for name, one in compare_models(first, second, config, split.value, where).items():
        d = one.difference
        scores = [f"{area(s.auroc)} {_bounds(s.low, s.high)}" for s in (one.a, one.b)]
        change = f"{d.difference:+.3f} {_bounds(d.low, d.high)}" if d.difference == d.difference else "—"
        table.add_row(name, *scores, change, "—" if d.p != d.p else "<.001" if d.p < 0.001 else f"{d.p:.3f}")
    console.print(table)


def relate(
    model: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    data: Annotated[
        list[Path], typer.Argument(help="The suture.toml of the images; more for thresholds it cannot give.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="SVG to write.")],
    pair: Annotated[
        list[str] | None, typer.Option(help="Two classes, 'Mass:Lung Lesion'; by default those of the paper.")
    ] = None,
    split: Annotated[Part, typer.Option(help="Which images.")] = Part.test,
    device: ModelDevice = None,
) -> None:
    """Draw how a model's predictions of related classes go together."""
    from suture.core.errors import ConfigError
    from suture.core.files import atomic_write
    from suture.data.config import load_site_config
    from suture.reports.cooccurrence import RELATED
    from suture.reports.cooccurrence import relate as relate_classes
    from suture.reports.plots import plot_contingencies

    for text in pair or ():
        if text.count(":") != 1:
            raise ConfigError(f"--pair {text!r} is no pair; write 'First Class:Second Class'")
    pairs = [(a.strip(), b.strip()) for a, b in (text.split(":") for text in pair or ())] or RELATED
    found = relate_classes(model, [load_site_config(p) for p in data], split.value, pairs, device_of(device))
    for one in found:
        console.print(f"P({one.second} | {one.first}) = {one.second_given_first:.2f}", highlight=False)
        console.print(f"P({one.first} | {one.second}) = {one.first_given_second:.2f}", highlight=False)
        if one.why:
            console.print(one.why, style="yellow", highlight=False)
    atomic_write(out, plot_contingencies(found))
    console.print(f"written: {out}", soft_wrap=True, highlight=False)


def latent(
    model: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    data: Annotated[
        list[Path],
        typer.Argument(help="The suture.toml of each source, or a file of its own name: nih.toml."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="SVG to write.")],
    images: Annotated[int, typer.Option(min=3, help="At most so many of each source.")] = 500,
    split: Annotated[Part, typer.Option(help="Which images.")] = Part.test,
    seed: int = 1,
    device: ModelDevice = None,
) -> None:
    """Draw a model's features of images of several sources in two dimensions (t-SNE)."""
    from suture.cli.sources import load_sources
    from suture.core.files import atomic_write
    from suture.reports.plots import latent as draw

    atomic_write(out, draw(model, load_sources(data), split.value, images, seed, device_of(device)))
    console.print(f"written: {out}", soft_wrap=True, highlight=False)


def _bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None or low != low else f"({low:.3f}, {high:.3f})"


def experiment(
    name: Annotated[str, typer.Argument(help="A name in experiments/, or a path.")],
    preset: Annotated[str | None, typer.Option(help="A preset; by default the first.")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the data sets.", envvar="SUTURE_DATA")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/experiments"),
    results: Annotated[Path, typer.Option(help="Folder of tables and kept figures.")] = Path("docs/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    device: Device = None,
    site_threads: SiteThreads = None,
    amp: Amp = False,
    render: Annotated[bool, typer.Option("--render", help="Only render what is there.")] = False,
) -> None:
    """Do the missing runs of a paper's table or figure, and render it."""
    from suture.experiments.by_class import compare_rows
    from suture.experiments.conduct import collect, conduct
    from suture.experiments.loading import load_experiment
    from suture.experiments.plots import write_plots
    from suture.experiments.pool import Place
    from suture.experiments.render import stem_of, write_tables
    from suture.experiments.testing import absent_tests
    from suture.simulation.machine import compute_on

    chosen = load_experiment(name)
    size = chosen.preset(preset)
    kept, stem = results / "runs", Path(name).stem
    work, root = work.resolve(), data_root.resolve() if data_root else None
    if not render:
        compute_on(device, site_threads, amp)
        conduct(chosen, size, kept, work, root, jobs, _say)
    try:
        if not render:
            place = Place(kept, work, root, absent_tests(chosen.tests, root), _say)
            write_plots(chosen, size, place, results, stem_of(chosen, size, stem))
            compare_rows(chosen, size, place)
    finally:  # a drawing that cannot be made costs no table
        for path in write_tables(chosen, size, collect(chosen, size, kept), results, stem):
            console.print(f"written: {path}", soft_wrap=True, highlight=False)


def _say(line: str) -> None:
    console.print(f"{datetime.now():%H:%M:%S} {line}", soft_wrap=True, highlight=False)


def predict(
    model: Annotated[Path, typer.Argument(help="The model/ folder of a run.")],
    source: Annotated[
        Path,
        typer.Argument(
            help="An image, a folder of images or a CSV with an image column; or .txt files, or a CSV with a "
            "text column."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="CSV to write.")],
    device: ModelDevice = None,
) -> None:
    """Write one probability per class for each image or document."""
    from suture.learning.prediction import predict_to_csv

    count, skipped = predict_to_csv(model, source, out, device_of(device))
    for name in skipped:
        console.print(f"skipped, unreadable: {name}", style="yellow", highlight=False)
    console.print(f"{count} predicted: {out}")
