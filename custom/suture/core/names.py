"""Names that come from elsewhere and end up in paths, logs and reports: of sites, experiments and classes.

FLARE's own check takes ``"x\\n"`` and names of 300 characters, so each is checked wherever it enters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from suture.core.errors import ConfigError, LabelError

LONGEST = 200
"""Characters of a class name."""

_PLAIN = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,%d}"
_SITE = re.compile(_PLAIN % 63)
_EXPERIMENT = re.compile(_PLAIN % 127)
_RULE = "letters, digits, '.', '_' and '-', not starting with '.'"


def check_sites(names: Iterable[str]) -> None:
    """Site names become file names, so they are plain.

    Raises:
        ConfigError: naming the first that is not.
    """
    for name in names:
        if not _SITE.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is no site name; use at most 64 {_RULE}")


def check_experiment(name: str) -> str:
    """The name of an experiment, under which the parties keep their states in a folder of that name.

    Raises:
        ConfigError: it is not plain; it is the last part of ``--out``, or that of ``--experiment``.
    """
    if not _EXPERIMENT.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is no name of an experiment (the last part of --out, or --experiment); use at "
            f"most 128 {_RULE}"
        )
    return name


def check_label(name: str) -> str:
    """The name of a class: printable, of one line, no path.

    Raises:
        LabelError: it is not; says why.
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
