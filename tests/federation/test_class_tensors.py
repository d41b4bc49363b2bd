"""Tensors of classes and of the model's form, up and down, by name, and the head that predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from parties import METHOD, begun, history, limited, record, task_in
from torch import Tensor

from federated import same
from one_step import equal
from rounds import reply_of
from strangers.scaffold import Scaffold
from suture.federation.loop import Loop
from suture.federation.server.global_model import read_model
from suture.federation.server.norms import Measure
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.averaging import LocalAveraging, WeightedMean
from suture.methods.base import (
    About,
    GlobalModel,
    LabelUse,
    LabelView,
    RoundContext,
    hyperparameters,
    layout_of,
)
from suture.methods.fedavg import FedAvg
from suture.models.classifier import Layout
from suture.models.saved import load_model
from suture.protocol.egress import CLASSES, SCALE_OF_MODEL, Channel, Egress, strip_prefix
from suture.protocol.messages import TaskData, Update, align_rows

NUMBERS = {"Fibrosis": 1.0, "Hernia": 2.0, "Zwerchfellbruch": 2.0, "Mass": 3.0, "Nodule": 4.0}
PAIRS = (CLASSES, CLASSES, 2)


def pairs_of(labels: Iterable[str]) -> Tensor:
    """``[c, c, 2]``: for classes i and j a one, and the number that says which two they are."""
    number = torch.tensor([NUMBERS[name] for name in labels])
    code = number[:, None] * 10 + number
    return torch.stack([torch.ones_like(code), code], dim=-1)


@hyperparameters
class Pairs(LocalAveraging):
    """A site sends the pairs of its classes that it has; the server sends their means down."""

    about = About("pairs", "Pairs", "none")
    received: ClassVar[list[tuple[str, TaskData]]] = []
    walks: ClassVar[list[list[Update]]] = []
    view: LabelView = "own"

    @property
    def labels(self) -> LabelUse:
        return LabelUse(view=self.view)

    def egress(self, layout: Layout) -> Egress:
        up = Channel("pairs", "up", PAIRS, why="which classes a site has")
        return replace(super().egress(layout), channels=(up, Channel("pairs", "down", PAIRS)))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        self.received.append((site.name, received))
        update, kept = super().train(site, received, round_)
        images = torch.nan_to_num(site.samples["train"].y).sum(dim=0)
        has = (images >= max(site.min_count, 1)).float()
        pairs = pairs_of(received.labels) * has[:, None, None] * has[None, :, None]
        return replace(update, channels={"pairs": pairs}), kept

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        mean = WeightedMean(previous.labels, {}, previous.channels)
        self.walks.append(list(updates))
        for update in updates:
            pairs = align_rows(update.channels["pairs"], update.labels, previous.labels, axis=1)
            mean.add_rows(update.labels, {"pairs": pairs}, pairs.flatten(1).any(dim=1))
        return replace(super().aggregate(previous, updates, ctx), channels=mean.head())


@pytest.fixture(autouse=True)
def no_memory() -> None:
    Pairs.received.clear()
    Pairs.walks.clear()


def spelt(tiny: Any, **more: Any) -> Any:
    """A federation in which beta calls the Hernia by another name, and every site has another order."""
    labels = {
        "alpha": ("Mass", "Nodule"),
        "beta": ("Nodule", "Zwerchfellbruch"),
        "gamma": ("Nodule", "Fibrosis"),
    }
    table = tiny(Pairs(), {**labels, "beta": ("Nodule", "Hernia")}).configs["beta"].data.table
    table.write_text(table.read_text().replace("Hernia", "Zwerchfellbruch"))
    method = Pairs(local=METHOD.local, view=more.pop("view", "own"))
    return tiny(method, labels, label_map={"Zwerchfellbruch": "Hernia"}, **more)


def check_pairs(pairs: Tensor, labels: tuple[str, ...]) -> None:
    """Every pair that a site has, Nodule and another, carries its number; of the others nothing is known."""
    for i, one in enumerate(labels):
        for j, other in enumerate(labels):
            share, code = pairs[i, j].tolist()
            if one == other or "Nodule" in (one, other):
                assert code == pytest.approx(share * (10 * NUMBERS[one] + NUMBERS[other]))
                assert share > 0
            else:
                assert (share, code) == (0, 0)


PLAIN = Pairs(local=METHOD.local)
SCAFFOLD = Scaffold(local=LocalTraining(lr=0.05, batch_size=8, optimiser="sgd", momentum=0.0))
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")
TWO = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}


@pytest.mark.complete
@pytest.mark.parametrize("view", ["own", "all"])
def test_both_axes_go_up_and_down_by_name(view: str, tiny: Any) -> None:
    small = spelt(tiny, view=view)
    server = small.run()
    # With its own view a site sends pairs of its classes; with that of all, only its images say which it has.
    assert server.model.labels == EVERY
    check_pairs(server.model.channels["pairs"], EVERY)
    # Nodule is of three sites, each with one other class.
    assert server.model.channels["pairs"][3, :, 0].tolist() == pytest.approx([1 / 3] * 3 + [1])
    first, second = Pairs.received[:3], Pairs.received[3:]
    assert [site for site, _ in first] == [site for site, _ in second] == ["alpha", "beta", "gamma"]
    assert not any(payload.channels["pairs"].any() for _, payload in first)
    for site, payload in second:
        own = small.sites()[site].trainer.data[0].names
        assert sorted(payload.labels) == sorted(own) if view == "own" else set(own) < set(payload.labels)
        check_pairs(payload.channels["pairs"], payload.labels)


def test_by_name_by_hand() -> None:
    sent = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert align_rows(sent, ("B", "A"), ("A", "C", "B")).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert align_rows(sent, ("B", "A"), ("A", "C", "B"), axis=1).tolist() == [[2, 0, 1], [4, 0, 3]]
    assert align_rows(sent, ("B", "A"), ("A",)).tolist() == [[3, 4]]
    assert align_rows(sent, ("B", "A"), ("C",), axis=1).tolist() == [[0], [0]]


@pytest.mark.complete
@pytest.mark.parametrize("method", [PLAIN, SCAFFOLD], ids=["classes", "model"])
def test_a_class_that_joins_begins_with_zeros(method: Any, tiny: Any) -> None:
    """On both axes of a tensor of classes, and in the rows of one of the model's form."""
    before = tiny(method, TWO, rounds=1).run().model
    small = tiny(method, {**TWO, "gamma": ("Nodule", "Fibrosis")}, rounds=2)
    server, loop = small.server(), Loop(small.sites())
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    assert (before.labels, server.model.labels) == (EVERY[1:], EVERY)
    for name, tensor in server.model.channels.items():
        held = before.channels[name]
        axes = [axis for axis, n in enumerate(tensor.shape) if n != held.shape[axis]]
        kept, joined = tensor, []
        for axis in axes:
            joined.append(kept.narrow(axis, 0, 1))
            kept = kept.narrow(axis, 1, kept.shape[axis] - 1)
        assert torch.equal(kept, held)
        assert not any(rows.any() for rows in joined)
        assert len(axes) == (2 if name == "pairs" else name.partition("/")[2] in server.model.head)
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    assert server.round == 2


@pytest.mark.complete
@pytest.mark.parametrize("method", [PLAIN, SCAFFOLD], ids=["classes", "model"])
def test_a_continued_federation_equals_a_whole_one(method: Any, tiny: Any) -> None:
    tiny(method, rounds=1).run()
    server, whole = (tiny(method, rounds=2).run(out) for out in ("run", "whole"))
    assert (server.round, len(server.record.run["labels"])) == (2, 4)
    stored = read_model(server.states.newest()[1], server.plan, "")  # type: ignore[index]
    for group in ("shared", "head", "channels"):
        assert equal(getattr(server.model, group), getattr(whole.model, group))
        assert equal(getattr(stored, group), getattr(whole.model, group))
    assert stored.buffers == server.model.buffers
    assert all(tensor.any() for tensor in whole.model.channels.values())


@pytest.mark.complete
def test_a_class_that_nobody_sends_keeps_its_tensor(tiny: Any) -> None:
    """No image of beta has a Hernia any more: its pairs stay, and are no NaN."""
    tiny(PLAIN, rounds=1).run()
    small = tiny(PLAIN, rounds=2)
    table = small.configs["beta"].data.table
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.rsplit(",", 1)[0] + ",0" for row in rows)]) + "\n")
    pairs = small.run().model.channels["pairs"]
    assert pairs[1, 1].tolist() == [1, 22]
    assert bool(torch.isfinite(pairs).all())


@pytest.mark.complete
def test_classes_below_the_smallest_count_are_sent_as_zeros(tiny: Any) -> None:
    """alpha has 9 training images with a Mass, and one with a Nodule."""
    table = tiny(PLAIN).configs["alpha"].data.table
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    for i, row in enumerate(row for row in rows if row[2] == "train"):
        row[3:] = [str(int(i < 9)), str(int(i == 0))]
    table.write_text("\n".join(",".join(row) for row in (header, *rows)) + "\n")
    model = limited(tiny(PLAIN, rounds=1), "alpha", min_count=5).run().model
    alpha = next(update for update in Pairs.walks[0] if update.labels == ("Mass", "Nodule"))
    assert alpha.channels["pairs"].tolist() == [[[1, 33], [0, 0]], [[0, 0], [0, 0]]]
    # gamma alone counts in the mean of Nodule beside Mass.
    assert model.channels["pairs"][3, 2].tolist() == [pytest.approx(1 / 2), pytest.approx(43 / 2)]


# SCAFFOLD's control variates


@hyperparameters
class Bounded(Scaffold):
    """Declares that the change is of the scale of the model."""

    def egress(self, layout: Layout) -> Egress:
        egress = super().egress(layout)
        *others, change = egress.channels
        return replace(egress, channels=(*others, replace(change, range=SCALE_OF_MODEL)))


@pytest.fixture
def small(tiny: Any) -> Any:
    """SCAFFOLD at three sites after round 1: server, sites, and their tasks of round 2."""
    federation = tiny(SCAFFOLD, rounds=2)
    loop = Loop(federation.sites())
    server = federation.server()
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    return server, loop._sites, {name: task_in(packed) for name, packed in server.assign().items()}


def test_a_site_is_sent_every_tensor_and_the_rows_that_it_may_see(small: Any) -> None:
    server, sites, payloads = small
    control = strip_prefix("control", server.model.channels)
    assert control.keys() == server.model.trained.keys()
    assert not control.keys() & server.model.buffers
    assert all(bool(tensor.any()) for tensor in control.values())
    for name, payload in payloads.items():
        assert payload.labels == tuple(sorted(sites[name].trainer.data[0].names))
        where = server.model.where(payload.labels)
        for key, tensor in strip_prefix("control", payload.channels).items():
            expected = control[key][where] if key in server.model.head else control[key]
            assert torch.equal(tensor, expected), key


def test_half_precision_leaves_channels_as_they_are(tiny: Any) -> None:
    made = tiny(SCAFFOLD)
    made.plan = replace(made.plan, transport="float16")
    _, sites, tasks = begun(made)
    for message in (*tasks.values(), reply_of(sites["alpha"], tasks["alpha"])):
        assert {t.dtype for t in message.shared.values()} == {torch.float16}
        assert {t.dtype for t in message.channels.values()} == {torch.float32}


def test_a_channel_of_one_scale_is_bounded_as_a_whole(small: Any) -> None:
    server, sites, payloads = small
    update = reply_of(sites["alpha"], payloads["alpha"])
    layout = layout_of(server.model, SCAFFOLD)
    norms = Measure()(update, payloads["alpha"], Bounded(local=SCAFFOLD.local).egress(layout))
    total = torch.cat([t.flatten() for t in update.channels.values()]).norm()
    assert norms.channels == {"change": pytest.approx(float(total), rel=1e-5)}
    assert Measure()(update, payloads["alpha"], SCAFFOLD.egress(layout)).channels == {}


# The head that predicts


@hyperparameters
class Negated(FedAvg):
    """FedAvg that predicts with the negative of the merged head: each AUROC becomes one minus it."""

    about = About("negated", "Negated", "none")

    def egress(self, layout: Layout) -> Egress:
        egress, minus = super().egress(layout), Channel("minus", "down", (CLASSES, layout.features + 1))
        return replace(egress, channels=(*egress.channels, minus))

    def predictor(
        self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        rows = channels["minus"]
        assert {"head.weight", "head.bias"} < tensors.keys()
        return {"head.weight": rows[:, :-1], "head.bias": rows[:, -1]}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        rows = torch.cat([merged.head["head.weight"], merged.head["head.bias"][:, None]], dim=1)
        return replace(merged, channels={"minus": -rows})


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["last", "server_metric"])
def test_the_predictor_is_measured_selected_and_exported_and_training_goes_on_from_the_merged_rows(
    selection: str, tiny: Any
) -> None:
    labels = dict.fromkeys(
        ("alpha", "beta", *["server"] * (selection == "server_metric")), ("Mass", "Nodule")
    )
    settings = {"labels": labels, "rounds": 3, "selection": selection, "n": 60}
    plain = tiny(FedAvg(local=METHOD.local), **settings).run("plain")
    minus = tiny(Negated(local=METHOD.local), **settings).run("minus")
    assert same(plain.model, minus.model)
    key = "server_auroc" if selection == "server_metric" else "auroc"
    one, two = ([line["validation"][key] for line in history(server)] for server in (plain, minus))
    assert [1 - area for area in one] == pytest.approx(two)
    best = two.index(max(two)) + 1 if selection == "server_metric" else 3
    assert minus.selected_round == best
    served = minus.select_model().head
    saved, _ = load_model(minus.record.folder / "model")
    for name, tensor in read_model(minus.states.read_best(best), minus.plan, "").head.items():
        assert torch.equal(served[name], -tensor)
        assert torch.equal(saved.state_dict()[name], -tensor)
    if plain.selected_round == minus.selected_round:
        tested = [record(server, "metrics.json")["auroc"] for server in (plain, minus)]
        assert tested[1] == {name: pytest.approx(1 - area) for name, area in tested[0].items()}
