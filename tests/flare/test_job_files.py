"""A job names the files of a party by bare names in one folder; no other file of it can be named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from one_site import OneSite

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.federation.plan import Plan
from suture.flare.codec import as_text, from_shareable_, from_text
from suture.flare.compat.tensors import register
from suture.flare.executor import SiteExecutor
from suture.flare.workspace import with_own_embedding, with_own_prior, with_own_weights
from suture.learning.prediction import open_model
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.priors import PriorSpec
from suture.models.saved import load_model, load_spec, save_model
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import unpack
from suture.simulation.job import Job
from suture_papers.fedmas.fedmas import FedMAS

IMAGES = ModelSpec()
TEXT = ModelSpec("lstm", vocabulary=("heart", "lung"))


def job(model: ModelSpec = IMAGES, **prior: Any) -> Job:
    return Job("trial", "Trial", FedMAS(prior=PriorSpec(**prior)), model, 2)


@pytest.mark.parametrize("words", ["/etc/passwd", "words.txt", "../words.txt", "corpus", ""])
def test_a_plan_names_no_file_of_words(words: str) -> None:
    plan = job().plan("trial").to_dict()
    plan["model"]["vocabulary"] = words
    with pytest.raises(ConfigError, match=r"model\.vocabulary=.* a job needs the words themselves"):
        Plan.from_dict(plan)


@pytest.mark.parametrize("words", ["/etc/passwd", "words.txt"])
def test_a_saved_model_names_no_file_of_words(words: str, tmp_path: Path) -> None:
    save_model(build(TEXT, LabelSet(("Mass",)), 1, pretrained=False), TEXT, tmp_path, {})
    assert open_model(tmp_path).reads_text
    path = tmp_path / "model.json"
    description = json.loads(path.read_text())
    description["model"]["vocabulary"] = words
    path.write_text(json.dumps(description))
    for read in (load_model, load_spec, open_model):
        with pytest.raises(ConfigError, match=r"model\.json needs the words themselves"):
            read(tmp_path)


def test_a_prior_is_looked_up_in_the_sites_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    files = tmp_path / "files"
    files.mkdir()
    (tmp_path / "secret").touch()
    (files / "prior.pt").touch()
    (files / "link.pt").symlink_to(tmp_path / "secret")
    plan = job(name="checkpoint", path="prior.pt").plan("trial")
    assert with_own_prior(plan, files).method.prior == PriorSpec("checkpoint", str(files / "prior.pt"))
    paths = (str(tmp_path / "secret"), "../secret", "~/prior.pt", str(files / "prior.pt"))
    for name in (*paths, "link.pt", "none.pt"):
        stray = dataclasses.replace(plan, method=FedMAS(prior=PriorSpec("checkpoint", name)))
        with pytest.raises(ConfigError, match=r"method\.prior\.path=.*\[storage\] files"):
            with_own_prior(stray, files)
        monkeypatch.setenv("SUTURE_SITES", str(tmp_path))  # one person's simulation
        assert with_own_prior(stray, files) == stray
        monkeypatch.delenv("SUTURE_SITES")
    packaged = job().plan("trial")
    assert with_own_prior(packaged, files) == packaged


def test_weights_are_looked_up_in_the_servers_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    (tmp_path / "w.pth").touch()
    plan = job(ModelSpec("resnet18", weights="w.pth")).plan("trial")
    assert with_own_weights(plan, tmp_path).model.weights == str(tmp_path / "w.pth")
    for weights in ("/etc/passwd", str(tmp_path / "w.pth"), "package"):
        stray = dataclasses.replace(plan, model=ModelSpec("resnet18", weights=weights))
        with pytest.raises(ConfigError, match=r"model\.weights=.*\[storage\] files"):
            with_own_weights(stray, tmp_path)
    for model in (ModelSpec("resnet18", weights="download"), ModelSpec("resnet18")):
        usual = dataclasses.replace(plan, model=model)
        assert with_own_weights(usual, tmp_path) == usual


def test_name_vectors_and_embeddings_are_looked_up_in_a_partys_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    (tmp_path / "names.safetensors").touch()
    (tmp_path / "minilm").mkdir()
    named = job(ModelSpec("cnn", row_init="named", name_vectors="names.safetensors")).plan("trial")
    found = with_own_weights(named, tmp_path).model.name_vectors
    assert found == str(tmp_path / "names.safetensors")
    text = dataclasses.replace(
        named, method=SurgicalAggregation(), model=ModelSpec("vectors", embedding="minilm")
    )
    assert with_own_embedding(text, tmp_path).model.embedding == str(tmp_path / "minilm")
    for model, finder in (
        (ModelSpec("cnn", row_init="named", name_vectors="/etc/passwd"), with_own_weights),
        (ModelSpec("vectors", embedding="/etc"), with_own_embedding),
    ):
        stray = dataclasses.replace(text, model=model)
        with pytest.raises(ConfigError, match=r"model\.(name_vectors|embedding)=.*\[storage\] files"):
            finder(stray, tmp_path)
    usual = dataclasses.replace(text, model=ModelSpec("vectors"))
    assert with_own_embedding(usual, tmp_path) == usual


def test_a_site_abstains_from_a_job_that_names_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through FLARE's runner: nothing of the file, not even whether it exists, is in the answer."""
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    register()
    (tmp_path / "there").touch()
    (tmp_path / "suture.toml").write_text('[data]\ndataset = "hospital"\nroot = "images"\ntable = "t.csv"\n')
    answers = []
    for name in ("there", "none"):
        plan = job(name="checkpoint", path=str(tmp_path / name)).plan("trial")
        site = OneSite(tmp_path / f"site-{name}", plan, tmp_path / "suture.toml")
        reply = unpack(from_shareable_(site.answer(TaskData("handshake", 0))))
        answers.append(reply)
        (line,) = (tmp_path / f"site-{name}" / "suture" / "errors.jsonl").read_text().splitlines()
        assert "by its bare name" in json.loads(line)["message"]
    assert answers == [Abstain("configuration", "ConfigError")] * 2


@pytest.mark.parametrize("text", ["", "[1]", "null", "{" * 100_000, "{'a': 1}"])
def test_settings_that_are_no_table_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="export the job again"):
        from_text(text)
    assert from_text(as_text({"a": {"path": "b.c"}})) == {"a": {"path": "b.c"}}
    assert SiteExecutor(text, 1).plan == text
