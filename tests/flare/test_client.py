"""The script's side of FLARE's Client API with class names, and the example's scripts, without FLARE."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import nvflare.client
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from flare_job import FlareJob
from suture.core.errors import ConfigError
from suture.flare.client import gradients, load, receive, send
from suture.flare.components import MethodAggregator
from suture.flare.local import network
from suture.methods.base import Share
from suture.protocol.messages import RECORDED

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flare-fedavg"
JOBS = EXAMPLE.parents[1] / "jobs"
LABELS = ["Edema", "Hernia", "Mass", "Nodule", "Pneumonia"]
START = {"b": torch.zeros(3), "head.bias": torch.zeros(5)}


class OneSite:
    """FLARE's Client API at the only site of a job."""

    def __init__(self, job: FlareJob, site: str = "site-1") -> None:
        self.job, self.site, self.sent = job, site, list[FLModel]()

    def init(self) -> None:
        """Nothing has to begin."""

    def get_site_name(self) -> str:
        """The name of the site."""
        return self.site

    def receive(self, timeout: float | None = None) -> FLModel | None:
        """The task of the round; None after the last one."""
        if self.job.round >= self.job.rounds:
            return None
        task = self.job.task(self.site)
        rounds = {"current_round": self.job.round, "total_rounds": self.job.rounds}
        return FLModel(params=task.data, meta=dict(task.meta), **rounds)

    def send(self, model: FLModel) -> None:
        """The answer, with which the round ends."""
        self.sent.append(model)
        if model.params:
            meta = {**model.meta, "client_name": self.site}
            self.job.aggregator.accept_model(FLModel(params=model.params, metrics=model.metrics, meta=meta))
        else:
            self.job.introduce(self.site, **model.meta)
        self.job.close()


@pytest.fixture
def at_site(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(job: FlareJob) -> OneSite:
        site = OneSite(job)
        for name in ("init", "get_site_name", "receive", "send"):
            monkeypatch.setattr(nvflare.client, name, getattr(site, name))
        return site

    return install


def test_the_first_task_is_answered_with_the_classes(at_site: Any) -> None:
    site = at_site(FlareJob(MethodAggregator("surgical", LABELS), START, rounds=3))
    rounds = 0
    while (model := receive(["Nodule", "Mass"], images=7)) is not None:
        assert model.meta == {"labels": ["Nodule", "Mass"], "phase": "main"}
        assert model.params["head.bias"].shape == (2,)
        send(FLModel(params={n: t + 1 for n, t in model.params.items()}), model.meta["labels"])
        rounds += 1
    assert rounds == 2
    assert site.sent[0].meta == {"labels": ["Nodule", "Mass"], "images": 7}
    assert site.job.params["head.bias"].tolist() == [0, 0, 2, 2, 0]


def test_a_script_can_send_every_number_that_is_recorded() -> None:
    assert signature(send).parameters.keys() >= {*RECORDED}


def test_what_the_method_declares_travels_with_the_model(at_site: Any) -> None:
    site = at_site(FlareJob(MethodAggregator("fedlsm", LABELS), START))
    model = receive(["Mass"], images=10, counts={"Mass": (2, 8)})
    assert model is not None
    assert model.meta["labels"] == LABELS
    assert model.meta["channels"]["positive_weight"][2] == 4
    send(
        FLModel(params=model.params, metrics={"accuracy": torch.tensor(1 / 3)}),
        model.meta["labels"],
        class_weights=torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]),  # type: ignore[arg-type]
        scalars={"pseudo_positive": 1 / 3, "pseudo_negative": 0},
        train_loss=2 / 3,
    )
    sent = site.sent[-1]
    assert sent.metrics == {"accuracy": 0.333333}
    assert sent.meta["scalars"]["pseudo_positive"] == 0.333333
    assert sent.meta["train_loss"] == 0.666667
    assert sent.meta["class_weights"] == [0.0, 0.0, 3.0, 0.0, 0.0]


def test_a_class_that_the_job_lacks_ends_the_script(at_site: Any) -> None:
    at_site(FlareJob(MethodAggregator("surgical", LABELS), START))
    with pytest.raises(ConfigError, match="refuses the site's classes"):
        receive(["Fracture"])


def test_a_job_without_the_servers_filter_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvflare.client, "receive", lambda _timeout: FLModel(params=dict(START)))
    with pytest.raises(ConfigError, match="add SiteRowsFilter"):
        receive(["Mass"])


OWN, *FRAMEWORKS = "with_torch", "with_pmfl", "with_monai", "with_lightning", "with_huggingface"


@pytest.fixture(params=[OWN, *(pytest.param(name, marks=pytest.mark.complete) for name in FRAMEWORKS)])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of a script of the example, whose modules can be imported until the test is over."""
    for path in (EXAMPLE / OWN, EXAMPLE, EXAMPLE / request.param):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.chdir(tmp_path)
    for name in ("net", "data"):
        sys.modules.pop(name, None)
    yield EXAMPLE / request.param
    for name in ("net", "data"):
        sys.modules.pop(name, None)


@pytest.mark.complete
def test_each_script_of_the_example_learns(
    folder: Path, at_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["client.py", "Mass", "Nodule"])
    torch.manual_seed(0)
    net = import_module("net")
    method = "pmfl" if folder.name == "with_pmfl" else "surgical"
    aggregator = MethodAggregator(method, LABELS, head=net.HEAD)
    site = at_site(FlareJob(aggregator, net.Net(classes=5).state_dict(), rounds=5))
    script = next(path / "client.py" for path in (folder, EXAMPLE) if (path / "client.py").is_file())
    runpy.run_path(str(script))
    assert site.job.round == 5
    assert site.sent[0].meta["labels"] == ["Mass", "Nodule"]
    accuracies = [model.metrics["accuracy"] for model in site.sent[1:]]
    assert accuracies[-1] > accuracies[0]
    assert len(script.read_text().splitlines()) <= 30


@pytest.mark.complete
@pytest.mark.parametrize(
    ("job", "words", "counts", "beside"),
    [
        ("surgical", ["Mass", "Nodule"], False, set()),
        ("fedlsm", ["Mass", "Nodule"], True, {"weight", "class_weights", "scalars"}),
        ("fedmas", ["Edema", "Mass", "Nodule"], False, {"weight"}),
        ("pmfl", ["effusion"], False, {"scalars", "train_loss"}),
    ],
)
def test_a_job_of_flare_sends_beside_the_weights_what_its_paper_does(
    job: str, words: list[str], counts: bool, beside: set[str], at_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["client.py", *words])
    monkeypatch.syspath_prepend(str(JOBS / f"flare_{job}"))
    sys.modules.pop("shared", None)
    shared = import_module("shared")
    if job != "pmfl":
        monkeypatch.setitem(shared.MODEL, "encoder", "cnn")
    labels = ["Target"] if job == "pmfl" else ["Edema", "Mass", "Nodule"]
    start = network(labels, shared.MODEL).state_dict()
    aggregator = MethodAggregator(shared.METHOD, labels, settings=shared.SETTINGS)
    site = at_site(FlareJob(aggregator, start, rounds=3))
    runpy.run_path(str(JOBS / f"flare_{job}" / "client.py"))
    sys.modules.pop("shared")
    first, *updates = site.sent
    assert [set(model.meta) - {"labels"} for model in updates] == [beside, beside]
    assert ("counts" in first.meta) == counts
    moved = {n for n, t in site.job.params.items() if not torch.equal(t, start[n])}
    assert len(moved) > 5
    if job == "pmfl":
        half = {n: len(t) // 2 for n, t in start.items()}
        assert all(len(t) == half[n] for n, t in updates[-1].params.items())
        assert not any(torch.ne(site.job.params[n], t)[half[n] :].any() for n, t in start.items())


def an_lstm() -> torch.nn.ModuleDict:
    parts = {"lstm": torch.nn.LSTM(2, 4), "norm": torch.nn.BatchNorm1d(4), "head": torch.nn.Linear(4, 2)}
    return torch.nn.ModuleDict(parts)


@pytest.mark.parametrize(
    ("method", "share", "kept"),
    [("pmfl", {}, 8), ("pmfl", {"of": "units", "fraction": 0.25}, 12), ("metafl", {}, 0), ("pfl", {}, 0)],
)
def test_what_arrives_is_loaded_and_its_gradient_is_an_answer(
    method: str, share: dict[str, Any], kept: int, at_site: Any
) -> None:
    """PMFL sends half of the rows of a tensor, which `load_state_dict(strict=False)` refuses."""
    model, theirs = an_lstm(), an_lstm().state_dict()
    aggregator = MethodAggregator(method, ["Edema", "Mass"], settings={"share": share} if share else {})
    site = at_site(FlareJob(aggregator, theirs, rounds=3))
    own = model["head"].weight.clone()
    received, named = receive(["Edema", "Mass"], images=4), Share(**share) if share else None
    assert received is not None
    load(model, received, named)
    differs = (model["lstm"].weight_ih_l0 != theirs["lstm.weight_ih_l0"]).any(1)
    assert differs.sum() == kept
    assert torch.equal(model["head"].weight, theirs["head.weight"] if method == "metafl" else own)
    model["lstm"](torch.randn(3, 2))[0].sum().backward()  # which the head has no part in
    params = gradients(model, received, named)
    assert {n: t.shape for n, t in params.items()} == {n: t.shape for n, t in received.params.items()}
    assert params["lstm.weight_ih_l0"].abs().sum() > 0
    if method != "pfl":
        send(FLModel(params=params), ["Edema", "Mass"], scalars={"query_loss": 0.5}, train_loss=0.5)
        assert site.job.round == 2


@pytest.mark.parametrize(
    "params", [{"b": torch.zeros(2)}, {"head.bias": torch.zeros(3)}, {"head.bias": torch.zeros(2, 2)}]
)
def test_what_does_not_fit_the_model_is_named(params: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(params))} has arrived with shape"):
        load(an_lstm(), FLModel(params=params))
