"""The statement of a site's ledger as tables and lines for the terminal.

The statement of a site's ledger for its administrator: what was released, and what the budgets leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.table import Table

from suture.core.errors import ConfigError
from suture.core.escaping import number_of, rich
from suture.core.privacy import PrivacyConfig
from suture.data.config import load_site_config
from suture.federation.site.ledger import ANCHOR, LEDGER_FILE, Ledger, Mark, Release, tally_of
from suture.federation.state_files import EXPERIMENTS
from suture.privacy.differential_privacy import epsilon
from suture.protocol.messages import Spent


@dataclass(frozen=True)
class _BudgetLine:
    """What an experiment has released under one setting of clip and noise.

    Attributes:
        last: time of the last release.
        epsilon: of it alone, at the δ of that time; None is infinity.
        steps: of DP-SGD, with their noise and rate: ``60 steps, σ 1.4, q 0.13``; empty without any.
        figures: number of figures of each class.
        numbers: number of other numbers that noise does not protect.
        jobs: FLARE's ids of those that requested them, each with its submitter.
    """

    experiment: str
    clip: float | None
    noise: float
    delta: float
    answers: int
    updates: int
    epsilon: float | None
    steps: str
    figures: Mapping[str, int]
    numbers: int
    last: str
    jobs: Mapping[str, str]


@dataclass(frozen=True)
class Statement:
    """All that a site has released.

    Attributes:
        lines: by experiment and setting.
        spent: over all experiments, at `delta`.
        figures: number of figures of each class over all experiments.
        answers_left, anew_left: by experiment: answers that its budgets leave.
        figures_left: by class.
        experiments: number of experiments that the site has answered in.
        max_experiments, max_epsilon: the site's bounds over all experiments.
        breaks: in which ways the ledger is not whole: the site releases nothing until they are accepted.
        accepted: those that the administrator has accepted: the figures of `spent` are lower bounds.
        labels: what the site's classes are called and contain; None where it has stated neither.
    """

    lines: Sequence[_BudgetLine]
    spent: Spent
    delta: float
    figures: Mapping[str, int]
    answers_left: Mapping[str, int]
    anew_left: Mapping[str, int]
    figures_left: Mapping[str, int]
    experiments: int
    max_experiments: int
    max_epsilon: float | None
    breaks: Sequence[str]
    accepted: Sequence[str]
    labels: Mark | None


def read_statement(folder: Path) -> Statement:
    """Return the statement of a site's ledger; see `find_ledger`."""
    return state_of(*find_ledger(folder))


def find_ledger(folder: Path) -> tuple[Ledger, PrivacyConfig]:
    """Return the ledger of a site and its limits.

    Args:
        folder: its FLARE workspace, its folder with suture.toml (of a study or a run), or the ledger's.

    Raises:
        ConfigError: there is no ledger, nor an experiment that has noted one; or suture.toml cannot be used.
    """
    places = [
        base / name for base in (folder, folder.parent) for name in ("local/suture.toml", "suture.toml")
    ]
    path = next((path for path in places if path.is_file()), None)
    config = load_site_config(path) if path else None
    state = [config.storage.ledger or config.storage.state] if config else []
    places = [folder, *state, folder / "suture"]
    found = next(
        (p for p in places if (p / LEDGER_FILE).is_file() or any(p.glob(f"{EXPERIMENTS}/*/{ANCHOR}"))), None
    )
    if found is None:
        raise ConfigError(
            f"{folder} has no {LEDGER_FILE}: give the workspace of a site, or the folder that its "
            "suture.toml names as [storage] state. A site has no ledger before its first answer"
        )
    limits = config.privacy if config else PrivacyConfig()
    return Ledger(found / LEDGER_FILE, limits), limits


def state_of(ledger: Ledger, limits: PrivacyConfig) -> Statement:
    """Return the statement of a ledger under the limits of its site."""
    releases = ledger.releases()
    own: dict[str, list[Release]] = {}
    for release in releases:
        own.setdefault(release.experiment, []).append(release)
    told = tally_of(releases)
    figures = dict(sorted(told.figures.items()))
    return Statement(
        [line for group in own.values() for line in budget_lines(group)],
        ledger.spent(),
        limits.delta,
        figures,
        {name: max(limits.max_answers - len(group), 0) for name, group in own.items()},
        {name: max(limits.reanswers - told.anew[name], 0) for name in own},
        {name: max(limits.max_figures - times, 0) for name, times in figures.items()},
        len(own),
        limits.max_experiments,
        limits.max_epsilon,
        ledger.breaks()[0],
        list(ledger.accepted),
        ledger.labels,
    )


def budget_lines(releases: Iterable[Release]) -> list[_BudgetLine]:
    """Return the lines of one experiment: a changed clip or noise ends a line and begins another."""
    return [_line(list(group)) for _, group in groupby(releases, lambda release: release.settings)]


def _line(group: Sequence[Release]) -> _BudgetLine:
    last, told = group[-1], tally_of(group)
    return _BudgetLine(
        last.experiment,
        last.clip,
        last.noise,
        last.delta,
        len(group),
        sum(r.update for r in group),
        epsilon((r.mechanism for r in group if r.mechanism), last.delta),
        _steps(group),
        dict(told.figures),
        sum(r.numbers for r in group),
        last.time,
        {release.job: release.submitter for release in group if release.job},
    )


def _steps(group: Sequence[Release]) -> str:
    steps: Counter[tuple[float, float]] = Counter()
    for release in group:
        if release.task == "train" and release.steps:
            steps[release.multiplier, release.rate] += release.steps
    return "; ".join(f"{n} steps, σ {sigma:.3g}, q {rate:.2g}" for (sigma, rate), n in steps.items())


def statement_of(folder: Path, accept: bool = False) -> Statement:
    """Return what a site has released.

    Args:
        folder: the site's FLARE workspace, or the folder of its states.
        accept: record first that lines of the ledger are missing or were changed.

    Raises:
        ConfigError: there is no ledger.
    """
    if accept:
        find_ledger(folder)[0].accept()
    return read_statement(folder)


def ledger_totals(found: Statement) -> Iterator[str]:
    """Yield the totals over all experiments, and what the ledger lacks."""
    spent, bound = found.spent, _number(found.max_epsilon, "none")
    lower = "≥" if spent.epsilon is not None and (found.breaks or found.accepted) else "="
    yield (
        f"all experiments: {spent.updates} updates, {spent.unprotected} of them without noise; "
        f"ε {lower} {_number(spent.epsilon, '∞')} at δ = {found.delta:g} (max_epsilon: {bound})"
    )
    yield f"experiments: {found.experiments} (max_experiments: {_describe_left(found.max_experiments)})"
    for line in found.lines:
        yield from (f"{line.experiment}: job {job} of {user or 'no user'}" for job, user in line.jobs.items())
    if labels := found.labels:
        parents = number_of(sum(map(len, labels.parents.values())), "parent")
        since = f"since {labels.time[:10]} (digest {str(labels.digest)[:12]})"
        yield f"label mapping: {number_of(len(labels.names), 'name')} and {parents}, {since}"
    yield from (f"ε is a lower bound: {why}" for why in found.accepted)
    yield from (f"incomplete ledger: {why}" for why in found.breaks)
    if found.breaks:
        yield (
            "The site releases nothing until you restore the newest copy of the ledger, or run the same "
            "command with --accept, which records the gap"
        )


def ledger_tables(found: Statement) -> Iterator[Table]:
    """Yield tables of the answers and of the updates of each experiment, and of the classes."""
    answers = _table("experiment", "answers", "left", "repeats left", "figures", "other numbers", "last")
    updates = _table("experiment", "updates", "clip", "noise", "ε")
    for line in found.lines:
        name = line.experiment
        left = map(_describe_left, (found.answers_left[name], found.anew_left[name]))
        counts = map(str, (sum(line.figures.values()), line.numbers, line.last[:10]))
        answers.add_row(rich(name), str(line.answers), *left, *counts)
        noise = line.steps or _number(line.noise or None, "none")
        clip, spent = _number(line.clip, "none"), _number(line.epsilon, "∞")
        updates.add_row(rich(name), str(line.updates), clip, noise, spent)
    yield from (answers, updates)
    classes = _table("class", "figures", "left")
    for name, times in found.figures.items():
        classes.add_row(rich(name), str(times), _describe_left(found.figures_left[name]))
    yield classes


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for head in heads:
        named = head in ("experiment", "class")
        table.add_column(head, justify="left" if named else "right", overflow="fold" if named else "ellipsis")
    return table


def _describe_left(budget: int) -> str:
    """A budget in few columns; that of public data is practically unlimited."""
    return str(budget) if budget < 10**6 else "≥ 10⁶"


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"
