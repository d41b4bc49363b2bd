"""Operating points of a federation: what sites say of their scores, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from between import Between
from rounds import reply_of
from suture.core.errors import RejectedUpdate
from suture.federation.loop import federate
from suture.federation.server.server import Server
from suture.federation.site.store import FirstCounts
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Curves
from suture.learning.training import LocalTraining
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.check import check_reply
from suture.protocol.decisions import JOINED, Decided, DecidedClass, DecidedGroup
from suture.protocol.messages import Metrics, Scores, TaskData
from suture.protocol.packing import Packed, unpack
from suture_results.report import render_report

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
MEASURED = ("measured", "counts", "diagrams", "site_diagrams")
DECISION = {"sensitivity": 0.8, "calibration": "temperature"}


def run(federation: Any, change: Callable[[str, TaskData, Packed], Packed | None] | None = None) -> Server:
    server = federation.server()
    federate(server, Between(federation.sites(), change or (lambda *said: said[-1])))
    return server


def written(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.record.folder / name).read_text())
    return found


def open_sites(federation: Any, **limits: Any) -> Any:
    """The federation with other limits of its sites."""
    privacy = {"min_count": 0, "min_loss": 0} | limits
    for name, config in federation.configs.items():
        changed = config.privacy.model_copy(update=privacy)
        federation.configs[name] = config.model_copy(update={"privacy": changed})
    return federation


def enough(diagrams: dict[str, Any]) -> set[str]:
    """The classes that are decided: there are ten validation images of either kind."""
    return {name for name, one in diagrams.items() if min(one["images"]) >= 10}


def test_the_model_carries_its_decisions_and_the_results_how_well_they_do(tiny: Any) -> None:
    server = run(open_sites(tiny(METHOD, n=60, decision=DECISION)))
    kept, results = (
        written(server, "model/model.json")["decisions"],
        written(server, "metrics.json")["decisions"],
    )
    assert kept["format"] == 1
    assert kept["settings"]["sensitivity"] == 0.8
    assert {k: v for k, v in results.items() if k not in MEASURED} == kept
    assert set(results["diagrams"]) == set(server.registry.labels)
    assert set(kept["pooled"]) == enough(results["diagrams"]) == {"Mass", "Nodule"}
    for site in server.registry.members:
        assert set(kept["sites"][site]) == enough(results["site_diagrams"][site])
        for name, found in results["measured"][site].items():
            assert found["half"]["sensitivity"] is not None
            own = kept["sites"][site].get(name, {"thresholds": {}})["thresholds"]
            assert (found["own"] is None) == ("sensitivity" not in own)


@pytest.mark.complete
def test_a_sites_curves_are_those_of_the_counts_it_has_sent_once(tiny: Any) -> None:
    """Nothing else leaves for them: the same counts, read by themselves, give every point."""
    answers: dict[str, list[Scores]] = {}

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if isinstance(reply, Scores):
            answers.setdefault(site, []).append(reply)
        return answer

    server = run(open_sites(tiny(METHOD, n=120, decision=DECISION), min_count=4), note)
    decisions, drawn = server.fitted.decisions, written(server, "metrics.json")["decisions"]["site_diagrams"]
    assert decisions
    assert set(drawn) == set(answers)
    for site, (reply,) in answers.items():
        names = server.registry.members[site].names
        assert set(drawn[site]) <= set(names)
        for name, found in drawn[site].items():
            row = reply.labels.index(name)
            positives, negatives = (reply.class_tensors[k][row].numpy() for k in ("positives", "negatives"))
            assert found["images"] == [int(one[one != JOINED].sum()) for one in (positives, negatives)]
            again = diagrams(Curves.of([(positives, negatives)]), decisions.of(site, name), "sensitivity")
            assert found == json.loads(json.dumps(asdict(again)))
    page = render_report(server.record.folder)
    assert all(f'aria-label="{site}: ROC of' in page for site in drawn)


@pytest.mark.complete
def test_without_the_setting_nothing_more_is_asked(tiny: Any) -> None:
    asked = set()

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        asked.add((task.task, bool(task.decisions)))
        return answer

    server = run(tiny(METHOD), note)
    assert asked == {("handshake", False), ("train", False), ("evaluate", False)}
    assert "decisions" not in written(server, "model/model.json")
    assert written(server, "metrics.json")["decisions"] == {}


@pytest.mark.complete
def test_sites_that_hold_a_part_of_the_model_are_not_asked(tiny: Any) -> None:
    server = run(tiny(PersonalisedFL(local=METHOD.local), decision=DECISION))
    assert not server.decides
    assert written(server, "metrics.json")["decisions"] == {}


@pytest.mark.complete
def test_a_site_counts_its_validation_images_once_in_the_ledger(tiny: Any) -> None:
    federation = open_sites(tiny(METHOD, n=60, decision=DECISION))
    answers: dict[str, Scores] = {}

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "calibrate":
            scores = unpack(answer)
            assert isinstance(scores, Scores)
            answers[site] = scores
        return answer

    run(federation, note)
    for name, site in federation.sites().items():
        own, samples = site.trainer.data
        y = samples["validation"].y
        for row, label in enumerate(answers[name].labels):
            for kind, value in (("positives", 1), ("negatives", 0)):
                counts = answers[name].class_tensors[kind][row]
                assert int(counts[counts != JOINED].sum()) == int((y[:, own.index(label)] == value).sum())
        ledger = site.releases.ledger.releases()
        released = [r for r in ledger if (r.task, r.experiment) == ("calibrate", name)]
        assert len(released) == 1
        assert released[0].figures == dict.fromkeys(answers[name].labels, 1)
        assert released[0].numbers > 0


@pytest.mark.complete
def test_no_count_is_of_fewer_patients_than_the_limit(tiny: Any) -> None:
    """Every image of these sites is of a patient of its own."""
    seen = []

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "calibrate":
            scores = unpack(answer)
            assert isinstance(scores, Scores)
            for counts in scores.class_tensors.values():
                seen.extend(counts[counts != JOINED].tolist())
        return answer

    run(open_sites(tiny(METHOD, n=120, decision=DECISION), min_count=4), note)
    assert seen
    assert min(seen) >= 4


@pytest.mark.complete
def test_a_server_that_asks_for_counts_of_many_models_spends_the_sites_answers(tiny: Any) -> None:
    """Each round has another model; a site counts for one, and answers anew three times."""
    federation = open_sites(tiny(METHOD, n=60, rounds=6, selection="last"))
    sites, asked = federation.sites(), []

    def ask(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "train" and task.committed and site == "alpha":
            asked.append(reply_of(sites[site], replace(task, task="calibrate", round=task.committed)))
        return answer

    federate(federation.server(), Between(sites, ask))
    assert [type(one).__name__ for one in asked] == ["Scores"] * 4 + ["Abstain"]
    assert asked[-1].reason == "budget"


@pytest.mark.complete
def test_rounded_counts_show_no_cell_as_empty(tiny: Any) -> None:
    """A run whose sites round to twice their `min_count` decides the classes of which they show enough."""
    tried = []

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "calibrate":
            scores = unpack(answer)
            assert isinstance(scores, Scores)
            emptied = {k: t.masked_fill(t == 8, 0) for k, t in scores.class_tensors.items()}
            assert any((t == 8).any() for t in scores.class_tensors.values())
            with pytest.raises(RejectedUpdate, match="too few images"):
                check_reply(replace(scores, class_tensors=emptied), sites[site].answer(task).allowed)
            tried.extend(t[t != JOINED].min().item() for t in scores.class_tensors.values())
        return answer

    federation = open_sites(tiny(METHOD, n=120, decision=DECISION), min_count=4, round_counts=8)
    sites, server = federation.sites(), federation.server()
    federate(server, Between(sites, note))
    assert min(tried) == 8
    assert server.fitted.decisions
    assert set(server.fitted.decisions.pooled) == {
        "Mass",
        "Nodule",
    }  # of the others they show eight positives


AT = torch.tensor([385])
UNDECLARED: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "too few images": lambda s: {k: t.clone().index_fill_(1, AT, 1) for k, t in s.items()},
    "none at its end": lambda s: {k: t.clone().index_fill_(1, AT, JOINED) for k, t in s.items()},
    "a count above": lambda s: {k: t.clone().index_fill_(1, AT, 2_000_000_000) for k, t in s.items()},
    "shape": lambda s: {k: t[:, :-1] for k, t in s.items()},
    "int32": lambda s: {k: t.float() for k, t in s.items()},
    "missing": lambda s: {"positives": s["positives"]},
}


def test_the_sites_filter_refuses_counts_that_were_not_declared(tiny: Any) -> None:
    federation = open_sites(tiny(METHOD, n=120, decision=DECISION), min_count=4)
    tried = []

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "calibrate":
            scores = unpack(answer)
            assert isinstance(scores, Scores)
            expected = sites[site].answer(task).allowed
            check_reply(scores, expected)
            for what, change in UNDECLARED.items():
                with pytest.raises(RejectedUpdate, match=what):
                    check_reply(replace(scores, class_tensors=change(scores.class_tensors)), expected)
            with pytest.raises(RejectedUpdate, match="unknown label"):
                check_reply(replace(scores, labels=("Nobody", *scores.labels[1:])), expected)
            tried.append(site)
        return answer

    sites = federation.sites()
    federate(federation.server(), Between(sites, lie))
    assert len(tried) == 3


@pytest.mark.complete
def test_a_site_that_does_not_answer_uses_the_threshold_of_the_others(tiny: Any) -> None:
    def silent(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == "alpha" and task.task == "calibrate" else answer

    server = run(open_sites(tiny(METHOD, n=60, decision=DECISION)), silent)
    results = written(server, "metrics.json")["decisions"]
    assert "alpha" not in results["sites"]
    shared = set(server.registry.members["alpha"].names) & set(results["pooled"])
    assert set(results["measured"]["alpha"]) == shared
    for found in results["measured"]["alpha"].values():
        assert found["own"] is None
        assert found["half"] is not None


@pytest.mark.complete
def test_figures_of_decisions_that_were_not_asked_for_are_refused(tiny: Any) -> None:
    federation = open_sites(tiny(METHOD, n=60, decision=DECISION))
    refused = []

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.split == "test":
            reply: Any = unpack(answer)
            allowed: Any = sites[site].answer(task).allowed
            with pytest.raises(RejectedUpdate, match="were not asked for"):
                check_reply(reply, replace(allowed, task=replace(allowed.task, decisions={})))
            refused.append(site)
        return answer

    sites = federation.sites()
    federate(federation.server(), Between(sites, note))
    assert len(refused) == 3


def with_sexes(federation: Any) -> Any:
    """The federation with a column that is no label in each table."""
    for name, config in federation.configs.items():
        table = pd.read_csv(config.data.table, dtype=str, keep_default_na=False)
        table["sex"] = ["FM"[row % 2] for row in range(len(table))]
        table.to_csv(config.data.table, index=False)
        data = config.data.model_copy(update={"attribute_column": "sex"})
        federation.configs[name] = config.model_copy(update={"data": data})
    return federation


@pytest.mark.complete
def test_each_group_is_decided_and_shown(tiny: Any) -> None:
    server = run(with_sexes(open_sites(tiny(METHOD, n=120, decision=DECISION))))
    found = written(server, "metrics.json")["decisions"]
    for site, classes in found["measured"].items():
        for name, one in classes.items():
            groups = one["groups"]
            assert set(groups) == {"F", "M"}
            numbers = [sum(g[kind] for g in groups.values()) for kind in ("positives", "negatives")]
            assert numbers == found["counts"][site][name]
            whole = (one["own"] or one["pooled"])["sensitivity"]
            hits = [g["positives"] * (g["sensitivity"] or 0) for g in groups.values()]
            assert sum(hits) == pytest.approx(whole * numbers[0], abs=1e-3)
    page = render_report(server.record.folder)
    assert "By group" in page
    assert ">gap</td>" in page


@pytest.mark.complete
def test_a_group_that_the_site_has_not_named_is_refused(tiny: Any) -> None:
    federation = with_sexes(open_sites(tiny(METHOD, n=120, decision=DECISION)))

    def rename(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.split != "test":
            return answer
        text = json.dumps(answer.header).replace('"groups": {"F"', '"groups": {"John Doe"')
        assert "John Doe" in text
        return Packed(answer.tensors, json.loads(text))

    server = run(federation, rename)
    events = (server.record.folder / "events.jsonl").read_text()
    assert "the group 'John Doe' has no figures by attribute" in events
    assert written(server, "metrics.json")["decisions"]["measured"] == {}


def test_what_was_first_said_of_a_group_stands(tiny: Any, tmp_path: Path) -> None:
    """Two answers that differ by a patient would show in which group, and with what, that patient is."""
    point = Decided(0.5, 0.5)
    one = DecidedClass(None, None, point, (None, None), (None, None))

    def sent(folder: Path, **groups: DecidedGroup) -> dict[str, DecidedGroup]:
        metrics = Metrics(1, "test", 60, None, {}, decided={"Mass": replace(one, groups=groups)})
        return FirstCounts(folder).within(metrics).decided["Mass"].groups

    first = sent(tmp_path / "a", F=DecidedGroup(10, 20, 0.5, 0.5))
    assert first == {"F": DecidedGroup(10, 20, 0.5, 0.5)}
    both = sent(tmp_path / "a", F=DecidedGroup(11, 20, 0.6, 0.5), M=DecidedGroup(9, 9, 1.0, 1.0))
    assert both == {"F": DecidedGroup(10, 20, 0.6, 0.5)}
    assert sent(tmp_path / "a", M=DecidedGroup(9, 9, 1.0, 1.0)) == {}
    assert sent(tmp_path / "b") == {}
    assert sent(tmp_path / "b", M=DecidedGroup(9, 9, 1.0, 1.0)) == {}


@pytest.mark.complete
def test_the_pooled_threshold_is_that_of_all_images_together(tiny: Any) -> None:
    """With every cell shown, it is a quantile of the scores up to the width of a cell."""
    federation = open_sites(tiny(METHOD, n=120, decision=DECISION))
    server = run(federation)
    from scipy.special import logit

    from suture_results.prediction import open_model

    model = open_model(server.record.folder / "model")
    found = written(server, "metrics.json")["decisions"]["pooled"]
    for name in server.registry.labels:
        scores = []
        for site in federation.sites().values():
            own, samples = site.trainer.data
            if name in own.names:
                part = samples["validation"]
                p = model(part.inputs["image"])[:, model.labels.index(name)]
                scores.append(p[part.y[:, own.index(name)] == 1].numpy())
        threshold = found[name]["thresholds"].get("sensitivity")
        if threshold is not None:
            together = np.concatenate(scores)
            below = (
                (logit(together) < logit(threshold) - 0.0625).mean(),
                (logit(together) < logit(threshold) + 0.0625),
            )
            assert below[0] <= 0.2 <= below[1].mean() + 1e-9
