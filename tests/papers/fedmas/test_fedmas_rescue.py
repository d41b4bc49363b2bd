"""Rescue factors that cannot weight a mean: the site is named, and left out of the round."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from suture.core.errors import FederationError, RescueFactorError
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.models import ModelSpec
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_papers.fedmas.fedmas import LEAST, Divergence, FedMAS, check_rescue

METHOD = FedMAS(local=LocalTraining(lr=1e-2, batch_size=8))
WIDE = ModelSpec("cnn", size=16, projection=128)
ABSTAINED = "rescue_factor (RescueFactorError)"

Spoil = Callable[[set[str], float], None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Makes v_k, and so RF, of some sites such a number."""
    honest = Divergence.while_training

    def make(sites: set[str], number: float) -> None:
        def bad(watch: Divergence) -> Tensor:
            v = honest(watch)
            return torch.full_like(v, number) if watch._site.name in sites else v

        monkeypatch.setattr(Divergence, "while_training", bad)

    return make


def history(server: Server) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]


def tensors(server: Server) -> dict[str, Tensor]:
    return dict(load(server.states.path(server.round)).tensors)


def without(federation: Any, lost: str, out: str) -> dict[str, Tensor]:
    """The model of a federation that gets no update of one site."""

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == lost and task.task == "train" else answer

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lose))
    return tensors(server)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 0.0, -1.0, LEAST / 2])
def test_what_is_no_weight_is_refused_by_the_sites_name(factor: float) -> None:
    with pytest.raises(RescueFactorError, match=f"beta: the rescue factor of round 3 is {factor}, which"):
        check_rescue(factor, "beta", 3)


@pytest.mark.parametrize("factor", [LEAST, 1.0, 1e9])
def test_any_other_is_taken(factor: float) -> None:
    check_rescue(factor, "beta", 3)


@pytest.mark.complete
@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0, -1.0])
def test_the_others_are_merged_without_that_site(factor: float, tiny: Any, spoil: Spoil) -> None:
    federation = tiny(METHOD, model=WIDE, rounds=1, min_sites=2)
    expected = without(federation, "beta", "lost")
    spoil({"beta"}, factor)
    server = federation.run()
    (line,) = history(server)
    assert line["status"] == "committed"
    assert (line["sites"]["beta"]["status"], line["sites"]["beta"]["reason"]) == ("abstained", ABSTAINED)
    assert {s for s, at in line["sites"].items() if at["status"] == "accepted"} == {"alpha", "gamma"}
    found = tensors(server)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    folder = federation.folder / "run"
    assert "beta: the rescue factor of round 1 is" in (folder / "sites" / "beta" / "errors.jsonl").read_text()
    assert ABSTAINED in (folder / "report.html").read_text()


@pytest.mark.complete
def test_a_site_whose_images_have_no_class_takes_part_and_decides_nothing(tiny: Any) -> None:
    federation = tiny(METHOD, model=WIDE, rounds=1)
    table: Path = federation.configs["beta"].data.table
    rows = list(csv.reader(table.open(newline="")))
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *([*row[:3], *("0" for _ in row[3:])] for row in rows[1:])])
    server = federation.run()
    (line,) = history(server)
    assert {at["status"] for at in line["sites"].values()} == {"accepted"}
    federation.schedule = replace(federation.schedule, min_sites=2)
    expected = without(federation, "beta", "lost")
    for name, tensor in tensors(server).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.complete
def test_where_none_is_left_the_model_stays_to_the_byte(tiny: Any, spoil: Spoil) -> None:
    federation = tiny(METHOD, model=WIDE, rounds=1, min_sites=0.5, max_failed_rounds=2)
    before = federation.run()
    path = before.states.path(1)
    kept = path.read_bytes()
    spoil({"alpha", "beta", "gamma"}, math.nan)
    federation.schedule = replace(federation.schedule, rounds=3)
    server = federation.server()
    with pytest.raises(FederationError, match=r"round 2: 0 usable updates of 2 needed; alpha: rescue_factor"):
        federate(server, Loop(federation.sites()))
    assert path.read_bytes() == kept
    assert server.states.rounds()[-1] == 1
    assert all(torch.equal(tensor, before.model.shared[name]) for name, tensor in server.model.shared.items())
    assert all(torch.equal(tensor, before.model.head[name]) for name, tensor in server.model.head.items())
    failed = [line for line in history(server) if line["status"] == "unchanged"]
    assert [line["round"] for line in failed] == [2, 2]
    assert all(at["reason"] == ABSTAINED for line in failed for at in line["sites"].values())


@pytest.mark.complete
def test_one_that_is_forged_is_refused_by_its_name(tiny: Any) -> None:
    def forge(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site != "beta" or not isinstance(update, Update):
            return answer
        return pack(replace(update, weight=0.0, class_weights=0 * update.class_weights))

    federation = tiny(METHOD, model=WIDE, rounds=1, min_sites=0.5)
    server = federation.server()
    federate(server, Between(federation.sites(), forge))
    line = history(server)[0]["sites"]["beta"]
    assert line["status"] == "rejected"
    assert line["reason"].startswith("weight is 0.0, outside [1e-12, ")


@pytest.mark.complete
def test_merged_by_numbers_of_images_no_factor_is_needed(tiny: Any, spoil: Spoil) -> None:
    spoil({"beta"}, math.nan)
    assert tiny(replace(METHOD, aggregation="images"), model=WIDE, rounds=1).run().round == 1
