"""The filters of jobs with a `MethodAggregator`: what a site receives, and what leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.workspace import Workspace
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.fl_conf import create_privacy_manager

from flare_job import FlareJob, context
from suture.core.errors import ConfigError, LabelError, RejectedUpdate
from suture.flare.compat.tensors import register
from suture.flare.components import DeclaredResultFilter, MethodAggregator, SiteRowsFilter

LABELS = ["Edema", "Hernia", "Mass", "Nodule", "Pneumonia"]
OWN = ["Mass", "Nodule"]
START = {"b": torch.zeros(3), "head.weight": torch.zeros(5, 2), "head.bias": torch.zeros(5)}
GOOD = {"b": torch.ones(3), "head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)}


def shareable(data: Any, **meta: Any) -> Shareable:
    return DXO(DataKind.WEIGHTS, data, meta).to_shareable()


def received(guard: DeclaredResultFilter, task: Shareable) -> FLContext:
    """The context of a task that has passed the site's filter, as it is when the result goes out."""
    ctx = context("server", FilterKey.IN)
    assert guard.process(task, ctx) is task
    ctx.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT, private=True, sticky=False)
    return ctx


def training(guard: DeclaredResultFilter | None = None) -> tuple[DeclaredResultFilter, FLContext]:
    guard = guard or DeclaredResultFilter("surgical", OWN, metrics={"accuracy": [0, 1]})
    return guard, received(guard, shareable(GOOD, labels=OWN, phase="main"))


# The server's


def test_what_no_aggregator_has_prepared_does_not_leave_the_server() -> None:
    with pytest.raises(RejectedUpdate, match="no MethodAggregator"):
        SiteRowsFilter().process(shareable(START), context("alpha"))


def test_a_broadcast_stays_whole_for_the_next_site() -> None:
    known = FlareJob(MethodAggregator("surgical", LABELS), START)
    known.introduce("alpha", ["Nodule"])
    assert known.task("alpha").data["head.bias"].shape == (1,)
    assert known.params["head.bias"].shape == (5,)
    assert "left over" not in known.task("alpha").meta  # what FLARE's controller adds to the model


# The site's


def test_a_declared_result_passes_as_it_is() -> None:
    guard, ctx = training()
    sent = shareable(GOOD, labels=OWN, train_loss=0.25, **{MetaKey.INITIAL_METRICS: {"accuracy": 0.5}})
    sent.set_header("note", "patient 17")
    out = guard.process(sent, ctx)
    dxo = from_shareable(out)
    assert dxo.data.keys() == GOOD.keys()
    assert all(torch.equal(dxo.data[name], tensor) for name, tensor in GOOD.items())
    assert dxo.meta == {"labels": OWN, "train_loss": 0.25, MetaKey.INITIAL_METRICS: {"accuracy": 0.5}}
    assert out.get_header("note") is None
    again = from_shareable(guard.process(out, ctx))  # a job and a site's policy may both have the filter
    assert again.meta == dxo.meta


def test_arrays_leave_as_arrays() -> None:
    guard, ctx = training()
    out = guard.process(shareable({n: t.numpy() for n, t in GOOD.items()}, labels=OWN), ctx)
    assert all(isinstance(value, np.ndarray) for value in from_shareable(out).data.values())


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
    array = from_shareable(guard.process(shareable(arrays, labels=OWN), ctx)).data["head.bias"]
    assert array.flags.c_contiguous
    assert not np.shares_memory(array, arrays["head.weight"])


def test_what_leaves_is_built_from_checked_values() -> None:
    guard, ctx = training()
    out = guard.process(shareable(GOOD, labels=OWN, weight="0001.000"), ctx)
    assert from_shareable(out).meta["weight"] == 1.0


@pytest.mark.parametrize(
    ("data", "meta"),
    [
        (GOOD, {}),
        (GOOD, {"labels": ["Mass", "Edema"]}),
        (GOOD, {"labels": ["Mass", "Mass"]}),
        (GOOD, {"labels": OWN, "note": "patient 17"}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: {"auroc": 0.5}}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: {"accuracy": 1.5}}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: {"accuracy": 0.123456789}}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: {"accuracy": float("nan")}}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: "high"}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: None, MetaKey.PROCESSED_ALGORITHM: "he"}),
        (GOOD, {"labels": OWN, "scalars": {"patients": 17.0}}),
        (GOOD, {"labels": OWN, "weight": 17.0}),
        (GOOD, {"labels": OWN, "channels": {"x": np.ones(3)}}),
        ({**GOOD, "b": torch.tensor([0.0, 0.0, float("inf")])}, {"labels": OWN}),
        ({**GOOD, "b": torch.tensor([0.0, 0.0, 1e23])}, {"labels": OWN}),
        (GOOD, {"labels": OWN, MetaKey.INITIAL_METRICS: {3: 0.5}}),
        ({**GOOD, "b": torch.zeros(3).double()}, {"labels": OWN}),
        ({**GOOD, "more": torch.ones(1)}, {"labels": OWN}),
        ({**GOOD, "head.bias": torch.ones(3)}, {"labels": OWN}),
        ({"b": torch.ones(3)}, {"labels": OWN}),
        ({}, {"labels": OWN}),
        (None, {"labels": OWN}),
    ],
)
def test_what_was_not_declared_stays_at_the_site(data: Any, meta: dict[str, Any], caplog: Any) -> None:
    guard, ctx = training()
    sent = DXO(DataKind.WEIGHTS, GOOD, meta)
    sent.data = data
    with pytest.raises(RejectedUpdate, match="held back") as error:
        guard.process(sent.to_shareable(), ctx)
    assert "patient" not in str(error.value)  # FLARE writes it into the log of errors
    assert "held back" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        Shareable({"weights": [1, 2, 3]}),
        DXO(DataKind.WEIGHT_DIFF, GOOD, {"labels": OWN}).to_shareable(),
        DXO(DataKind.METRICS, {"accuracy": 1.0}, {"labels": OWN}).to_shareable(),
        DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, GOOD, {"labels": OWN})}).to_shareable(),
        DXO(DataKind.ANALYTIC, {"text": "patient 17"}).to_shareable(),
    ],
)
def test_another_kind_of_message_stays_at_the_site(sent: Shareable) -> None:
    guard, ctx = training()
    with pytest.raises(RejectedUpdate, match="held back"):
        guard.process(sent, ctx)


@pytest.mark.parametrize("code", [ReturnCode.EXECUTION_EXCEPTION, "patient 17"])
def test_an_error_code_leaves_without_data(code: str) -> None:
    guard, ctx = training()
    sent = shareable(GOOD, labels=OWN)
    sent.set_return_code(code)
    out = guard.process(sent, ctx)
    assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert out == make_reply(ReturnCode.EXECUTION_EXCEPTION)


@pytest.mark.parametrize(
    ("direction", "chain"),
    [(FilterKey.IN, FilterChainType.TASK_RESULT_CHAIN), (FilterKey.OUT, FilterChainType.TASK_DATA_CHAIN)],
)
def test_at_the_server_the_filter_of_a_site_lets_nothing_pass(direction: str, chain: str) -> None:
    """There results come in and tasks go out; a result is not to be taken for a task."""
    guard = DeclaredResultFilter("surgical", OWN)
    guard.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    infinite = {**GOOD, "b": torch.full((3,), torch.inf)}
    with pytest.raises(RejectedUpdate):
        guard.process(shareable(infinite, labels=OWN), context("server", direction))


@pytest.mark.parametrize("kind", [MethodAggregator, DeclaredResultFilter])
def test_one_name_is_no_list_of_names(kind: Any) -> None:
    with pytest.raises(LabelError, match="'Mas' is one name; give a list"):
        kind("surgical", "Mas")


def test_bounds_that_are_no_pair_are_refused() -> None:
    with pytest.raises(ConfigError, match="the lowest and the highest"):
        DeclaredResultFilter("surgical", OWN, metrics={"accuracy": 1})  # type: ignore[dict-item]


def test_a_result_without_a_task_stays_at_the_site() -> None:
    guard = DeclaredResultFilter("surgical", OWN)
    for direction in (FilterKey.OUT, FilterKey.INOUT):
        with pytest.raises(RejectedUpdate):
            guard.process(shareable(GOOD, labels=OWN), context("server", direction))


@pytest.mark.parametrize(
    ("data", "meta"),
    [
        (GOOD, {}),
        (GOOD, {"labels": ["Mass", "Edema"]}),
        (GOOD, {"labels": ["Mass"]}),
        (GOOD, {"labels": OWN, "script": "x"}),
        ({**GOOD, "head.bias": torch.ones(5)}, {"labels": OWN}),
        ({**GOOD, "head.bias": torch.tensor(1.0)}, {"labels": OWN}),
        ({**GOOD, "b": "x"}, {"labels": OWN}),
        (GOOD, {"labels": LABELS}),  # a site of this method sees its own classes only
        ({}, {"labels": LABELS}),
    ],
)
def test_a_task_of_other_classes_does_not_reach_the_script(data: Any, meta: dict[str, Any]) -> None:
    with pytest.raises(RejectedUpdate, match="held back"):
        received(DeclaredResultFilter("surgical", OWN), shareable(data, **meta))


def test_a_site_of_a_method_for_all_classes_sends_all_rows() -> None:
    rows = {"b": torch.ones(3), "head.bias": torch.ones(5)}
    guard = DeclaredResultFilter("vanilla", OWN)
    ctx = received(guard, shareable(rows, labels=LABELS, phase="main"))
    assert from_shareable(guard.process(shareable(rows, labels=LABELS), ctx)).meta["labels"] == LABELS
    with pytest.raises(RejectedUpdate):
        received(guard, shareable({"b": torch.ones(3), "head.bias": torch.ones(1)}, labels=["Edema"]))


@pytest.mark.parametrize(
    "meta",
    [
        {"labels": ["Mass"]},
        {"labels": [*OWN, "Edema"]},
        {"labels": OWN, "images": 101},
        {"labels": OWN, "images": -1},
        {"labels": OWN, "counts": {"Mass": [1, 2], "Nodule": [1, 2]}},  # FedLSM weights sites by images
        {"labels": OWN, "images": 3.5},
        {"labels": OWN, "counts": {"Mass": [1, 2]}},
        {"labels": OWN, "counts": {"Mass": [1, 2], "Nodule": [1, 2], "Edema": [1, 2]}},
        {"labels": OWN, "counts": {"Mass": [1, 2], "Nodule": [1, -2]}},
        {"labels": OWN, "counts": {"Mass": [1, 2], "Nodule": [1, 2, 3]}},
        {"labels": OWN, "note": "patient 17"},
        {},
    ],
)
def test_a_site_is_introduced_as_it_has_declared(meta: dict[str, Any]) -> None:
    guard = DeclaredResultFilter("fedlsm", OWN, images=100)
    ctx = received(guard, shareable({}))
    counts = {"Mass": [1, 2], "Nodule": None}
    out = guard.process(shareable({}, labels=OWN, images=100, counts=counts), ctx)
    assert from_shareable(out).meta == {
        "labels": OWN,
        "images": 100,
        "counts": {"Mass": (1, 2), "Nodule": None},
    }
    with pytest.raises(RejectedUpdate, match="held back"):
        guard.process(shareable({}, **meta), ctx)
    with pytest.raises(RejectedUpdate, match="held back"):  # an empty task gets no tensors
        guard.process(shareable(GOOD, labels=OWN), ctx)


def test_counts_and_channels_survive_flares_serialiser() -> None:
    register()
    common_decomposers.register()  # as every process of FLARE does
    known = FlareJob(MethodAggregator("fedlsm", LABELS), START)
    meta = {"labels": OWN, "images": 10, "counts": {"Mass": (2, 8), "Nodule": None}}
    sent = from_shareable(fobs.loads(fobs.dumps(shareable({}, **meta))))
    known.introduce("alpha", **sent.meta)
    known.close()
    task = from_shareable(fobs.loads(fobs.dumps(known.task("alpha").to_shareable())))
    assert task.meta["channels"]["positive_weight"].tolist() == [1, 1, 4, 1, 1]
    assert task.data["head.bias"].shape == (5,)


def test_counts_scalars_and_losses_stay_in_their_ranges() -> None:
    guard = DeclaredResultFilter("fedlsm", OWN, images=100)
    rows = {"b": torch.ones(3), "head.bias": torch.ones(2)}
    ctx = received(guard, shareable(rows, labels=OWN, phase="main"))
    declared = {"pseudo_positive": 3.0, "pseudo_negative": 0.0}
    good: dict[str, Any] = {"labels": OWN, "weight": 100.0, "class_weights": [3.0, 0.0], "scalars": declared}
    assert from_shareable(guard.process(shareable(rows, **good), ctx)).meta == good
    for wrong in (
        {"weight": 101.0},
        {"weight": 2.5},
        {"class_weights": [-1.0, 0.0]},
        {"class_weights": [1e6, 0.0]},
        {"scalars": {**declared, "pseudo_positive": -1.0}},
        {"scalars": {**declared, "pseudo_positive": 0.12345678}},
        {"scalars": {"pseudo_positive": 3.0}},
        {"train_loss": float("nan")},
        {"train_loss": 0.12345678},
    ):
        with pytest.raises(RejectedUpdate, match="held back"):
            guard.process(shareable(rows, **{**good, **wrong}), ctx)


def test_a_site_installs_the_filter_by_scope_in_its_privacy_json(tmp_path: Path) -> None:
    entry = {
        "path": "suture.flare.components.DeclaredResultFilter",
        "args": {"method": "surgical", "labels": OWN},
    }
    scope = {"name": "by-class", "task_data_filters": [entry], "task_result_filters": [entry]}
    for folder in ("local", "startup"):
        (tmp_path / folder).mkdir()
    (tmp_path / "local" / "privacy.json").write_text(json.dumps({"scopes": [scope]}))
    found = create_privacy_manager(Workspace(str(tmp_path), "alpha"), names_only=False).get_scope("by-class")
    (entering,), (leaving,) = found.task_data_filters[FilterKey.IN], found.task_result_filters[FilterKey.OUT]
    ctx = received(entering, shareable(GOOD, labels=OWN, phase="main"))
    assert from_shareable(leaving.process(shareable(GOOD, labels=OWN), ctx)).meta == {"labels": OWN}
    with pytest.raises(RejectedUpdate):
        leaving.process(shareable(GOOD, labels=LABELS[:2]), ctx)


def test_metrics_need_two_bounds() -> None:
    with pytest.raises(ConfigError, match="lowest and the highest"):
        DeclaredResultFilter("surgical", OWN, metrics={"accuracy": [0]})
