"""Robust merges in a whole federation: a liar, two who agree, and rows that too few sites send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from noted import noted
from suture.core.errors import ConfigError, FederationError
from suture.execution.job import with_settings
from suture.federation.loop import Loop, federate
from suture.federation.server import collector
from suture.federation.server.collector import Receiver
from suture.federation.server.server import Server
from suture.flare.codec import from_shareable_, to_shareable
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import TaskData, TaskName, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.missing_labels.fedalign import FedAlign
from suture_results.report import write_report

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
FOUR = {
    "alpha": ("Mass", "Nodule"),
    "beta": ("Mass", "Nodule"),
    "delta": ("Hernia", "Mass"),
    "gamma": ("Hernia", "Mass", "Nodule"),
}
SEVEN = dict.fromkeys(("alpha", "beta", "delta", "eps", "eta", "gamma", "zeta"), ("Mass", "Nodule"))


def merged(
    tiny: Any,
    out: str,
    robust: dict[str, Any] | None,
    liars: tuple[str, ...] = (),
    sites: dict[str, tuple[str, ...]] = FOUR,
    times: float = -10.0,
    rounds: int = 2,
) -> Server:
    """A federation in which liars send so many times their change."""
    settings: dict[str, Any] = {"robust": robust} if robust else {}
    federation = tiny(METHOD, sites, selection="last", rounds=rounds, **settings)

    def lie(site: str, task: TaskData, answer: Packed) -> Packed | None:
        update = unpack(answer)
        if site not in liars or not isinstance(update, Update):
            return answer

        def part(sent: dict[str, Tensor], was: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t if "running" in n else was[n] + times * (t - was[n]) for n, t in sent.items()}

        return pack(
            replace(update, shared=part(update.shared, task.shared), head=part(update.head, task.head))
        )

    server: Server = federation.server(out)
    federate(server, Between(federation.sites(out), lie))
    write_report(server.record.folder)
    return server


def distance(one: Server, other: Server) -> float:
    """How far two models are from each other, over their shared parameters."""
    pairs = [(t, other.model.shared[n]) for n, t in one.model.shared.items() if n not in one.model.buffers]
    return float(torch.cat([(a - b).flatten() for a, b in pairs]).norm())


@pytest.mark.complete
def test_liars_who_agree_move_the_model_less_than_with_the_mean(tiny: Any) -> None:
    """As many as the merge is for, who send the same multiple of an honest change.

    By a merge of each number and by one of whole updates; methods/test_robust.py has what holds for each.
    """
    liars = ("alpha", "beta")

    def moved(out: str, robust: dict[str, Any] | None) -> float:
        lied, honest = (
            merged(tiny, f"{out}-{len(who)}", robust, who, SEVEN, rounds=1) for who in (liars, ())
        )
        return distance(lied, honest)

    by_mean = moved("mean", None)
    for kind in ("trimmed", "krum"):
        assert moved(kind, {"kind": kind, "liars": len(liars)}) < 0.4 * by_mean, kind


@pytest.mark.complete
def test_rows_that_too_few_sites_send_are_listed_before_the_first_round(tiny: Any) -> None:
    server = merged(tiny, "run", {"kind": "trimmed", "liars": 1})
    run = json.loads((server.record.folder / "run.json").read_text())
    assert run["robust"] == {"kind": "trimmed", "liars": 1}
    assert run["unprotected"] == ["Hernia"]
    values = {"kind": "trimmed", "fewest": 3, "round": None, "labels": ["Hernia"]}
    assert {"code": "unprotected", "values": values} in run["notes"]
    assert any("fewer than 3 sites send their rows: Hernia." in note for note in noted(server))
    events = [json.loads(line) for line in (server.record.folder / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    told = next(i for i, event in enumerate(events) if event.get("values") == values)
    assert told < kinds.index("round")
    page = (server.record.folder / "report.html").read_text()
    assert "alpha, beta" in page or "delta and gamma (unprotected)" in page
    assert page.count("(unprotected)") == 1
    assert "unprotected" not in json.loads(
        (merged(tiny, "mean", None).record.folder / "run.json").read_text()
    )


@pytest.mark.complete
def test_a_row_that_an_absent_site_leaves_unprotected_is_noted(tiny: Any) -> None:
    federation = tiny(
        METHOD, FOUR, selection="last", min_sites=3, robust={"kind": "median", "liars": 1}, rounds=2
    )

    def absent(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == "beta" and task.task == "train" and task.round == 2 else answer

    server = federation.server()
    federate(server, Between(federation.sites(), absent))
    (note,) = [text for text in noted(server) if "in round" in text]
    assert "because fewer than 3 sites send their rows in round 2: Nodule." in note


def test_a_round_needs_as_many_updates_as_the_merge(tiny: Any) -> None:
    federation = tiny(METHOD, FOUR, selection="last", min_sites=1, robust={"liars": 1}, max_failed_rounds=1)
    alone = Between(federation.sites(), lambda site, task, answer: _only(site, task, answer))
    with pytest.raises(FederationError, match="2 usable updates of 3 needed"):
        federate(federation.server(), alone)


def _only(site: str, task: TaskData, answer: Packed) -> Packed | None:
    return answer if task.task != "train" or site in ("alpha", "beta") else None


def test_too_few_sites_for_a_merge_are_refused_before_the_first_round(tiny: Any) -> None:
    federation = tiny(METHOD, FOUR, robust={"kind": "krum", "liars": 1})
    with pytest.raises(FederationError, match=r"needs 5 sites or more, and 4 take part; .*liars or kind"):
        federate(federation.server(), Between(federation.sites(), lambda *given: given[2]))


def test_a_method_with_another_merge_is_refused(tiny: Any) -> None:
    federation = tiny(FedAlign(local=LocalTraining(lr=1e-2, batch_size=8)), robust={"kind": "median"})
    with pytest.raises(ConfigError, match=r"FedAlign also merges .*, which would stay a plain mean; remove"):
        federation.server()


@pytest.mark.complete
def test_a_merge_goes_on_where_it_was(tiny: Any) -> None:
    """The radius and the last change of the model are those of the committed rounds."""
    robust = {"kind": "centered", "liars": 1}
    whole = tiny(METHOD, FOUR, selection="last", robust=robust, rounds=3).run("whole")
    tiny(METHOD, FOUR, selection="last", robust=robust, rounds=2).run("parts")
    parts = tiny(METHOD, FOUR, selection="last", robust=robust, rounds=3).run("parts")
    assert all(torch.equal(tensor, parts.model.shared[name]) for name, tensor in whole.model.shared.items())
    assert whole.state.bound.radii == parts.state.bound.radii
    assert set(whole.state.bound.radii) == {"", "Mass", "Nodule"}


@pytest.mark.complete
def test_what_a_merge_keeps_of_a_site_is_recorded(tiny: Any) -> None:
    server = merged(tiny, "run", {"kind": "krum", "liars": 2}, ("alpha", "beta"), SEVEN)
    lines = [
        json.loads(line) for line in Path(server.record.folder / "history.jsonl").read_text().splitlines()
    ]
    assert all(line["sites"]["alpha"]["kept"] == 0 for line in lines)
    assert sum(site["kept"] for site in lines[0]["sites"].values()) == 5


@pytest.mark.complete
def test_a_site_that_opposes_the_others_is_named_in_the_events(tiny: Any) -> None:
    server = merged(tiny, "run", None, ("alpha",), SEVEN, times=-20.0)
    events = [json.loads(line) for line in (server.record.folder / "events.jsonl").read_text().splitlines()]
    odd = [event for event in events if event["event"] == "outliers"]
    assert [event["round"] for event in odd] == [1, 2]
    assert all(set(event["sites"]) == {"alpha"} for event in odd)
    assert odd[0]["sites"]["alpha"]["norm"] > 10


def test_the_settings_of_a_merge_can_be_set_on_the_command_line() -> None:
    from suture.execution.job import load_job

    job = with_settings(load_job("demo"), ["robust.kind=krum", "robust.liars=1"])
    assert (job.robust.kind, job.robust.fewest) == ("krum", 5)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="liars"):
        with_settings(job, ["robust.liars=0"])
    with pytest.raises(ConfigError, match="plain mean"):
        with_settings(job, ["method=fedalign"]).schedule()


class AsInFlare(Loop):
    """Messages as FLARE carries them; every update lies on disk; the last site answers first."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name in sorted(payloads, reverse=True):
            received = unpack(from_shareable_(to_shareable(payloads[name])))
            assert isinstance(received, TaskData)
            receive(name, from_shareable_(to_shareable(self._sites[name].answer(received).packed)))
        return {}


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["median", "centered", "krum"])
def test_a_robust_merge_is_the_same_in_the_loop_and_in_flare(
    kind: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, where the updates come in another order, are read from files.

    Of each number, of whole updates with a memory of the round before, and of some of them.
    """
    federation = tiny(METHOD, SEVEN, selection="last", rounds=2, robust={"kind": kind, "liars": 1})
    loop = federation.run("loop").model
    monkeypatch.setattr(collector, "IN_MEMORY", 0)
    server = federation.server("flare")
    federate(server, AsInFlare(federation.sites("flare")))
    for part, other in ((loop.shared, server.model.shared), (loop.head, server.model.head)):
        assert all(torch.equal(tensor, other[name]) for name, tensor in part.items())
