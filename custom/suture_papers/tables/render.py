"""The page of a paper: a section and a figure for each preset of its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from suture.core import escaping as targets
from suture.core.files import atomic_write
from suture.federation.server.results import AT_SERVER
from suture_papers.tables.cells import DASH, Grid, Notes, class_means, lines, over_series, shows_interval
from suture_papers.tables.figures import draw
from suture_papers.tables.loading import Paper, load_spec
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.results import Result, ResultStore
from suture_papers.tables.spec import OWN_COLUMNS, Column, Table, Value
from suture_papers.tables.tuned_columns import show_settings, task_cells
from suture_papers.tables.verdict import verdict
from suture_results.formatting import count

_MARKS = "Marks: ns p ≥ .05, * p < .05, ** p < .01, *** p < .001; † differences that are not normal."

_PAIRS = {
    "runs": ("seeds", "runs of the same seed"),
    "classes": ("classes", "classes"),
    "tuned": ("fine-tuning runs", "fine-tuning runs on the same random split"),
}
"""What means are over, and what is paired, for captions."""


def write_page(paper: Paper, folder: Path, asked: str | None = None) -> list[Path]:
    """Write NAME.md and its figures from the stored results in ``runs/`` of the folder.

    Args:
        asked: the `stem_of` a preset that is shown though results are missing; others are left out then.

    Returns:
        The files; none where there is no section.

    Raises:
        ConfigError, DataError: as `collect`.
        OSError: the folder cannot be written.
    """
    sections: list[str] = []
    written: dict[Path, bytes] = {}
    for name, file in paper.tables.items():
        spec, store = load_spec(str(file)), ResultStore(folder / "runs", name)
        for table in map(spec.preset, spec.presets):
            outcome, stem = collect(table, store), stem_of(table, name)
            if stem == asked or all(outcome.results.values()):
                sections += section(outcome, name)
                written[folder / f"{stem}.svg"] = draw(outcome)
    if sections:
        text = markdown([f"# {paper.title}", _MARKS, *sections])
        written = {folder / f"{paper.name}.md": text.encode(), **written}
    for path, content in written.items():
        atomic_write(path, content)
    return list(written)


def stem_of(table: Table, name: str) -> str:
    """Return the heading of a preset's section: NAME for the first preset, else NAME-PRESET."""
    return name if table == table.spec.preset(None) else f"{name}-{table.size}"


def markdown(parts: Sequence[str]) -> str:
    """Return a page of these paragraphs, in which no asterisk emphasises."""
    return re.sub(r"(?<!\\)\*", r"\\*", "\n\n".join(parts)) + "\n"


def section(outcome: Outcome, name: str) -> Iterator[str]:
    """Yield the paragraphs of a preset: its sentence, its figure, its main table, and folded all else.

    Args:
        name: of the table.
    """
    table, stem, main = outcome.table, stem_of(outcome.table, name), main_table(outcome)
    yield f"## {stem}"
    yield f"{table.spec.title} ({table.spec.source})."
    yield verdict(outcome)
    yield f"![{_of_figure(table)}]({stem}.svg)"
    yield from (show_grid(main), main.caption, *main.notes)
    for grid in _closer(outcome):
        yield from _folded(grid.caption, show_grid(grid), *grid.notes)
    facts = "\n".join(f"- {key}: {text}" for key, text in preamble(outcome, name))
    yield from _folded("How it was run", facts)


def _folded(summary: str, *parts: str) -> tuple[str, ...]:
    return (f'<details markdown="1">\n<summary>{summary}</summary>', *parts, "</details>")


def show_grid(table: Grid) -> str:
    """Return a table as Markdown."""
    classes = table.heads[0] == "class"
    rows = [[targets.markdown(row[0]), *row[1:]] if classes else row for row in table.rows]
    grid = [table.heads, ["---"] * len(table.heads), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in grid)


def _of_figure(table: Table) -> str:
    """Return what the figure shows."""
    reference = table.spec.rows[table.spec.reference].name
    if table.pairs == "tuned":
        return "AUROC after each epoch: mean over fine-tuning runs, in a band of their SD"
    if table.spec.series:
        return f"Means by {table.spec.series.label}, a line for each method; marks against {reference}"
    return f"Means and single runs, with marks against {reference}"


def _closer(outcome: Outcome) -> list[Grid]:
    """Return the tables of what the main table's means are over: tasks, values of the series, or classes."""
    table = outcome.table
    if table.pairs == "tuned":
        return [_task_table(outcome)]
    if table.spec.series:
        return [series_table(outcome)]
    columns = [table.columns[0] if table.tests else OWN_COLUMNS[0]]
    if any(column.metric in ("recall", "balanced_accuracy") for column in table.columns):
        columns.append(Column("recall", metric="recall"))
    return [class_table(outcome, column) for column in columns]


def main_table(outcome: Outcome) -> Grid:
    """Return the table with a line for each row and value of the series."""
    table = outcome.table
    notes, columns, drawn_up = Notes(), table.columns, lines(outcome)
    published = not table.spec.series and any(line.published for line in drawn_up)
    heads = [
        *([table.spec.series.label] if table.spec.series else []),
        "method",
        *(head for column in columns for head in (column.name, "p")),
        *([table.preset.tune.key.rsplit(".", 1)[-1]] if table.preset.tune else []),
        "runs",
        *(["published"] if published else []),
    ]
    rows = [
        [
            *([str(line.x)] if table.spec.series else []),
            line.name,
            *(text for c in columns for text in notes.cells(line.estimates[c.name])),
            *([_value(line.tuned)] if table.preset.tune else []),
            str(line.runs),
            *([_show_published(line.published, columns)] if published else []),
        ]
        for line in drawn_up
    ]
    over, pairs = _PAIRS[table.pairs]
    reference = table.spec.rows[table.spec.reference].name
    shown = [column.name for column in columns if shows_interval(table, column)]
    intervals = f" (95 % interval over test patients: {', '.join(shown)})" if shown else ""
    caption = f"Mean ± SD over {over}{intervals}; p of paired two-tailed t-tests of {reference} over {pairs}."
    return Grid(caption, heads, rows, notes.lines())


def series_table(outcome: Outcome) -> Grid:
    """Return the table of each row over the whole series."""
    table = outcome.table
    rows = {key: [row.name] for key, row in table.rows.items()}
    notes, columns = Notes(), table.columns
    for column in columns:
        for row, estimate in over_series(outcome, column).items():
            rows[row] += notes.cells(estimate)
    heads = ["method", *(head for column in columns for head in (column.name, "p"))]
    published = {key: _show_published(row.published, columns) for key, row in table.rows.items()}
    if set(published.values()) != {DASH}:
        heads.append("published")
        rows = {row: [*cells, published[row]] for row, cells in rows.items()}
    steady = [row.name for row in table.spec.rows.values() if row.steady]
    fixed = f"; {', '.join(steady)}: the run at the first value stands at all of them" if steady else ""
    return Grid(f"Over all values, compared run by run{fixed}", heads, list(rows.values()), notes.lines())


def _task_table(outcome: Outcome) -> Grid:
    """Return the table of every figure of each task that models were fine-tuned on."""
    spec = outcome.table.spec
    heads = ["task", "method", *show_settings(spec).values(), "trained on / tested on"]
    goal = "" if spec.goal is None else f"; epochs to the final mean AUROC of {spec.rows[spec.goal].name}"
    return Grid(f"Each task: mean ± SD over fine-tuning runs{goal}", heads, task_cells(outcome))


def class_table(outcome: Outcome, column: Column) -> Grid:
    """Return the table of the AUROC (or recall) of each class, mean over the runs."""
    spec, rows = outcome.table.spec, outcome.table.rows
    areas = {row: class_means(spec, row, outcome.results[row, "None"], column) for row in rows}
    names = sorted({name for found in areas.values() for name in found})
    by_class = spec.by_class if column.metric == "auroc" else None
    printed = by_class.published if by_class else {}

    def cell(row: str, name: str) -> str:
        own = f"{areas[row][name]:.3f}" if name in areas[row] else DASH
        return f"{own} · {printed[row][name]}" if name in printed.get(row, {}) else own

    cells = [[name, *(cell(row, name) for row in rows)] for name in names]
    heads = ["class", *(row.name for row in rows.values())]
    where = f" ({column.name})" if column.test else ""
    what = "Recall" if column.metric == "recall" else "AUROC"
    lacking = any(cell.startswith(DASH) for row in cells for cell in row)
    notes = [f"{DASH} not run, not trained, or without positive or negative test images"] if lacking else []
    published = f"; after a dot what the paper printed ({by_class.source})" if by_class else ""
    return Grid(f"{what} of each class{where}, mean over the runs{published}", heads, cells, notes)


def preamble(outcome: Outcome, name: str) -> Iterator[tuple[str, str]]:
    """Yield how the runs of a preset were made and what they cost, as pairs of key and text."""
    table = outcome.table
    found = (result for cell in outcome.results.values() for result in cell.values())
    results = list({json.dumps(result.run["settings"], sort_keys=True): result for result in found}.values())
    settings = {**table.spec.set, **table.preset.set}
    hours = sum(result.seconds for result in results) / 3600
    yield "preset", f"{table.size}: {table.preset.note}"
    yield "command", f"suture table {name} --preset {table.size} --data-root DIR"
    yield "settings", ", ".join(f"{key}={_value(value)}" for key, value in settings.items())
    yield "seeds", ", ".join(map(str, table.preset.seeds))
    yield "cost", f"{len(results)} runs in the table, {hours:.1f} hours of one thread"
    if images := _tested_on(table.columns, results):
        yield "tested on", images
    if tune := table.preset.tune:
        tried = ", ".join(map(_value, tune.values))
        by_classes = any(result.validation_balanced_accuracy is not None for result in results)
        judge = "validation balanced accuracy" if by_classes else "mean validation AUROC"
        yield "tuned", f"{tune.key} of {tried}, by {judge} of seed {tune.seed}"
    if table.spec.note:
        yield "note", table.spec.note


def _tested_on(columns: Sequence[Column], results: Sequence[Result]) -> str:
    """Return how many images each test set has, with a warning where the runs of one table differ in it."""
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


def _show_published(values: Mapping[str, str], columns: Sequence[Column]) -> str:
    """Return what the paper printed in these columns; with their names, where there are several."""
    heads = [column.name for column in columns]
    return "; ".join(f"{k}: {v}" if len(heads) > 1 else v for k, v in values.items() if k in heads) or DASH


def _value(value: Value) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)
