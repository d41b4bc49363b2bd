"""The aggregator for FLARE's workflows: figures by hand, and every method's own bytes."""

from __future__ import annotations

import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_opt.pt.lazy_tensor_dict import _LazyRef, _TempDirRef
from safetensors.torch import save_file
from torch import Tensor

from flare_job import LABELS, SITES, START, FlareJob, full, known_job
from hypothesis_profiles import examples
from rounds import conformant
from suture.core.errors import FederationError, RejectedUpdate
from suture.federation.plan import round_context
from suture.flare.components import MethodAggregator
from suture.flare.components.aggregator import _Updates
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method, layout_of, with_channels
from suture.protocol.egress import NUM_SAMPLES, OWNED_CLASSES, SCALE_OF_MODEL, WEIGHT, Channel
from suture.protocol.messages import Update
from world import refused

FEDERATED = sorted(
    n for n, kind in METHODS.items() if not (kind.about.local_only or kind.about.pooled or n == "afl")
)


def merged(known: FlareJob, values: dict[str, float]) -> dict[str, Tensor]:
    """The next model, when each site has answered with one value in all its tensors."""
    for site, value in values.items():
        known.task(site)
        known.answer(site, full(value, len(SITES[site])), labels=list(SITES[site]))
    return dict(known.close().params)


def test_a_row_is_the_mean_over_the_sites_that_annotate_its_class() -> None:
    known = known_job()
    task = known.task("gamma")
    assert task.meta == {"labels": list(SITES["gamma"]), "phase": "main"}
    assert task.data["head.weight"].shape == (3, 2)
    model = merged(known, {"gamma": 6.0, "alpha": 1.0, "beta": 2.0})
    assert model["b"].tolist() == [3.0] * 3
    # Edema 6; Hernia 2; Mass (1 + 6) / 2; Nodule (1 + 2 + 6) / 3; nobody annotates Pneumonia
    assert model["head.bias"].tolist() == [6.0, 2.0, 3.5, 3.0, -1.0]
    assert model["head.weight"][:, 1].tolist() == [6.0, 2.0, 3.5, 3.0, -1.0]


def test_arrays_stay_arrays_and_a_layer_may_have_another_name() -> None:
    arrays = {"b": np.zeros(3, np.float32), "class_layers.out.bias": np.full(5, -1, np.float32)}
    known = FlareJob(MethodAggregator("surgical", LABELS, head="class_layers.out"), arrays)
    known.introduce("alpha", ["Nodule", "Mass"])
    known.close()
    assert isinstance(known.task("alpha").data["class_layers.out.bias"], np.ndarray)
    own = {"b": np.ones(3, np.float32), "class_layers.out.bias": np.array([5, 4], np.float32)}
    known.answer("alpha", own, labels=["Nodule", "Mass"])  # the site's own order
    model = known.close().params
    assert isinstance(model["b"], np.ndarray)
    assert model["class_layers.out.bias"].tolist() == [-1, -1, 4, 5, -1]


def test_metrics_are_means_of_what_every_site_has_sent() -> None:
    known = known_job()
    for site, metrics in (("alpha", {"auroc": 0.5, "loss": 1.0}), ("beta", {"auroc": 0.75})):
        known.task(site)
        meta = {"labels": list(SITES[site]), "client_name": site}
        known.aggregator.accept_model(FLModel(params=full(1, 2), metrics=metrics, meta=meta))
    assert known.close().metrics == {"auroc": 0.625}


def test_without_a_result_the_model_stays() -> None:
    with pytest.raises(FederationError):
        MethodAggregator("surgical", LABELS).aggregate_model()
    known = known_job()
    known.task("alpha")
    model = known.close().params
    assert model.keys() == START.keys()
    assert all(model[name] is tensor for name, tensor in START.items())


def test_a_robust_merge_takes_the_place_of_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    """Of three sites the median; Nodule is annotated at all, each other class at fewer than three."""
    known = known_job(robust={"kind": "median", "liars": 1}, max_update=None)
    model = merged(known, {"gamma": 1e6, "alpha": 1.0, "beta": 2.0})
    assert model["b"].tolist() == [2.0] * 3
    assert model["head.bias"].tolist() == [1e6, 2.0, (1 + 1e6) / 2, 2.0, -1.0]
    assert "plain mean: Edema, Hernia, Mass" in caplog.text
    with refused("2 results", "needs 3", by=FederationError):
        merged(known, {"alpha": 1.0, "beta": 2.0})


def test_the_radius_of_a_robust_merge_at_most_doubles() -> None:
    """Changes of one number: 1, 1, 1, so r = 1; then 8, 8, 8, so r = 2 of it, and each keeps 1/4."""
    start = {**START, "b": torch.zeros(1)}
    known = known_job(start=start, robust={"kind": "clip"})
    for value, mean in ((1.0, 1.0), (9.0, 3.0)):
        for site, labels in SITES.items():
            known.task(site)
            known.answer(site, full(value, len(labels)) | {"b": torch.tensor([value])}, labels=list(labels))
        assert known.close().params["b"].tolist() == [mean]


def test_a_site_is_sent_what_its_method_shares_with_it() -> None:
    """Half of a layer by PMFL, no frozen batch norm, and the weights that come of the sites' counts."""
    half = FlareJob(
        MethodAggregator("pmfl", ["target"]), {"b": torch.zeros(4, 2), "head.bias": torch.zeros(1)}
    )
    half.introduce("alpha", ["target"])
    half.close()
    assert {name: tuple(t.shape) for name, t in half.task("alpha").data.items()} == {"b": (2, 2)}

    norm = {"n.weight": torch.ones(2), "n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2)}
    start = {**START, **norm, "normal.weight": torch.ones(1)}
    frozen = known_job(start=start, settings={"batch_norm": "frozen"})
    assert frozen.task("alpha").data.keys() == {*START, "normal.weight"}

    known = FlareJob(MethodAggregator("fedlsm", LABELS), START)
    assert (known.task("alpha").data, known.task("alpha").meta) == ({}, {})  # which asks for its classes
    known.introduce("alpha", ["Mass"], 10, {"Mass": [2, 8]})
    known.introduce("beta", ["Mass", "Edema"], 10, {"Mass": [3, 7], "Edema": None})
    known.close()
    task = known.task("beta")
    assert task.meta["labels"] == list(LABELS)  # a site of FedLSM sees the names of all classes
    # Mass: (8 + 7) / (2 + 3); Edema was withheld, and nobody counts the others
    assert task.meta["channels"]["positive_weight"].tolist() == [1, 1, 3, 1, 1]


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


@pytest.mark.complete
@pytest.mark.parametrize("name", FEDERATED)
@examples(6, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_bytes_are_those_of_the_methods_own_aggregate(name: str, data: st.DataObject) -> None:
    method: Any = conformant(name)
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
    aggregator = MethodAggregator(name, labels, label_type=label_type, settings=asdict(method))
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
        found = known.close().params
        expected = {**{k.removeprefix("backbone."): t for k, t in model.shared.items()}, **model.head}
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].numpy().tobytes() == tensor.numpy().tobytes(), key
    assert known.panics == []


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
    sites, folder = [f"s{i}" for i in range(12)], _TempDirRef(str(tmp_path))
    known = known_job(sites=dict.fromkeys(sites, ("Mass",)))
    for i, site in enumerate(sites):
        known.task(site)
        path = tmp_path / f"{site}.safetensors"
        save_file(tensors := full(float(i), 1), path)
        known.answer(site, {n: _Watched(str(path), n, folder) for n in tensors}, labels=["Mass"])
    own = known.aggregator
    for update in _Updates(own._contract, own._received, own._allowed):
        del update
    assert _Watched.most == 1
    model = known.close().params
    assert model["b"].tolist() == [5.5] * 3
    assert model["head.bias"].tolist() == [-1, -1, 5.5, -1, -1]


@pytest.mark.parametrize("content", [None, b"\xff" * 99])
def test_a_file_that_cannot_be_read_costs_that_site_its_round(content: bytes | None, tmp_path: Path) -> None:
    known, path = known_job(sites=dict.fromkeys(("alpha", "beta"), ("Mass",))), tmp_path / "damaged"
    for site in ("alpha", "beta"):
        known.task(site)
    if content is not None:
        path.write_bytes(content)
    lazy = {n: _LazyRef(str(path), n, _TempDirRef(str(tmp_path))) for n in full(1.0, 1)}
    with refused("alpha", "round 1", by=RejectedUpdate):
        known.answer("alpha", lazy, labels=["Mass"])
    known.answer("beta", full(2.0, 1), labels=["Mass"])
    assert known.close().params["b"].tolist() == [2.0] * 3
