"""One line of `suture doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        about: what was looked at, in a word or two.
        text: what is so.
        remedy: what to do; empty where all is well.
    """

    about: str
    status: Status
    text: str
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    """All is well."""
    return Finding(about, "ok", text)


def warning(about: str, text: str, remedy: str) -> Finding:
    """Something that a person should know."""
    return Finding(about, "warning", text, remedy)


def error(about: str, text: str, remedy: str) -> Finding:
    """Something that must be mended before the party can take part."""
    return Finding(about, "error", text, remedy)
