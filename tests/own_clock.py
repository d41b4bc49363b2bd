"""A clock of its own for a module under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


def own_clock(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]) -> None:
    """Replace functions of `time` for one module; threads that an earlier test has left keep the system's."""
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(**{**vars(time), **functions}))
