"""What a method keeps at a site outlives a phase, follows the classes, and is of committed rounds alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rounds import reply_of
from suture.federation.loop import Loop
from suture.federation.server.server import Server
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, hyperparameters
from suture.models.classifier import Layout
from suture.protocol.egress import CLASSES, Channel, Egress, add_prefix
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import unpack

LOCAL = LocalTraining(lr=1e-2, batch_size=8)


@hyperparameters
class Counting(LocalAveraging):
    """Keeps the number of its rounds, and of each class the number of rounds in which it was there."""

    about = About("counting", "Counting", "a test")
    labels = LabelUse(view="all")
    seen: ClassVar[list[tuple[str, LocalRound]]] = []

    undeclared: ClassVar[dict[str, Tensor]] = {}

    def egress(self, layout: Layout) -> Egress:
        rounds = Channel("rounds", "site", (1,)), Channel("of_classes", "site", (CLASSES, 2))
        like = [Channel(name, "site", layout.trained) for name in ("before", "rows")]
        return replace(super().egress(layout), channels=(*rounds, *like))

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        self.seen.append((site.name, round_))
        update, state = super().train(site, received, round_)
        kept = {name: round_.kept[name] + 1 for name in ("rounds", "of_classes")}
        trained = dict(site.model.named_parameters())
        model = add_prefix("before", trained) | add_prefix("rows", trained)
        return update, state | kept | model | self.undeclared


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Counting.seen.clear()
    Counting.undeclared.clear()


def rounds_of(site: str) -> list[LocalRound]:
    return [round_ for name, round_ in Counting.seen if name == site]


def kept_by(site: str) -> list[float]:
    """The number of rounds that the site had kept at the beginning of each round; 0 where it had none."""
    return [float(r.kept["rounds"]) for r in rounds_of(site)]


def begun(server: Server, loop: Loop) -> Server:
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    return server


def one_round(server: Server, loop: Loop, without: str = "") -> None:
    tasks = {name: packed for name, packed in server.assign().items() if name != without}
    server.close_round(loop.exchange("train", tasks, server.receiver()))


@pytest.mark.complete
def test_it_outlives_the_phase_that_moments_end_with_and_the_process(tiny: Any) -> None:
    method = Counting(local=replace(LOCAL, warmup_epochs=1))
    tiny(method, rounds=2).run()
    tiny(method, rounds=4).run()
    rounds = rounds_of("alpha")
    assert [r.phase for r in rounds] == ["warm-up", "main", "main", "main"]
    assert [bool(r.optimiser_state) for r in rounds] == [False, False, True, True]
    assert kept_by("alpha") == [0, 1, 2, 3]
    kept = rounds[-1].kept  # a channel may have a name with a slash
    assert kept["rows/head.weight"].any()
    assert torch.equal(kept["rows/head.weight"], kept["before/head.weight"])


@pytest.mark.complete
def test_another_form_than_the_declared_one_is_refused(tiny: Any) -> None:
    tiny(Counting(local=LOCAL), rounds=1).run()
    federation = tiny(Counting(local=LOCAL), rounds=2)
    loop = Loop(federation.sites())
    task = unpack(begun(federation.server(), loop).assign()["alpha"])
    site = loop._sites["alpha"]
    number, state = site.states.files.newest()
    faulty = {
        "of_classes": torch.zeros(2, 2),
        "rounds": torch.zeros(1).double(),
        "before/head.bias": None,
        "rows/head.bias": torch.zeros(3),
    }
    for name, tensor in faulty.items():
        tensors = {k: t for k, t in state.tensors.items() if k != f"kept/{name}"}
        tensors |= {} if tensor is None else {f"kept/{name}": tensor}
        site.states.files.save(number, replace(state, tensors=tensors), 0)
        assert reply_of(site, task).reason == "configuration"  # type: ignore[arg-type]
        error = (site.folder / "errors.jsonl").read_text().splitlines()[-1]
        assert "alpha" in error
        assert name in error


@pytest.mark.parametrize(
    "tensors",
    [{"more": torch.zeros(1)}, {"rounds": torch.zeros(2)}, {"before/head.bias": torch.zeros(4, 1)}],
)
def test_a_method_keeps_what_it_declares(tensors: dict[str, Tensor], tiny: Any) -> None:
    Counting.undeclared.update(tensors)
    federation = tiny(Counting(local=LOCAL), rounds=1)
    loop = Loop(federation.sites())
    task = unpack(begun(federation.server(), loop).assign()["alpha"])
    site = loop._sites["alpha"]
    assert reply_of(site, task).reason == "configuration"  # type: ignore[arg-type]
    error = (site.folder / "errors.jsonl").read_text()
    assert repr(next(iter(tensors))) in error
    assert site.states.files.rounds() == []


@pytest.mark.complete
@pytest.mark.parametrize("restarted", [False, True])
def test_a_round_that_is_not_committed_leaves_no_trace(restarted: bool, tiny: Any) -> None:
    """Round 2 is trained and lost; trained again, it begins with what round 1 has left, and so do others."""
    federation = tiny(Counting(local=LOCAL), rounds=3)
    loop = Loop(federation.sites())
    server = begun(federation.server(), loop)
    one_round(server, loop)
    lost = {name: reply_of(loop._sites[name], unpack(packed)) for name, packed in server.assign().items()}
    for site in loop._sites.values():  # or it would repeat its answer without training
        shutil.rmtree(site.folder / "answers")
    if restarted:
        loop = Loop(federation.sites())
        server = begun(federation.server(), loop)
    again = {name: reply_of(loop._sites[name], unpack(packed)) for name, packed in server.assign().items()}
    assert kept_by("alpha") == [0, 1, 1]
    for name, update in lost.items():
        repeated = again[name]
        assert isinstance(update, Update)
        assert isinstance(repeated, Update)
        assert all(torch.equal(t, repeated.shared[k]) for k, t in update.shared.items())
    one_round(server, loop)
    one_round(server, loop)
    assert kept_by("alpha") == [0, 1, 1, 2]


@pytest.mark.complete
def test_rows_follow_their_classes_when_others_join(tiny: Any) -> None:
    """Hernia, Mass and Nodule are three, then four: Fibrosis comes first and begins with zeros."""
    method, both = Counting(local=LOCAL), {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    tiny(method, both, rounds=1).run()
    tiny(method, both | {"gamma": ("Fibrosis", "Nodule")}, rounds=3).run()
    before, joined, after = rounds_of("alpha")
    assert not any(tensor.any() for tensor in before.kept.values())
    assert joined.kept["of_classes"].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert after.kept["of_classes"].tolist() == [[1, 1], [2, 2], [2, 2], [2, 2]]
    rows = joined.kept["before/head.weight"]
    assert rows.any(dim=1).tolist() == [False, True, True, True]
    assert joined.kept["rounds"].tolist() == [1]
