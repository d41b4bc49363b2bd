"""Checks of names that other parties choose: of sites, experiments and classes.

They appear in paths, logs and reports.

FLARE's own check takes ``"x\\n"`` and names of 300 characters, so each is checked wherever it enters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from suture.core.errors import ConfigError, LabelError
from suture.core.printable import printable

LONGEST = 200
"""Largest number of characters of a class name."""

_PLAIN = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,%d}"
_SITE = re.compile(_PLAIN % 63)
_EXPERIMENT = re.compile(_PLAIN % 127)
_RULE = "letters, digits, '.', '_' and '-', not starting with '.'"


def check_sites(names: Iterable[str]) -> None:
    """Check site names, which become file names.

    Raises:
        ConfigError: names the first one that cannot be used.
    """
    for name in names:
        if not _SITE.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is no site name; use at most 64 {_RULE}")


def check_experiment(name: str) -> str:
    """Check and return the name of an experiment, which becomes the name of the folder of its states.

    Raises:
        ConfigError: it cannot be used; the user gives it as last part of ``suture run --out`` or as
            ``suture export --experiment``.
    """
    if not _EXPERIMENT.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is no name of an experiment (the last part of --out, or "
            f"`suture export --experiment`); use at most 128 {_RULE}"
        )
    return name


def check_job(name: str) -> str:
    """Check and return the name of a job, which becomes a part of the names of files and folders.

    Raises:
        ConfigError: it cannot be used.
    """
    if not _EXPERIMENT.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is no name of a job; use at most 128 {_RULE}")
    return name


def as_job(text: str) -> str:
    """Return a text, such as the name of a folder, as a name of a job, with '_' for other characters."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:64].lstrip(".") or "study"


def shown_name(name: object) -> str:
    """Return the name of a job or site that another party chose, quoted if Suture would refuse it."""
    text = str(name)
    return text if _EXPERIMENT.fullmatch(text) else f"{printable(text, 80)!r} (no valid name)"


def check_label(name: str) -> str:
    """Check and return the name of a class: printable, on one line, no path.

    Raises:
        LabelError: it cannot be used; says why.
    """
    shown = f"{name[:80]!r}{'…' if len(name) > 80 else ''}"
    if len(name) > LONGEST:
        raise LabelError(
            f"{shown} is not a label name: it has {len(name)} characters, at most {LONGEST} are allowed"
        )
    if not name.isprintable():
        raise LabelError(f"{shown} is not a label name: it has invisible or control characters; remove them")
    if "/" in name or "\\" in name:
        raise LabelError(f"{shown} is not a label name: it has a slash; write 'or'")
    if not any(c.isalnum() for c in name):
        raise LabelError(f"{shown} is not a label name; give it at least one letter or digit")
    return name
