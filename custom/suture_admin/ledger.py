"""The statement of a site's ledger as tables and lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from suture.core.printable import number_of
from suture.core.targets import rich
from suture_admin.statement import Statement, find_ledger, read_statement


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
    yield f"experiments: {found.experiments} (max_experiments: {_left(found.max_experiments)})"
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
        left = map(_left, (found.answers_left[name], found.anew_left[name]))
        counts = map(str, (sum(line.figures.values()), line.numbers, line.last[:10]))
        answers.add_row(rich(name), str(line.answers), *left, *counts)
        noise = line.steps or _number(line.noise or None, "none")
        clip, spent = _number(line.clip, "none"), _number(line.epsilon, "∞")
        updates.add_row(rich(name), str(line.updates), clip, noise, spent)
    yield from (answers, updates)
    classes = _table("class", "figures", "left")
    for name, times in found.figures.items():
        classes.add_row(rich(name), str(times), _left(found.figures_left[name]))
    yield classes


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for head in heads:
        named = head in ("experiment", "class")
        table.add_column(head, justify="left" if named else "right", overflow="fold" if named else "ellipsis")
    return table


def _left(budget: int) -> str:
    """A budget in few columns; that of public data is practically unlimited."""
    return str(budget) if budget < 10**6 else "≥ 10⁶"


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"
