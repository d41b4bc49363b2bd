"""Phantoms: the same seed gives the same bytes, and labels say what is drawn."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from suture.core.errors import SutureError
from suture_synthetic import phantom_scans
from suture_synthetic.phantom import FINDINGS, Anatomy, chest
from suture_synthetic.phantom_hospitals import write_hospitals
from suture_synthetic.phantom_scans import HOSPITALS, Order, PhantomSpec, Scanner, drawing

SPEC = PhantomSpec(images=30, held_out=30, size=32)


def one(*findings: str, contrast: float = 1.0, seed: int = 0) -> np.ndarray:
    anatomy = Anatomy.draw(np.random.default_rng(7))
    return chest(anatomy, frozenset(findings), 64, contrast, np.random.default_rng(seed))


def test_same_seed_same_bytes() -> None:
    a, b, c = (Order(HOSPITALS[0].scanner, 20, SPEC, seed).draw() for seed in (1, 1, 2))
    assert a[0].tobytes() == b[0].tobytes()
    assert a[0].tobytes() != c[0].tobytes()
    assert a[2] == b[2]
    assert len(set(a[2])) < 20  # several images of a patient


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_finding_is_drawn_and_more_strongly_with_contrast(finding: str) -> None:
    changes = []
    for contrast in (0.5, 1.5):
        differences = [np.abs(one(finding, contrast=contrast, seed=s) - one(seed=s)).mean() for s in range(8)]
        changes.append(np.mean(differences))
    assert changes[0] > 1e-4
    assert changes[1] > changes[0]


def test_labels_of_a_site_are_what_its_images_show() -> None:
    images, y, patients = Order(Scanner(), 60, SPEC, 3).draw()
    assert images.shape == (60, 32, 32)
    assert images.dtype == np.uint8
    assert y.shape == (60, len(FINDINGS))
    assert set(np.unique(y)) == {0.0, 1.0}
    assert len(patients) == 60


def test_scanners_differ_and_shift_zero_makes_them_one() -> None:
    means = [Order(h.scanner, 30, SPEC, 1).draw()[0].mean() for h in HOSPITALS]
    assert max(means) - min(means) > 3
    same = [Order(h.scanner.between(0), 30, SPEC, 1).draw()[0].tobytes() for h in HOSPITALS]
    assert same[0] == same[1] == same[2]
    assert HOSPITALS[1].scanner.between(1) == HOSPITALS[1].scanner


def test_some_labels_are_known_to_all_some_to_two_and_some_to_one() -> None:
    owners = {label: sum(label in h.labels for h in HOSPITALS) for label in FINDINGS}
    assert sorted(set(owners.values())) == [1, 2, 3]
    for hospital in HOSPITALS:
        assert any(owners[label] == 1 for label in hospital.labels)
    assert len(FINDINGS) >= 8


def test_sites_are_written_as_hospitals_have_them(tmp_path: Path) -> None:
    tables = write_hospitals(tmp_path, SPEC, 1)
    for hospital in HOSPITALS:
        rows = list(csv.DictReader(tables[hospital.name].open()))
        assert tuple(rows[0])[3:] == hospital.labels
        assert len(rows) == 30
        splits: dict[str, set[str]] = {}
        for row in rows:
            splits.setdefault(row["patient"], set()).add(row["split"])
        assert all(len(found) == 1 for found in splits.values())
    server = list(csv.DictReader(tables["server"].open()))
    assert tuple(server[0])[3:] == FINDINGS
    assert {row["split"] for row in server} == {"validation", "test"}
    own, held = ({row["patient"] for row in csv.DictReader(tables[n].open())} for n in ("harbor", "server"))
    assert own
    assert held


def test_a_second_write_keeps_what_is_there_and_another_spec_replaces_it(tmp_path: Path) -> None:
    table = write_hospitals(tmp_path, SPEC, 1)["harbor"]
    before = table.stat().st_mtime_ns
    assert write_hospitals(tmp_path, SPEC, 1)["harbor"].stat().st_mtime_ns == before
    write_hospitals(tmp_path, replace(SPEC, images=20), 1)
    assert len(table.read_text().splitlines()) == 21
    full = write_hospitals(tmp_path, replace(SPEC, every_label=True), 1)["harbor"]
    assert full.read_text().splitlines()[0].count(",") == 2 + len(FINDINGS)


ORDERS = [Order(hospital.scanner, 700, SPEC, seed) for seed, hospital in enumerate(HOSPITALS)]


def children() -> set[psutil.Process]:
    """The processes of this one; another test may have left some."""
    return set(psutil.Process().children())


@pytest.mark.complete
def test_another_process_draws_the_same_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(phantom_scans, "usable_cores", lambda: 2)
    with drawing(ORDERS) as parts:
        assert len(children() - before) == 1
        found = list(parts)
    assert children() <= before
    monkeypatch.setattr(phantom_scans, "usable_cores", lambda: 1)
    with drawing(ORDERS) as parts:
        assert children() <= before
        alone = list(parts)
    for (images, y, patients), (own, own_y, own_patients) in zip(found, alone, strict=True):
        assert images.tobytes() == own.tobytes()
        assert y.tobytes() == own_y.tobytes()
        assert patients == own_patients


@pytest.mark.complete
def test_no_file_of_the_working_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('that of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suture_synthetic.phantom_scans.usable_cores", lambda: 2)
    with drawing(ORDERS) as parts:
        assert len(list(parts)) == len(ORDERS)


@pytest.mark.complete
def test_a_process_that_draws_and_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phantom_scans, "usable_cores", lambda: 2)
    before = children()
    with drawing(ORDERS) as parts:
        next(parts)
        (drawer,) = children() - before
        drawer.kill()
        with pytest.raises(SutureError, match="draws images ended with code -9"):
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


def test_an_interrupted_write_leaves_no_half_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("suture_synthetic.phantom_hospitals.write_site", full)
    with pytest.raises(OSError, match="No space"):
        write_hospitals(tmp_path / "sites", SPEC, 1)
    assert not list((tmp_path / "sites").iterdir())
