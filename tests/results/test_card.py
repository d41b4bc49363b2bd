"""The card of a model says what the files of its run say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from example_run import LABELS, SITES, metrics_record, run_record
from suture.cli.app import app
from suture.core.errors import DataError
from suture.core.escaping import markdown
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model, stated_digest
from suture_results.card import PAGE, rounded, try_card, write_card
from suture_results.report import write_report

SPEC = ModelSpec("cnn", size=32)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save_model(build(SPEC, LabelSet(tuple(LABELS)), 1, pretrained=False), SPEC, tmp_path / "model", {})
    (tmp_path / "run.json").write_text(json.dumps(run_record()))
    (tmp_path / "metrics.json").write_text(json.dumps(metrics_record()))
    return tmp_path


def test_the_figures_are_those_of_the_run(run_dir: Path) -> None:
    """Every number with three decimals is one of metrics.json, and each class's and site's is there."""
    text = write_card(run_dir).read_text()
    metrics = (run_dir / "metrics.json").read_text()
    known = {f"{float(number):.3f}" for number in re.findall(r"\d+\.\d+", metrics)}
    found = set(re.findall(r"(?<![\d.])\d\.\d{3}(?![\d.])", text.partition("## Figures")[2]))
    assert found
    assert found <= known
    for value in json.loads(metrics)["auroc"].values():
        assert value is None or f"{value:.3f}" in found
    assert all(f"| {site} |" in text for site in SITES)
    assert f"SHA-256 of model.safetensors: {stated_digest(run_dir / 'model')}" in text


@pytest.mark.parametrize("rounded", [False, True])
def test_figures_that_sites_round_are_not_read_as_exact(rounded: bool, run_dir: Path) -> None:
    record = metrics_record()
    steps = {name: 0.5 for name, value in record["auroc"].items() if rounded and value is not None}
    (run_dir / "metrics.json").write_text(json.dumps(record | {"steps": steps}))
    card = write_card(run_dir).read_text()
    assert (" in steps of 0.5 | " in card) is rounded
    assert ("Sites round their figures" in card) is rounded


def test_the_front_matter_is_read_and_no_licence_is_invented(run_dir: Path) -> None:
    text = write_card(run_dir).read_text()
    facts = yaml.safe_load(text.split("---\n")[1])
    assert "license" not in facts
    assert "Licence: not stated" in text
    assert facts["pipeline_tag"] == "image-classification"
    value = facts["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == round(json.loads((run_dir / "metrics.json").read_text())["mean_auroc"], 3)
    done = CliRunner().invoke(app, ["model", "card", str(run_dir), "--license", "apache-2.0"])
    assert done.exit_code == 0, done.output
    text = (run_dir / "model" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "apache-2.0"
    assert "Licence: apache-2.0" in text


def test_counts_are_rounded_and_foreign_text_is_no_markup() -> None:
    assert [rounded(n) for n in (None, 0, 9, 10, 99, 149, 1057)] == [
        "—",
        "< 10",
        "< 10",
        "10",
        "99",
        "150",
        "1100",
    ]
    assert markdown("a|<b>\n[x](y)") == r"a\|\<b\>\\n\[x\](y)"


def test_a_run_that_failed_has_no_card(run_dir: Path) -> None:
    (run_dir / "run.json").write_text(json.dumps(run_record() | {"status": "failed"}))
    with pytest.raises(DataError, match="is failed"):
        write_card(run_dir)


def test_the_page_says_what_the_card_says_and_foreign_text_is_no_markup(run_dir: Path) -> None:
    """Names come from other sites: a script in one is text on the page too, and no link is made."""
    bad = "<script>alert(1)</script> [x](javascript:alert(2)) ![y](https://z) `a` &lt; \n# Title"
    run = run_record() | {"title": bad, "notes": [{"code": "method", "values": {"text": bad}}]}
    (run_dir / "run.json").write_text(json.dumps(run))
    card = write_card(run_dir).read_text()
    page = (run_dir / "model" / PAGE).read_text()
    body = page.partition("<body>")[2]
    assert not re.findall(r"<(script|a|img|code)\b", body)
    assert "&lt;script&gt;" in body
    assert not re.findall(r"<[^>]*\b(?:src|href)=|url\(|@import", page)  # it needs no other file
    assert body.count("<h1>") == 1
    assert body.count("<h2>") == card.count("\n## ")
    for value in json.loads((run_dir / "metrics.json").read_text())["auroc"].values():
        assert value is None or f"{value:.3f}</td>" in body


def test_a_run_is_not_lost_to_its_card(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / "run.json").write_text(json.dumps(run_record() | {"status": "interrupted"}))
    try_card(run_dir)
    assert not (run_dir / "model" / "README.md").exists()
    (run_dir / "run.json").write_text(json.dumps(run_record()))
    try_card(run_dir)
    assert (run_dir / "model" / PAGE).exists()
    assert not caplog.records
    (run_dir / "metrics.json").write_text("{")
    try_card(run_dir)
    assert "has no card" in caplog.text


def test_a_robust_merge_is_stated(run_dir: Path) -> None:
    assert "Robust merge" not in write_card(run_dir).read_text()
    robust = {"robust": {"kind": "median", "liars": 1}}
    (run_dir / "run.json").write_text(json.dumps(run_record() | robust))
    assert "- Robust merge: kind median, liars 1\n" in write_card(run_dir).read_text()
    (run_dir / "run.json").write_text(json.dumps(run_record() | robust | {"unprotected": [LABELS[0]]}))
    assert "liars 1; the notes name unprotected classes\n" in write_card(run_dir).read_text()


def test_the_noisy_number_of_a_site_with_epsilon_is_no_number_of_images(run_dir: Path) -> None:
    write_report(run_dir)
    assert "with noise" not in write_card(run_dir).read_text() + (run_dir / "report.html").read_text()
    site, *_ = run_record()["sites"]
    own = {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5}
    (run_dir / "run.json").write_text(json.dumps(run_record() | {"protection": {site: own}}))
    write_report(run_dir)
    for path in (write_card(run_dir), run_dir / "report.html"):
        assert path.read_text().count(" patients, with noise") == 1, path.name


def test_the_modalities_of_the_model_are_stated(run_dir: Path) -> None:
    assert "DICOM" not in write_card(run_dir).read_text()
    record = run_record()
    record["model"] = {**record["model"], "modalities": ["CR", "DX"]}
    (run_dir / "run.json").write_text(json.dumps(record))
    assert "- DICOM modalities: CR, DX\n" in write_card(run_dir).read_text()


@pytest.mark.parametrize(
    ("facts", "model", "said"),
    [
        ({}, {}, "- Pretrained weights: none\n"),
        ({}, {"weights": "download"}, "- Pretrained weights: those that Suture names download\n"),
        (
            {"pretrained": {"file": "dino_v2.pth", "sha256": "ab" * 32}},
            {},
            f"dino\\_v2.pth, SHA-256 {'ab' * 32}\n",
        ),
        (
            {"pretrained": {"file": "a", "sha256": "cd" * 32}},
            {"train": "head"},
            f"SHA-256 {'cd' * 32}, frozen\n",
        ),
    ],
)
def test_the_card_states_the_weights_that_the_model_began_with(
    facts: dict[str, Any], model: dict[str, Any], said: str, run_dir: Path
) -> None:
    record = run_record()
    record |= {"model": record["model"] | model} | facts
    (run_dir / "run.json").write_text(json.dumps(record))
    assert said in write_card(run_dir).read_text()
