"""One exchange: what is no message, comes late or twice is dropped, and only updates make a quorum."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import suture.federation.server.collector as collecting
import suture.protocol.packing as packing
from own_clock import own_clock
from suture.core.errors import FederationError
from suture.federation.server.aggregator import Updates
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.registry import Member, SiteRegistry
from suture.methods import averaging
from suture.methods.averaging import weighted_mean
from suture.methods.base import GlobalModel
from suture.protocol.check import AllowedReply
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import Abstain, Metrics, SiteNumbers, TaskData, Update, ones
from suture.protocol.packing import Packed, pack
from world import refused

SITES = ("a", "b", "c")


EGRESS = Egress({"w": ((2,), "torch.float32")}, {})


SIZE = 16
"""Of an update: two numbers of float32 and a class weight of float64."""


def update(number: int = 1, value: float = 1.0) -> Packed:
    return pack(Update(number, ("Mass",), {"w": torch.full((2,), value)}, {}, ones(("Mass",))))


@pytest.fixture
def collector(tmp_path: Path) -> UpdateCollector:
    return UpdateCollector(tmp_path / "spool", lambda *_, **__: None)


def open_round(collector: UpdateCollector, number: int = 1) -> None:
    allowed = AllowedReply(TaskData("train", number, number - 1, labels=("Mass",)), EGRESS, ("Mass",))
    collector.open(dict.fromkeys(SITES, allowed))


def test_each_number_that_a_site_sends_is_in_its_record(collector: UpdateCollector) -> None:
    numbers: dict[str, Any] = dict.fromkeys((one.name for one in fields(SiteNumbers)), 0.5)
    numbers["scalars"] = {"steps": 3.0}
    egress = replace(EGRESS, scalars={"steps": (0.0, 10.0)})
    collector.open({"a": AllowedReply(TaskData("train", 1, labels=("Mass",)), egress, ("Mass",))})
    sent = Update(1, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",)), **numbers)
    collector.receive("a", pack(sent))
    line = collector.close({})["a"]
    assert {name: getattr(line, name) for name in numbers} == numbers
    assert line.numbers == numbers | numbers.pop("scalars")


def test_a_quorum_and_its_grace_are_enough(
    collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    own_clock(monkeypatch, "suture.federation.server.collector", monotonic=lambda: now)
    open_round(collector)
    take = collector.receiver(quorum=2, grace=5)
    take("a", update())
    now += 60
    assert not take.enough(SITES)
    take("b", update())
    now += 4.9
    assert not take.enough(SITES)
    now += 0.2
    assert take.enough(SITES)
    assert not collector.receiver(quorum=2, grace=None).enough(SITES)
    assert not collector.receiver(quorum=3, grace=0).enough(SITES)


def test_only_accepted_updates_count(collector: UpdateCollector) -> None:
    open_round(collector)
    take = collector.receiver(quorum=2, grace=0)
    take("a", update())
    take("b", update(value=float("nan")))
    take("c", pack(Abstain("out_of_memory", "MemoryError")))
    take("stranger", update())
    for again in ("a", "b", "c"):
        take(again, update())
    assert not take.enough(SITES)
    assert collector.accepted() == ["a"]
    assert [collector.lines[site].status for site in "abc"] == ["accepted", "rejected", "abstained"]


def test_a_late_update_is_dropped_with_a_line_and_never_counts_in_a_later_round(
    collector: UpdateCollector, caplog: pytest.LogCaptureFixture
) -> None:
    open_round(collector)
    late = collector.receiver(2, 0)
    late("a", update(value=1.0))
    late("b", update(value=1.0))
    assert collector.close({})["c"].status == "missing"
    late("c", update(value=9.0))
    # The same round is tried again: even an answer that would fit it is one to a closed exchange.
    open_round(collector)
    late("c", update(value=9.0))
    assert caplog.text.count("a late answer of c") == 2
    collector.receiver(2, 0)("c", update(value=2.0))
    assert collector.accepted() == ["c"]
    collector.close({})
    (accepted,) = collector.updates()
    assert torch.equal(accepted[1].shared["w"], torch.full((2,), 2.0))


def test_a_failed_disk_makes_no_quorum(collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(collecting, "IN_MEMORY", SIZE)
    open_round(collector)
    monkeypatch.setattr(collecting, "save", full)
    take = collector.receiver(2, 0)
    take("a", update())
    take("b", update())
    assert not take.enough(SITES)
    with refused("No space left", by=FederationError):
        collector.close({})


def test_beyond_its_limit_updates_wait_on_disk_and_come_back_the_same(
    collector: UpdateCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (0, SIZE, 2 * SIZE, 3 * SIZE):
        monkeypatch.setattr(collecting, "IN_MEMORY", limit)
        for number in (1, 2):  # the second round has as much memory as the first
            open_round(collector, number)
            for site, value in zip(SITES, (1.0, 2.0, 3.0), strict=True):
                collector.receive(site, update(number, value))
            on_disk = sorted(path.name for path in (tmp_path / "spool").glob("*"))
            assert on_disk == [f"{site}.safetensors" for site in SITES[limit // SIZE :]]
            collector.close({})
        walks = [[(s, u.shared["w"].tolist()) for s, u in collector.updates()] for _ in range(2)]
        assert walks[0] == walks[1] == [("a", [1.0, 1.0]), ("b", [2.0, 2.0]), ("c", [3.0, 3.0])]
        collector.empty()
        assert not (tmp_path / "spool").exists()


def test_memory_counts_what_a_view_holds(
    collector: UpdateCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", 2 * SIZE)
    open_round(collector)
    view = Packed({**update().tensors, "shared/w": torch.ones(100)[:2]}, update().header)
    collector.receive("a", view)
    collector.receive("b", update())
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["a.safetensors"]


def test_dropped_updates_leave_the_memory(collector: UpdateCollector) -> None:
    """Of a closed exchange when they are dropped, and of one that failed when the next one is opened."""
    for drop in (collector.empty, lambda: open_round(collector, 2)):
        open_round(collector)
        sent = update()
        alive = weakref.ref(sent.tensors["shared/w"])
        collector.receive("a", sent)
        collector.close({})
        del sent
        assert alive() is not None
        drop()
        assert alive() is None


def test_a_rejected_update_never_reaches_the_spool(
    collector: UpdateCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", 0)
    open_round(collector)
    collector.receive("a", update(value=float("nan")))
    collector.receive("b", Packed({**update().tensors, "shared/more": torch.ones(1)}, update().header))
    assert not (tmp_path / "spool").exists()
    collector.receive("c", update())
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("limit", [0, collecting.IN_MEMORY])
def test_an_update_comes_back_as_it_was_received(
    limit: int, collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", limit)
    sent = Update(
        1,
        ("Mass", "Hernia"),
        {"w": torch.tensor([1.0, 2.0])},
        {"bias": torch.tensor([3.0, 4.0])},
        torch.tensor([1.0, 0.5], dtype=torch.float64),
        channels={"proxy": torch.tensor([5.0, 6.0])},
        scalars={"steps": 7.0},
        train_loss=0.25,
        metrics=Metrics(0, "validation", 3, 0.5, {}),
    )
    egress = Egress(
        EGRESS.shared,
        {"bias": ((), "torch.float32")},
        (Channel("proxy", "up", (CLASSES,)),),
        class_weight=(0.0, 1.0),
        scalars={"steps": (0.0, 10.0)},
    )
    allowed = AllowedReply(TaskData("train", 1, labels=sent.labels), egress, sent.labels)
    collector.open({"a": allowed})
    collector.receive("a", pack(sent))
    assert collector.close({})["a"].status == "accepted"
    ((site, read),) = collector.updates()
    assert site == "a"
    assert pack(read).header == pack(sent).header
    assert pack(read).tensors.keys() == pack(sent).tensors.keys()
    assert all(torch.equal(tensor, pack(read).tensors[name]) for name, tensor in pack(sent).tensors.items())


def test_the_size_of_an_answer_is_checked_once_and_before_it_is_converted(
    collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Packed] = []
    for module in (packing, collecting):
        monkeypatch.setattr(module, "check_size", seen.append)
    open_round(collector)
    take = collector.receiver(quorum=3, grace=None)
    take("a", update())
    take("b", Packed({}, {"type": "update"}))
    assert len(seen) == 2
    assert collector.accepted() == ["a"]
    assert collector.lines["b"].status == "rejected"


DEEP: Any = []


@pytest.mark.parametrize(
    "packed",
    [
        Packed({}, {"type": "handshake", "labels": DEEP}),
        Packed({}, {"type": "handshake", "labels": {1, 2}}),
        Packed({}, {"type": "handshake", "labels": torch.ones(2)}),
        Packed({}, {3: "handshake"}),  # type: ignore[dict-item]
        Packed({}, {"type": "handshake", "labels": ["Mass"] * 1_000_000}),
        Packed({"w": "no tensor"}, {"type": "update"}),  # type: ignore[dict-item]
        Packed({"shared/w": torch.zeros(2, device="meta")}, update().header),
        Packed({3: torch.zeros(3)}, {"type": "update"}),  # type: ignore[dict-item]
    ],
    ids=range(8),
)
def test_what_is_no_message_is_rejected_and_the_exchange_goes_on(
    packed: Packed, collector: UpdateCollector
) -> None:
    """A collector never raises, whatever it receives."""
    open_round(collector)
    collector.receive("a", packed)
    lines = collector.close({})
    assert lines["a"].status == "rejected"
    assert lines["a"].reason
    assert lines["b"].status == "missing"


def test_tensors_that_share_memory_are_spooled_apart(
    collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", 0)
    whole = torch.arange(8.0)
    egress = Egress({"v": ((3,), "torch.float32"), "w": ((2, 4), "torch.float32")}, {})
    sent = Update(1, ("Mass",), {"v": whole[:3], "w": whole.view(2, 4)}, {}, ones(("Mass",)))
    collector.open({"a": AllowedReply(TaskData("train", 1, labels=("Mass",)), egress, ("Mass",))})
    collector.receive("a", pack(sent))
    assert collector.close({})["a"].status == "accepted"
    ((_, read),) = collector.updates()
    assert all(torch.equal(tensor, sent.shared[name]) for name, tensor in read.shared.items())


class _Reading(UpdateCollector):
    """Reads updates as a collector does, and notes how many of those before are still held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def updates(self) -> Iterator[tuple[str, Update]]:
        read: list[weakref.ref[torch.Tensor]] = []

        def next_one() -> Update:
            self.held.append(sum(one() is not None for one in read))
            tensor = torch.ones(2)
            read.append(weakref.ref(tensor))
            return Update(1, ("Masse",), {"w": tensor}, {"b": torch.ones(1)}, ones(("Masse",)))

        for site in SITES:
            yield site, next_one()


@pytest.mark.parametrize(
    ("together", "waiting", "held"),
    [(9, 7, [0, 0, 0]), (9, 8, [0, 1, 0]), (9, 16, [0, 1, 2]), (0, 99, [0, 0, 0]), (1, 99, [0, 1, 0])],
)
def test_a_mean_lets_go_of_updates_before_the_next_one_is_read(
    together: int, waiting: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has 8 bytes."""
    monkeypatch.setattr(averaging, "_TOGETHER", together)
    monkeypatch.setattr(averaging, "_WAITING", waiting)
    member = Member(("Masse",), ("Mass",), {"train": 1}, 1)
    collector, registry = _Reading(), SiteRegistry(dict.fromkeys(SITES, member), ("Mass",))
    model = GlobalModel(("Mass",), {"w": torch.zeros(2)}, {"b": torch.zeros(1)})
    mean = weighted_mean(model, Updates(collector, registry))
    assert mean.head()["b"].tolist() == [1.0]
    assert mean.shared()["w"].tolist() == [1.0, 1.0]
    assert collector.held == held
