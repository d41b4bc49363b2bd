"""Numbers as text for readers: few digits, a unit, and an em dash for a missing value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from suture.core.validation import flat
from suture.protocol.messages import FEW

DASH = "—"
FEW_NOTE = f"few = under {FEW} positives or negatives, with the interval of a share of so few"
_THIN = "\u202f"  # narrow no-break space, between a number and its unit
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def area(value: float | None) -> str:
    """Return an AUROC with three decimals."""
    return DASH if value is None else f"{value:.3f}"


def step_path(value: float | None, step: float | None) -> str:
    """Return an AUROC or a loss, with the step to whose multiples a site has rounded it, if one has."""
    return area(value) if value is None or step is None else f"{area(value)} in steps of {step:g}"


def hundredths(value: float | None) -> str:
    """Return a figure with two decimals."""
    return DASH if value is None else f"{value:.2f}"


def interval(bounds: tuple[float, float] | None) -> str:
    """Return the bounds of an interval with three decimals."""
    return DASH if bounds is None else f"{bounds[0]:.3f}–{bounds[1]:.3f}"


def p_value(p: float) -> str:
    """Return a p in three digits; NaN, no test, is a dash."""
    return DASH if math.isnan(p) else "<.001" if p < 0.001 else f"{p:.3f}"


def count(value: int | None) -> str:
    """Return a whole number with its thousands set apart, as in all other texts."""
    return DASH if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """Return a share in whole per cent; one that only rounds to 0 or 100 % becomes <1 % or >99 %."""
    if share is None:
        return DASH
    whole = round(100 * share)
    if 0 < share < 1 and whole in {0, 100}:
        return f"{'>99' if whole else '<1'}{_THIN}%"
    return f"{whole}{_THIN}%"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return size and name of the largest unit that does not exceed a number of bytes."""
    return next((u for u in _BYTES if largest >= u[0]), _BYTES[-1])


def size(value: float) -> str:
    """Return a number of bytes with its unit and three significant digits."""
    factor, unit = byte_unit(value)
    return f"{_significant(value / factor)}{_THIN}{unit}"


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units; below two minutes in seconds."""
    if seconds is None:
        return DASH
    if seconds < 120:
        return f"{_significant(seconds)}{_THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes}{_THIN}min {rest}{_THIN}s"
    return f"{minutes // 60}{_THIN}h {minutes % 60}{_THIN}min"


def date_time(when: datetime | None) -> str:
    """Return a date and time, with the time zone where it has one."""
    if when is None:
        return DASH
    zone = f" {when.tzname()}" if when.tzinfo else ""
    return f"{when.day} {when:%B %Y, %H:%M}{zone}"


def spans(numbers: Iterable[int]) -> str:
    """Return the numbers of rounds with neighbours joined: "1, 3–5"."""
    groups: list[list[int]] = []
    for n in sorted(numbers):
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}" for g in groups)


def setting(value: object) -> str:
    """Return a configured value: text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _significant(value: float) -> str:
    """Return three significant digits, without an exponent below a million."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def leaves(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return nested settings one by one, under dotted names."""
    return [leaf for name, value in settings.items() for leaf in flat(name, value).items()]


FORMATS = (area, step_path, hundredths, interval, count, size, duration, date_time, percent, setting, leaves)
"""The filters of a page's template."""
