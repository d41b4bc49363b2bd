"""A site whose labels fit nobody else's loses its place; the others begin, or go on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from between import Between
from suture.core.errors import FederationError, LabelError
from suture.federation.loop import Loop, federate
from suture.federation.server.registry import Agreement, agree, misfits
from suture.federation.server.results import Results
from suture.federation.server.selection import mean_over_sites
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol import records
from suture.protocol.messages import MOST_CLASSES, ClassScore, Metrics, SiteInfo, TaskData
from suture.protocol.packing import Packed, pack, unpack
from suture.protocol.records import parse

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
NOTHING = Agreement((), {}, False)


def info(*labels: str, **more: Any) -> SiteInfo:
    return SiteInfo(labels, {"train": 10}, 1, "code", **more)


OTHERS = {"a": info("Mass", "Nodule"), "b": info("Nodule", "Mass")}

LIES: dict[str, tuple[dict[str, Any], str]] = {
    "two spellings of one class": ({"labels": ("Mass", "mass")}, "correct the label map"),
    "another label type": (
        {"label_type": "multiclass"},
        "its labels are multiclass, those of the federation multilabel",
    ),
    "another prior": ({"prior": "abcdef"}, "its prior is abcdef"),
    "look-alikes of its own": ({"labels": ("Sarcoidosis", "Sarcoidosys")}, "nearly the same"),
    "a look-alike of a shared class": ({"labels": ("Nodules of lung", "Nodulle")}, "nearly the same"),
}


def lied(tiny: Any, out: str, change: dict[str, Any] | None, rounds: int = 2) -> Server:
    """A federation in which alpha's site info is changed, or lost; gamma and beta share the class Nodule."""
    federation = tiny(METHOD, min_sites=2, rounds=rounds, selection="last")

    def lie(site: str, task: TaskData, answer: Packed) -> Packed | None:
        reply = unpack(answer)
        if site != "alpha" or not isinstance(reply, SiteInfo):
            return answer
        return pack(replace(reply, **change)) if change else None

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lie))
    return server


def model(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()


WITHOUT: dict[bool, bytes] = {}
"""The model without alpha, of a continued experiment or not; every test has the same data."""


@pytest.mark.complete
@pytest.mark.parametrize("continued", [False, True], ids=["at the start", "in a continued experiment"])
@pytest.mark.parametrize("kind", [k for k in LIES if k != "another prior"])
def test_it_costs_the_site_its_place(kind: str, continued: bool, tiny: Any) -> None:
    change, words = LIES[kind]

    def run(out: str, lie: dict[str, Any] | None) -> Server:
        if continued:
            first = tiny(METHOD, min_sites=2, rounds=1, selection="last")
            federate(first.server(out), Loop(first.sites(out)))
        return lied(tiny, out, lie)

    server = run("lied", change)
    if continued not in WITHOUT:
        WITHOUT[continued] = model(run("lost", None))
    assert model(server) == WITHOUT[continued]
    events = (server.record.folder / "events.jsonl").read_text().splitlines()
    begun = [e for e in map(json.loads, events) if e["event"] == "begin"][-1]
    assert words in begun["refused"]["alpha"]


@pytest.mark.parametrize("kind", LIES)
def test_the_reason_is_attributed_to_the_site(kind: str) -> None:
    change, words = LIES[kind]
    others = {s: replace(i, prior="123456" if kind == "another prior" else None) for s, i in OTHERS.items()}
    liar = replace(info("Mass"), **change)
    (found,) = misfits({**others, "liar": liar}, NOTHING).items()
    assert found[0] == "liar"
    assert words in found[1]


def test_a_site_that_imitates_several_others_is_refused() -> None:
    sites = {"a": info("Sarcoidosis"), "b": info("Silicosis"), "liar": info("Sarcoidosys", "Sillicosis")}
    assert list(misfits(sites, NOTHING)) == ["liar"]


def test_what_nobody_can_attribute_stops_the_run() -> None:
    sites = {"a": info("Sarcoidosis"), "b": info("Sarcoidosys"), "c": info("Mass")}
    assert misfits(sites, NOTHING) == {}
    with pytest.raises(FederationError, match="nearly the same"):
        agree(sites, Agreement())
    assert misfits({"a": info("Mass"), "b": info("Mass", label_type="multiclass")}, NOTHING) == {}


def test_the_experiment_decides_what_is_usual() -> None:
    """Even against the majority: its model exists."""
    new = {s: replace(i, label_type="multiclass", prior="new") for s, i in OTHERS.items()}
    agreed = Agreement(("Mass",), {}, False, "multilabel", "old")
    assert set(misfits({**new, "c": info("Mass", prior="old")}, agreed)) == {"a", "b"}
    named = Agreement(("Sarcoidosis",), {}, False)
    assert set(misfits({"a": info("Sarcoidosys"), "b": info("Sarcoidosis")}, named)) == {"a"}


def test_a_site_without_a_place_counts_against_the_quorum(tiny: Any) -> None:
    federation = tiny(METHOD)

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        is_alpha = site == "alpha" and isinstance(reply, SiteInfo)
        return pack(replace(reply, labels=("Mass", "mass"))) if is_alpha else answer

    with pytest.raises(LabelError, match=r"alpha: .*correct the label map"):
        federate(federation.server(), Between(federation.sites(), lie))


@pytest.mark.complete
def test_ten_thousand_classes_are_agreed_on_and_no_more() -> None:
    half = MOST_CLASSES // 2
    sites = {
        site: unpack(pack(info(*(f"Finding {n:05d} x{n * 7919 % 10007:05d}" for n in range(at, at + half)))))
        for site, at in (("a", 0), ("b", half))
    }
    registry = agree(sites, Agreement(accept=True))  # type: ignore[arg-type]
    assert len(registry.labels) == MOST_CLASSES
    assert sum(map(len, registry.owners().values())) == MOST_CLASSES
    more = {**sites, "c": info("Mass")}
    with pytest.raises(FederationError, match="10001 classes together; at most 10000"):
        agree(more, Agreement(accept=True))  # type: ignore[arg-type]
    flood = info(*(f"Junk {n}" for n in range(MOST_CLASSES)))
    assert "exceed 10000" in misfits({**OTHERS, "liar": flood}, Agreement((), {}, True))["liar"]


@pytest.mark.complete
def test_a_union_of_ten_thousand_classes_has_results() -> None:
    """No site has them all, so no single message has shown that they are too many."""
    halves = [tuple(f"Finding {n:05d}" for n in range(at, at + 5_000)) for at in (0, 5_000)]
    sites = {site: info(*own) for site, own in zip("ab", halves, strict=True)}
    registry = agree(sites, Agreement(accept=True))
    scored = ClassScore(0.5, None, None, 1, 1)
    tested = {s: Metrics(1, "test", 2, 0.5, dict.fromkeys(i.labels, scored)) for s, i in sites.items()}
    measured = mean_over_sites(registry, tested, 1)
    content = Results(registry.labels, registry.owners(), measured, "sites' test data").to_dict()
    assert len(content["auroc"]) == MOST_CLASSES
    assert content["mean_auroc"] == 0.5
    assert parse(records.Metrics, content, "metrics.json").groups == {"shared": None, "unique": 0.5}
