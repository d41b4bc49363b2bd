"""The script's side of FLARE's Client API with class names, and the scripts and jobs of the examples."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
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

from flare_example import EXAMPLE, job_py
from flare_job import LABELS, START, FlareJob
from suture.core.errors import ConfigError
from suture.flare.client import gradients, load, receive, send
from suture.flare.components import MethodAggregator
from suture.flare.local import network
from suture.methods.base import Share
from suture.models.weights import read_checkpoint
from suture.protocol.messages import RECORDED
from world import refused

JOBS = EXAMPLE.parents[1] / "jobs"
SITES = {"site-1": {"Mass", "Nodule"}, "site-2": {"Hernia", "Nodule"}, "site-3": {"Edema", "Mass", "Nodule"}}


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
    assert site.job.params["head.bias"].tolist() == [-1, -1, 1, 1, -1]


def test_what_the_method_declares_travels_with_the_model(at_site: Any) -> None:
    site = at_site(FlareJob(MethodAggregator("fedlsm", LABELS), START))
    model = receive(["Mass"], images=10, counts={"Mass": (2, 8)})
    assert model is not None
    assert model.meta["labels"] == list(LABELS)
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
    assert signature(send).parameters.keys() >= {*RECORDED}


def test_a_script_ends_where_it_could_not_take_part(at_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_site(FlareJob(MethodAggregator("surgical", LABELS), START))
    with refused("classes", by=ConfigError):
        receive(["Fracture"])
    monkeypatch.setattr(nvflare.client, "receive", lambda _timeout: FLModel(params=dict(START)))
    with refused("SiteRowsFilter", by=ConfigError):
        receive(["Mass"])


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
    with refused(*params, by=ConfigError):
        load(an_lstm(), FLModel(params=params))


# The scripts and jobs of the examples


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
    code = JOBS / f"flare_{job}" / "app_site-1" / "custom"
    monkeypatch.setattr(sys, "argv", ["client.py", *words])
    monkeypatch.syspath_prepend(str(code))
    sys.modules.pop("shared", None)
    shared = import_module("shared")
    if job != "pmfl":
        monkeypatch.setitem(shared.MODEL, "encoder", "cnn")
    labels = ["Target"] if job == "pmfl" else ["Edema", "Mass", "Nodule"]
    start = network(labels, shared.MODEL).state_dict()
    aggregator = MethodAggregator(shared.METHOD, labels, settings=shared.SETTINGS)
    site = at_site(FlareJob(aggregator, start, rounds=3))
    runpy.run_path(str(code / "client.py"))
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


def test_each_site_is_told_its_own_classes_only(tmp_path: Path) -> None:
    job_py("export", "--to", tmp_path)
    assert not list(tmp_path.rglob("suture")), "the job carries a copy of the installed package"
    for site, own in SITES.items():
        files = [path for path in (tmp_path / "by-class" / f"app_{site}").rglob("*") if path.is_file()]
        assert {"client.py", "data.py", "net.py"} <= {path.name for path in files}
        text = "".join(path.read_text() for path in files)
        assert set(re.findall("Edema|Hernia|Mass|Nodule|Pneumonia", text)) == own


@pytest.mark.parametrize("name", ["surgical", "fedlsm", "fedmas", "pmfl"])
def test_a_job_of_flares_own_workflow_is_its_classes_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JOBS / f"flare_{name}"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    job = runpy.run_path(str(folder / "job.py"))
    monkeypatch.delitem(sys.modules, "shared")
    job["recipe"].export(str(tmp_path))
    exported = tmp_path / f"flare_{name}"
    assert {str(path.relative_to(exported)) for path in exported.rglob("*.py")} == {
        "app_server/custom/shared.py",
        *(f"app_{site}/custom/{file}.py" for site in job["SITES"] for file in ("client", "shared")),
    }
    files = {path.relative_to(exported): path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    assert files == {name: (folder / name).read_bytes() for name in files}, "python benchmarks/reference.py"
    sites = "app_site-1", "app_site-2"
    apps = ("app_server", *sites)
    of = {app: json.loads(path.read_text()) for app in apps for path in exported.glob(f"{app}/config/*.json")}
    assert of["app_server"]["workflows"][0]["path"] == "nvflare.app_common.workflows.fedavg.FedAvg"
    aggregator = of["app_server"]["workflows"][0]["args"]["aggregator"]

    def filters(app: str, way: str) -> list[dict[str, Any]]:
        return [
            {**f["args"], "class": f["path"].rpartition(".")[2]} for c in of[app][way] for f in c["filters"]
        ]

    assert aggregator["path"].endswith(".MethodAggregator")
    assert filters("app_server", "task_data_filters") == [{"class": "SiteRowsFilter"}]
    same = {"method": name, "settings": aggregator["args"]["settings"]}
    for app in sites:
        for way in ("task_data_filters", "task_result_filters"):
            [guard] = filters(app, way)
            assert guard["class"] == "DeclaredResultFilter"
            assert guard | same == guard
    if name == "surgical":
        assert "Edema" not in json.dumps(of["app_site-1"])


@pytest.mark.complete
def test_it_learns_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "job.py", "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    for site, own in SITES.items():
        assert f"{site} takes part with {len(own)} classes" in said
    best = [float(value) for value in re.findall(r"new best validation metric at round \d: (\S+)", said)]
    assert len(best) >= 2
    assert best[-1] > 0.8 > best[0]
    (path,) = tmp_path.rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    assert model["head.weight"].shape == (5, 16)
