"""What came out of a table, as one sentence: its reference row against each other row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from suture_papers.tables.cells import DASH, Estimate, lines, over_series, p_value
from suture_papers.tables.outcome import Outcome
from suture_results.comparison import Comparison

_OVER = {"runs": ("seed", "seeds"), "classes": ("class", "classes"), "tuned": ("split", "splits")}
_LOWER_IS_BETTER = ("loss", "epochs")


def verdict(outcome: Outcome) -> str:
    """Return one sentence on the first column: wins, ties and losses with the 95 % interval and p of each.

    A difference counts as one only where the paired t-test is significant and its differences may be normal
    (`Comparison.significant`). Over a series, the pairs are those of all its values.
    """
    table, spec = outcome.table, outcome.table.spec
    column = table.columns[0]
    if spec.series:
        found = over_series(outcome, column)
    else:
        found = {line.row: line.estimates[column.name] for line in lines(outcome)}
    name = spec.rows[spec.reference].name
    own = found.pop(spec.reference)
    if math.isnan(own.mean):
        return f"No result yet: {name} has no {column.name} ({own.why or 'undefined'})."
    if not found:
        return f"{name} has {column.name} {number(own.mean)}; there is no comparison."
    one, many = ("run", "runs") if spec.series else _OVER[table.pairs]
    numbers = {estimate.against.n for estimate in found.values() if estimate.against and estimate.against.n}
    over = f", over {min(numbers)} {one if numbers == {1} else many}" if len(numbers) == 1 else ""
    said: dict[str, list[str]] = {}
    for row, estimate in found.items():
        verb, what = _compare(spec.rows[row].name, estimate, column.metric in _LOWER_IS_BETTER)
        if not over and estimate.against and estimate.against.n:
            what += f" over {estimate.against.n} {one if estimate.against.n == 1 else many}"
        said.setdefault(verb, []).append(what)
    if _HAS in said:
        # Names of rows have commas of their own.
        figures = "; ".join([number(own.mean), *said[_HAS]])
        said[_HAS] = [f"{figures}: too few runs to test a difference"]
    clauses = "; ".join(f"{verb} {_list(said[verb])}" for verb in sorted(said, key=_ORDER.index))
    return f"{column.name}{over}: {name} {clauses}."


_BEATS, _LOSES, _TIES = "beats", "is worse than", "does not differ significantly from"
_BETTER, _WORSE, _HAS, _NOT = "is better than", "is worse than", "has", "cannot be compared with"
_ORDER = (_BEATS, _LOSES, _TIES, _BETTER, _WORSE, _HAS, _NOT)


def _compare(name: str, other: Estimate, lower: bool) -> tuple[str, str]:
    """Say how the reference did against one row, as a verb and its object.

    Args:
        name: of the row.
        other: the estimate of the row, with how the reference differs from it.
        lower: whether the lower figure is the better one.
    """
    against = other.against
    if against is None or against.n == 0:
        return _NOT, f"{name} ({other.why or (against.why if against else '') or 'no pair is defined'})"
    if against.n == 1:
        return _HAS, f"{name} {number(other.mean)}"
    gain = -against.difference if lower else against.difference
    size, won = number(abs(gain)), gain > 0
    if against.significant:
        return (_BEATS if won else _LOSES), f"{name} by {size} ({_facts(against, against.difference < 0)})"
    if against.p >= 0.05:
        return _TIES, f"{name} ({number(gain)}, {_facts(against, lower)})"
    return (
        _BETTER if won else _WORSE
    ), f"{name} by {size}, but {against.why or 'the differences are not normal'}"


def _facts(against: Comparison, flip: bool) -> str:
    """Return interval and p of a comparison; `flip` says that the difference is shown negated."""
    low, high = (-against.high, -against.low) if flip else (against.low, against.high)
    p = p_value(against.p)
    bounds = (
        "" if math.isnan(low) else f"95 % {number(low)} to {number(high)}, "
    )  # none if all pairs are alike
    return f"{bounds}p {p if p.startswith('<') else f'= {p}'}"


def _list(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def number(value: float) -> str:
    """Return a figure with three decimals and no leading 0 below 1; a dash where undefined."""
    if math.isnan(value):
        return DASH
    return f"{round(value, 3) + 0.0:.3f}".replace("-0.", "-.").removeprefix("0").replace("-", "\u2212")
