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
from suture.execution.job import Job, load_job
from suture.federation.plan import Plan
from suture.flare import PLAN
from suture.flare.codec import from_shareable_
from suture.flare.compat.tensors import register
from suture.flare.recipe import export_job
from suture.flare.workspace import with_own_files
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.priors import PriorSpec
from suture.models.saved import load_model, load_spec, save_model
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import unpack
from suture_papers.fedmas.fedmas import FedMAS
from suture_results.prediction import open_model

PRIOR, EMBEDDING, SERVER = "method.prior.path", "model.embedding", ("model.weights", "model.name_vectors")
IMAGES = ModelSpec()
TEXT = ModelSpec("lstm", vocabulary=("heart", "lung"))


def job(model: ModelSpec = IMAGES, **prior: Any) -> Job:
    return Job(name="trial", title="Trial", method=FedMAS(prior=PriorSpec(**prior)), model=model, rounds=2)


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


def test_a_job_that_is_sent_names_files_by_their_bare_names(tmp_path: Path) -> None:
    (tmp_path / "names.safetensors").touch()
    (tmp_path / "job.toml").write_text(
        'rounds = 1\n[method]\nname = "fedmas"\n'
        '[method.prior]\nname = "checkpoint"\npath = "/priors/ours.pt"\n'
        '[model]\nprojection = 128\nrow_init = "named"\nname_vectors = "names.safetensors"\n'
    )
    sent = load_job(tmp_path)
    assert sent.model.name_vectors == str(tmp_path / "names.safetensors")
    folder = export_job(sent, tmp_path / "out", sites=["a"])
    for path in folder.rglob(PLAN):
        assert '"names.safetensors"' in path.read_text()
        assert '"ours.pt"' in path.read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and "/priors/" in path.read_text()]


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
    assert with_own_files(plan, files, PRIOR).method.prior == PriorSpec("checkpoint", str(files / "prior.pt"))
    paths = (str(tmp_path / "secret"), "../secret", "~/prior.pt", str(files / "prior.pt"))
    for name in (*paths, "link.pt", "none.pt", "tfidf", "download"):
        stray = dataclasses.replace(plan, method=FedMAS(prior=PriorSpec("checkpoint", name)))
        with pytest.raises(ConfigError, match=r"method\.prior\.path=.*\[storage\] files"):
            with_own_files(stray, files, PRIOR)
        monkeypatch.setenv("SUTURE_SITES", str(tmp_path))  # one person's simulation
        assert with_own_files(stray, files, PRIOR) == stray
        monkeypatch.delenv("SUTURE_SITES")
    packaged = job().plan("trial")
    assert with_own_files(packaged, files, PRIOR) == packaged


def test_weights_are_looked_up_in_the_servers_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    (tmp_path / "w.pth").touch()
    plan = job(ModelSpec("resnet18", weights="w.pth")).plan("trial")
    assert with_own_files(plan, tmp_path, *SERVER).model.weights == str(tmp_path / "w.pth")
    for weights in ("/etc/passwd", str(tmp_path / "w.pth"), "package"):
        stray = dataclasses.replace(plan, model=ModelSpec("resnet18", weights=weights))
        with pytest.raises(ConfigError, match=r"model\.weights=.*\[storage\] files"):
            with_own_files(stray, tmp_path, *SERVER)
    for model in (ModelSpec("resnet18", weights="download"), ModelSpec("resnet18")):
        usual = dataclasses.replace(plan, model=model)
        assert with_own_files(usual, tmp_path, *SERVER) == usual


def test_name_vectors_and_embeddings_are_looked_up_in_a_partys_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    (tmp_path / "names.safetensors").touch()
    (tmp_path / "minilm").mkdir()
    named = job(ModelSpec("cnn", row_init="named", name_vectors="names.safetensors")).plan("trial")
    found = with_own_files(named, tmp_path, *SERVER).model.name_vectors
    assert found == str(tmp_path / "names.safetensors")
    text = dataclasses.replace(
        named, method=SurgicalAggregation(), model=ModelSpec("vectors", embedding="minilm")
    )
    assert with_own_files(text, tmp_path, EMBEDDING).model.embedding == str(tmp_path / "minilm")
    for model, keys in (
        (ModelSpec("cnn", row_init="named", name_vectors="/etc/passwd"), SERVER),
        (ModelSpec("vectors", embedding="/etc"), (EMBEDDING,)),
    ):
        stray = dataclasses.replace(text, model=model)
        with pytest.raises(ConfigError, match=r"model\.(name_vectors|embedding)=.*\[storage\] files"):
            with_own_files(stray, tmp_path, *keys)
    usual = dataclasses.replace(text, model=ModelSpec("vectors"))
    assert with_own_files(usual, tmp_path, EMBEDDING) == usual


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
