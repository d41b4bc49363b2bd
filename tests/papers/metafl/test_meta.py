"""MetaFL, PMFL and their baseline: numbers by hand, and twenty steps against a program in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from one_step import context_with, equal
from rounds import reply_of, train_round
from suture.core.errors import DataError, FederationError
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.data.batch import Batch, Samples
from suture.data.config import TrainingConfig
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.learning.losses import masked_loss
from suture.learning.training import SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext, Share, SharingSpec, with_channels
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, Layout, head_rows, load_tensors, split_state
from suture.models.encoders import TextLSTM
from suture.protocol.egress import NUM_SAMPLES
from suture.protocol.messages import Abstain, TaskData, Update, ones
from suture.protocol.packing import load
from suture_papers.metafl.fl import FL
from suture_papers.metafl.inner_loop import (
    INNER,
    ServerStep,
    adapt,
    batch_of,
    take_step,
    twice_differentiable,
)
from suture_papers.metafl.metafl import MetaFL
from suture_papers.metafl.pmfl import PMFL
from world import refused

TARGET = LabelSet(("target",))
WORDS = 21
SITES = ("a", "b")


def at(round_: int) -> RoundContext:
    return RoundContext(round_, Phase("main", 100), 0)


# By hand: L_k = (theta - c_k)^2 / 2 for support and query, theta = 1, alpha = 0.1, two steps, c = 0 and 3.


def scalar(c: float) -> Any:
    return lambda parameters, batch: ((parameters["w"] - c) ** 2 / 2).sum()  # noqa: ARG005


@pytest.mark.parametrize(("order", "gradient", "after"), [(1, -0.405, 1.2025), (2, -0.32805, 1.164025)])
def test_two_steps_on_a_parabola(order: int, gradient: float, after: float) -> None:
    grads, losses, ends = [], [], []
    none = Batch({}, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    for c in (0.0, 3.0):
        start = {"w": torch.ones(1, dtype=torch.float64, requires_grad=True)}
        phi, _ = adapt(scalar(c), start, none, 0.1, 2, second_order=order == 2)
        loss = scalar(c)(phi, none)
        (g,) = torch.autograd.grad(loss, [start["w"] if order == 2 else phi["w"]])
        grads.append(g)
        losses.append(loss.item())
        ends.append(phi["w"].item())
    assert ends == pytest.approx([0.81, 1.38])
    assert sum(losses) / 2 == pytest.approx(0.820125)
    assert torch.stack(grads).mean().item() == pytest.approx(gradient)
    method = MetaFL(server=ServerStep("sgd", 0.5))
    updates = [Update(1, (), {"w": g}, {}, ones(()), kind="gradient") for g in grads]
    model = with_channels(GlobalModel((), {"w": torch.ones(1, dtype=torch.float64)}, {}), method)
    assert take_step(method.sharing, model, updates, method.server).shared["w"].item() == pytest.approx(after)


def test_fl_counts_every_site_once_or_by_its_samples() -> None:
    """phi = 1 at a site of 10 samples and 4 at one of 30: (1 + 4)/2, and (10 * 1 + 30 * 4)/40 of Eq. 2."""
    model = GlobalModel((), {"w": torch.zeros(1, dtype=torch.float64)}, {})
    phi = {n: {"w": torch.full((1,), w, dtype=torch.float64)} for n, w in ((10, 1.0), (30, 4.0))}
    sites = {n: context_with(text_model(0), silo(0, n)) for n in phi}
    for weights, after, allowed in (("equal", 2.5, (1.0, 1.0)), ("images", 3.25, NUM_SAMPLES)):
        method: Any = FL(weights=weights)
        assert method.egress(Layout({}, {})).weight == allowed
        updates = [Update(1, (), own, {}, ones(()), weight=method.weight(sites[n])) for n, own in phi.items()]
        assert method.aggregate(model, updates, at(1)).shared["w"].item() == after


# Which rows are half of a model


def test_half_of_the_text_model() -> None:
    model = text_model(1)
    state = model.state_dict()
    half = {name: len(t) for name, t in PMFL().sharing.parts(state, {})[0].items()}
    assert half.pop("backbone.embedding.weight") == 10
    assert half.keys() == {name for name in state if ".lstm." in name}  # no half of one row of output
    assert set(half.values()) == {64}
    assert set(PMFL().sharing.local(model)) == set(state)  # a site keeps all of it
    assert not MetaFL().sharing.local(model)
    assert sum(t.numel() for t in state.values()) == 41_537 + 128 * WORDS


# Against a program in one process


def text_model(seed: int) -> Classifier:
    torch.manual_seed(seed)
    backbone, features = TextLSTM(WORDS), TextLSTM.FEATURES
    model = Classifier(backbone, features, TARGET, reads=("tokens", "length"))
    load_tensors(model, head_rows(TARGET, features, seed))
    return model


def silo(seed: int, n: int = 24) -> Samples:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (n, 4), generator=g)
    length = torch.randint(1, 5, (n,), generator=g)
    y = (torch.rand(n, 1, generator=g) > 0.5).double()
    return Samples({"tokens": tokens, "length": length}, y, tuple(map(str, range(n))))


def order_of(site: str, n: int) -> Tensor:
    """The order in which a site takes its n rows: one permutation, of the seed 0 and its name."""
    return torch.randperm(n, generator=generator_for(0, site, "batches"))


def federation(
    method: Any, rounds: int, sizes: tuple[int, ...] = (24, 24)
) -> tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """The method's own halves, round after round; the server's tensors after each, and the sites' models."""
    models = {site: text_model(0).double() for site in SITES}
    state, head = split_state(text_model(0).double().state_dict())
    server = with_channels(GlobalModel(TARGET.names, state, head), method)
    after = []
    for round_ in range(1, rounds + 1):
        updates = []
        for i, site in enumerate(SITES):
            shared, rows = method.sharing.parts(server.shared, server.head)
            model = models[site]
            load_tensors(model, method.sharing.put(model.state_dict(), {**shared, **rows}))
            update, _ = train_round(
                method,
                context_with(model, silo(i, sizes[i]), site),
                TaskData("train", labels=TARGET.names, shared=shared, head=rows),
                at(round_),
            )
            updates.append(update)
        server = method.aggregate(server, updates, at(round_))
        after.append({**server.shared, **server.head})
    return after, {site: model.state_dict() for site, model in models.items()}


def reference(
    rounds: int,
    order: int,
    half: bool,
    algorithm: Literal["meta", "fl"] = "meta",
    batches: int = 3,
    sizes: tuple[int, ...] = (24, 24),
    shares: tuple[float, ...] = (1 / 2, 1 / 2),
) -> tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """The same as a plain program: models side by side, slices, and one optimiser."""
    theta = text_model(0).double()
    names = [name for name, _ in theta.named_parameters()]
    rows = {n: len(p) // 2 if half else len(p) for n, p in theta.named_parameters()}
    locals_ = {site: text_model(0).double() for site in SITES}
    optimiser = torch.optim.Adam(theta.parameters(), 1e-3)
    after = []
    for round_ in range(rounds):
        total = [torch.zeros_like(p) for p in theta.parameters()]
        for i, site in enumerate(SITES):
            phi = {n: p.detach().clone() for n, p in locals_[site].named_parameters()}
            for n, p in theta.named_parameters():
                phi[n][: rows[n]] = p.detach()[: rows[n]]
            start = [phi[n].requires_grad_() for n in names]
            data, size = silo(i, sizes[i]), sizes[i] // batches
            data = data.rows(order_of(site, sizes[i]))
            first = round_ % batches * size
            support = data.batch(torch.arange(first, first + size // 2))
            query = data.batch(torch.arange(first + size // 2, first + size))

            def loss(values: list[Tensor], batch: Batch) -> Tensor:
                out = torch.func.functional_call(
                    theta, dict(zip(names, values, strict=True)), (batch.inputs,)
                )
                return torch.nn.functional.binary_cross_entropy_with_logits(out, batch.y)

            values = start
            for _ in range(2):
                grads = torch.autograd.grad(loss(values, support), values, create_graph=order == 2)
                values = [v - 0.05 * g for v, g in zip(values, grads, strict=True)]
            wanted = start if order == 2 else values
            for t, g in zip(total, torch.autograd.grad(loss(values, query), wanted), strict=True):
                t += g / len(SITES)
            with torch.no_grad():
                for p, v in zip(locals_[site].parameters(), values, strict=True):
                    p.copy_(v)
        if algorithm == "fl":
            with torch.no_grad():
                for k, p in enumerate(theta.parameters()):
                    own = [list(m.parameters())[k] for m in locals_.values()]
                    p.copy_(sum(share * phi for share, phi in zip(shares, own, strict=True)))
        else:
            for (n, p), g in zip(theta.named_parameters(), total, strict=True):
                g[rows[n] :] = 0
                p.grad = g
            optimiser.step()
        after.append({n: p.detach().clone() for n, p in theta.named_parameters()})
    return after, {site: {n: p.detach() for n, p in m.named_parameters()} for site, m in locals_.items()}


def close(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-12)


LOCAL = replace(INNER, lr=0.05, iterations=2)


@pytest.mark.complete
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("half", [True, False])
def test_twenty_server_steps_equal_the_program_in_one_process(order: Literal[1, 2], half: bool) -> None:
    kind: Any = PMFL if half else MetaFL
    ours, own = federation(kind(local=LOCAL, order=order, batches=3), 20)
    theirs, locals_ = reference(20, order, half)
    for one, two in zip(ours, theirs, strict=True):
        close(one, two)
    if half:
        for site in SITES:
            close(own[site], locals_[site])


@pytest.mark.parametrize(("weights", "shares"), [("equal", (1 / 2, 1 / 2)), ("images", (24 / 60, 36 / 60))])
def test_the_baseline_is_the_mean_of_the_adapted_models(weights: Any, shares: tuple[float, ...]) -> None:
    sizes = (24, 36)
    ours, _ = federation(FL(local=LOCAL, batches=3, weights=weights), 5, sizes)
    theirs, _ = reference(5, 1, False, "fl", sizes=sizes, shares=shares)
    for one, two in zip(ours, theirs, strict=True):
        close(one, two)


def test_rows_that_do_not_cross_stay_bitwise_as_they_were() -> None:
    before = text_model(0).double().state_dict()
    after = federation(PMFL(local=LOCAL, batches=3), 7)[0][-1]
    for name, tensor in after.items():
        half = len(tensor) // 2
        assert torch.equal(tensor[half:], before[name][half:])
        assert half == 0 or not torch.equal(tensor[:half], before[name][:half])


# What crosses, and what is refused


@pytest.mark.parametrize("order", [1, 2])
def test_second_derivatives_are_taken_without_cudnn(
    order: Literal[1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its LSTM has none; a CPU would not notice."""
    seen = set()

    def noticed(*args: Any) -> Tensor:
        seen.add(torch.backends.cudnn.enabled)
        return masked_loss(*args)

    monkeypatch.setattr("suture.methods.base.masked_loss", noticed)
    federation(MetaFL(local=LOCAL, order=order, batches=3), 1)
    assert seen == {order == 1}
    assert torch.backends.cudnn.enabled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", [1, 2])
def test_a_gpu_has_the_gradient_of_the_cpu(order: Literal[1, 2]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        site = context_with(text_model(0).to(device), replace(silo(0), y=silo(0).y.float()))
        site = replace(site, device=torch.device(device))
        task = TaskData("train", labels=TARGET.names)
        found.append(train_round(MetaFL(local=LOCAL, order=order, batches=3), site, task, at(1))[0].shared)
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "enabled"), [("lstm", False), ("cnn", True)])
def test_only_a_recurrent_network_loses_cudnn(name: str, enabled: bool) -> None:
    model = build(ModelSpec(name, size=16), LabelSet(("Mass",)), 1, pretrained=False)
    with twice_differentiable(model):
        assert torch.backends.cudnn.enabled is enabled
    assert torch.backends.cudnn.enabled


# A site: its batches, where its half begins, and what is refused


def numbered(y: torch.Tensor) -> Samples:
    """Rows that say which they are."""
    return Samples({"row": torch.arange(len(y))}, y[:, None], tuple(map(str, range(len(y)))))


def test_batches_share_the_data_out_and_come_again() -> None:
    data, model = numbered(torch.zeros(24)), text_model(0)
    site = context_with(model, data, "a")
    order = torch.randperm(24, generator=generator_for(0, "a", "batches")).tolist()

    def rows(round_: int, of: SiteContext = site, seed: int = 0) -> list[int]:
        return [int(i) for half in batch_of(of, round_, 5, seed) for i in half.inputs["row"]]

    passed = [row for round_ in range(1, 6) for row in rows(round_)]
    # 24 rows in 5 batches of 4; the last 4 of the order are left out.
    assert passed == order[:20]
    assert rows(7) == rows(2)
    assert rows(2, context_with(model, data, "b")) != rows(2) != rows(2, seed=1)
    with refused("a has 24", "batches=3", by=DataError):
        batch_of(site, 1, 13, 0)


@pytest.mark.complete
@pytest.mark.parametrize("init", ["server", "own"])
def test_a_sites_own_half_begins_where_the_job_says(init: Any, tiny: Any) -> None:
    """After a round of steps too small to see, in a run and in another one."""
    made = tiny(PMFL(local=replace(INNER, lr=1e-30), batches=2, share=Share(init=init)), LABELS, rounds=1)
    found, again = (states(made.run(out).record.folder, 1) for out in ("one", "two"))
    names = [n for n in found if n.startswith("alpha") and n.endswith("weight") and "head" not in n]
    assert len(names) > 3
    for name in names:
        mine, theirs = found[name], found[name.replace("alpha", "beta")]
        half = len(mine) // 2
        assert torch.equal(mine, again[name])
        assert torch.equal(mine[:half], theirs[:half])
        if mine.dim() > 1:  # batch norm begins with ones everywhere
            assert torch.equal(mine[half:], theirs[half:]) == (init == "server")


@pytest.mark.parametrize("training", [{"batch_size": 8}, {"amp": True}, {"compile": "kernels"}])
def test_what_a_site_sets_in_vain_is_refused(training: dict[str, Any], tiny: Any) -> None:
    made = tiny(MetaFL(batches=2))
    own = TrainingConfig.model_validate(training)
    made.configs["alpha"] = made.configs["alpha"].model_copy(update={"training": own})
    site = made.sites()["alpha"]
    answer = reply_of(site, TaskData("handshake"))
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert next(iter(training)) in (site.folder / "errors.jsonl").read_text()


def test_a_full_memory_is_not_tried_again_with_the_same_batch(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def hungry(*_: Any) -> None:
        tried.append(1)
        raise MemoryError("no more")

    monkeypatch.setattr(MetaFL, "train", hungry)
    with refused("out_of_memory", by=FederationError):
        tiny(MetaFL(batches=2), {"alpha": ("Mass",)}, max_failed_rounds=1).run()
    assert tried == [1]


def test_half_of_the_units_of_an_lstm() -> None:
    rows = Share(of="units").rows("backbone.lstm.weight_ih_l0", 128).tolist()
    assert rows == [u + gate for gate in (0, 32, 64, 96) for u in range(16)]
    assert Share(of="units").rows("backbone.embedding.weight", 21).tolist() == list(range(10))


def test_rows_go_back_to_their_places() -> None:
    share, whole = Share(0.5), {"x": torch.arange(5.0), "head.bias": torch.zeros(1)}
    part = SharingSpec(share=share).parts(whole, {})[0]
    assert part.keys() == {"x"}
    again = SharingSpec(share=share).put(whole, {"x": torch.tensor([7.0, 8.0])})
    assert again["x"].tolist() == [7, 8, 2, 3, 4]
    assert torch.equal(SharingSpec(share=share).put(whole, part)["x"], whole["x"])


# Parties that die between rounds


LABELS = {"alpha": ("Mass",), "beta": ("Nodule",)}


def states(folder: Path, round_: int = 4) -> dict[str, Tensor]:
    """All that server and sites hold after a round, by party and name."""
    places = {"server": folder / "state", **{name: folder / "sites" / name for name in LABELS}}
    return {
        f"{party}/{name}": tensor
        for party, place in places.items()
        for name, tensor in load(place / f"round-{round_:06d}.safetensors").tensors.items()
    }


@pytest.mark.complete
def test_a_server_and_sites_that_die_before_a_commit_end_with_the_same_bytes(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The personal halves and Adam's moments come back as they were; `KeyboardInterrupt` is kill -9 here."""
    made = tiny(PMFL(local=INNER, batches=2), LABELS, rounds=4)
    made.run("whole")
    whole, commit = states(made.folder / "whole"), Server._commit

    def die(self: Server, number: int, *committed: Any) -> None:
        if number == 3:
            raise KeyboardInterrupt
        commit(self, number, *committed)

    monkeypatch.setattr(Server, "_commit", die)
    with pytest.raises(KeyboardInterrupt):
        federate(made.server("cut"), Loop(made.sites("cut")))
    monkeypatch.undo()
    federate(made.server("cut"), Loop(made.sites("cut")))
    assert equal(states(made.folder / "cut"), whole)
    steps = {float(tensor) for name, tensor in whole.items() if name.endswith("/step")}
    assert steps == {4.0}  # Adam's, of the server
    halves = [whole[f"{site}/fixed/head.weight"] for site in LABELS]
    assert not torch.equal(*halves)  # each site's own, or there would be nothing to lose
