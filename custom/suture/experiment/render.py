"""An experiment as Markdown, as a page, and as a figure; complete or not, it says what it rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from suture.experiment.conduct import Outcome
from suture.experiment.figure import draw, draw_curves
from suture.experiment.fine_tuned import shown, task_cells
from suture.experiment.spec import OWN_COLUMNS, Experiment, Preset, Value
from suture.experiment.table import DASH, Figure, Line, class_means, lines, over_series
from suture.files import atomic_write

MARKS = "ns p ≥ .05, * p < .05, ** p < .01, *** p < .001; † differences that are not normal (Shapiro-Wilk)"

_PAIRS = {
    "runs": ("seeds", "runs of the same seed"),
    "classes": ("classes", "classes"),
    "tuned": ("fine-tuning runs", "fine-tuning runs on the same division"),
}
"""What figures are means over, and what is paired."""


@dataclass(frozen=True)
class Table:
    """Text in cells."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_tables(
    experiment: Experiment, preset: Preset, outcome: Outcome, folder: Path, name: str
) -> list[Path]:
    """Writes NAME.md, NAME.html and NAME.svg, and of fine-tuned models NAME-curves.svg.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {f"{name}.svg": draw(experiment, preset, outcome)}
    captions = {f"{name}.svg": experiment.title}
    second = series_table if experiment.series else class_table
    if experiment.pairs == "tuned":
        second = task_table
        drawn[f"{name}-curves.svg"] = draw_curves(experiment, preset, outcome)
        captions[f"{name}-curves.svg"] = "Learning curves"
    tables = [main_table(experiment, preset, outcome), second(experiment, preset, outcome)]
    facts = preamble(experiment, preset, outcome, name)
    svgs = [svg.decode() for svg in drawn.values()]
    page = _template().render(title=experiment.title, facts=facts, tables=tables, svgs=svgs)
    written = {
        folder / f"{name}.md": markdown(experiment.title, facts, tables, captions).encode(),
        folder / f"{name}.html": page.encode(),
        **{folder / file: svg for file, svg in drawn.items()},
    }
    for path, content in written.items():
        atomic_write(path, content)
    return list(written)


def main_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """A line for each row and value of the series."""
    published = any(row.published for row in experiment.rows.values())
    heads = [
        *([experiment.series.label] if experiment.series else []),
        "method",
        *(head for column in experiment.columns for head in (column.name, "p")),
        *([preset.tune.key.rsplit(".", 1)[-1]] if preset.tune else []),
        "runs",
        *(["published"] if published else []),
    ]
    rows = [
        [
            *([str(line.x)] if experiment.series else []),
            line.name,
            *_figures(experiment, line),
            *([_value(line.tuned)] if preset.tune else []),
            str(line.runs),
            *([_published(line)] if published else []),
        ]
        for line in lines(experiment, preset, outcome)
    ]
    over, pairs = _PAIRS[experiment.pairs]
    reference = experiment.rows[experiment.reference].name
    caption = f"Mean ± SD over {over}; p of paired two-tailed t-tests of {reference} over {pairs}. {MARKS}."
    return Table(caption, heads, rows)


def series_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """Each row over the whole series."""
    rows = {row: [experiment.rows[row].name] for row in experiment.rows if row not in preset.skip}
    for column in experiment.columns:
        for row, figure in over_series(experiment, preset, outcome, column).items():
            rows[row] += [figure.text, p_text(figure)]
    heads = ["method", *(head for column in experiment.columns for head in (column.name, "p"))]
    return Table("Over all values of the series, compared run by run.", heads, list(rows.values()))


def class_table(experiment: Experiment, preset: Preset, outcome: Outcome) -> Table:
    """The AUROC of each class, mean over the runs."""
    rows = [row for row in experiment.rows if row not in preset.skip]
    column = experiment.columns[0] if experiment.tests else OWN_COLUMNS[0]
    areas = [class_means(experiment, row, outcome.results[row, "None"], column) for row in rows]
    names = sorted({name for found in areas for name in found})
    cells = [[name, *(f"{a[name]:.3f}" if name in a else DASH for a in areas)] for name in names]
    heads = ["class", *(experiment.rows[row].name for row in rows)]
    where = f" ({column.name})" if experiment.tests else ""
    return Table(f"AUROC of each class{where}, mean over the runs.", heads, cells)


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
    results = [result for cell in outcome.results.values() for result in cell.values()]
    size = next(key for key, value in experiment.presets.items() if value is preset)
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
    if preset.tune:
        tried = ", ".join(map(_value, preset.tune.values))
        how = f"{preset.tune.key} of {tried}, by mean validation AUROC of seed {preset.tune.seed}"
        facts.append(("tuned", how))
    return [*facts, ("note", experiment.note)] if experiment.note else facts


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
        parts += [body, table.caption]
    return "\n\n".join(parts).replace("*", "\\*") + "\n"


def p_text(figure: Figure) -> str:
    """A p value of three digits, without the leading 0."""
    if figure.against is None or math.isnan(figure.against.p):
        return DASH
    return "< .001" if figure.against.p < 0.001 else f"{figure.against.p:.3f}".removeprefix("0")


def _figures(experiment: Experiment, line: Line) -> list[str]:
    return [text for column in experiment.columns for text in _cell(line.figures[column.name])]


def _cell(figure: Figure) -> tuple[str, str]:
    return figure.text, p_text(figure)


def _published(line: Line) -> str:
    several = len(line.published) > 1
    return "; ".join(f"{k}: {v}" if several else v for k, v in line.published.items()) or DASH


def _value(value: Value) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)


def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("table.html")
