"""The Markdown, the HTML page and the figures of a table, complete or not."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from suture.core import escaping as targets
from suture.core.files import atomic_write, read_regular, writing
from suture.federation.server.results import AT_SERVER
from suture_papers.tables.cells import (
    DASH,
    Grid,
    Notes,
    class_means,
    lines,
    over_series,
    p_value,
    shows_interval,
)
from suture_papers.tables.figures import draw, existing_plots, plot_curves
from suture_papers.tables.outcome import ClassComparison, Outcome
from suture_papers.tables.results import Result
from suture_papers.tables.spec import OWN_COLUMNS, Column, Table, TableSpec, Value
from suture_papers.tables.study import plan_facts, same_rows, sentences, study_tables
from suture_papers.tables.tuned_columns import show_settings, task_cells
from suture_papers.tables.verdict import verdict
from suture_results.formatting import count
from suture_results.report import templates

_MARKS = "ns p ≥ .05, * p < .05, ** p < .01, *** p < .001; † differences that are not normal (Shapiro-Wilk)"

_PAIRS = {
    "runs": ("seeds", "runs of the same seed"),
    "classes": ("classes", "classes"),
    "tuned": ("fine-tuning runs", "fine-tuning runs on the same random split"),
}
"""What means are over, and what is paired, for captions."""


def write_tables(outcome: Outcome, folder: Path, name: str) -> list[Path]:
    """Write NAME.md with the tables, NAME.html with tables and figures, and NAME.svg.

    For fine-tuned models NAME-curves.svg is written, too. The files of another preset than the first are
    called NAME-PRESET.md and so on. The HTML page also shows, as images, the further plots in the folder.

    Args:
        name: of the table.

    Raises:
        OSError: the folder cannot be written.
    """
    table = outcome.table
    facts = [*preamble(outcome, name), *(plan_facts(table, outcome.plan) if table.spec.plan else [])]
    name = stem_of(table, name)
    made = {f"{name}.svg": draw(outcome)}
    figures = [(_of_figure(table), made[f"{name}.svg"].decode(), "")]
    if table.pairs == "tuned":
        made[f"{name}-curves.svg"] = curves = plot_curves(outcome)
        caption = "AUROC after each epoch: mean over fine-tuning runs, in a band of their SD."
        figures.append((caption, curves.decode(), ""))
    for file, caption in existing_plots(table.spec, folder, name).items():
        figures.append((caption, "", _image(folder / file)))
    tables = study_tables(outcome) if table.spec.plan else [main_table(outcome)]
    tables += _closer(outcome)
    said = sentences(outcome) if table.spec.plan else verdict(outcome)
    title = preset_title(table)
    template = templates(Path(__file__).parent).get_template("table.html")
    page = template.render(title=title, verdict=said, facts=facts, tables=tables, figures=figures)
    written = {
        folder / f"{name}.md": markdown(title, said, facts, tables).encode(),
        folder / f"{name}.html": page.encode(),
        **{folder / file: svg for file, svg in made.items()},
    }
    for path, content in written.items():
        atomic_write(path, content)
    return list(written)


def _image(path: Path) -> str:
    """Return an SVG as the source of an image: nobody knows who has drawn the file, and what it would run."""
    with writing(path):
        return f"data:image/svg+xml;base64,{base64.b64encode(read_regular(path)).decode()}"


def _of_figure(table: Table) -> str:
    """Return the caption of the figure of the main table."""
    if table.spec.plan:
        control = table.spec.rows[table.spec.reference].name
        return (
            f"Difference from {control} with its 95 % interval; at the right the mean over seeds. Band: ±δ. "
            "In colour: better or worse."
        )
    marks = f"marks as in the table, against {table.spec.rows[table.spec.reference].name}"
    over, _ = _PAIRS[table.pairs]
    if table.spec.series:
        return f"Means over {over} by {table.spec.series.label}, a line for each method; {marks}."
    dots = "" if table.pairs == "classes" else f"A dot is one of the {over}. "
    return f"{dots}A bar is the mean over {over}; {marks}."


def _closer(outcome: Outcome) -> list[Grid]:
    """Return the tables of what the main table's means are over: tasks, values of the series, or classes."""
    table = outcome.table
    if table.pairs == "tuned":
        return [_task_table(outcome)]
    if table.spec.series:
        return [series_table(outcome)]
    own = table.columns
    columns = [own[0] if table.tests else OWN_COLUMNS[0]]
    if any(c.metric in ("recall", "balanced_accuracy") for c in own):
        columns.append(Column("recall", metric="recall"))
    tables = [class_table(outcome, column) for column in columns]
    return [*tables, comparison_table(table.spec, outcome.by_class)] if outcome.by_class else tables


def stem_of(table: Table, name: str) -> str:
    """Return the stem of a preset's files: NAME for the first preset, else NAME-PRESET."""
    return name if table == table.spec.preset(None) else f"{name}-{table.size}"


def preset_title(table: Table) -> str:
    """Return the title of a table; with that of the preset where a study has several."""
    spec = table.spec
    several = spec.plan and len(spec.presets) > 1
    return f"{spec.title}: {table.preset.title or table.size}" if several else spec.title


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
    intervals = _intervals(table)
    tests = f"p of paired two-tailed t-tests of {reference} over {pairs}"
    caption = f"Mean ± SD over {over}{intervals}; {tests}. {_MARKS}."
    return Grid(caption, heads, rows, notes.lines())


def _intervals(table: Table) -> str:
    """Return which columns show an interval in place of the SD, for a caption."""
    names = [column.name for column in table.columns if shows_interval(table, column)]
    if not names:
        return ""
    what = "of the mean from a bootstrap over the patients of the test set, where one is stored"
    return f" (in {', '.join(names)}: 95 % interval {what})"


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
    caption = (
        "Over all values of the series, compared run by run; the figure has these marks beside its lines."
        + (f" {', '.join(steady)}: the run at the first value stands at all of them." if steady else "")
    )
    return Grid(caption, heads, list(rows.values()), notes.lines())


def _task_table(outcome: Outcome) -> Grid:
    """Return the table of every figure of each task that models were fine-tuned on."""
    spec = outcome.table.spec
    heads = ["task", "method", *show_settings(spec).values(), "trained on / tested on"]
    caption = (
        "Mean ± SD over fine-tuning runs, after the last epoch. Precision, recall and F1 at the threshold of "
        "the greatest Youden index on the test part itself."
    )
    if spec.goal is not None:
        caption += (
            f" Epochs are those until the AUROC reaches the mean of {spec.rows[spec.goal].name} "
            "after its last epoch, over the runs that reach it; in brackets how many do, where not all."
        )
    return Grid(caption, heads, task_cells(outcome))


def class_table(outcome: Outcome, column: Column) -> Grid:
    """Return the table of the AUROC (or recall) of each class, mean over the runs."""
    spec, twins = outcome.table.spec, same_rows(outcome) if outcome.table.spec.plan else {}
    rows = {key: row for key, row in outcome.table.rows.items() if key not in twins}
    areas = {row: class_means(spec, row, outcome.results[row, "None"], column) for row in rows}
    names = sorted({name for found in areas.values() for name in found})
    by_class = spec.by_class
    printed = by_class.published if by_class and not by_class.rows and column.metric == "auroc" else {}

    def cell(row: str, name: str) -> str:
        own = f"{areas[row][name]:.3f}" if name in areas[row] else DASH
        return f"{own} ({printed[row][name]})" if name in printed.get(row, {}) else own

    cells = [[name, *(cell(row, name) for row in rows)] for name in names]
    heads = ["class", *(row.name for row in rows.values())]
    where = f" ({column.name})" if column.test else ""
    what = "Recall" if column.metric == "recall" else "AUROC"
    lacking = any(cell.startswith(DASH) for row in cells for cell in row)
    notes = [f"{DASH} not run, not trained, or without positive or negative test images"] if lacking else []
    published = f"; in brackets what the paper printed ({by_class.source})" if by_class and printed else ""
    return Grid(f"{what} of each class{where}, mean over the runs{published}.", heads, cells, notes)


def comparison_table(spec: TableSpec, compared: ClassComparison) -> Grid:
    """Return the table of models of single runs, each compared with the first on the same images."""
    assert spec.by_class is not None
    first, *others = compared
    by_class = spec.by_class
    heads = ["class", spec.rows[first].name]
    for row in others:
        heads += [spec.rows[row].name, "p"]
    heads += [f"published: {spec.rows[row].name}" for row in compared if row in by_class.published]
    rows = []
    for name in dict.fromkeys(name for classes in compared.values() for name in classes):
        cells = [name, _area(compared[first].get(name, {}))]
        for row in others:
            found = compared[row].get(name, {})
            cells += [_area(found), p_value(found.get("p"))]
        cells += [by_class.published[row].get(name, DASH) for row in compared if row in by_class.published]
        rows.append(cells)
    bootstrap = "a paired bootstrap over the patients of the test set"
    test = "DeLong's test, clustered by patient (Obuchowski 1997)," if spec.plan else bootstrap
    caption = (
        f"AUROC (95 % interval) of each class, one model a row (the first seed), and p of {test} against "
        f"{spec.rows[first].name}"
    )
    return Grid(f"{caption} ({by_class.source})." if by_class.source else f"{caption}.", heads, rows)


def _area(found: Mapping[str, float | None]) -> str:
    area, low, high = (found.get(key) for key in ("auroc", "low", "high"))
    bounds = "" if low is None or high is None else f" ({low:.3f}, {high:.3f})"
    return DASH if area is None else f"{area:.3f}{bounds}"


def preamble(outcome: Outcome, name: str) -> list[tuple[str, str]]:
    """Return what the tables show, how their runs were made and what they cost, as pairs of key and text."""
    table = outcome.table
    found = (result for cell in outcome.results.values() for result in cell.values())
    results = list({json.dumps(result.run["settings"], sort_keys=True): result for result in found}.values())
    settings = {**table.spec.set, **table.preset.set}
    hours = sum(result.seconds for result in results) / 3600
    facts = [
        ("source" if table.spec.plan else "published in", table.spec.source),
        ("preset", f"{table.size}: {table.preset.note}"),
        ("command", f"suture table {name} --preset {table.size} --data-root DIR"),
        ("settings", ", ".join(f"{key}={_value(value)}" for key, value in settings.items())),
        ("seeds", ", ".join(map(str, table.preset.seeds))),
        ("cost", f"{len(results)} runs in the table, {hours:.1f} hours of one thread"),
    ]
    if images := _tested_on(table.columns, results, varies=table.spec.plan is not None):
        facts.append(("tested on", images))
    if tune := table.preset.tune:
        tried = ", ".join(map(_value, tune.values))
        by_classes = any(result.validation_balanced_accuracy is not None for result in results)
        judge = "validation balanced accuracy" if by_classes else "mean validation AUROC"
        facts.append(("tuned", f"{tune.key} of {tried}, by {judge} of seed {tune.seed}"))
        own = [(row.name, row.tune) for row in table.rows.values() if row.tune]
        facts += [("tuned", f"{name}: {g.key} of {', '.join(map(_value, g.values))}") for name, g in own]
    return [*facts, ("note", table.spec.note)] if table.spec.note else facts


def _tested_on(columns: Sequence[Column], results: Sequence[Result], *, varies: bool) -> str:
    """Return how many images each test set has, with a warning where the runs of one table differ in it.

    Args:
        varies: whether each seed has test images of its own, as in a study.
    """
    sizes: dict[str, set[int]] = {}
    for result in results:
        if result.metrics.get("source") == AT_SERVER and any(column.test is None for column in columns):
            sizes.setdefault("", set()).add(result.metrics["n"])
        for name, models in result.tests.items():
            sizes.setdefault(f"{name}: ", set()).update(m["n"] for m in models.values() if "n" in m)
    mixed = "" if varies else " (NOT the same for all runs: delete their results, and make them again)"

    def text(found: set[int]) -> str:
        between = " to " if varies else " or "
        return between.join(map(count, sorted({min(found), max(found)} if varies else found)))

    return "; ".join(
        f"{name}{text(found)} images{mixed if len(found) > 1 else ''}"
        for name, found in sizes.items()
        if found
    )


def markdown(title: str, said: str, facts: Sequence[tuple[str, str]], tables: Sequence[Grid]) -> str:
    """Return a table as Markdown; its figures are on the HTML page alone."""
    parts = [f"# {title}", said, "\n".join(f"- {key}: {value}" for key, value in facts)]
    for table in tables:
        classes = table.heads[0] == "class"
        rows = [[targets.markdown(row[0]), *row[1:]] if classes else row for row in table.rows]
        grid = [table.heads, ["---"] * len(table.heads), *rows]
        body = "\n".join("| " + " | ".join(row) + " |" for row in grid)
        parts += [body, table.caption, *table.notes]
    return re.sub(r"(?<!\\)\*", r"\\*", "\n\n".join(parts)) + "\n"


def _show_published(values: Mapping[str, str], columns: Sequence[Column]) -> str:
    """Return what the paper printed in these columns; with their names, where there are several."""
    heads = [column.name for column in columns]
    return "; ".join(f"{k}: {v}" if len(heads) > 1 else v for k, v in values.items() if k in heads) or DASH


def _value(value: Value) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)
