"""PMFL when parties die between rounds: the personal halves and Adam's moments come back as they were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server.server import Server
from suture.protocol.messages import TaskName
from suture.protocol.packing import Packed, load
from suture_papers.metafl.inner_loop import INNER
from suture_papers.metafl.pmfl import PMFL

pytestmark = pytest.mark.complete


METHOD = PMFL(local=INNER, batches=2)
LABELS = {"alpha": ("Mass",), "beta": ("Nodule",)}


class Died(Exception):
    """Stands for kill -9."""


class Forgetful(Loop):
    """A loop whose sites are processes that end after every answer: only their disks remember."""

    def __init__(self, federation: Any, out: str) -> None:
        super().__init__(federation.sites(out))
        self._again = lambda: federation.sites(out)

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        self._sites = self._again()
        return super().exchange(task, payloads, receive)


def states(folder: Path, round_: int = 4) -> dict[str, Tensor]:
    """All that server and sites hold after a round, by party and name."""
    places = {"server": folder / "state", **{name: folder / "sites" / name for name in LABELS}}
    return {
        f"{party}/{name}": tensor
        for party, place in places.items()
        for name, tensor in load(place / f"round-{round_:06d}.safetensors").tensors.items()
    }


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


@pytest.fixture
def federation(tiny: Any) -> Any:
    return tiny(METHOD, LABELS, rounds=4)


@pytest.fixture
def whole(federation: Any) -> dict[str, Tensor]:
    federation.run("whole")
    return states(federation.folder / "whole")


def test_sites_that_die_after_every_answer_change_nothing(federation: Any, whole: dict[str, Tensor]) -> None:
    federate(federation.server("cut"), Forgetful(federation, "cut"))
    assert same(states(federation.folder / "cut"), whole)
    halves = [whole[f"{site}/fixed/head.weight"] for site in LABELS]
    assert not torch.equal(*halves)  # each site's own, or there would be nothing to lose


def test_a_server_and_sites_that_die_before_a_commit_end_with_the_same_bytes(
    federation: Any, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Server._commit

    def die(self: Server, number: int, *committed: Any) -> None:
        if number == 3:
            raise Died
        commit(self, number, *committed)

    monkeypatch.setattr(Server, "_commit", die)
    with pytest.raises(Died):
        federate(federation.server("cut"), Loop(federation.sites("cut")))
    monkeypatch.undo()
    federate(federation.server("cut"), Loop(federation.sites("cut")))
    again = states(federation.folder / "cut")
    assert same(again, whole)
    steps = [tensor for name, tensor in again.items() if name.endswith("/step")]
    assert steps
    assert {float(step) for step in steps} == {4.0}  # Adam's, of the server
