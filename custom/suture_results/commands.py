"""Commands on saved models: predict, evaluate, compare, decide, explain and finetune."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from suture.cli.common import Json, ModelDevice, bar, console, device_of, emit, plain_table, print_line
from suture.core.entry_points import needed
from suture.core.errors import ConfigError, DataError
from suture.core.escaping import number_of, rich
from suture.core.files import write_json
from suture_results.run_options import MaxFailed, Model, figures_table, parse_number_map

if TYPE_CHECKING:
    from pandas import DataFrame

    from suture_results.inputs import Inputs

Labelled = Annotated[
    Path, typer.Argument(help="Labelled data: a suture.toml, or a table or folder as for suture init.")
]
Chosen = Annotated[
    Literal["train", "validation", "test", "all"] | None,
    typer.Option("--split", help="Which images; by default all where the table has no splits."),
]
Patients = Annotated[
    Literal["mean", "max"] | None,
    typer.Option(help="Score patients by the mean or the largest probability of their images."),
]

_SHOWN = 5
"""Files that are named on the terminal."""


def evaluate(
    model: Model,
    data: Labelled,
    split: Chosen = None,
    per_patient: Patients = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="JSON to write.")] = None,
    scores: Annotated[Path | None, typer.Option(help="CSV to write: labels and probabilities.")] = None,
    device: ModelDevice = None,
    as_json: Json = False,
) -> None:
    """Measure a saved model on labelled data: AUROC of every class, with its interval."""
    from suture.protocol.messages import few
    from suture_results import actions
    from suture_results.formatting import FEW_NOTE, area, count, interval
    from suture_results.saved_models import as_metrics, write_scores

    done = actions.evaluate(model, data, split, per_patient=per_patient, device=device_of(device))
    if out:
        write_json(out, as_metrics(done))
    if scores:
        write_scores(done, scores)
    if as_json:
        emit("evaluate", as_metrics(done))
        return
    what = "patients" if per_patient else _read_by(model)
    table = figures_table(f"{count(len(done.patients))} {what}", "AUROC", "95 % CI", "Positives")
    defined = {name: s for name, s in done.classes.items() if s.auroc is not None}
    of_few = [name for name, s in defined.items() if few(s.positives, s.negatives)]
    for name, score in done.classes.items():
        bounds = None if score.low is None or score.high is None else (score.low, score.high)
        marked = area(score.auroc) + " (few)" * (name in of_few)
        table.add_row(name, marked, interval(bounds), count(score.positives))
    of_mean = interval(done.interval) if done.interval else ""
    table.add_row("[bold]Mean ± SD", f"[bold]{area(done.mean)} ± {area(done.spread)}", of_mean, "")
    table.add_row("[bold]Loss (cross-entropy)", f"[bold]{area(done.loss)}", "", "")
    console.print(table)
    if of_few:
        print_line(FEW_NOTE)
    if done.unlearned:
        print_line(f"the mean is undefined: the model has not learned {', '.join(done.unlearned)}")
    if done.others:
        print_line(f"not compared, because the data do not label them: {', '.join(done.others)}")
    for path in filter(None, (out, scores)):
        print_line(f"written: {path}")


def compare(
    first: Model,
    second: Model,
    data: Labelled,
    split: Chosen = None,
    per_patient: Patients = None,
    device: ModelDevice = None,
    page: Annotated[Path | None, typer.Option(help="Also write the comparison as a page (HTML).")] = None,
    as_json: Json = False,
) -> None:
    """Compare two saved models on the same images: AUROC of every class, with p of a paired bootstrap."""
    from suture_results import actions
    from suture_results.comparison import MEAN
    from suture_results.comparison_page import verdict, write_comparison

    found = actions.compare(first, second, data, split, per_patient=per_patient, device=device_of(device))
    if as_json:
        emit("compare", found)
        return
    runs = [folder.parent if folder.name == "model" else folder for folder in (first, second)]
    names = [run.name if runs[0].name != runs[1].name else str(run) for run in runs]
    lines = found.lines()
    what = f"AUROC of {names[0]} against {names[1]}"
    said = f"{verdict(what, lines[:-1])} Mean difference: {lines[-1].shown} ({lines[-1].bounds})"
    print_line(said, style="bold")
    table = plain_table("class", *map(rich, names), "difference (95 % CI)", "p (Holm)")
    for line in lines:
        areas = (value.partition(" ")[0] for value in line.values)
        table.add_row(rich(line.name), *areas, f"{line.shown} ({line.bounds})", line.p_value)
    console.print(table)
    if page is not None:
        write_comparison(
            page,
            lines,
            title=" against ".join(names),
            verdict=said,
            what="Class",
            heads=names,
            mean=MEAN,
            how=f"On the same {_read_by(first)}.",
            note="Of the first model from the second.",
        )
        print_line(f"written: {page}")


def decide(
    model: Model,
    data: Labelled,
    sensitivity: Annotated[float | None, typer.Option(help="Target sensitivity.")] = None,
    specificity: Annotated[float | None, typer.Option(help="Target specificity.")] = None,
    cost: Annotated[float | None, typer.Option(help="Cost of a missed finding, in false alarms.")] = None,
    youden: Annotated[bool, typer.Option("--youden", help="Maximise sensitivity + specificity.")] = False,
    split: Chosen = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the thresholds that the model has.")
    ] = False,
    device: ModelDevice = None,
    as_json: Json = False,
) -> None:
    """Fit the thresholds of a trained model to validation data on this machine; by default sensitivity 0.9.

    Writes them into model.json, for predict --decide and exports. Fit them on data that the model was not
    trained on, and measure it on others.
    """
    from suture_results import actions
    from suture_results.formatting import area, count

    targets = {"sensitivity": sensitivity, "specificity": specificity, "cost": cost}
    given = {key: value for key, value in targets.items() if value is not None}
    if len(given) + youden > 1:
        raise ConfigError("give one of --sensitivity, --specificity, --cost and --youden")
    rule = next(iter(given), "youden" if youden else "sensitivity")
    settings = {"rule": rule, **given}
    points = actions.decide(
        model, data, split, settings=settings, overwrite=overwrite, device=device_of(device)
    )
    if as_json:
        emit("decide", points)
        return
    heads = ("Threshold", "Sensitivity", "Specificity", "Positives", "Negatives")
    table = figures_table(f"on the {_read_by(model)} that they were fitted to", *heads)
    for name, one in points.items():
        rates = (area(one.threshold), area(one.sensitivity), area(one.specificity))
        table.add_row(name, *rates, count(one.positives), count(one.negatives))
    console.print(table)
    print_line("next: suture predict MODEL IMAGES -o FILE.csv --decide all")


def _read_by(model: Path) -> str:
    """What a model reads, in the plural."""
    from suture.models import encoder_of
    from suture.models.saved import load_spec
    from suture_results.run_options import model_folder

    return "documents" if encoder_of(load_spec(model_folder(model))).reads == "text" else "images"


def predict(
    model: Model,
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders or archives of them, tables that name them, or suture.toml files. A model "
            "of text takes .txt files, or tables with a text column."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="CSV to write.")],
    column: Annotated[
        str | None,
        typer.Option(help="Column of a table with the images or texts; by default it is detected."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Folder or archive of a table's images; by default the folder of the table."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=16,
            help="True bit depth of images stored with 16 bits; for a suture.toml, set [data] bits there.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images or documents per batch; by default 64, or fewer if they are large and on a CPU.",
        ),
    ] = None,
    max_failed: MaxFailed = 0,
    device: ModelDevice = None,
    decide: Annotated[
        str | None,
        typer.Option(
            help="Add calibrated values, and decisions by the thresholds of this site, or of 'all' sites."
        ),
    ] = None,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(
            help="'CLASS=0.02': prevalence of the class in these images; corrects calibrated values. "
            "Repeatable."
        ),
    ] = None,
    dicom_sr: Annotated[
        Path | None,
        typer.Option(
            "--dicom-sr", help="Folder for a DICOM Structured Report of the decisions on each DICOM image."
        ),
    ] = None,
) -> None:
    """Write one probability per class for each image or document.

    Unusable files, and files that are not images, are listed with the reason in OUT.left_out.csv.
    """
    from suture_results.inputs import find_inputs
    from suture_results.prediction import left_out, predict_to_csv

    decided = _decider(model, decide, prevalence or (), dicom_sr)  # raises before hours of work
    with bar() as progress:
        frame = predict_to_csv(
            model,
            sources,
            out,
            device_of(device),
            column=column,
            root=root,
            bits=bits,
            batch=batch,
            progress=progress,
            decided=decided,
        )
    _print_left_out(frame, left_out(out))
    print_line(f"{len(frame):,} predicted: {out}")
    inputs = find_inputs(sources, "image", column, root, bits)
    refused = _write_reports(
        model, decided(frame), inputs, decide, parse_number_map(prevalence or ()), dicom_sr
    )
    _limit_failed(frame, left_out(out), max_failed, refused)


def _decider(
    model: Path, site: str | None, prevalence: Iterable[str], reports: Path | None
) -> Callable[[DataFrame], DataFrame]:
    """Return what decides, after a check that reports can be written where they are wanted."""
    from suture_results.decided_predictions import decider

    if reports is not None:
        if site is None:
            raise ConfigError("--dicom-sr reports decisions; add --decide SITE, or --decide all")
        needed("highdicom", "--dicom-sr", "dicom-sr")
    return decider(model, site, parse_number_map(prevalence))


def _write_reports(
    model: Path,
    decided: DataFrame,
    inputs: AbstractContextManager[Inputs],
    site: str | None,
    corrected: Iterable[str],
    folder: Path | None,
) -> int:
    """Write a Structured Report of each DICOM image where they are wanted; print which inputs have none.

    Returns:
        how many DICOM images have none.
    """
    if folder is None or site is None:
        return 0
    from suture_results.model_export.dicom_report import open_reporter, write_reports

    with inputs as them:
        written = write_reports(open_reporter(model, site, {*corrected}), decided, them.found, folder)
    for name, reason in written.refused.items():
        print_line(f"no report of {name}: {reason}", style="yellow")
    if written.others:
        print_line(f"without a report, because not DICOM: {number_of(written.others, 'input')}")
    print_line(f"{number_of(len(written.reports), 'report')}: {folder}")
    return len(written.refused)


def _print_left_out(frame: DataFrame, listed: Path) -> None:
    """Print the first of what was taken for granted, cannot be used or is no image."""
    for note in frame.attrs["notes"]:
        print_line(note)
    failed, others = frame.attrs["failed"], frame.attrs["others"]
    for reason in list(failed.values())[:_SHOWN]:
        print_line(f"left out: {reason}", style="yellow")
    if others:
        first = ", ".join(list(others)[:_SHOWN])
        what = number_of(len(others), "other file")
        print_line(f"not {frame.index.name}s: {what}, such as {first}; see {listed}")


def _limit_failed(frame: DataFrame, listed: Path, most: int, unreported: int = 0) -> None:
    """Check that no more inputs are left out than the user allows.

    Args:
        unreported: how many that are predicted have no report.

    Raises:
        DataError: there are more; says how many, and where the reasons are.
    """
    failed = len(frame.attrs["failed"])
    if failed > most:
        raise DataError(
            f"{failed:,} of {failed + len(frame):,} {frame.index.name}s cannot be used; {listed} lists the "
            f"reasons. The others are predicted; --max-failed {failed + unreported} accepts this"
        )
    if failed + unreported > most:
        raise DataError(
            f"{unreported:,} of {len(frame):,} predicted {frame.index.name}s have no report; the reasons "
            f"are above. --max-failed {failed + unreported} accepts this"
        )


def explain(
    model: Model,
    sources: Annotated[list[Path], typer.Argument(help="Images, or folders or archives of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the pictures.")],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="Class to explain; by default the three most likely. Repeatable."),
    ] = None,
    images: Annotated[int, typer.Option("-n", min=1, help="Maximum number of images.")] = 20,
    kind: Annotated[
        str, typer.Option("--map", help="Kind of map: grad-cam, grad-cam++ or occlusion.")
    ] = "grad-cam",
    max_failed: MaxFailed = 0,
) -> None:
    """Draw the regions that a prediction depends on: each image beside its maps, and a table of them."""
    from suture_results import actions

    done = actions.explain(model, sources, out, classes or (), images, kind)
    for name, reason in done.failed.items():
        print_line(f"left out: {name}: {reason}", style="yellow")
    for note in done.notes:
        print_line(f"note: {note}", style="yellow")
    if done.beyond:
        print_line(f"not drawn: {done.beyond:,} more images; -n draws more")
    print_line(f"{number_of(len(done.written), 'picture')}: {out}")
    if (failed := len(done.failed)) > max_failed:
        raise DataError(
            f"{failed:,} of {failed + len(done.written):,} images cannot be used: the reasons are above. "
            f"The others are drawn; --max-failed {failed} accepts this"
        )


def finetune(
    model: Model,
    data: Annotated[Path, typer.Argument(help="The suture.toml of the data.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for tuned.json and the model.")],
    target: Annotated[str | None, typer.Option(help="Class to train; by default [data] target.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    runs: Annotated[int, typer.Option(min=1, help="Random splits of the data; each trains a model.")] = 5,
    examples: Annotated[int | None, typer.Option(min=4, help="Maximum number of training examples.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights, for comparison.")
    ] = False,
    seed: int = 1,
) -> None:
    """Fine-tune a trained model on a task of your own, and test it.

    The test split stays out: measure it with evaluate OUT. The model of the first run is saved in OUT/model,
    and tuned.json lists the cases that each run was tested on. Learning rate, batch size, device, threads and
    precision are those of [training] in the suture.toml.
    """
    from suture.execution.job import TUNED
    from suture_results import actions
    from suture_results.finetuning_results import finetuning_table

    tuned = actions.finetune(model, data, out, target, epochs, runs, examples, fresh, seed)
    console.print(finetuning_table(tuned))
    print_line(f"written: {out / TUNED}")
