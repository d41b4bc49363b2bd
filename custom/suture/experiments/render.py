"""An experiment as Markdown, as a page, and as a figure; complete or not, it says what it rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from suture.core.files import atomic_write
from suture.experiments.class_tables import by_class_table, class_table
from suture.experiments.conduct import Outcome
from suture.experiments.figure import draw, plot_curves
from suture.experiments.fine_tuned import shown, task_cells
from suture.experiments.plots import drawn
from suture.experiments.runs import Result
from suture.experiments.spec import OWN_COLUMNS, Column, Experiment, Preset, Value
from suture.experiments.table import DASH, lines, over_series, shows_interval
from suture.experiments.tabular import Notes, Table
from suture.federation.server.results import AT_SERVER
from suture.reports.formatting import count

MARKS = "ns p ≥ .05, * p < .05, ** p < .01, *** p < .001; † differences that are not normal (Shapiro-Wilk)"

_PAIRS = {
    "runs": ("seeds", "runs of the same seed"),
    "classes": ("classes", "classes"),
    "tuned": ("fine-tuning runs", "fine-tuning runs on the same division"),
}
"""What figures are means over, and what is paired."""


def write_tables(
    experiment: Experiment, preset: Preset, outcome: Outcome, folder: Path, name: str
) -> list[Path]:
    """Writes NAME.md, NAME.html and NAME.svg, and of fine-tuned models NAME-curves.svg.

    Drawings that are there are shown too. Of another preset than the first they are NAME-PRESET.md and so on.

    Args:
        name: of the experiment.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = preamble(experiment, preset, outcome, name)
    name = stem_of(experiment, preset, name)
    made = {f"{name}.svg": draw(experiment, preset, outcome)}
    captions = {f"{name}.svg": experiment.title}
    if experiment.pairs == "tuned":
        made[f"{name}-curves.svg"] = plot_curves(experiment, preset, outcome)
        captions[f"{name}-curves.svg"] = "Learning curves"
    tables = [main_table(experiment, preset, outcome), *_closer(experiment, preset, outcome)]
    beside = drawn(experiment, folder, name)
    svgs = [svg.decode() for svg in made.values()] + [(folder / file).read_text() for file in beside]
    page = _template().render(title=experiment.title, facts=facts, tables=tables, svgs=svgs)
    written = {
        folder / f"{name}.md": markdown(experiment.title, facts, tables, captions | beside).encode(),
        folder / f"{name}.html": page.encode(),
        **{folder / file: svg for file, svg in made.items()},
    }
    for path, content in written.items():
        atomic_write(path, content)
    return list(written)


def _closer(experiment: Experiment, preset: Preset, outcome: Outcome) -> list[Table]:
    """What stands behind the figures of the main table."""
    if experiment.pairs == "tuned":
        return [task_table(experiment, preset, outcome)]
    if experiment.series:
        return [series_table(experiment, preset, outcome)]
    shown_here = experiment.columns_in(preset)
    columns = [shown_here[0] if experiment.tests_in(preset) else OWN_COLUMNS[0]]
    if any(c.metric in ("recall", "balanced_accuracy") for c in shown_here):
        columns.append(Column("recall", metric="recall"))
    tables = [class_table(experiment, preset, outcome, column) for column in columns]
    return [*tables, by_class_table(experiment, outcome.by_class)] if outcome.by_class else tables


def stem_of(experiment: Experiment, preset: Preset, name: str) -> str:
    """What the files of a preset are called: as the experiment, if it is the first."""
    return name if preset is experiment.preset(None) else f"{name}-{experiment.name_of(preset)}"


def main_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """A line for each row and value of the series."""
    notes, columns, drawn_up = Notes(), experiment.columns_in(preset), lines(experiment, preset, outcome)
    published = not experiment.series and any(line.published for line in drawn_up)
    heads = [
        *([experiment.series.label] if experiment.series else []),
        "method",
        *(head for column in columns for head in (column.name, "p")),
        *([preset.tune.key.rsplit(".", 1)[-1]] if preset.tune else []),
        "runs",
        *(["published"] if published else []),
    ]
    rows = [
        [
            *([str(line.x)] if experiment.series else []),
            line.name,
            *(text for c in columns for text in notes.cells(line.figures[c.name])),
            *([_value(line.tuned)] if preset.tune else []),
            str(line.runs),
            *([_published(line.published, columns)] if published else []),
        ]
        for line in drawn_up
    ]
    over, pairs = _PAIRS[experiment.pairs_in(preset)]
    reference = experiment.rows[experiment.reference].name
    intervals = _intervals(preset, columns)
    tests = f"p of paired two-tailed t-tests of {reference} over {pairs}"
    caption = f"Mean ± SD over {over}{intervals}; {tests}. {MARKS}."
    return Table(caption, heads, rows, notes.lines())


def _intervals(preset: Preset, columns: Sequence[Column]) -> str:
    """Which columns have an interval in place of the SD, for a caption."""
    names = [column.name for column in columns if shows_interval(preset, column)]
    if not names:
        return ""
    what = "of the mean from a bootstrap over the patients of the test set, where one was kept"
    return f" (in {', '.join(names)}: 95 % interval {what})"


def series_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """Each row over the whole series."""
    rows = {row: [experiment.rows[row].name] for row in experiment.rows if row not in preset.skip}
    notes = Notes()
    columns = experiment.columns_in(preset)
    for column in columns:
        for row, figure in over_series(experiment, preset, outcome, column).items():
            rows[row] += notes.cells(figure)
    heads = ["method", *(head for column in columns for head in (column.name, "p"))]
    published = {row: _published(experiment.rows[row].published, columns) for row in rows}
    if set(published.values()) != {DASH}:
        heads.append("published")
        rows = {row: [*cells, published[row]] for row, cells in rows.items()}
    steady = [row.name for row in experiment.rows.values() if row.steady]
    caption = (
        "Over all values of the series, compared run by run; the figure has these marks beside its lines."
        + (f" {', '.join(steady)}: the run at the first value stands at all of them." if steady else "")
    )
    return Table(caption, heads, list(rows.values()), notes.lines())


def task_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """Every figure of each task."""
    heads = ["task", "method", *shown(experiment).values(), "trained on / tested on"]
    caption = (
        "Mean ± SD over fine-tuning runs, after the last epoch. Precision, recall and F1 at the threshold of "
        "the greatest Youden index on the test part itself."
    )
    if experiment.goal is not None:
        caption += (
            f" Epochs are those until the AUROC reaches the mean of {experiment.rows[experiment.goal].name} "
            "after its last epoch, over the runs that reach it; in brackets how many do, where not all."
        )
    return Table(caption, heads, task_cells(experiment, preset, outcome))


def preamble(experiment: Experiment, preset: Preset, outcome: Outcome, name: str) -> list[tuple[str, str]]:
    """What the figures are, how they were made and what they cost."""
    kept = (result for cell in outcome.results.values() for result in cell.values())
    results = list({json.dumps(result.run["settings"], sort_keys=True): result for result in kept}.values())
    size = experiment.name_of(preset)
    settings = {**experiment.set, **preset.set}
    hours = sum(result.seconds for result in results) / 3600
    facts = [
        ("published in", experiment.source),
        ("preset", f"{size}: {preset.note}"),
        ("command", f"suture experiment {name} --preset {size} --data-root DIR"),
        ("settings", ", ".join(f"{key}={_value(value)}" for key, value in settings.items())),
        ("seeds", ", ".join(map(str, preset.seeds))),
        ("cost", f"{len(results)} runs in the table, {hours:.1f} hours of one thread"),
    ]
    if images := _tested_on(experiment.columns_in(preset), results):
        facts.append(("tested on", images))
    if preset.tune:
        tried = ", ".join(map(_value, preset.tune.values))
        by_classes = any(result.validation_balanced_accuracy is not None for result in results)
        judge = "validation balanced accuracy" if by_classes else "mean validation AUROC"
        how = f"{preset.tune.key} of {tried}, by {judge} of seed {preset.tune.seed}"
        facts.append(("tuned", how))
    return [*facts, ("note", experiment.note)] if experiment.note else facts


def _tested_on(columns: Sequence[Column], results: Sequence[Result]) -> str:
    """How many images each test set has; says so where the runs of one table differ in it."""
    sizes: dict[str, set[int]] = {}
    for result in results:
        if result.metrics.get("source") == AT_SERVER and any(column.test is None for column in columns):
            sizes.setdefault("", set()).add(result.metrics["n"])
        for name, models in result.tests.items():
            sizes.setdefault(f"{name}: ", set()).update(m["n"] for m in models.values() if "n" in m)
    mixed = " (NOT the same for all runs: delete their results, and make them again)"
    return "; ".join(
        f"{name}{' or '.join(map(count, sorted(found)))} images{mixed if len(found) > 1 else ''}"
        for name, found in sizes.items()
        if found
    )


def markdown(
    title: str, facts: Sequence[tuple[str, str]], tables: Sequence[Table], figures: Mapping[str, str]
) -> str:
    """The experiment as a page of the documentation.

    Args:
        figures: the caption of each file.
    """
    parts = [f"# {title}", "\n".join(f"- {key}: {value}" for key, value in facts)]
    parts += [f"![{caption}]({file})" for file, caption in figures.items()]
    for table in tables:
        grid = [table.heads, ["---"] * len(table.heads), *table.rows]
        body = "\n".join("| " + " | ".join(row) + " |" for row in grid)
        parts += [body, table.caption, *table.notes]
    return "\n\n".join(parts).replace("*", "\\*") + "\n"


def _published(values: Mapping[str, str], columns: Sequence[Column]) -> str:
    """What the paper printed in these columns; with their names, where there are several."""
    heads = [column.name for column in columns]
    return "; ".join(f"{k}: {v}" if len(heads) > 1 else v for k, v in values.items() if k in heads) or DASH


def _value(value: Value) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)


def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("table.html")
