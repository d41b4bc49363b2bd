"""Methods made for images, on documents: the jobs `surgical_openi` and `reports_openi` on a few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from official import Report, write_openi
from suture.core.errors import ConfigError
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture_papers.chest_xrays.openi import FINDINGS, THIRTEEN

pytestmark = pytest.mark.complete


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
    run_job(job, "local", tmp_path / "r", resume=False, overwrite=False, workers=None)
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    known = [set(site["labels"]) for site in run["sites"].values()]
    assert [len(labels) for labels in known] == [4, 4]
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert metrics["auroc"].keys() == set.union(*known)
    lines = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    first, last = (sum(site["train_loss"] for site in line["sites"].values()) for line in lines)
    assert last < first


@pytest.mark.parametrize("method", ["surgical", "pmfl"])
def test_a_run_with_the_words_of_its_documents_goes_on_where_it_stopped(method: str, tmp_path: Path) -> None:
    """As every preset of PMFL needs it, whose words are known only when the sites are written."""
    root = write_openi(tmp_path / "openi", REPORTS).parent
    few = ["simulation.cap=8", "method.batches=3", "finetuning.runs=1", "finetuning.epochs=1"]
    small = ["simulation.clients=2"] if method == "surgical" else [*few, "finetuning.few=8"]
    settings = [*small, "model.vocabulary=corpus", f"simulation.root={root}"]
    job = with_settings(load_job(f"{method}_openi"), [*settings, "rounds=3"])
    part = tmp_path / "part"
    run_job(with_settings(job, ["rounds=2"]), "local", part)
    run_job(job, "local", part, resume=True)
    run_job(job, "local", tmp_path / "whole")
    for name in ("model/model.safetensors", "model/model.json"):
        assert (part / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    more = with_settings(job, ["rounds=4"])
    with pytest.raises(ConfigError, match=r"begun with model\.vocabulary=.* has model\.vocabulary=clinical"):
        run_job(with_settings(more, ["model.vocabulary=clinical"]), "local", part, resume=True)


def test_a_run_of_other_words_does_not_go_on_with_those_of_its_documents(tmp_path: Path) -> None:
    root = write_openi(tmp_path / "openi", REPORTS).parent
    job = with_settings(
        load_job("surgical_openi"), ["rounds=1", "simulation.clients=2", f"simulation.root={root}"]
    )
    out = tmp_path / "r"
    run_job(job, "local", out)
    before = (out / "run.json").read_bytes()
    corpus = with_settings(job, ["rounds=2", "model.vocabulary=corpus"])
    says = r"begun with model\.vocabulary=clinical, and this job has model\.vocabulary=corpus"
    with pytest.raises(ConfigError, match=says):
        run_job(corpus, "local", out, resume=True)
    assert (out / "run.json").read_bytes() == before


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
        workers=None,
    )
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    known = [site["labels"] for site in run["sites"].values()]
    assert sorted(map(len, known)) == [4, 4, 5]
    assert sorted(name for own in known for name in own) == sorted(THIRTEEN)
    lines = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    losses = [line["validation"]["loss"] for line in lines]
    assert losses[-1] < losses[0]
