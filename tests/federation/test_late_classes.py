"""Sites that join, with classes of their own, or leave: the selected round may be older than a class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from rounds import conformant
from suture.federation.server.selection import ModelSelection
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.decisions import DecisionSettings
from suture_synthetic.method_checks import subject_of

pytestmark = pytest.mark.complete


LOCAL = LocalTraining(lr=1e-3, batch_size=8)
CLASSES = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "late": ("Mass", "Fibrosis")}
DECIDED = {"decision": DecisionSettings()}


@pytest.fixture
def first_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round that is measured stays the best one."""
    for name in ("after", "after_losses"):
        before = getattr(ModelSelection, name)

        def once(self: ModelSelection, candidate: Any, *_: Any, before: Any = before) -> ModelSelection:
            found: ModelSelection = self if self.best else before(self, candidate)
            return found

        monkeypatch.setattr(ModelSelection, name, once)
    restored = ModelSelection.restore
    monkeypatch.setattr(ModelSelection, "restore", lambda *args, **_: restored(*args))


def in_turn(tiny: Any, method: Any, steps: Sequence[Sequence[str]], **schedule: object) -> tuple[Server, Any]:
    """Run one experiment with these sites in each step, a round more each; return the last server."""
    whole = tiny(method, CLASSES, **schedule)
    for rounds, sites in enumerate(steps, 1):
        configs = {name: whole.configs[name] for name in sites}
        server = replace(
            whole, configs=configs, schedule=replace(whole.schedule, rounds=rounds, **schedule)
        ).run()
    return server, json.loads((server.record.folder / "metrics.json").read_text())


UNLIKE = ("afl", "fedavg", "fedlsm", "fedmlp", "individual", "pfl", "surgical")
"""Methods that differ in what a late class changes: sums that it enlarges, rows of all classes
and of a site's own, a teacher, tensors of classes, and models and heads that stay at a site.
"""


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.usefixtures("first_is_best")
def test_a_class_that_is_newer_than_the_selected_round_is_not_measured(name: str, tiny: Any) -> None:
    method = subject_of(conformant(name)).method
    steps = (("alpha", "beta"), ("alpha", "beta", "late"), ("beta", "late"), ("alpha", "beta", "late"))
    server, found = in_turn(tiny, method, steps)
    assert server.record.run["status"] == "finished"
    assert "Fibrosis" in found["auroc"]
    if method.sharing.personal == "model":  # each site selects a round of its own
        return
    assert server.selected_round == 1
    assert found["auroc"]["Fibrosis"] is None
    assert found["undefined"]["Fibrosis"] == {"code": "joined", "values": {"round": 1}}
    assert found["counts"]["Mass"] != [None, None], "what the model has is measured"
    if method.sharing.personal == "nothing":
        assert found["sites"]["late"].keys() == {"Mass"}


@pytest.mark.parametrize(
    ("order", "method"),
    list(
        zip(permutations(CLASSES), 3 * [SurgicalAggregation(local=LOCAL), FedAvg(local=LOCAL)], strict=True)
    ),
)
@pytest.mark.usefixtures("first_is_best")
def test_sites_join_and_leave_in_any_order(order: tuple[str, ...], method: Any, tiny: Any) -> None:
    """The model is that of the first round whoever comes later, in which figures nobody has an error."""
    first, second, third = order
    steps = [(first,), (first, second), (second,), (second, third), (third,)]
    server, found = in_turn(tiny, method, steps, **DECIDED)
    labels = set(load_spec_labels(server))
    assert labels == set(CLASSES[first])
    assert set(found["auroc"]) == {"Fibrosis", "Hernia", "Mass", "Nodule"} & {
        name for site in CLASSES for name in CLASSES[site]
    }
    for name in set(found["auroc"]) - labels:
        assert found["undefined"][name] == {"code": "joined", "values": {"round": 1}}
    for site, scores in found["sites"].items():
        assert scores.keys() == set(CLASSES[site]) & labels
    assert not list(server.record.folder.glob("sites/*/errors.jsonl"))


def load_spec_labels(server: Server) -> list[str]:
    facts = json.loads((server.record.folder / "model" / "model.json").read_text())
    return list(facts["labels"])


@pytest.mark.parametrize(
    ("method", "selection", "comparable"),
    [
        (SurgicalAggregation(local=LOCAL), "site_loss", True),
        (FedAvg(local=LOCAL), "site_loss", False),  # its loss is over all classes, unknown ones as absent
        (FedAvg(local=LOCAL), "last", True),
    ],
)
def test_losses_over_other_classes_are_not_compared(
    method: Any, selection: str, comparable: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = ModelSelection.restore, []

    def restored(self: ModelSelection, *args: Any, **how: Any) -> ModelSelection:
        done = before(self, *args, **how)
        found.append(done.best is None or not done.best.unmeasured)
        return done

    monkeypatch.setattr(ModelSelection, "restore", restored)
    steps = [*[("alpha", "beta")] * 3, tuple(CLASSES)]
    server, _ = in_turn(tiny, method, steps, selection=selection)
    assert found == [True, True, comparable]
    assert server.state.standings.best is not None
    assert not server.state.standings.best.unmeasured


def test_a_later_round_that_is_better_has_the_class(tiny: Any) -> None:
    server, found = in_turn(
        tiny, SurgicalAggregation(local=LOCAL), [("alpha", "beta"), tuple(CLASSES)], selection="last"
    )
    assert server.selected_round == 2
    assert found["auroc"]["Fibrosis"] is not None
    assert set(load_spec_labels(server)) == {"Fibrosis", "Hernia", "Mass", "Nodule"}
