"""The cosine of an update to the mean of the others, from 2,048 numbers of each, and what it marks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from noted import noted
from suture.federation.loop import federate
from suture.federation.server.norms import Direction, Measure, class_signs, cosines
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.robust import site_updates
from suture.protocol.egress import Egress
from suture.protocol.messages import Labels, TaskData, Update, ones
from suture.protocol.packing import Packed, pack, unpack
from suture.protocol.records import read_history
from suture_results.report import write_report

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=8), batch_norm="frozen")


def of(values: Tensor) -> Tensor:
    direction = Direction()
    direction.add("w", 0, values.double())
    return direction.unit()


def test_small_updates_are_compared_exactly() -> None:
    found = cosines(
        {
            "a": of(torch.tensor([1.0, 0.0])),
            "b": of(torch.tensor([0.0, 5.0])),
            "c": of(torch.tensor([-2.0, 0.0])),
        }
    )
    # Of unit length: the others' mean of a is (-1, 1) / 2, that of b is 0.
    assert found == {
        "a": pytest.approx(-(0.5**0.5), abs=1e-3),
        "b": None,
        "c": pytest.approx(-(0.5**0.5), abs=1e-3),
    }
    assert cosines({"a": of(torch.ones(2))}) == {"a": None}
    assert cosines({"a": of(torch.zeros(2)), "b": of(torch.ones(2))}) == {"a": None, "b": None}
    assert cosines({s: of(torch.full((3,), 3e38)) for s in "ab"}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_large_updates_are_compared_to_a_few_hundredths(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(300_001, generator=g)
    updates = {s: common + 2 * torch.randn(300_001, generator=g) for s in "abcd"}
    updates["d"] = -updates["d"]
    units = {s: t / t.norm() for s, t in updates.items()}
    total = sum(units.values())
    exact = {s: float(u @ (total - u) / (total - u).norm()) for s, u in units.items()}
    assert cosines({s: of(t) for s, t in updates.items()}) == pytest.approx(exact, abs=0.08)


def measured(labels: Labels, rows: Tensor, shared: Tensor) -> Tensor:
    task = TaskData(
        "train", labels=labels, shared={"w": torch.zeros_like(shared)}, head={"b": torch.zeros_like(rows)}
    )
    update = Update(1, labels, {"w": shared}, {"b": rows}, ones(labels))
    return Measure()(update, task, Egress({}, {})).direction


def test_rows_of_classes_are_compared_by_name() -> None:
    rows, shared = torch.randn(3, 5), torch.randn(70_000)
    one = measured(("Mass", "Nodule", "Edema"), rows, shared)
    assert torch.allclose(one, measured(("edema", "Mass", "Nodule"), rows[[2, 0, 1]], shared), atol=1e-6)
    assert not torch.allclose(one, measured(("Edema", "Mass", "Nodule"), rows, shared), atol=1e-3)
    assert class_signs(("Mass", "Nodule")).abs().tolist() == [1, 1]


def changed(factor: float, liars: tuple[str, ...] = ("alpha",)) -> Any:
    """Some sites scale their change."""

    def change(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site not in liars or not isinstance(update, Update):
            return answer
        scaled = {
            group: {
                k: (t - base[k]) * factor + base[k] if t.is_floating_point() else t for k, t in sent.items()
            }
            for group, sent, base in (
                ("shared", update.shared, task.shared),
                ("head", update.head, task.head),
            )
        }
        return pack(replace(update, **scaled))

    return change


SITES = dict.fromkeys(("alpha", "beta", "delta", "epsilon", "gamma"), ("Mass", "Nodule"))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("factor", "marks"),
    [
        (1.0, []),
        (-1.0, ["opposed to the other sites"]),
        (-10.0, ["opposed to the other sites", "over 10 times as long"]),
        (20.0, ["over 10 times as long"]),
        (0.0, ["less than a hundredth as long"]),  # a free rider, which sends back what it received
    ],
)
def test_a_sign_flip_is_marked_and_honest_sites_are_not(factor: float, marks: list[str], tiny: Any) -> None:
    federation = tiny(METHOD, SITES, rounds=4, selection="last")
    server = federation.server()
    federate(server, Between(federation.sites(), changed(factor)))
    found = site_updates(read_history(server.record.folder))
    assert {s: [text.split(" in ")[0] for text in one.marks] for s, one in found.items()} == (
        {site: [] for site in SITES} | {"alpha": marks}
    )
    said = [note for note in noted(server) if note.startswith("Two groups")]
    assert ["beta, delta, epsilon, gamma; and alpha: " in note for note in said] == [True] * bool(marks)
    write_report(server.record.folder)
    page = (server.record.folder / "report.html").read_text()
    assert "Comparison of the sites' updates</h2>" in page
    assert ("opposed to the other sites in" in page) == (factor < 0)
    assert all(f"{mark} in 4 of 4" in page for mark in marks)
    events = [json.loads(line) for line in (server.record.folder / "events.jsonl").read_text().splitlines()]
    told = [event["sites"] for event in events if event["event"] == "outliers"]
    assert [list(sites) for sites in told] == [["alpha"]] * (4 if marks else 0)


def test_a_majority_that_lies_has_an_honest_site_marked_and_the_note_says_so(tiny: Any) -> None:
    """Two of three send a twentieth of their change: gamma is long beside them, as one liar would be."""
    sites = {name: SITES[name] for name in ("alpha", "beta", "gamma")}
    server = tiny(METHOD, sites, rounds=2, selection="last").server()
    federate(server, Between(tiny(METHOD, sites, rounds=2).sites(), changed(0.05, ("alpha", "beta"))))
    [said] = [note for note in noted(server) if "over 10 times as long in 2 of 2" in note]
    assert "alpha, beta; and gamma: " in said
    assert "cannot tell which" in said


def test_two_sites_have_figures_and_no_mark(tiny: Any) -> None:
    federation = tiny(METHOD, dict(list(SITES.items())[:2]), rounds=2, selection="last")
    server = federation.server()
    federate(server, Between(federation.sites(), changed(-10.0)))
    history = read_history(server.record.folder)
    assert all(site.cosine is not None and site.norm for line in history for site in line.sites.values())
    assert site_updates(history) == {}
