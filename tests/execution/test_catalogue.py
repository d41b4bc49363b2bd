"""What `suture list` shows is what there is, and what cannot be used does not hide the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from reference import from_registries, write_pages

from suture.cli.app import documented
from suture.core.errors import ConfigError
from suture.execution import catalogue
from suture.execution.catalogue import check_names, model_facts, read_stored, rows
from suture.methods import METHODS
from suture.methods.base import Question
from suture_papers.tables import loading
from world import refused, suture


@pytest.mark.complete
def test_the_stored_descriptions_are_those_of_the_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, too: the first model of a list is the one to begin with."""
    found, kept = from_registries(), read_stored()
    assert found == kept, "generate it again: python benchmarks/reference.py"
    assert [list(entries) for entries in found.values()] == [list(entries) for entries in kept.values()]
    unmeasured = {name for name, entry in kept["method"].items() if entry["cost"] is None}
    assert unmeasured == {name for name in kept["method"] if METHODS[name].about.local_only}
    old, kept_bytes = tmp_path / "catalogue.json", catalogue.CATALOGUE_FILE.read_bytes()
    old.write_text("{}")
    monkeypatch.setattr(catalogue, "CATALOGUE_FILE", old)
    assert old in write_pages(documented(), tmp_path / "docs")
    assert old.read_bytes() == kept_bytes


def test_every_kind_is_listed_and_a_faulty_file_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(rows())
    kinds = {"method", "model", "prior", "data set", "simulation", "job", "table"}
    assert {kind for kind, _, _ in found} == kinds
    assert all(name and text and "not usable" not in text for _, name, text in found)
    job, table = tmp_path / "job.py", tmp_path / "table.toml"
    job.write_text('"""A job.\n')
    table.write_text("titel = 1")
    monkeypatch.setattr(catalogue, "known_jobs", lambda: {"broken": job})
    monkeypatch.setattr(loading, "known_tables", lambda: {"wrong": table})
    texts = {name: text for _, name, text in rows()}
    for name, path in (("broken", job), ("wrong", table)):
        assert texts[name].startswith(f"not usable: {path}")
    assert "surgical" in texts


def test_a_slip_is_named_before_the_job_is_run(tmp_path: Path) -> None:
    """But a name that only the job's own code registers is no slip."""
    job = tmp_path / "job.py"
    job.write_text("raise SystemExit")
    check_names(str(job), ["rounds=1", "method=fedavg"])
    for name, settings, named in ((str(job), ["method=fedavgg"], "'fedavg'"), ("dmo", [], "'demo'")):
        with refused(named, by=ConfigError):
            check_names(name, settings)
    for text in ("import suture\nsuture.register(Mine)", "from suture import register", "import mine"):
        job.write_text(text)
        check_names(str(job), ["method=mine"])


def test_the_command_lists_methods_by_what_they_answer_and_answers_a_slip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    theirs = [*rows(), ("method", "surgical", "not usable: two packages register it")]
    monkeypatch.setattr(catalogue, "rows", lambda: theirs)
    assert json.loads(suture("list", "methods", "--json"))["result"]["surgical"].startswith("Surgical")
    heads = {line.strip() for line in suture("list", "methods").splitlines()} & {*get_args(Question)}
    assert heads == {kind.about.question for kind in METHODS.values()}
    assert "suture[lite]" in suture("list", "models")
    said = " ".join(suture("list").split())
    for word in ("surgical", "densenet121", "moco_resnet50", "hospital", "nih", "chest_all"):
        assert word in said
    for words, named in (
        (("jobs", "demo"), "suture list models NAME"),
        (("models", "timm:test_vitt"), "'test_vit'"),
        (("model",), "'models'"),
        (("models", "timm:dinov3"), "vit_small_patch16_dinov3"),
    ):
        with refused(named, by=ConfigError):
            suture("list", *words)
    assert "97,392" in suture("list", "models", "cnn")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("timm:test_vit", {"batch norm": "none", "features": "64", "images": "160", "weights": "a file"}),
        ("timm:test_vit", {"adapters": "blocks.*.attn.qkv, blocks.*.attn.proj"}),
        ("cnn", {"images": "model.size=64", "parameters": "97,392", "batch norm": "4 layers"}),
        ("cnn", {"adapters": "conv1, conv2, conv3, conv4", "weights": "a file or folder"}),
        ("torchvision:densenet121", {"adapters": "denseblock*.denselayer*.conv2, features.transition*.conv"}),
        ("efficientnet_lite0", {"adapters": "bias only"}),
        ("resnet18", {"normalisation": "[0.485, 0.456, 0.406]", "weights": "download"}),
        ("vectors", {"features": "256 for each text", "weights": "none"}),
    ],
)
def test_a_model_is_described(name: str, facts: dict[str, str]) -> None:
    found = dict(model_facts(name))
    assert {key: text for key, text in facts.items() if text not in found[key]} == {}
