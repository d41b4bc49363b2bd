"""`suture evaluate` and `suture experiment`."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
    device: str = "cpu",
) -> None:
    """Measure a saved model on labelled data: AUROC of every class, with its interval."""
    from suture.config import load_site_config
    from suture.evaluating import as_metrics, write_scores
    from suture.evaluating import evaluate as evaluate_model
    from suture.evaluation.formats import area, count, interval
    from suture.files import write_json

    done = evaluate_model(model, load_site_config(data), split.value, device)
    table = Table(title=f"{count(len(done.patients))} images", title_justify="left", show_edge=False)
    table.add_column("Class")
    for head in ("AUROC", "95 % CI", "Positives"):
        table.add_column(head, justify="right")
    for name, score in done.classes.items():
        bounds = None if score.low is None or score.high is None else (score.low, score.high)
        table.add_row(name, area(score.auroc), interval(bounds), count(score.positives))
    table.add_row("[bold]Mean", f"[bold]{area(done.mean)}", "", "")
    console.print(table)
    if done.unlearned:
        console.print(f"the mean is undefined: the model has not learned {', '.join(done.unlearned)}")
    if out:
        write_json(out, as_metrics(done))
    if scores:
        write_scores(done, scores)


def experiment(
    name: Annotated[str, typer.Argument(help="A name in experiments/, or a path.")],
    preset: Annotated[str | None, typer.Option(help="A preset; by default the first.")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the data sets.", envvar="SUTURE_DATA")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/experiments"),
    results: Annotated[Path, typer.Option(help="Folder of tables and kept figures.")] = Path("docs/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each of one torch thread.")] = 2,
    render: Annotated[bool, typer.Option("--render", help="Only render what is there.")] = False,
) -> None:
    """Do the missing runs of a paper's table or figure, and render it."""
    from suture.experiment.conduct import collect, conduct
    from suture.experiment.render import write_tables
    from suture.experiment.spec import load_experiment

    chosen = load_experiment(name)
    size = chosen.preset(preset)
    kept = results / "runs"
    if not render:
        root = data_root.resolve() if data_root else None
        conduct(chosen, size, kept, work.resolve(), root, jobs, _say)
    for path in write_tables(chosen, size, collect(chosen, size, kept), results, Path(name).stem):
        console.print(f"written: {path}", soft_wrap=True, highlight=False)


def _say(line: str) -> None:
    console.print(f"{datetime.now():%H:%M:%S} {line}", soft_wrap=True, highlight=False)
