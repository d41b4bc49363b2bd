"""Methods made for images, on documents: the jobs `surgical_openi` and `reports_openi` on a few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from official import Report, write_openi
from suture.data.readers.openi import FINDINGS, THIRTEEN
from suture.simulation.job import load_job, with_settings
from suture.simulation.run import run_job

REPORTS: list[Report] = [
    (f"It shows {FINDINGS[i % 8].lower()}.", "", (f"{FINDINGS[i % 8]}/mild",))
    if i % 2
    else (f"{FINDINGS[i % 8]} and {FINDINGS[(i + 3) % 8]}.", "", (FINDINGS[i % 8], FINDINGS[(i + 3) % 8]))
    for i in range(240)
]
"""Each has one finding or two, and says so."""


@pytest.mark.parametrize("method", ["surgical", "vanilla", "partial"])
def test_the_job_of_text_trains_on_a_few_documents(method: str, tmp_path: Path) -> None:
    root = write_openi(tmp_path / "openi", REPORTS).parent
    small = ["rounds=2", "method.local.lr=0.01", "simulation.clients=2", "model.vocabulary=corpus"]
    job = with_settings(load_job("surgical_openi"), [*small, f"simulation.root={root}", f"method={method}"])
    run_job(job, "local", tmp_path / "r", resume=False, overwrite=False, threads=None)
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    known = [set(site["labels"]) for site in run["sites"].values()]
    assert [len(labels) for labels in known] == [4, 4]
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert metrics["auroc"].keys() == set.union(*known)
    lines = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    first, last = (sum(site["train_loss"] for site in line["sites"].values()) for line in lines)
    assert last < first


def test_vectors_of_documents_train_and_no_site_shares_a_finding(tmp_path: Path) -> None:
    reports: list[Report] = [
        (f"It shows {THIRTEEN[i % 13].lower()}.", "", (f"{THIRTEEN[i % 13]}/mild",)) for i in range(260)
    ]
    root = write_openi(tmp_path / "openi", reports).parent
    settings = ["rounds=4", "method.local.batch_size=8", f"simulation.root={root}"]
    run_job(
        with_settings(load_job("reports_openi"), settings),
        *("local", tmp_path / "r"),
        resume=False,
        overwrite=False,
        threads=None,
    )
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    known = [site["labels"] for site in run["sites"].values()]
    assert sorted(map(len, known)) == [4, 4, 5]
    assert sorted(name for own in known for name in own) == sorted(THIRTEEN)
    lines = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    losses = [line["validation"]["loss"] for line in lines]
    assert losses[-1] < losses[0]
