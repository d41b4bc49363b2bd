"""suture.federation.plan: what every party knows, and the hash that tells one package from another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_job import SMALL
from suture.core.errors import CodeMismatch, ConfigError
from suture.data.batch import Augmentation
from suture.federation.plan import Plan, Schedule, code_hash, needed_sites
from suture.federation.server.server import open_server
from suture.methods import METHODS
from suture.models import ModelSpec


@pytest.mark.parametrize("name", ["fedlsm", "fedmas"])
def test_a_method_of_images_is_refused_a_model_of_text(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"needs images, and the model 'lstm' reads text; .* both: surgical,"
    ):
        Plan(METHODS[name](), ModelSpec("lstm"), Augmentation(), 1, "run", "code")
    assert Plan(METHODS["fedavg"](), ModelSpec("lstm"), Augmentation(), 1, "run", "code").model.name == "lstm"


@pytest.mark.parametrize(
    ("method", "train"), [("surgical", "head"), ("surgical", "adapters"), ("afl", "all")]
)
def test_a_frozen_encoder_needs_weights(method: str, train: Any) -> None:
    """AFL freezes the encoder itself."""

    def plan(**model: Any) -> Plan:
        job = replace(SMALL, method=METHODS[method](), model=ModelSpec(size=64, train=train, **model))
        return job.plan("run")

    with pytest.raises(ConfigError, match=r"cnn has no .* model\.weights"):
        plan(name="cnn")
    random = plan(name="cnn", weights="random").with_paths(Path("files"), ["model.weights"])
    assert random.model.weights == "random", "a word, not a file of the server"
    assert plan(name="efficientnet_lite0").model.weights == "package"


def test_a_second_head_that_nobody_trains_is_refused() -> None:
    spec = ModelSpec("cnn", projection=8, second_head=True)
    for kind in METHODS.values():
        if kind().sharing.prior is None:
            with pytest.raises(ConfigError, match=r"a second head; set model.second_head=false"):
                Plan(kind(), spec, Augmentation(), 1, "run", "code")
    assert {name for name, kind in METHODS.items() if kind().sharing.prior is not None} == {"fedmas"}


TITLE: Any = {"name": "five", "title": "five rounds"}


def test_patience_without_a_best_round_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patience=3 .* or remove patience"):
        Schedule(**TITLE, rounds=5, selection="last", patience=3)
    assert Schedule(**TITLE, rounds=5, selection="server_metric", patience=3).patience == 3
    assert Schedule(**TITLE, rounds=5, selection="last").patience is None


def test_enough_sites_are_a_number_or_a_share_rounded_up() -> None:
    assert [needed_sites(None, n) for n in (1, 8)] == [1, 8]
    assert [needed_sites(2, n) for n in (1, 8)] == [2, 2]
    assert [needed_sites(0.5, n) for n in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]
    assert needed_sites(0.07, 100) == 7, "and not the eight of a rounding error"
    share = Schedule.from_dict({**TITLE, "rounds": 1, "min_sites": 0.5})
    assert Schedule.from_dict(json.loads(json.dumps(share.to_dict()))) == share


@pytest.mark.parametrize("wrong", [0, 0.0, -1, 1.5, float("nan")])
def test_another_number_of_sites_is_refused(wrong: float) -> None:
    with pytest.raises(
        ConfigError, match=r"a number of sites from 1 .*or a share of them between 0 and 1|finite number"
    ):
        Schedule.from_dict({**TITLE, "rounds": 1, "min_sites": wrong})


OTHER: dict[str, Any] = {
    "method": "surgical",
    "hyperparameters": {
        "local": {"lr": 1e-3, "epochs": 1, "batch_size": 8, "moments": "kept"},
        "batch_norm": "average",
    },
    "model": {"name": "cnn", "size": 16},
    "augmentation": {},
    "seed": 1,
    "experiment": "run",
    "code": "0123456789abcdef",
    "transport": "float32",
    "secure_aggregation": None,
}
"""The plan in a job folder that another version has exported, with a setting that this one does not have."""


def test_the_plan_of_another_version_is_refused_by_that_and_not_only_by_the_setting() -> None:
    with pytest.raises(CodeMismatch, match=r"another version .* export the job again \(.*moments") as refused:
        Plan.from_dict(OTHER)
    assert "0123456789abcdef" in str(refused.value)
    with pytest.raises(ConfigError, match=r"unknown key 'local\.moments'") as wrong:
        Plan.from_dict({**OTHER, "code": code_hash()})
    assert not isinstance(wrong.value, CodeMismatch)


@pytest.mark.parametrize("change", [{"devices": "gpu"}, {"code": None}])
def test_a_plan_of_other_keys_is_refused(change: dict[str, Any]) -> None:
    values = {key: value for key, value in {**OTHER, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=r"missing or unknown key '(devices|code)'; export the job again"):
        Plan.from_dict(values)


def test_a_server_refuses_a_job_that_another_version_made(tmp_path: Path) -> None:
    plan = Plan.from_dict({**OTHER, "hyperparameters": {}})
    with pytest.raises(CodeMismatch, match=r"the server runs another version .* export the job again"):
        open_server(plan, Schedule(**TITLE, rounds=1), None, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        [],
        None,
        "x",
        {"method": ["fedavg"]},
        {"method": "y" * 70_000},
        {"method": None},
        {"hyperparameters": None},
        {"hyperparameters": [1]},
        {"model": 1.5},
        {"model": {"hidden": 10**9}},
        {"model": {"size": 30_000}},
        {"model": {"std": [0]}},
        {"augmentation": "x"},
        {"seed": "x"},
        {"seed": float("inf")},
        {"seed": 2**70},
        {"experiment": 3},
        {"code": ["x"]},
        {"code": "\ud800"},
        {"transport": "float8"},
        {7: 1},
    ],
    ids=str,
)
def test_a_plan_of_a_job_that_is_none_is_a_configuration_error(change: Any) -> None:
    """Whatever somebody has written into the configuration of a job."""
    plan = Plan(METHODS["fedavg"](), ModelSpec("cnn"), Augmentation(), 1, "run", code_hash()).to_dict()
    assert Plan.from_dict(plan).seed == 1
    with pytest.raises(ConfigError) as caught:
        Plan.from_dict({**plan, **change} if isinstance(change, dict) else change)
    assert len(str(caught.value)) < 1_000
    assert str(caught.value).isprintable()
