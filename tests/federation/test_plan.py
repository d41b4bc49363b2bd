"""What every party knows of a run, the hash of its code, and whose an experiment is."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parties import METHOD, record
from PIL import Image

from small_job import SMALL
from suture.core.errors import CodeMismatch, ConfigError
from suture.data.batch import Augmentation
from suture.execution.job import load_job
from suture.federation.loop import Loop, federate
from suture.federation.ownership import OWNER, NotOwner, Submitter, claim, may_use
from suture.federation.plan import Plan, Schedule, code_hash, needed_sites
from suture.federation.server.record import what_leaves
from suture.federation.server.server import open_server
from suture.methods import METHODS
from suture.models import ModelSpec
from suture.protocol.egress import Layout
from suture_results.model_export.explanation import explain
from suture_results.prediction import open_model
from world import refused, write_image


@pytest.mark.parametrize("name", ["fedlsm", "fedmas"])
def test_a_method_of_images_is_refused_a_model_of_text(name: str) -> None:
    with refused(METHODS[name].about.title, "lstm", "surgical", by=ConfigError):
        Plan(METHODS[name](), ModelSpec("lstm"), Augmentation(), 1, "run", "code")
    assert Plan(METHODS["fedavg"](), ModelSpec("lstm"), Augmentation(), 1, "run", "code").model.name == "lstm"


def test_what_leaves_is_listed_as_far_as_it_is_known() -> None:
    """Counts by the label type of the federation, and lengths by the model."""

    def listed(method: str, *known: Any) -> dict[str, str]:
        plan = Plan(METHODS[method](), ModelSpec("cnn"), Augmentation(), 1, "run", "code")
        return {field["field"]: field["shape"] for field in what_leaves(plan, *known)}

    layout = Layout({"w": ((2,), "torch.float32")}, {"head.weight": ((7,), "torch.float32")})
    types = (None, "multilabel", "multiclass")
    assert ["counts" in listed("fedavg", layout, one) for one in types] == [True, True, False]
    told = [listed("fedmlp", known)["prototypes"] for known in (layout, Layout({}, {}))]
    assert told == ["for each class 2 × 7 numbers", "numbers for each class"]


@pytest.mark.parametrize(
    ("method", "train"), [("surgical", "head"), ("surgical", "adapters"), ("afl", "all")]
)
def test_a_frozen_encoder_needs_weights(method: str, train: Any) -> None:
    """AFL freezes the encoder itself."""

    def plan(**model: Any) -> Plan:
        job = replace(SMALL, method=METHODS[method](), model=ModelSpec(size=64, train=train, **model))
        return job.plan("run")

    with refused("cnn", "model.weights", by=ConfigError):
        plan(name="cnn")
    random = plan(name="cnn", weights="random").with_paths(Path("files"), ["model.weights"])
    assert random.model.weights == "random", "a word, not a file of the server"
    assert plan(name="efficientnet_lite0").model.weights == "package"


def test_a_second_head_that_nobody_trains_is_refused() -> None:
    spec, trains = ModelSpec("cnn", projection=8, second_head=True), set()
    for name, kind in METHODS.items():
        if kind().sharing.prior is not None:
            trains.add(name)
            continue
        with refused("model.second_head=false", by=ConfigError):
            Plan(kind(), spec, Augmentation(), 1, "run", "code")
    assert trains == {"fedmas"}


TITLE: Any = {"name": "five", "title": "five rounds", "rounds": 5}


def test_patience_without_a_best_round_is_refused() -> None:
    with refused("patience=3", by=ConfigError):
        Schedule(**TITLE, selection="last", patience=3)
    assert Schedule(**TITLE, selection="server_metric", patience=3).patience == 3
    assert Schedule(**TITLE, selection="last").patience is None


def test_enough_sites_are_a_number_or_a_share_rounded_up() -> None:
    assert [needed_sites(None, n) for n in (1, 8)] == [1, 8]
    assert [needed_sites(2, n) for n in (1, 8)] == [2, 2]
    assert [needed_sites(0.5, n) for n in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]
    assert needed_sites(0.07, 100) == 7, "and not the eight of a rounding error"
    share = Schedule.from_dict({**TITLE, "min_sites": 0.5})
    assert Schedule.from_dict(json.loads(json.dumps(share.to_dict()))) == share
    for wrong in (0, 0.0, -1, 1.5, float("nan")):
        with refused("min_sites", by=ConfigError):
            Schedule.from_dict({**TITLE, "min_sites": wrong})


def plan_of_this_version() -> dict[str, Any]:
    plan = Plan(METHODS["fedavg"](), ModelSpec("cnn"), Augmentation(), 1, "run", code_hash())
    return json.loads(json.dumps(plan.to_dict()))  # type: ignore[no-any-return]


def test_the_plan_of_another_version_is_refused_by_that_and_not_only_by_the_setting(tmp_path: Path) -> None:
    own = plan_of_this_version()
    own["hyperparameters"]["local"]["moments"] = "kept"
    other = {**own, "code": "0123456789abcdef"}
    with refused("0123456789abcdef", "moments", by=CodeMismatch):
        Plan.from_dict(other)
    with pytest.raises(ConfigError, match=r"local\.moments") as wrong:
        Plan.from_dict(own)
    assert not isinstance(wrong.value, CodeMismatch)
    plan = Plan.from_dict({**other, "hyperparameters": {}})
    with refused("0123456789abcdef", by=CodeMismatch):
        open_server(plan, Schedule(**TITLE), None, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        [],
        {"method": ["fedavg"]},
        {"method": "y" * 70_000},
        {"hyperparameters": [1]},
        {"model": {"hidden": 10**9}},
        {"model": {"std": [0]}},
        {"seed": float("inf")},
        {"seed": 2**70},
        {"code": ["x"]},
        {"code": "\ud800"},
        {"code": None},
        {"devices": "gpu"},
        {"transport": "float8"},
        {7: 1},
    ],
    ids=str,
)
def test_a_plan_of_a_job_that_is_none_is_a_configuration_error(change: Any) -> None:
    """Whatever somebody has written into the configuration of a job."""
    plan = plan_of_this_version()
    assert Plan.from_dict(plan).seed == 1
    with pytest.raises(ConfigError) as caught:
        Plan.from_dict({**plan, **change} if isinstance(change, dict) else change)
    assert len(str(caught.value)) < 1_000
    assert str(caught.value).isprintable()


# An encoder of a folder that only the server has


JOB = """
rounds = 2
[model]
name = "hf:encoder"
size = 16
[method]
name = "surgical"
[simulation]
kind = "PhantomSites"
"""


def encoder(folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes, patch_size=8)).save_pretrained(folder)
    found = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3, "size": {"shortest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(found))
    return folder


@pytest.mark.complete
def test_a_federation_starts_from_the_folder_of_the_server_and_its_model_needs_none(
    tiny: Any, tmp_path: Path
) -> None:
    folder, job = encoder(tmp_path / "encoder"), tmp_path / "job.toml"
    job.write_text(JOB)
    plan = load_job(job).plan("run")
    assert (plan.model.name, plan.model.weights) == ("hf:dinov2", str(folder))
    values = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(values) == plan
    values["model"] |= {"name": f"hf:{folder}", "encoder_config": None}
    with refused("encoder", by=ConfigError):  # a job from elsewhere that names a folder of a site
        Plan.from_dict(values)
    federation = tiny(METHOD, model=plan.model, rounds=1)
    sites = replace(federation, plan=replace(federation.plan, model=replace(plan.model, weights="/nowhere")))
    server = federation.server()
    federate(server, Loop(sites.sites()))
    weights = (folder / "model.safetensors").read_bytes()
    made = record(server, "run.json")
    assert made["pretrained"] == {"file": "encoder", "sha256": hashlib.sha256(weights).hexdigest()}
    facts = {"model": "hf:dinov2", "pretrained": 32, "size": 16}
    assert made["notes"] == [{"code": "pretrained_size", "values": facts}]
    folder.rename(tmp_path / "gone")
    model = open_model(server.record.folder / "model")
    image = write_image(tmp_path / "a.png")
    pixels = np.asarray(Image.open(image))
    expected = model(torch.from_numpy(pixels.copy())[None, None]).numpy()
    assert np.abs(model.predict(image).to_numpy() - expected).max() <= 1e-6
    with refused("hf:dinov2", by=ConfigError):
        explain(model, pixels)  # it has no feature maps
    assert explain(model, pixels, kind="occlusion").maps


LEAD = Submitter("lead@a.org", "a")
OTHER = Submitter("lead@b.org", "b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trial"


def test_the_first_submitter_owns_an_experiment_and_others_are_refused(folder: Path) -> None:
    claim(folder, LEAD, ())
    claim(folder, LEAD, ())
    for other in (OTHER, Submitter(LEAD.name, "b"), Submitter(OTHER.name, "a"), None):
        with refused("'trial'", by=NotOwner):
            claim(folder, other, (OTHER.name,))
    owner = {"name": "lead@a.org", "org": "a", "study": "default", "shared_with": []}
    assert json.loads((folder / OWNER).read_text()) == owner


def test_a_study_of_flare_is_a_part_of_the_owner(folder: Path) -> None:
    """Who may act in one study is not thereby given a model of another, the same user neither."""
    lung = replace(LEAD, study="lung")
    claim(folder, lung, (OTHER.name,))
    claim(folder, lung, None)
    claim(folder, replace(OTHER, study="lung"), None)
    for other in (LEAD, OTHER, replace(LEAD, study="heart"), replace(OTHER, study="heart")):
        with refused("--study", by=NotOwner):
            claim(folder, other, None)
    assert may_use(folder, LEAD.name, "lung")
    assert not may_use(folder, LEAD.name)
    assert not may_use(folder, OTHER.name, "heart")


def test_the_owner_shares_by_name_and_takes_it_back(folder: Path) -> None:
    assert may_use(folder, OTHER.name)
    claim(folder, LEAD, (OTHER.name,))
    assert may_use(folder, OTHER.name)
    claim(folder, OTHER, ("third@c.org",))
    with refused(by=NotOwner):
        claim(folder, Submitter("third@c.org", "c"), None)  # only the owner's list counts
    claim(folder, LEAD, None)  # a copy of a job says nothing about sharing
    claim(folder, OTHER, None)
    claim(folder, LEAD, ())
    with refused(by=NotOwner):
        claim(folder, OTHER, None)
    assert [may_use(folder, name) for name in (LEAD.name, OTHER.name)] == [True, False]


def test_states_without_an_owner_are_nobodys(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    claim(folder, None, None)  # a loop or a simulation has no users
    assert not (folder / OWNER).exists()
    with refused(by=NotOwner):
        claim(folder, LEAD, ())


def test_a_refusal_tells_nothing_of_the_owner_or_the_progress(tmp_path: Path) -> None:
    said = set()
    for case in ("owned", "shared", "no owner"):
        folder = tmp_path / case / "trial"
        if case == "no owner":
            (folder / "state").mkdir(parents=True)
        else:
            claim(folder, LEAD, ("x@a.org",) if case == "shared" else ())
        with pytest.raises(NotOwner) as refusal:
            claim(folder, OTHER, ())
        said.add(str(refusal.value))
    (text,) = said
    assert LEAD.name not in text
    assert "x@a.org" not in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "a", "org": "b", "shared_with": 3}'])
def test_a_broken_file_is_an_error_and_no_way_in(content: str, folder: Path) -> None:
    folder.mkdir()
    (folder / OWNER).write_text(content)
    with refused("owner.json", by=ConfigError):
        claim(folder, OTHER, ())
    assert (folder / OWNER).read_text() == content


def test_of_two_first_jobs_one_is_the_owner(folder: Path) -> None:
    refused: list[str] = []
    start = threading.Barrier(8)

    def job(number: int) -> None:
        start.wait()
        try:
            claim(folder, Submitter(f"user-{number}", "a"), ())
        except NotOwner:
            refused.append(f"user-{number}")

    jobs = [threading.Thread(target=job, args=(i,)) for i in range(8)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    owner = json.loads((folder / OWNER).read_text())["name"]
    assert sorted([*refused, owner]) == [f"user-{i}" for i in range(8)]
    assert [path.name for path in folder.iterdir()] == [OWNER]
