"""Phantoms: the same seed gives the same bytes, and labels say what is drawn."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from suture.core.errors import SutureError
from suture_synthetic import phantom_hospitals, phantom_scans
from suture_synthetic.phantom import FINDINGS, Anatomy, chest
from suture_synthetic.phantom_hospitals import write_hospitals
from suture_synthetic.phantom_scans import HOSPITALS, Order, PhantomSpec, Scanner, drawing
from world import refused

SPEC = PhantomSpec(images=30, held_out=30, size=32)


def test_a_seed_gives_the_same_images_and_labels_of_its_findings() -> None:
    a, b, c = (Order(HOSPITALS[0].scanner, 20, SPEC, seed).draw() for seed in (1, 1, 2))
    assert a[0].tobytes() == b[0].tobytes() != c[0].tobytes()
    assert a[2] == b[2]
    assert len(set(a[2])) < 20  # several images of a patient
    images, y, patients = Order(Scanner(), 60, SPEC, 3).draw()
    assert (images.shape, images.dtype) == ((60, 32, 32), np.uint8)
    assert y.shape == (60, len(FINDINGS))
    assert set(np.unique(y)) == {0.0, 1.0}
    assert len(patients) == 60


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_is_drawn_and_more_strongly_with_contrast(finding: str) -> None:
    anatomy = Anatomy.draw(np.random.default_rng(7))

    def one(findings: set[str], contrast: float, seed: int) -> np.ndarray:
        return chest(anatomy, frozenset(findings), 64, contrast, np.random.default_rng(seed))

    weak, strong = (
        np.mean([np.abs(one({finding}, contrast, s) - one(set(), 1.0, s)).mean() for s in range(8)])
        for contrast in (0.5, 1.5)
    )
    assert 1e-4 < weak < strong


def test_scanners_differ_and_shift_zero_makes_them_one() -> None:
    means = [Order(h.scanner, 30, SPEC, 1).draw()[0].mean() for h in HOSPITALS]
    assert max(means) - min(means) > 3
    same = [Order(h.scanner.between(0), 30, SPEC, 1).draw()[0].tobytes() for h in HOSPITALS]
    assert same[0] == same[1] == same[2]
    assert HOSPITALS[1].scanner.between(1) == HOSPITALS[1].scanner


def test_sites_are_written_as_hospitals_have_them_and_again_only_where_the_spec_differs(
    tmp_path: Path,
) -> None:
    tables = write_hospitals(tmp_path, SPEC, 1)
    for hospital in HOSPITALS:
        rows = pd.read_csv(tables[hospital.name])
        assert tuple(rows)[3:] == hospital.labels
        assert len(rows) == 30
        assert rows.groupby("patient")["split"].nunique().max() == 1
    server = pd.read_csv(tables["server"])
    assert tuple(server)[3:] == FINDINGS
    assert set(server["split"]) == {"validation", "test"}
    table = tables["harbor"]
    before = table.stat().st_mtime_ns
    assert write_hospitals(tmp_path, SPEC, 1)["harbor"].stat().st_mtime_ns == before
    write_hospitals(tmp_path, replace(SPEC, images=20), 1)
    assert len(pd.read_csv(table)) == 20
    write_hospitals(tmp_path, replace(SPEC, every_label=True), 1)
    assert tuple(pd.read_csv(table))[3:] == FINDINGS


def test_an_interrupted_write_leaves_no_half_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(phantom_hospitals, "write_site", full)
    with pytest.raises(OSError, match="No space"):
        write_hospitals(tmp_path / "sites", SPEC, 1)
    assert not list((tmp_path / "sites").iterdir())


ORDERS = [Order(hospital.scanner, 700, SPEC, seed) for seed, hospital in enumerate(HOSPITALS)]


def children() -> set[psutil.Process]:
    """The processes of this one; another test may have left some."""
    return set(psutil.Process().children())


@pytest.mark.complete
def test_another_process_draws_the_same_runs_no_file_of_the_user_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('that of the user')")
    monkeypatch.chdir(tmp_path)
    before, drawn = children(), []
    for cores, processes in ((2, 1), (1, 0)):
        monkeypatch.setattr(phantom_scans, "usable_cores", lambda cores=cores: cores)
        with drawing(ORDERS) as parts:
            assert len(children() - before) == processes
            drawn.append([(images.tobytes(), y.tobytes(), patients) for images, y, patients in parts])
        assert children() <= before
    assert drawn[0] == drawn[1]


@pytest.mark.complete
def test_a_process_that_draws_and_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phantom_scans, "usable_cores", lambda: 2)
    before = children()
    with drawing(ORDERS) as parts:
        next(parts)
        (drawer,) = children() - before
        drawer.kill()
        with refused("-9", by=SutureError):
            list(parts)
    assert children() <= before


@pytest.mark.complete
def test_the_other_process_ends_with_the_one_that_asks_and_imports_no_torch() -> None:
    program = (
        "import os, sys; from suture_synthetic import phantom_scans as p; p.usable_cores = lambda: 2;"
        "order = p.Order(p.Scanner(), 1_000, p.PhantomSpec(size=16), 1); made = p.drawing([order] * 20);"
        "next(made.__enter__()); import psutil; [child] = psutil.Process().children();"
        "print(child.pid, 'torch' in sys.modules, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    pid, torch = done.stdout.split()
    assert torch == "False"
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
