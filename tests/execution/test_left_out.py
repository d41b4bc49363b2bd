"""What a run's figures do not cover is said in run.json, in the report and on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from suture.execution.job import Job
from suture.execution.run import run_job
from suture.execution.study import StudySites
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_results.notes import read_sentences
from suture_results.report_command import show_run

pytestmark = pytest.mark.complete


LABELS = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "gamma": ("Fibrosis", "Nodule")}


@pytest.fixture
def study(tmp_path: Path, hospital: Callable[..., Path]) -> Job:
    """Of alpha's 40 images five are missing and one is broken; beta validates and tests nothing."""
    folder = tmp_path / "study"
    for seed, (name, labels) in enumerate(LABELS.items()):
        hospital(folder / name, labels, 40, seed)
    alpha, beta = folder / "alpha", folder / "beta" / "labels.csv"
    for number in range(5):
        (alpha / "images" / f"00{number}.png").unlink()
    (alpha / "images" / "011.png").write_bytes(b"no image")
    toml = (alpha / "suture.toml").read_text()
    (alpha / "suture.toml").write_text(toml.replace("[data]", "[data]\npartial = true"))
    beta.write_text(beta.read_text().replace(",validation,", ",train,").replace(",test,", ",train,"))
    return Job(
        name="study",
        title="a study",
        method=SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8)),
        model=ModelSpec("cnn", size=16),
        rounds=1,
        simulation=StudySites(str(folder)),
    )


def test_images_sites_and_classes_that_no_figure_covers_are_named(
    study: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_job(study, out=tmp_path / "r", progress=True)
    printed = capsys.readouterr().out
    images = tmp_path / "study" / "alpha" / "images"
    facts = [
        ("alpha", "5 of 40 rows", str(images)),
        ("alpha", "1 of 35 images", "suture data check"),
        ("selected", "alpha and gamma", "beta has no validation images"),
        ("final", "alpha and gamma", "beta has no test images"),
        ("never validated", "Hernia", "no site that annotates it"),
        ("test AUROC", "Hernia", "not evaluated"),
    ]
    whole = read_sentences(out).left_out
    assert len(whole) == len(facts)
    for words in facts:
        assert any(all(word in sentence for word in words) for sentence in whole), words
    show_run(out)
    shown = " ".join(capsys.readouterr().out.split())
    page = " ".join((out / "report.html").read_text().split())
    for sentence in whole:
        assert f"warning: {sentence}" in shown
        assert f"<li>{sentence}</li>" in page
    assert "(2 of 3 sites)" in printed
    everything = "".join((out / name).read_text() for name in ("history.jsonl", "events.jsonl"))
    assert "cannot be read" not in everything, "the count stays at the site"


def test_a_run_again_says_it_once_and_a_whole_one_nothing(study: Job, tmp_path: Path) -> None:
    out = run_job(study, out=tmp_path / "r")
    before = json.loads((out / "run.json").read_text())["left_out"]
    run_job(study, out=out, overwrite=True)
    assert json.loads((out / "run.json").read_text())["left_out"] == before
    only = Job(
        name="one",
        title="one",
        method=study.method,
        model=study.model,
        rounds=1,
        simulation=study.simulation.__class__(study.simulation.folder, sites=("gamma",)),
    )
    alone = run_job(only, out=tmp_path / "alone")
    assert json.loads((alone / "run.json").read_text())["left_out"] == []
    assert ">Left out</h2>" not in (alone / "report.html").read_text()
