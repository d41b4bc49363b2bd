"""What a `MethodAggregator` leaves out, and what the filters of server and site do not let pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.fl_conf import create_privacy_manager

from flare_job import LABELS, SITES, START, FlareJob, context, full, known_job
from suture.core.errors import ConfigError, LabelError, RejectedUpdate, SutureError
from suture.flare.compat.tensors import register
from suture.flare.components import DeclaredResultFilter, MethodAggregator, SiteRowsFilter
from suture.methods import METHODS
from world import refused

OWN = list(SITES["alpha"])
GOOD = full(1.0, 2)


def shareable(data: Any, **meta: Any) -> Shareable:
    dxo = DXO(DataKind.WEIGHTS, {}, meta)
    dxo.data = data
    return dxo.to_shareable()


def received(guard: DeclaredResultFilter, task: Shareable) -> FLContext:
    """The context of a task that has passed the site's filter, as it is when the result goes out."""
    ctx = context("server", FilterKey.IN)
    assert guard.process(task, ctx) is task
    ctx.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT, private=True, sticky=False)
    return ctx


def training() -> tuple[DeclaredResultFilter, FLContext]:
    guard = DeclaredResultFilter("surgical", OWN, metrics={"accuracy": [0, 1]})
    return guard, received(guard, shareable(GOOD, labels=OWN, phase="main"))


def held_back(sent: Shareable, guard: DeclaredResultFilter, ctx: FLContext) -> None:
    """It does not leave; FLARE writes the error into the log of errors, which says nothing of it."""
    with pytest.raises(RejectedUpdate) as caught:
        guard.process(sent, ctx)
    assert "patient" not in str(caught.value)


# Results


# Of what `check_reply` tells apart two: see tests of suture.protocol.
LIES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another order": (GOOD, {"labels": ["Nodule", "Mass"]}, "labels"),
    "no names": (GOOD, {}, "labels"),
    "a name that is none": (GOOD, {"labels": ["Mass", 3]}, "labels"),
    "names as text": (GOOD, {"labels": "Mass"}, "labels"),
    "names of too many rows": (full(1.0, 3), {"labels": [*OWN, "Edema"]}, "'Edema'"),
    "a number whose square is none": ({**GOOD, "b": torch.tensor([0.0, 1e23, 0.0])}, {"labels": OWN}, "b"),
    "another type": ({**GOOD, "b": torch.zeros(3).double()}, {"labels": OWN}, "float64"),
    "a name that is no text": ({**GOOD, 3: torch.ones(1)}, {"labels": OWN}, "WEIGHTS"),
    "no tensor": ({**GOOD, "b": "zeros"}, {"labels": OWN}, "b"),
    "an array of text": ({**GOOD, "b": np.array(["1"])}, {"labels": OWN}, "b"),
    "a sparse tensor": ({**GOOD, "b": torch.zeros(3).to_sparse()}, {"labels": OWN}, "sparse"),
    "an undeclared field": (GOOD, {"labels": OWN, "note": "patient 17"}, "'note'"),
    "an encrypted model": (GOOD, {"labels": OWN, "PROCESSED_ALGORITHM": "he"}, "PROCESSED"),
    "a weight": (GOOD, {"labels": OWN, "weight": 2.0}, "weight"),
    "a weight as text": (GOOD, {"labels": OWN, "weight": "x"}, "weight"),
    "a class weight": (GOOD, {"labels": OWN, "class_weights": [1.0, 3.0]}, "class_weights"),
    "endless class weights": (GOOD, {"labels": OWN, "class_weights": [10**400, 1]}, "class_weights"),
    "class weights as text": (GOOD, {"labels": OWN, "class_weights": "11"}, "class_weights"),
    "an undeclared scalar": (GOOD, {"labels": OWN, "scalars": {"patients": 17.0}}, "scalars/patients"),
    "scalars as text": (GOOD, {"labels": OWN, "scalars": "x"}, "scalars"),
    "a long loss": (GOOD, {"labels": OWN, "train_loss": 0.123456789}, "train_loss"),
    "channels as text": (GOOD, {"labels": OWN, "channels": "x"}, "channels"),
}


@pytest.mark.parametrize(("data", "meta", "named"), LIES.values(), ids=list(LIES))
def test_a_result_that_was_not_declared_stays_at_its_site_and_else_is_left_out(
    data: Any, meta: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    held_back(shareable(data, **meta), *training())
    assert named in caplog.text  # log.txt says why
    known = known_job()
    known.task("alpha")
    with refused("alpha", "round 1", named, by=RejectedUpdate):
        known.answer("alpha", data, **meta)
    known.task("beta")
    known.answer("beta", full(2.0, 2), labels=list(SITES["beta"]))
    assert known.close().params["b"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": math.nan},
        {"accuracy": "high"},
        {"accuracy": 0.1234567},
        [1.0],
        {1: 0.5, "accuracy": 0.5},
        {"": 0.5},
        {"a" * 65: 0.5},
        {"accuracy\n2026-11-25 ERROR": 0.5},
        {str(i): 0.5 for i in range(101)},
    ],
)
def test_a_metric_that_is_no_number_of_six_digits_by_a_short_name_is_left_out(metrics: Any) -> None:
    for leak in (metrics, {"auroc": 0.5}, {"accuracy": 1.5}, {"accuracy": -0.5}):  # each has its bounds
        held_back(shareable(GOOD, labels=OWN, **{MetaKey.INITIAL_METRICS: leak}), *training())
    known = known_job()
    known.task("alpha")
    model = FLModel(params=GOOD, meta={"labels": OWN, "client_name": "alpha"})
    model.metrics = metrics
    with refused("alpha", "metric", by=RejectedUpdate):
        known.aggregator.accept_model(model)
    model.metrics = {"a" * 64: 0.5, **{str(i): 0.5 for i in range(99)}}
    known.aggregator.accept_model(model)
    assert known.close().metrics == model.metrics


@pytest.mark.parametrize(
    "sent",
    [
        shareable({}, labels=OWN),
        DXO(DataKind.WEIGHT_DIFF, GOOD, {"labels": OWN}).to_shareable(),
        DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, GOOD, {"labels": OWN})}).to_shareable(),
        DXO(DataKind.ANALYTIC, {"text": "patient 17"}).to_shareable(),
    ],
)
def test_another_kind_of_message_stays_at_the_site(sent: Shareable) -> None:
    held_back(sent, *training())


def test_a_result_is_taken_whole_once_and_only_where_it_was_requested() -> None:
    known = known_job()
    with refused("alpha", by=RejectedUpdate):
        known.answer("alpha", GOOD, labels=OWN)
    known.task("alpha")
    meta = {"labels": OWN, "client_name": "alpha"}
    with refused("params_transfer_type", by=RejectedUpdate):
        known.aggregator.accept_model(FLModel(params=GOOD, params_type=ParamsType.DIFF, meta=meta))
    known.answer("alpha", GOOD, labels=OWN)
    with refused("second", by=RejectedUpdate):
        known.answer("alpha", GOOD, labels=OWN)


def test_the_number_of_images_is_the_one_that_was_announced() -> None:
    known = known_job("fedavg", settings={"class_weights": "none"})
    known.task("alpha")
    with refused("99", by=RejectedUpdate):
        known.answer("alpha", full(1.0, 5), labels=list(LABELS), weight=99.0)
    known.answer("alpha", full(1.0, 5), labels=list(LABELS))  # 10 images
    known.task("beta")
    known.answer("beta", full(4.0, 5), labels=list(LABELS), weight=10.0)
    assert known.close().params["b"].tolist() == [2.5] * 3


@pytest.mark.parametrize(("method", "counted"), [("fedmas", False), ("fedlsm", True)])
def test_a_weight_that_is_for_the_site_to_say_is_never_made_up(method: str, counted: bool) -> None:
    label_type = METHODS[method]().labels.types[0]
    known = FlareJob(MethodAggregator(method, LABELS, label_type=label_type), START)
    known.introduce("alpha", ["Mass"], 10, {"Mass": (2, 8)} if counted else None)
    known.close()
    known.task("alpha")
    scalars = {"pseudo_positive": 1.0, "pseudo_negative": 1.0} if counted else {}
    with refused("class_weights" if counted else "weight", by=RejectedUpdate):
        known.answer("alpha", full(1.0, 5), labels=list(LABELS), scalars=scalars)


@pytest.mark.parametrize(("value", "max_update"), [(1e15, 100.0), (400.0, 100.0), (30.0, 10.0)])
def test_an_update_out_of_all_proportion_is_left_out(value: float, max_update: float) -> None:
    """The model has 15 numbers of -1, so its norm is 3.9; gamma sends 12 and alpha 9 of the value."""
    known = known_job(max_update=max_update)

    def send(**values: float) -> None:
        for site, number in values.items():
            known.task(site)
            known.answer(site, full(number, len(SITES[site])), labels=list(SITES[site]))

    with refused("max_update", by=RejectedUpdate):
        send(gamma=value)
    send(alpha=1.0, beta=2.0)
    assert known.close().params["b"].tolist() == [1.5] * 3
    # What was sent before bounds the next one, too, which may still be as long as the model.
    send(beta=2.0)
    with refused("max_update", by=RejectedUpdate):
        send(alpha=value)


def test_without_a_bound_the_largest_number_is_one_whose_square_is_finite() -> None:
    known = known_job("metafl", max_update=None)
    labels = known.task("alpha").meta["labels"]
    largest = {**full(1.0, len(labels)), "b": torch.tensor([0, 1e15, -1e15])}
    known.answer("alpha", largest, labels=labels)
    merged = known.close().params
    assert all(bool(tensor.isfinite().all()) for tensor in merged.values())
    assert merged["b"][1] != 0


def test_scatter_and_gather_is_told_whether_a_result_counts() -> None:
    known = known_job()
    known.task("alpha")

    def accepted(params: Any, round_: int = 1, client: str | None = "alpha") -> bool:
        result = shareable(params, labels=OWN)
        result.set_header(ServerCommandKey.FL_CLIENT, client and Client(client, "token"))
        result.set_peer_props({ReservedKey.IDENTITY_NAME: "alpha"})
        result.add_cookie(AppConstants.CONTRIBUTION_ROUND, round_)
        return known.aggregator.accept(result, context("alpha"))

    for broken in ({}, {"DXO": 1}, {"DXO": {"kind": "WEIGHTS", "data": 1, "meta": 2}}):
        result = Shareable(broken)
        result.set_header("__content_type__", "DXO")
        assert not known.aggregator.accept(result, context("alpha"))
    assert not accepted({})  # an introduction is no contribution
    assert not accepted(full(1.0, 3))
    assert not accepted(GOOD, round_=0)  # of the round before
    assert not accepted(GOOD, client="beta")  # which states the name of alpha
    assert not accepted(GOOD, client=None)  # no server has looked at the token
    assert accepted(GOOD)
    assert known.close().params["b"].tolist() == [1.0] * 3


# Introductions


@pytest.mark.parametrize(
    ("method", "meta"),
    [
        ("surgical", {"labels": ["Fracture"]}),
        ("surgical", {"labels": []}),
        ("surgical", {"labels": [3]}),
        ("surgical", {"labels": ["Mass"], "counts": {"Mass": [1, 2]}}),  # it requests none
        ("fedavg", {"labels": ["Mass"]}),  # it weights by images
        ("fedavg", {"labels": ["Mass"], "images": 101}),
    ],
)
def test_a_site_that_does_not_fit_the_job_stays_unknown(method: str, meta: dict[str, Any]) -> None:
    settings = {"class_weights": "none"} if method == "fedavg" else {}
    known = FlareJob(MethodAggregator(method, LABELS, settings=settings, images=100), START)
    known.introduce("alpha", **meta)
    known.close()
    assert known.task("alpha").data == {}
    known.introduce("alpha", ["Mass"], 100)  # another try
    assert "Mass" in (labels := known.task("alpha").meta["labels"])
    known.introduce("alpha", ["Edema"], 9)  # classes are announced once
    assert known.task("alpha").meta["labels"] == labels


def test_a_site_that_states_the_name_of_another_one_gets_no_rows_and_introduces_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = known_job()
    stolen = known.task("alpha", stated="gamma")
    assert (stolen.data, stolen.meta) == ({}, {})
    assert "alpha" in caplog.text
    assert known.task("gamma").meta["labels"] == list(SITES["gamma"])
    known.introduce("alpha", ["Pneumonia"], stated="delta")
    assert "'delta'" in caplog.text
    assert known.task("delta").data == {}
    known.introduce("delta", ["Edema"])
    assert known.task("delta").meta["labels"] == ["Edema"]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ["Mass"]},
        {"labels": None},
        {"images": 101},
        {"images": -1},
        {"images": None},
        {"counts": {"Mass": [1, 2]}},
        {"counts": {"Mass": [1, 2], "Nodule": [1, 2], "Edema": [1, 2]}},
        {"counts": {"Mass": [1, 2], "Nodule": [1, -2]}},
        {"note": "patient 17"},
    ],
)
def test_a_site_is_introduced_as_it_has_declared(change: dict[str, Any]) -> None:
    guard = DeclaredResultFilter("fedlsm", OWN, images=100)
    ctx = received(guard, shareable({}))
    good = {"labels": OWN, "images": 100, "counts": {"Mass": (1, 2), "Nodule": None}}
    assert from_shareable(guard.process(shareable({}, **good), ctx)).meta == good
    meta = {name: value for name, value in {**good, **change}.items() if value is not None}
    held_back(shareable({}, **meta), guard, ctx)
    held_back(shareable(GOOD, labels=OWN), guard, ctx)  # an empty task gets no tensors


# The filters


def test_what_no_aggregator_has_prepared_does_not_leave_the_server() -> None:
    with refused("MethodAggregator", by=RejectedUpdate):
        SiteRowsFilter().process(shareable(START), context("alpha"))


def test_a_broadcast_stays_whole_for_the_next_site() -> None:
    known = known_job()
    assert known.task("beta").data["head.bias"].shape == (2,)
    assert known.params["head.bias"].shape == (5,)
    assert "left over" not in known.task("alpha").meta  # what FLARE's controller adds to the model


def test_what_leaves_is_built_from_checked_values() -> None:
    guard, ctx = training()
    metrics = {MetaKey.INITIAL_METRICS: {"accuracy": 0.5}}
    sent = shareable(GOOD, labels=OWN, weight="0001.000", train_loss=0.25, **metrics)
    sent.set_header("note", "patient 17")
    out = guard.process(sent, ctx)
    dxo = from_shareable(out)
    assert dxo.data.keys() == GOOD.keys()
    assert all(torch.equal(dxo.data[name], tensor) for name, tensor in GOOD.items())
    assert dxo.meta == {"labels": OWN, "weight": 1.0, "train_loss": 0.25, **metrics}
    assert out.get_header("note") is None
    again = from_shareable(guard.process(out, ctx))  # a job and a site's policy may both have the filter
    assert again.meta == dxo.meta


class Described(torch.Tensor):
    """A tensor with a word about it."""

    note = "patient 17"


def test_a_tensor_leaves_alone() -> None:
    """A view would take the whole storage along, a subclass its attributes."""
    guard, ctx = training()
    storage = torch.arange(100.0)
    mixed = {
        "b": torch.ones(3).as_subclass(Described),
        "head.weight": storage[:4].view(2, 2).T,
        "head.bias": torch.nn.Parameter(storage[10:12]),
    }
    out = from_shareable(guard.process(shareable(mixed, labels=OWN), ctx)).data
    for name, tensor in mixed.items():
        assert type(out[name]) is torch.Tensor
        assert out[name].is_contiguous()
        assert out[name].untyped_storage().nbytes() == 4 * tensor.numel()
        assert out[name].tolist() == tensor.tolist()
    arrays = {"b": np.ones(3, np.float32), "head.weight": np.arange(100, dtype=np.float32)[:4].reshape(2, 2)}
    arrays["head.bias"] = arrays["head.weight"][:, 1]
    out = from_shareable(guard.process(shareable(arrays, labels=OWN), ctx)).data
    assert all(isinstance(array, np.ndarray) for array in out.values())
    assert out["head.bias"].flags.c_contiguous
    assert not np.shares_memory(out["head.bias"], arrays["head.weight"])


@pytest.mark.parametrize("code", [ReturnCode.EXECUTION_EXCEPTION, "patient 17"])
def test_an_error_code_leaves_without_data(code: str) -> None:
    guard, ctx = training()
    sent = shareable(GOOD, labels=OWN)
    sent.set_return_code(code)
    assert guard.process(sent, ctx) == make_reply(ReturnCode.EXECUTION_EXCEPTION)


def test_a_filter_in_the_wrong_place_lets_nothing_pass() -> None:
    """At the server results come in and tasks go out; and at a site no result without its task goes out."""
    in_, out = (
        (FilterKey.IN, FilterChainType.TASK_RESULT_CHAIN),
        (FilterKey.OUT, FilterChainType.TASK_DATA_CHAIN),
    )
    for direction, chain in (in_, out, (FilterKey.OUT, None), (FilterKey.INOUT, None)):
        guard = DeclaredResultFilter("surgical", OWN)
        if chain:
            guard.set_prop(FilterContextKey.CHAIN_TYPE, chain)
        held_back(shareable(GOOD, labels=OWN), guard, context("server", direction))


@pytest.mark.parametrize(
    ("data", "meta"),
    [
        (GOOD, {}),
        (GOOD, {"labels": ["Mass", "Edema"]}),
        (GOOD, {"labels": OWN, "script": "x"}),
        ({**GOOD, "head.bias": torch.ones(5)}, {"labels": OWN}),
        ({**GOOD, "head.bias": torch.tensor(1.0)}, {"labels": OWN}),
        ({**GOOD, "b": "x"}, {"labels": OWN}),
        (GOOD, {"labels": LABELS}),  # a site of this method sees its own classes only
    ],
)
def test_a_task_of_other_classes_does_not_reach_the_script(data: Any, meta: dict[str, Any]) -> None:
    with refused(by=RejectedUpdate):
        received(DeclaredResultFilter("surgical", OWN), shareable(data, **meta))


def test_a_site_of_a_method_for_all_classes_sends_all_rows() -> None:
    guard, every = DeclaredResultFilter("vanilla", OWN), list(LABELS)
    ctx = received(guard, shareable(full(1.0, 5), labels=every, phase="main"))
    assert from_shareable(guard.process(shareable(full(1.0, 5), labels=every), ctx)).meta["labels"] == every
    with refused(by=RejectedUpdate):
        received(guard, shareable(full(1.0, 1), labels=["Edema"]))


def test_counts_and_channels_survive_flares_serialiser() -> None:
    register()
    common_decomposers.register()  # as every process of FLARE does
    known = FlareJob(MethodAggregator("fedlsm", LABELS), START)
    meta = {"labels": OWN, "images": 10, "counts": {"Mass": (2, 8), "Nodule": None}}
    known.introduce("alpha", **from_shareable(fobs.loads(fobs.dumps(shareable({}, **meta)))).meta)
    known.close()
    task = from_shareable(fobs.loads(fobs.dumps(known.task("alpha").to_shareable())))
    assert task.meta["channels"]["positive_weight"].tolist() == [1, 1, 4, 1, 1]
    assert task.data["head.bias"].shape == (5,)


def test_counts_scalars_and_losses_stay_in_their_ranges() -> None:
    guard = DeclaredResultFilter("fedlsm", OWN, images=100)
    ctx = received(guard, shareable(GOOD, labels=OWN, phase="main"))
    declared = {"pseudo_positive": 3.0, "pseudo_negative": 0.0}
    good: dict[str, Any] = {"labels": OWN, "weight": 100.0, "class_weights": [3.0, 0.0], "scalars": declared}
    assert from_shareable(guard.process(shareable(GOOD, **good), ctx)).meta == good
    for wrong in (
        {"weight": 101.0},
        {"class_weights": [-1.0, 0.0]},
        {"scalars": {"pseudo_positive": 3.0}},
    ):
        held_back(shareable(GOOD, **{**good, **wrong}), guard, ctx)


def test_a_site_installs_the_filter_by_scope_in_its_privacy_json(tmp_path: Path) -> None:
    path = "suture.flare.components.DeclaredResultFilter"
    entry = {"path": path, "args": {"method": "surgical", "labels": OWN}}
    scope = {"name": "by-class", "task_data_filters": [entry], "task_result_filters": [entry]}
    for folder in ("local", "startup"):
        (tmp_path / folder).mkdir()
    (tmp_path / "local" / "privacy.json").write_text(json.dumps({"scopes": [scope]}))
    found = create_privacy_manager(Workspace(str(tmp_path), "alpha"), names_only=False).get_scope("by-class")
    (entering,), (leaving,) = found.task_data_filters[FilterKey.IN], found.task_result_filters[FilterKey.OUT]
    ctx = received(entering, shareable(GOOD, labels=OWN, phase="main"))
    assert from_shareable(leaving.process(shareable(GOOD, labels=OWN), ctx)).meta == {"labels": OWN}
    held_back(shareable(GOOD, labels=["Edema", "Hernia"]), leaving, ctx)


# Jobs


@pytest.mark.parametrize(
    ("make", "arguments", "named"),
    [
        (MethodAggregator, {"method": "surgica"}, "surgical"),
        (MethodAggregator, {"method": "individual"}, "federated"),
        (MethodAggregator, {"method": "metafl", "label_type": "multiclass"}, "label_type"),
        (MethodAggregator, {"settings": {"batch_nrm": "frozen"}}, "batch_norm"),
        (MethodAggregator, {"settings": {"robust": {"kind": "median"}}}, "robust"),
        (MethodAggregator, {"method": "fedalign", "robust": {}}, "FedAlign"),
        (MethodAggregator, {"robust": {"kind": "mean"}}, "kind"),
        (MethodAggregator, {"max_update": math.nan}, "max_update"),
        (MethodAggregator, {"labels": ["Mass", "Mass"]}, "'Mass'"),
        (MethodAggregator, {"labels": ["Mass", "a\nb"]}, "class"),
        (MethodAggregator, {"labels": "Mas"}, "'Mas'"),
        (DeclaredResultFilter, {"labels": "Mas"}, "'Mas'"),
        (DeclaredResultFilter, {"metrics": {"accuracy": 1}}, "metrics"),
        (DeclaredResultFilter, {"metrics": {"accuracy": [0]}}, "metrics"),
    ],
)
def test_wrong_arguments_are_refused_before_a_job_starts(
    make: Callable[..., Any], arguments: dict[str, Any], named: str
) -> None:
    with refused(named, by=LabelError if "labels" in arguments else ConfigError):
        make(**{"method": "surgical", "labels": LABELS, **arguments})


@pytest.mark.parametrize(
    ("method", "params", "how", "named"),
    [
        ("surgical", {"b": torch.zeros(3)}, {}, "'head'"),
        ("surgical", {"b": torch.zeros(3), "head.bias": torch.zeros(4)}, {}, "5"),
        ("surgical", {"b": torch.zeros(3), "head.bias": torch.tensor(1.0)}, {}, "5"),
        ("crt", START, {"label_type": "multiclass"}, "retrain.rounds"),  # more than the job's
        ("afl", START, {}, "AFL"),  # it sends no weights
    ],
)
def test_a_job_that_cannot_run_ends_and_nothing_leaves(
    method: str, params: Any, how: dict[str, Any], named: str
) -> None:
    known = FlareJob(MethodAggregator(method, LABELS, **how), params, rounds=5)
    if method == "afl":
        known.introduce("alpha", LABELS[:2], 9)
        known.close()
    with refused("MethodAggregator", by=SutureError):
        known.task("alpha")
    (panic,) = known.panics
    assert named in panic
