"""A process uses no more cores than it may."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suture.core import processes as cores
from suture.core.processes import usable_cores


@pytest.mark.parametrize(
    ("limit", "usable"),
    [
        (None, 8),
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("5000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("unknown\n", 8),
    ],
)
def test_the_limit_of_a_container_counts(
    limit: str | None, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(cores, "_CPU_MAX", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores() == usable


@pytest.mark.parametrize(("affinity", "usable"), [(3, 3), (None, 64)])
def test_the_affinity_counts_where_there_is_one(
    affinity: int | None, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_CPU_MAX", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity), raising=False)
    assert usable_cores() == usable
