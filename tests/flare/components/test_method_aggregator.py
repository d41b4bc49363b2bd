"""The aggregator for FLARE's workflows: figures by hand, and every method's own bytes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.lazy_tensor_dict import _LazyRef, _TempDirRef
from safetensors.torch import save_file
from torch import Tensor

from flare_job import FlareJob, context
from hypothesis_profiles import examples
from rounds import conformant
from suture.core.errors import ConfigError, FederationError, RejectedUpdate, SutureError
from suture.federation.plan import round_context
from suture.flare.components import MethodAggregator
from suture.flare.components.aggregator import _Updates
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method, layout_of, with_channels
from suture.protocol.egress import NUM_SAMPLES, OWNED_CLASSES, SCALE_OF_MODEL, WEIGHT, Channel
from suture.protocol.messages import Update

LABELS = ("Edema", "Hernia", "Mass", "Nodule", "Pneumonia")
SITES = {"alpha": ("Mass", "Nodule"), "beta": ("Hernia", "Nodule"), "gamma": ("Edema", "Mass", "Nodule")}
START = {"b": torch.zeros(3), "head.weight": torch.full((5, 2), -1.0), "head.bias": torch.full((5,), -1.0)}
FEDERATED = sorted(
    n for n, kind in METHODS.items() if not (kind.about.local_only or kind.about.pooled or n == "afl")
)


def job(method: str = "surgical", **arguments: Any) -> FlareJob:
    """A job whose three sites are known."""
    known = FlareJob(MethodAggregator(method, LABELS, **arguments), START)
    for site, labels in SITES.items():
        known.introduce(site, labels, images=10)
    known.close()
    return known


def full(value: float, rows: int) -> dict[str, Tensor]:
    """The tensors of a site, each number the same."""
    tensors = {"b": torch.zeros(3), "head.weight": torch.zeros(rows, 2), "head.bias": torch.zeros(rows)}
    return {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}


def test_a_row_is_the_mean_over_the_sites_that_annotate_its_class() -> None:
    known = job()
    for site, value in (("gamma", 6.0), ("alpha", 1.0), ("beta", 2.0)):
        task = known.task(site)
        assert task.meta == {"labels": list(SITES[site]), "phase": "main"}
        assert task.data["head.weight"].shape == (len(SITES[site]), 2)
        known.answer(site, full(value, len(SITES[site])), labels=list(SITES[site]))
    merged = known.close().params
    assert merged["b"].tolist() == [3.0] * 3
    # Edema 6; Hernia 2; Mass (1 + 6) / 2; Nodule (1 + 2 + 6) / 3; nobody annotates Pneumonia
    assert merged["head.bias"].tolist() == [6.0, 2.0, 3.5, 3.0, -1.0]
    assert merged["head.weight"][:, 1].tolist() == [6.0, 2.0, 3.5, 3.0, -1.0]


def test_arrays_stay_arrays_and_a_layer_may_have_another_name() -> None:
    arrays = {"b": np.zeros(3, np.float32), "class_layers.out.bias": np.full(5, -1, np.float32)}
    known = FlareJob(MethodAggregator("surgical", LABELS, head="class_layers.out"), arrays)
    known.introduce("alpha", ["Nodule", "Mass"])
    known.close()
    sent = known.task("alpha").data
    assert isinstance(sent["class_layers.out.bias"], np.ndarray)
    known.answer(
        "alpha",
        {"b": np.ones(3, np.float32), "class_layers.out.bias": np.array([5, 4], np.float32)},
        labels=["Nodule", "Mass"],  # the site's own order
    )
    merged = known.close().params
    assert isinstance(merged["b"], np.ndarray)
    assert merged["class_layers.out.bias"].tolist() == [-1, -1, 4, 5, -1]


def test_metrics_are_means_of_what_every_site_has_sent() -> None:
    known = job()
    for site, metrics in (("alpha", {"auroc": 0.5, "loss": 1.0}), ("beta", {"auroc": 0.75})):
        known.task(site)
        meta = {"labels": list(SITES[site]), "client_name": site}
        known.aggregator.accept_model(FLModel(params=full(1, 2), metrics=metrics, meta=meta))
    assert known.close().metrics == {"auroc": 0.625}


def test_the_first_task_of_a_site_is_empty() -> None:
    known = FlareJob(MethodAggregator("surgical", LABELS), START)
    assert known.task("alpha").data == {}
    assert known.task("alpha").meta == {}


def test_without_a_result_the_model_stays() -> None:
    with pytest.raises(FederationError, match="no task"):
        MethodAggregator("surgical", LABELS).aggregate_model()
    known = job()
    known.task("alpha")
    merged = known.close().params
    assert merged.keys() == START.keys()
    assert all(merged[name] is tensor for name, tensor in START.items())


def sent(known: FlareJob, values: dict[str, float]) -> None:
    """Each site answers with one value in all its tensors."""
    for site, value in values.items():
        known.task(site)
        known.answer(site, full(value, len(SITES[site])), labels=list(SITES[site]))


def test_a_robust_merge_takes_the_place_of_the_mean() -> None:
    """Of three sites the median; Nodule is annotated at all, each other class at fewer than three."""
    known = job(robust={"kind": "median", "liars": 1}, max_update=None)
    sent(known, {"gamma": 1e6, "alpha": 1.0, "beta": 2.0})
    merged = known.close().params
    assert merged["b"].tolist() == [2.0] * 3
    assert merged["head.bias"].tolist() == [1e6, 2.0, (1 + 1e6) / 2, 2.0, -1.0]


def test_the_radius_of_a_robust_merge_at_most_doubles() -> None:
    """Changes of one number: 1, 1, 1, so r = 1; then 8, 8, 8, so r = 2 of it, and each keeps 1/4."""
    start = {**START, "b": torch.zeros(1)}
    known = FlareJob(MethodAggregator("surgical", LABELS, robust={"kind": "clip"}), start)
    for site, labels in SITES.items():
        known.introduce(site, labels)
    known.close()
    for value, merged in ((1.0, 1.0), (9.0, 3.0)):
        for site, labels in SITES.items():
            known.task(site)
            known.answer(site, full(value, len(labels)) | {"b": torch.tensor([value])}, labels=list(labels))
        assert known.close().params["b"].tolist() == [merged]


def test_what_a_robust_merge_cannot_do_is_refused() -> None:
    known = job(robust={"kind": "median"})
    sent(known, {"alpha": 1.0, "beta": 2.0})
    with pytest.raises(FederationError, match=r"round 1 has 2 results, and robust.kind='median' .* needs 3"):
        known.close()
    with pytest.raises(ConfigError, match=r"FedAlign also merges .*, which would stay a plain mean"):
        job("fedalign", robust={})
    with pytest.raises(ConfigError, match="kind"):
        job(robust={"kind": "mean"})
    for bound in (0.5, math.nan):
        with pytest.raises(ConfigError, match="max_update"):
            job(max_update=bound)
    with pytest.raises(ConfigError, match="robust"):
        job(settings={"robust": {"kind": "median"}})


# Every method's own bytes


def _numbers(generator: torch.Generator, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def _channel(channel: Channel, name: str, rows: int, own: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """What a site sends of a channel, as it is declared."""
    shape, dtype = channel.forms[name]
    shape = tuple(rows if length == -1 else length for length in shape)
    if channel.range in (None, SCALE_OF_MODEL):
        low, high = -1.0, 1.0
    else:
        low, high = (0.0, float(n)) if channel.range == NUM_SAMPLES else channel.range  # type: ignore[assignment]
        low, high = max(low, -1e3), min(high, 1e3)
    values = _numbers(rng, shape, low, high)
    if channel.range == NUM_SAMPLES or "int" in dtype:
        values = values.floor()
    if channel.rows is not None:
        shown = own if channel.rows == "own" else ~own
        values = values * shown.view(-1, *[1] * (len(shape) - 1))
    return values.to(getattr(torch, dtype.removeprefix("torch.")))


def random_update(method: Method, model: GlobalModel, own: tuple[str, ...], n: int, seed: int) -> Update:
    """A random update that the method declares."""
    rng = torch.Generator().manual_seed(seed)
    labels = own if method.labels.view != "all" else model.labels
    egress = method.egress(layout_of(model, method))
    shared, head = method.sharing.parts(model.shared, model.rows(labels))
    drawn = [
        {name: torch.randn(t.shape, generator=rng) for name, t in part.items()} for part in (shared, head)
    ]
    low, high = (n, n) if egress.weight == NUM_SAMPLES else egress.weight
    weight = float(_numbers(rng, (), low, min(high, 1e3)))
    mine = torch.tensor([name in own for name in labels])
    if egress.class_weight == WEIGHT:
        rows = torch.full((len(labels),), weight, dtype=torch.float64)
    elif egress.class_weight == OWNED_CLASSES:
        rows = weight * mine.double()
    else:
        low, high = egress.class_weight  # type: ignore[misc]
        rows = _numbers(rng, (len(labels),), low, min(high, 1e3))
    ranges = {**egress.scalars, **egress.losses}
    scalars = {k: float(f"{_numbers(rng, (), a, min(b, 1e3)).item():.6g}") for k, (a, b) in ranges.items()}
    channels = {
        name: _channel(channel, name, len(labels), mine, n, rng)
        for channel in egress.going("up")
        for name in channel.forms
    }
    return Update(0, labels, *drawn, rows, weight, egress.kind, channels, scalars=scalars)  # type: ignore[arg-type]


def answered(known: FlareJob, site: str, update: Update, task: DXO) -> None:
    """The site sends the update as FLARE's own message."""
    tensors = {**update.shared, **update.head}
    params = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    assert params.keys() == task.data.keys()
    meta: dict[str, Any] = {"labels": list(update.labels), "weight": update.weight}
    meta |= {"class_weights": update.class_weights.tolist(), "scalars": dict(update.scalars)}
    known.answer(site, params, **meta, channels={n: t.numpy() for n, t in update.channels.items()})


def _settings(method: Method) -> dict[str, Any]:
    return asdict(method)  # type: ignore[call-overload,no-any-return]


@pytest.mark.complete
@pytest.mark.parametrize("name", FEDERATED)
@examples(6, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_bytes_are_those_of_the_methods_own_aggregate(name: str, data: st.DataObject) -> None:
    method = conformant(name)
    label_type = method.labels.types[0]
    target = method.labels.view == "target"
    labels = ("target",) if target else LABELS[: data.draw(st.integers(1, 5))]
    own = st.just(labels) if target else st.lists(st.sampled_from(labels), min_size=1, unique=True).map(tuple)
    sites = {
        site: (data.draw(own), data.draw(st.integers(1, 99)))
        for site in "abcd"[: data.draw(st.integers(1, 4))]
    }
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    params = {"first.weight": torch.randn(4, 3, generator=rng), "first.bias": torch.randn(4, generator=rng)}
    head = {"head.weight": torch.randn(len(labels), 4, generator=rng), "head.bias": torch.zeros(len(labels))}
    aggregator = MethodAggregator(name, labels, label_type=label_type, settings=_settings(method))
    known = FlareJob(aggregator, {**params, **head}, rounds=13)
    counted = label_type in method.egress(layout_of(GlobalModel(labels, params, head), method)).counts
    for site, (names, n) in sites.items():
        known.introduce(site, names, n, {c: [n, 2 * n] for c in names} if counted else None)
    known.close()
    shared = {f"backbone.{key}": tensor for key, tensor in params.items()}
    model = with_channels(GlobalModel(labels, shared, head, label_type=label_type), method)
    for number in (1, 2):
        updates = {site: random_update(method, model, *sites[site], seed=number) for site in sites}
        for site in data.draw(st.permutations(sorted(sites))):
            answered(known, site, updates[site], known.task(site))
        ctx = replace(round_context(method, 0, 12, number), sites=len(sites))
        model = method.aggregate(model, [updates[site] for site in sorted(sites)], ctx)
        merged = known.close().params
        expected = {**{k.removeprefix("backbone."): t for k, t in model.shared.items()}, **model.head}
        assert merged.keys() == expected.keys()
        for key, tensor in expected.items():
            assert merged[key].numpy().tobytes() == tensor.numpy().tobytes(), key
    assert known.panics == []


def test_every_federated_method_of_this_distribution_is_compared() -> None:
    assert {"surgical", "partial", "vanilla", "fedavg", "pfl", "fedlsm", "fedmas", "metafl", "pmfl"} < {
        *FEDERATED
    }
    assert len(FEDERATED) >= 20


def test_a_site_of_pmfl_is_sent_the_shared_half_alone() -> None:
    known = FlareJob(
        MethodAggregator("pmfl", ["target"]), {"b": torch.zeros(4, 2), "head.bias": torch.zeros(1)}
    )
    known.introduce("alpha", ["target"])
    known.close()
    assert {name: tuple(t.shape) for name, t in known.task("alpha").data.items()} == {"b": (2, 2)}


def test_frozen_batch_norm_does_not_travel() -> None:
    norm = {"n.weight": torch.ones(2), "n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2)}
    frozen = MethodAggregator("surgical", LABELS, settings={"batch_norm": "frozen"})
    known = FlareJob(frozen, {**START, **norm, "normal.weight": torch.ones(1)})
    known.introduce("alpha", ["Mass"])
    known.close()
    assert known.task("alpha").data.keys() == {*START, "normal.weight"}


def test_counts_of_the_sites_become_class_weights() -> None:
    known = FlareJob(MethodAggregator("fedlsm", LABELS), START)
    known.introduce("alpha", ["Mass"], 10, {"Mass": [2, 8]})
    known.introduce("beta", ["Mass", "Edema"], 10, {"Mass": [3, 7], "Edema": None})
    known.close()
    task = known.task("beta")
    assert task.meta["labels"] == list(LABELS)  # a site of FedLSM sees the names of all classes
    # Mass: (8 + 7) / (2 + 3); Edema was withheld, and nobody counts the others
    assert task.meta["channels"]["positive_weight"].tolist() == [1, 1, 3, 1, 1]


# Tensors in files


class _Watched(_LazyRef):  # type: ignore[misc]
    """FLARE's reference to a tensor in a file; remembers which tensors live that it has read."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def materialize(self) -> Tensor:
        tensor: Tensor = super().materialize()
        if self.key == "b":
            _Watched.alive.add(tensor)
            _Watched.most = max(_Watched.most, len(_Watched.alive))
        return tensor


def test_tensors_in_files_are_read_one_site_at_a_time(tmp_path: Path) -> None:
    known = FlareJob(MethodAggregator("surgical", LABELS), START)
    sites, folder = [f"s{i}" for i in range(12)], _TempDirRef(str(tmp_path))
    for site in sites:
        known.introduce(site, ["Mass"])
    known.close()
    for i, site in enumerate(sites):
        known.task(site)
        path = tmp_path / f"{site}.safetensors"
        save_file(tensors := full(float(i), 1), path)
        known.answer(site, {n: _Watched(str(path), n, folder) for n in tensors}, labels=["Mass"])
    own = known.aggregator
    for update in _Updates(own._contract, own._received, own._allowed):
        del update
    assert _Watched.most == 1
    merged = known.close().params
    assert merged["b"].tolist() == [5.5] * 3
    assert merged["head.bias"].tolist() == [-1, -1, 5.5, -1, -1]


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 99])
def test_a_file_that_cannot_be_read_costs_that_site_its_round(content: bytes | None, tmp_path: Path) -> None:
    known, path = FlareJob(MethodAggregator("surgical", LABELS), START), tmp_path / "damaged"
    for site in ("alpha", "beta"):
        known.introduce(site, ["Mass"])
    known.close()
    for site in ("alpha", "beta"):
        known.task(site)
    if content is not None:
        path.write_bytes(content)
    lazy = {n: _LazyRef(str(path), n, _TempDirRef(str(tmp_path))) for n in full(1.0, 1)}
    with pytest.raises(RejectedUpdate, match=r"alpha, round 1: .* cannot be read from its file"):
        known.answer("alpha", lazy, labels=["Mass"])
    known.answer("beta", full(2.0, 1), labels=["Mass"])
    assert known.close().params["b"].tolist() == [2.0] * 3


# What is refused


def hostile() -> Iterator[Any]:
    good, labels = full(1.0, 2), ["Mass", "Nodule"]
    nan = {**good, "b": torch.tensor([0.0, float("nan"), 0.0])}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "a foreign row": (good, {"labels": ["Mass", "Edema"]}, "unknown label 'Edema'"),
        "another order": (good, {"labels": ["Nodule", "Mass"]}, "labels"),
        "one name twice": (good, {"labels": ["Mass", "Mass"]}, "twice"),
        "no names": (good, {}, "names no labels"),
        "a name that is none": (good, {"labels": ["Mass", 3]}, "labels"),
        "names as text": (good, {"labels": "Mass"}, "labels"),
        "too many rows": (full(1.0, 3), {"labels": labels}, "shape"),
        "names of too many rows": (full(1.0, 3), {"labels": [*labels, "Edema"]}, "unknown label"),
        "a row too few": (full(1.0, 1), {"labels": labels}, "shape"),
        "a number that is none": (nan, {"labels": labels}, "not finite"),
        "another shape": ({**good, "b": torch.zeros(4)}, {"labels": labels}, "shape"),
        "another type": ({**good, "b": torch.zeros(3).double()}, {"labels": labels}, "float64"),
        "one tensor more": ({**good, "more": torch.ones(1)}, {"labels": labels}, "more was not declared"),
        "one tensor less": ({"b": good["b"]}, {"labels": labels}, "missing"),
        "a name that is no text": ({**good, 3: torch.ones(1)}, {"labels": labels}, "WEIGHTS by name"),  # type: ignore[dict-item]
        "no tensor": ({**good, "b": "zeros"}, {"labels": labels}, "nor an array"),
        "an array of text": ({**good, "b": np.array(["1"])}, {"labels": labels}, "nor an array of numbers"),
        "a sparse tensor": ({**good, "b": torch.zeros(3).to_sparse()}, {"labels": labels}, "sparse"),
        "a tensor without values": (
            {**good, "b": torch.zeros(3, device="meta")},
            {"labels": labels},
            "values",
        ),
        "an undeclared field": (good, {"labels": labels, "note": "x"}, "'note'"),
        "an encrypted model": (good, {"labels": labels, "PROCESSED_ALGORITHM": "he"}, "PROCESSED"),
        "a weight": (good, {"labels": labels, "weight": 2.0}, "weight"),
        "a weight as text": (good, {"labels": labels, "weight": "x"}, "weight"),
        "an endless weight": (good, {"labels": labels, "weight": float("inf")}, "weight"),
        "a class weight": (good, {"labels": labels, "class_weights": [1.0, 3.0]}, "class_weights"),
        "few class weights": (good, {"labels": labels, "class_weights": [1.0]}, "class_weights"),
        "endless class weights": (good, {"labels": labels, "class_weights": [10**400, 1]}, "class_weights"),
        "class weights as text": (good, {"labels": labels, "class_weights": "11"}, "class_weights"),
        "an undeclared scalar": (good, {"labels": labels, "scalars": {"x": 1.0}}, "scalars/x"),
        "scalars as text": (good, {"labels": labels, "scalars": "x"}, "scalars"),
        "a long loss": (good, {"labels": labels, "train_loss": 0.123456789}, "six digits"),
        "an undeclared channel": (good, {"labels": labels, "channels": {"x": np.ones(1)}}, "channels/x"),
        "channels as text": (good, {"labels": labels, "channels": "x"}, "channels"),
    }
    for name, case in cases.items():
        yield pytest.param(*case, id=name)


@pytest.mark.parametrize(("params", "meta", "why"), list(hostile()))
def test_a_result_that_was_not_declared_is_left_out(params: Any, meta: Any, why: str) -> None:
    known = job()
    known.task("alpha")
    with pytest.raises(RejectedUpdate, match=f"alpha, round 1: .*{why}"):
        known.answer("alpha", params, **meta)
    known.task("beta")
    known.answer("beta", full(2.0, 2), labels=["Hernia", "Nodule"])
    assert known.close().params["b"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "metrics",
    [
        {"auroc": float("nan")},
        {"auroc": "high"},
        {"auroc": 0.1234567},
        [1.0],
        {1: 0.5, "auroc": 0.5},
        {("auroc",): 0.5},
        {None: 0.5},
        {"": 0.5},
        {"a" * 65: 0.5},
        {"auroc\n2026-11-25 ERROR": 0.5},
        {str(i): 0.5 for i in range(101)},
    ],
)
def test_a_metric_that_is_no_number_of_six_digits_by_a_short_name_is_left_out(metrics: Any) -> None:
    known = job()
    known.task("alpha")
    model = FLModel(params=full(1.0, 2), meta={"labels": ["Mass", "Nodule"], "client_name": "alpha"})
    model.metrics = metrics
    with pytest.raises(RejectedUpdate, match="metric"):
        known.aggregator.accept_model(model)
    model.metrics = {"a" * 64: 0.5, **{str(i): 0.5 for i in range(99)}}
    known.aggregator.accept_model(model)
    assert known.close().metrics == model.metrics


def test_a_difference_is_refused_with_the_remedy() -> None:
    known = job()
    known.task("alpha")
    meta = {"labels": ["Mass", "Nodule"], "client_name": "alpha"}
    with pytest.raises(RejectedUpdate, match="params_transfer_type to FULL"):
        known.aggregator.accept_model(FLModel(params=full(1.0, 2), params_type=ParamsType.DIFF, meta=meta))


def test_a_result_is_taken_once_and_only_where_it_was_requested() -> None:
    known = job()
    with pytest.raises(RejectedUpdate, match="not requested"):
        known.answer("alpha", full(1.0, 2), labels=["Mass", "Nodule"])
    known.task("alpha")
    known.answer("alpha", full(1.0, 2), labels=["Mass", "Nodule"])
    with pytest.raises(RejectedUpdate, match="second"):
        known.answer("alpha", full(1.0, 2), labels=["Mass", "Nodule"])


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        (["Fracture"], None),
        (["Mass", "Mass"], None),
        ([], None),
        ([3], None),
        (["x" * 300], None),
        (["Mass"], {"Mass": [1, 2]}),  # surgical requests none
    ],
)
def test_a_site_with_other_classes_than_the_job_stays_unknown(labels: Any, counts: Any) -> None:
    known = FlareJob(MethodAggregator("surgical", LABELS), START)
    known.introduce("alpha", labels, counts=counts)
    known.close()
    assert known.task("alpha").data == {}
    known.introduce("alpha", ["Mass"])  # another try
    assert known.task("alpha").meta["labels"] == ["Mass"]


def test_classes_are_announced_once() -> None:
    known = job()
    known.introduce("alpha", ["Edema"])  # ignored
    assert known.task("alpha").meta["labels"] == ["Mass", "Nodule"]


def test_the_number_of_images_is_the_one_that_was_announced() -> None:
    known = job("fedavg", settings={"class_weights": "none"})
    known.task("alpha")
    with pytest.raises(RejectedUpdate, match="weight is 99"):
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
    with pytest.raises(RejectedUpdate, match="class_weights" if method == "fedlsm" else "weight"):
        known.answer(
            "alpha",
            full(1.0, 5),
            labels=list(LABELS),
            scalars={"pseudo_positive": 1.0, "pseudo_negative": 1.0} if counted else {},
        )


def test_more_images_than_the_job_expects_are_refused() -> None:
    aggregator = MethodAggregator("fedavg", LABELS, settings={"class_weights": "none"}, images=100)
    known = FlareJob(aggregator, START)
    known.introduce("alpha", ["Mass"], 101)
    known.introduce("beta", ["Mass"], 100)
    known.close()
    assert known.task("alpha").data == {}
    assert known.task("beta").data.keys() == START.keys()


def test_a_site_that_states_the_name_of_another_one_gets_no_rows_and_introduces_nobody(caplog: Any) -> None:
    known = job()
    stolen = known.task("alpha", stated="gamma")
    assert (stolen.data, stolen.meta) == ({}, {})
    assert "alpha states the name 'gamma'" in caplog.text
    assert known.task("gamma").meta["labels"] == list(SITES["gamma"])
    known.introduce("alpha", ["Pneumonia"], stated="delta")
    assert "'alpha' sent it and states the name 'delta'" in caplog.text
    assert known.task("delta").data == {}
    known.introduce("delta", ["Edema"])
    assert known.task("delta").meta["labels"] == ["Edema"]


@pytest.mark.parametrize("value", [1e23, -1e23, 1.01e15])
def test_a_finite_value_whose_square_is_not_is_left_out_and_the_job_goes_on(value: float) -> None:
    known = FlareJob(MethodAggregator("metafl", LABELS, max_update=None), START)
    for site in ("alpha", "beta"):
        known.introduce(site, ["Mass"])
    known.close()
    rows = len(known.task("alpha").meta["labels"])
    known.task("beta")
    labels = known.task("alpha").meta["labels"]
    with pytest.raises(RejectedUpdate, match="above 1e\\+15"):
        known.answer("alpha", {**full(1.0, rows), "b": torch.tensor([0, value, 0])}, labels=labels)
    known.answer("beta", {**full(1.0, rows), "b": torch.tensor([0, 1e15, -1e15])}, labels=labels)
    merged = known.close().params
    assert all(bool(tensor.isfinite().all()) for tensor in merged.values())
    assert merged["b"][1] != 0


@pytest.mark.parametrize(("value", "max_update"), [(1e15, 100.0), (400.0, 100.0), (30.0, 10.0)])
def test_an_update_out_of_all_proportion_is_left_out(value: float, max_update: float) -> None:
    """The model has 15 numbers of -1, so its norm is 3.9; gamma sends 12 and alpha 9 of the value."""
    known = job(max_update=max_update)
    with pytest.raises(RejectedUpdate, match=r"max_update"):
        sent(known, {"gamma": value})
    sent(known, {"alpha": 1.0, "beta": 2.0})
    assert known.close().params["b"].tolist() == [1.5] * 3
    # What was sent before bounds the next one, too, which may still be as long as the model.
    sent(known, {"beta": 2.0})
    with pytest.raises(RejectedUpdate, match=r"max_update"):
        sent(known, {"alpha": value})


def test_a_method_that_weights_by_images_needs_their_number() -> None:
    known = FlareJob(MethodAggregator("fedavg", LABELS, settings={"class_weights": "none"}), START)
    known.introduce("alpha", ["Mass"])
    known.close()
    assert known.task("alpha").data == {}


def test_scatter_and_gather_is_told_whether_a_result_counts() -> None:
    known = job()
    known.task("alpha")

    def accepted(params: Any, meta: dict[str, Any], round_: int = 1, client: str | None = "alpha") -> bool:
        result = DXO(DataKind.WEIGHTS, params, meta).to_shareable()
        result.set_header(ServerCommandKey.FL_CLIENT, client and Client(client, "token"))
        result.set_peer_props({ReservedKey.IDENTITY_NAME: "alpha"})
        result.add_cookie(AppConstants.CONTRIBUTION_ROUND, round_)
        return known.aggregator.accept(result, context("alpha"))

    meta = {"labels": ["Mass", "Nodule"]}
    for broken in (
        {},
        {"DXO": 1},
        {"DXO": {"kind": "WEIGHTS"}},
        {"DXO": {"kind": "WEIGHTS", "data": 1, "meta": 2}},
    ):
        result = Shareable(broken)
        result.set_header("__content_type__", "DXO")
        assert not known.aggregator.accept(result, context("alpha"))
    assert not accepted({}, {"labels": ["Mass", "Nodule"]})  # an introduction is no contribution
    assert not accepted(full(1.0, 3), meta)
    assert not accepted(full(1.0, 2), meta, round_=0)  # of the round before
    assert not accepted(full(1.0, 2), meta, client="beta")  # which states the name of alpha
    assert not accepted(full(1.0, 2), meta, client=None)  # no server has looked at the token
    assert accepted(full(1.0, 2), meta)
    assert known.close().params["b"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"method": "surgica"}, "surgical"),
        ({"method": "individual"}, "trains every site by itself"),
        ({"method": "central"}, "choose a federated method"),
        ({"method": "metafl", "label_type": "multiclass"}, "set label_type"),
        ({"settings": {"batch_nrm": "frozen"}}, "batch_norm"),
        ({"labels": []}, "label set is empty"),
        ({"labels": ["Mass", "Mass"]}, "twice"),
        ({"labels": ["Mass", "a\nb"]}, "rename the class"),
    ],
)
def test_wrong_arguments_are_refused_before_a_job_starts(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(SutureError, match=why):
        MethodAggregator(**{"method": "surgical", "labels": LABELS, **arguments})


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"b": torch.zeros(3)}, "lacks the layer 'head'"),
        ({"b": torch.zeros(3), "head.bias": torch.zeros(4)}, "each of the 5 labels"),
        ({"b": torch.zeros(3), "head.bias": torch.tensor(1.0)}, "each of the 5 labels"),
    ],
)
def test_a_model_without_a_row_for_each_class_ends_the_job(params: Any, why: str) -> None:
    known = FlareJob(MethodAggregator("surgical", LABELS), params)
    with pytest.raises(RejectedUpdate, match="no MethodAggregator"):  # nothing leaves
        known.task("alpha")
    (panic,) = known.panics
    assert why in panic


def test_too_few_rounds_for_the_method_end_the_job() -> None:
    known = FlareJob(MethodAggregator("crt", LABELS, label_type="multiclass"), START, rounds=5)
    with pytest.raises(RejectedUpdate):
        known.task("alpha")
    assert "retrain.rounds" in known.panics[0]


def test_a_method_that_sends_no_weights_ends_the_job() -> None:
    known = FlareJob(MethodAggregator("afl", LABELS), START)
    known.introduce("alpha", LABELS[:2], 9, None)
    known.close()
    with pytest.raises(RejectedUpdate):
        known.task("alpha")
    assert "AFL sends no weights" in known.panics[0]
