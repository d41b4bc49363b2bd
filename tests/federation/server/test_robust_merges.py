"""Robust merges in a whole federation: two who agree, rows that too few sites send, and another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    Change,
    events,
    history,
    record,
    run,
)
from torch import Tensor

from suture.core.errors import ConfigError, FederationError
from suture.execution.job import load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.server import collector
from suture.federation.server.collector import Receiver
from suture.flare.codec import from_shareable_, to_shareable
from suture.protocol.messages import TaskData, TaskName, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.missing_labels.fedalign import FedAlign
from suture_results.report import write_report
from world import refused

FOUR = {
    "alpha": ("Mass", "Nodule"),
    "beta": ("Mass", "Nodule"),
    "delta": ("Hernia", "Mass"),
    "gamma": ("Hernia", "Mass", "Nodule"),
}


SEVEN = dict.fromkeys(("alpha", "beta", "delta", "eps", "eta", "gamma", "zeta"), ("Mass", "Nodule"))


def times(factor: float, *liars: str) -> Change:
    """Some send so many times their change."""

    def part(sent: dict[str, Tensor], was: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t if "running" in n else was[n] + factor * (t - was[n]) for n, t in sent.items()}

    def change(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site not in liars or not isinstance(update, Update):
            return answer
        shared, head = part(update.shared, task.shared), part(update.head, task.head)
        return pack(replace(update, shared=shared, head=head))

    return change


@pytest.mark.complete
def test_liars_who_agree_move_the_model_less_than_with_the_mean(tiny: Any) -> None:
    """As many as the merge is for, who send the same multiple of an honest change.

    By a merge of each number and by one of whole updates; methods/test_robust.py has what holds for each.
    """

    def moved(robust: dict[str, Any] | None) -> float:
        federation = tiny(METHOD, SEVEN, selection="last", rounds=1, robust=robust)
        name = robust["kind"] if robust else "mean"
        lied = run(federation, f"{name}-lied", times(-10.0, "alpha", "beta"))
        if robust and robust["kind"] == "krum":
            assert [history(lied)[0]["sites"][site]["kept"] for site in SEVEN] == [0, 0, 1, 1, 1, 1, 1]
        one, two = (server.model for server in (lied, run(federation, name)))
        pairs = [(t, two.shared[n]) for n, t in one.shared.items() if n not in one.buffers]
        return float(torch.cat([(a - b).flatten() for a, b in pairs]).norm())

    by_mean = moved(None)
    for kind in ("trimmed", "krum"):
        assert moved({"kind": kind, "liars": 2}) < 0.4 * by_mean, kind


@pytest.mark.complete
def test_rows_that_too_few_sites_send_are_listed_before_the_first_round(tiny: Any) -> None:
    """And where an absent site leaves another one so, in that round."""
    robust = {"kind": "trimmed", "liars": 1}
    federation = tiny(METHOD, FOUR, selection="last", min_sites=3, robust=robust)

    def absent(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if (site, task.task, task.round) == ("beta", "train", 2) else answer

    server = run(federation, change=absent)
    made = record(server, "run.json")
    assert (made["robust"], made["unprotected"]) == (robust, ["Hernia"])
    before, later = ([*values["labels"]] for note in made["notes"] if "fewest" in (values := note["values"]))
    assert (before, later) == (["Hernia"], ["Nodule"])
    kinds = [event["event"] for event in events(server)]
    told = next(
        i for i, event in enumerate(events(server)) if event.get("values", {}).get("labels") == before
    )
    assert told < kinds.index("round")
    write_report(server.record.folder)
    assert (server.record.folder / "report.html").read_text().count("(unprotected)") == 1
    assert "unprotected" not in record(run(tiny(METHOD, FOUR, rounds=1), "mean"), "run.json")


def test_too_few_sites_or_updates_for_a_merge_are_refused(tiny: Any) -> None:
    with refused("5", "4", by=FederationError):
        tiny(METHOD, FOUR, robust={"kind": "krum", "liars": 1}).run()
    few = tiny(METHOD, FOUR, selection="last", min_sites=1, robust={"liars": 1}, max_failed_rounds=1)

    def only_two(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return answer if task.task != "train" or site in ("alpha", "beta") else None

    with refused("2 usable updates of 3", by=FederationError):
        run(few, "few", only_two)


def test_a_method_with_another_merge_is_refused(tiny: Any) -> None:
    federation = tiny(FedAlign(local=METHOD.local), robust={"kind": "median"})
    with refused("FedAlign", "robust", by=ConfigError):
        federation.server()
    job = with_settings(load_job("demo"), ["robust.kind=krum", "robust.liars=1"])
    assert (job.robust.kind, job.robust.fewest) == ("krum", 5)  # type: ignore[union-attr]
    with refused("liars", by=ConfigError):
        with_settings(job, ["robust.liars=0"])
    with refused("FedAlign", by=ConfigError):
        with_settings(job, ["method=fedalign"]).schedule()


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
