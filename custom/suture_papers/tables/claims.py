"""The claims of the papers, each decided by stored results and rendered as one page.

A claim is fixed before it is decided: the page prints the digest of the list, and marks runs that are older.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import check_known
from suture.core.files import read_toml
from suture.core.validation import STRICT, parse
from suture_papers.tables.cells import DASH, mean_of
from suture_papers.tables.loading import load_spec, paper_of
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.render import stem_of
from suture_papers.tables.results import ResultStore
from suture_papers.tables.spec import Column, Table
from suture_papers.tables.statistics import Difference, corrected_resampled, runs_needed
from suture_papers.tables.tuned_columns import goal_of, values_of_task

Verdict = Literal["confirmed", "equivalent", "refuted", "open"]
Pair = tuple[str, int, int]
"""What is compared with itself: a value of the series, a seed, and the number of a fine-tuning run."""

LEAST_PAIRS = 3
"""With fewer, a spread says nothing."""


@dataclass(frozen=True, config=STRICT)
class Study:
    """A column of a table at the size of a preset."""

    table: str
    preset: str
    column: str

    def find(self) -> tuple[Table, Column]:
        """Return both.

        Raises:
            ConfigError: one of the three does not exist; names the nearest.
        """
        table = load_spec(self.table).preset(self.preset)
        columns = {column.name: column for column in table.columns}
        check_known(f"column of a claim in {self.table}", self.column, columns)
        return table, columns[self.column]


@dataclass(frozen=True, config=STRICT)
class Claim:
    """What a paper says of two rows of its table.

    Attributes:
        paper, place: of the claim.
        says: the claim in a sentence.
        printed: the paper's figures.
        row, over: the rows whose difference decides, row - over.
        expects: whether the claim is that `row` is above `over`, or level with it.
        studies: where the difference is measured; their mean counts.
    """

    paper: str
    place: str
    says: str
    printed: str
    row: str
    over: str
    studies: Annotated[tuple[Study, ...], Field(min_length=1)]
    expects: Literal["more", "equal"] = "more"


@dataclass(frozen=True, config=STRICT)
class Claims:
    """The list of claims.

    Attributes:
        fixed: when it was written.
        margins: the smallest difference that matters, by metric.
        claims: by a short name.
    """

    fixed: datetime
    margins: dict[str, float]
    claims: dict[str, Claim]

    def margin(self, claim: Claim) -> float:
        """Return the margin of a claim."""
        return self.margins[claim.studies[0].find()[1].metric]


@plain(frozen=True)
class Decision:
    """What is known of a claim.

    Attributes:
        difference: over pairs, of runs of one seed or of fine-tunings on one random split.
        needed: with how many pairs the detectable difference would be the margin; see `runs_needed`.
        verdict: see `verdict`.
    """

    difference: Difference
    needed: int | None = None
    verdict: Verdict = "open"


def load_claims(path: Path) -> tuple[Claims, str]:
    """Return the claims and the SHA-256 of their canonical form.

    Raises:
        ConfigError: the file is damaged; or a table, preset, row, column or margin does not exist.
    """
    content = read_toml(path)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    found = parse(Claims, content, str(path))
    for name, claim in found.claims.items():
        for table, column in (study.find() for study in claim.studies):
            for row in (claim.row, claim.over):
                check_known(f"row of claim {name!r}", row, table.rows)
            check_known(f"metric in margins, for claim {name!r}", column.metric, found.margins)
    return found, digest


def decide(claim: Claim, claims: Claims, runs: Path) -> tuple[Decision, bool]:
    """Decide a claim from the stored results, and return whether one of these is older than the list.

    Raises:
        ConfigError, DataError: as `collect`.
    """
    measured: list[Mapping[Pair, float]] = []
    tested, earlier, of_classes = 0.0, False, False
    for study in claim.studies:
        table, column = study.find()
        outcome = collect(table, ResultStore(runs, study.table))
        measured.append(differences(outcome, claim.row, claim.over, column))
        of_classes |= table.pairs == "classes"
        for row, x in ((row, str(x)) for row in (claim.row, claim.over) for x in table.values):
            for one in outcome.results[row, x].values():
                end = one.run.get("finished")
                earlier |= end is None or datetime.fromisoformat(end) < claims.fixed
                for run in one.tuned[column.task]["runs"] if column.task else ():
                    tested = max(tested, run["test"] / run["train"])
    values = average(measured)
    if of_classes and values:  # the spread over classes is of one model
        values = [fmean(values)]
    return decision(values, claims.margin(claim), claim.expects, tested), earlier


def average(measured: Sequence[Mapping[Pair, float]]) -> list[float]:
    """Return the mean over the studies of each pair that all of them have."""
    common = set.intersection(*(set(one) for one in measured))
    return [fmean(one[pair] for one in measured) for pair in sorted(common)]


def differences(outcome: Outcome, row: str, over: str, column: Column) -> dict[Pair, float]:
    """Return row - over of each pair that has both figures; of a loss or of epochs, over - row."""
    spec, found = outcome.table.spec, {}
    sign = -1 if column.metric in ("loss", "epochs") else 1
    for x in map(str, outcome.table.values):
        figures: list[Mapping[tuple[int, int], float | None]] = []
        for name in (row, over):
            own = outcome.results[name, x]
            if column.task is None:
                figures.append({(s, 0): mean_of(spec, name, one, column) for s, one in own.items()})
            else:
                goal = goal_of(outcome, column.task) if column.metric == "epochs" else None
                figures.append(values_of_task(own, column, goal))
        for at in figures[0].keys() & figures[1].keys():
            a, b = (one[at] for one in figures)
            if a is not None and b is not None:
                found[x, *at] = sign * (a - b)
    return found


def decision(values: Sequence[float], margin: float, expects: str, tested: float = 0.0) -> Decision:
    """Decide by the 95 % interval of the mean of paired differences, of a t distribution.

    Args:
        tested: of fine-tunings on overlapping random splits, documents tested on over documents trained on:
            the variance is s² (1/n + tested) then (Nadeau and Bengio, Machine Learning 2003, Sec. 3).
    """
    d = corrected_resampled(values, tested)
    if d.n < LEAST_PAIRS:
        return Decision(Difference(d.n, d.mean))
    needed = None if math.isnan(d.spread) else runs_needed(d.spread, tested, margin)
    return Decision(d, needed, verdict(d.low, d.high, margin, expects))


def verdict(low: float, high: float, margin: float, expects: str) -> Verdict:
    """Return what an interval says of a claim.

    A claim of more is confirmed above the margin, equivalent within it, and refuted below 0. A claim of
    equality is confirmed within the margin on both sides, and refuted beyond it on one. Otherwise it is open.
    """
    within = -margin <= low and high <= margin
    if expects == "equal":
        return "confirmed" if within else "refuted" if low > margin or high < -margin else "open"
    if low > margin:
        return "confirmed"
    return "equivalent" if within else "refuted" if high < 0 else "open"


def page_of(path: Path, runs: Path) -> str:
    """Return the page of the claims as Markdown.

    Args:
        path: of the claims.
        runs: the folder of the stored results.
    """
    claims, digest = load_claims(path)
    lines: dict[str, list[str]] = {}
    verdicts: list[str] = []
    for claim in claims.claims.values():
        found, earlier = decide(claim, claims, runs)
        verdicts.append(found.verdict)
        lines.setdefault(claim.paper, []).append(_line(claim, found, claims.margin(claim), earlier))
    n = len(verdicts) - verdicts.count("open")
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("confirmed", "equivalent", "refuted"))
    parts = ["# Claims of the five papers", f"{n} of {len(verdicts)} claims are decided here: {counts}."]
    parts.append(_HOW.format(fixed=f"{claims.fixed:%d %B %Y}", digest=digest[:16]))
    for paper, rows in lines.items():
        parts += [f"## {paper}", "\n".join([_HEAD, "|---" * 9 + "|", *rows])]
    return "\n\n".join(parts) + "\n"


def _line(claim: Claim, found: Decision, margin: float, earlier: bool) -> str:
    """Return the row of a claim; without an interval, the column of pairs has the reason."""
    d = found.difference
    few = {0: "not run", 1: "a single run"}.get(d.n, f"{d.n} runs")
    interval = f" ({_with_sign(d.low)} to {_with_sign(d.high)})"
    undefined = math.isnan(d.low)
    places = {stem_of(study.find()[0], Path(study.table).stem): study.table for study in claim.studies}
    cells = [
        f"{claim.says} ({claim.place})",
        claim.printed,
        f"{_with_sign(d.mean)}{'' if undefined else interval}{' †' if earlier else ''}",
        few if undefined else str(d.n),
        DASH if math.isnan(d.detectable) else f"{d.detectable:.3f}",
        DASH if found.needed is None else str(found.needed),
        f"{margin:g}",
        "open" if found.verdict == "open" else f"**{found.verdict}**",
        ", ".join(
            f"[{stem}]({paper_of(name).name}.md#{stem})" if d.n else stem for stem, name in places.items()
        ),
    ]
    return "| " + " | ".join(cells) + " |"


def _with_sign(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:+.3f}".replace("-", "−").replace("0.", ".", 1)


_HEAD = "| claim | printed | here (95 %) | pairs | detectable | needed | margin | verdict | decided by |"
_HOW = """\
Each row is a claim of [claims.toml](claims.toml) (fixed on {fixed}, SHA-256 {digest}…), judged by the \
small runs of [these tables](README.md). The margin is the smallest difference that matters. *Confirmed*: \
the 95 % interval lies above the margin (for a claim of equality, within ± margin). *Equivalent*: within ± \
margin. *Refuted*: below 0 (for equality, beyond the margin). *Open*: otherwise. Pairs are seeds, values \
of a series, or fine-tunings on random splits after one meta-training; these splits overlap, so their \
interval has Nadeau and Bengio's correction. *Detectable*: the true difference that would be told from 0 \
four times in five. *Needed*: with how many pairs that would be the margin, roughly, as the spread is of \
few pairs; to confirm or to show equality takes more. A dash: more fine-tunings of one model cannot get \
there. Intervals hold for this data, network and budget, and are not adjusted for the \
number of claims; seeds share one test set. †: runs older than the list."""
