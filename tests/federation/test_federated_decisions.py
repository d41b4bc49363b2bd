"""Operating points of a federation: what sites say of their scores, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from parties import METHOD, events, limited, record, run
from torch import Tensor

from between import Between
from rounds import reply_of
from suture.core.errors import RejectedUpdate
from suture.federation.loop import federate
from suture.federation.server.server import Server
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Curves
from suture.methods.pfl import PersonalisedFL
from suture.protocol.check import check_reply
from suture.protocol.decisions import JOINED
from suture.protocol.messages import Scores, TaskData
from suture.protocol.packing import Packed, unpack
from suture_results.prediction import open_model
from suture_results.report import render_report
from world import refused

MEASURED = ("measured", "counts", "diagrams", "site_diagrams")
DECISION = {"sensitivity": 0.8, "calibration": "temperature"}


def decided(tiny: Any, n: int = 60, limits: dict[str, int] | None = None, **schedule: Any) -> Any:
    """A federation that decides, with limits of its sites."""
    return limited(tiny(METHOD, n=n, **{"decision": DECISION, **schedule}), **(limits or {}))


def counted(federation: Any) -> tuple[Server, dict[str, Scores]]:
    """The server of a run, and the counts that each site has sent once."""
    scores: dict[str, Scores] = {}

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if isinstance(reply, Scores):
            assert site not in scores
            scores[site] = reply
        return answer

    return run(federation, change=note), scores


def shown(scores: Mapping[str, Scores]) -> list[int]:
    """The counts of all cells that are not joined to the next one."""
    tensors = [tensor for one in scores.values() for tensor in one.class_tensors.values()]
    return [int(count) for tensor in tensors for count in tensor[tensor != JOINED]]


def enough(diagrams: dict[str, Any]) -> set[str]:
    """The classes that are decided: there are ten validation images of either kind."""
    return {name for name, one in diagrams.items() if min(one["images"]) >= 10}


def test_the_model_carries_its_decisions_and_the_results_how_well_they_do(tiny: Any) -> None:
    server = run(decided(tiny))
    kept, results = (record(server, name)["decisions"] for name in ("model/model.json", "metrics.json"))
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
    """Nothing else leaves for them: the same counts, read by themselves, give every point.

    No count is of fewer patients than the limit; every image of these sites is of a patient of its own.
    """
    federation = decided(tiny, n=120, limits={"min_count": 4})
    server, scores = counted(federation)
    assert min(shown(scores)) >= 4
    decisions, drawn = server.fitted.decisions, record(server, "metrics.json")["decisions"]["site_diagrams"]
    assert decisions
    assert set(drawn) == set(scores)
    for site, reply in scores.items():
        assert set(drawn[site]) <= set(server.registry.members[site].names)
        for name, found in drawn[site].items():
            row = reply.labels.index(name)
            positives, negatives = (reply.class_tensors[k][row].numpy() for k in ("positives", "negatives"))
            assert found["images"] == [int(one[one != JOINED].sum()) for one in (positives, negatives)]
            again = diagrams(Curves.of([(positives, negatives)]), decisions.of(site, name), "sensitivity")
            assert found == json.loads(json.dumps(asdict(again)))
    for name, site in federation.sites().items():
        releases = site.releases.ledger.releases()
        (released,) = (r for r in releases if (r.task, r.experiment) == ("calibrate", name))
        assert released.figures == dict.fromkeys(scores[name].labels, 1)
        assert released.numbers > 0
    page = render_report(server.record.folder)
    assert all(f'aria-label="{site}: ROC of' in page for site in drawn)


@pytest.mark.complete
def test_nothing_more_is_asked_without_the_setting_or_where_sites_hold_a_part_of_the_model(tiny: Any) -> None:
    asked = set()

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        asked.add((task.task, bool(task.decisions)))
        return answer

    personal = tiny(PersonalisedFL(local=METHOD.local), decision=DECISION)
    for server in (run(tiny(METHOD), "plain", note), run(personal, "personal", note)):
        assert not server.decides
        assert record(server, "metrics.json")["decisions"] == {}
    assert asked == {("handshake", False), ("train", False), ("evaluate", False)}


@pytest.mark.complete
def test_a_server_that_asks_for_counts_of_many_models_spends_the_sites_answers(tiny: Any) -> None:
    """Each round has another model; a site counts for one, and answers anew three times."""
    federation = decided(tiny, rounds=6, selection="last", decision=None)
    sites, asked = federation.sites(), []

    def ask(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "train" and task.committed and site == "alpha":
            asked.append(reply_of(sites[site], replace(task, task="calibrate", round=task.committed)))
        return answer

    federate(federation.server(), Between(sites, ask))
    assert [type(one).__name__ for one in asked] == ["Scores"] * 4 + ["Abstain"]
    assert asked[-1].reason == "budget"


def at(cell: int) -> Callable[[Tensor], Tensor]:
    return lambda counts: counts.clone().index_fill_(1, torch.tensor([385]), cell)


UNDECLARED: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("too few images", at(1)),
    ("none at its end", at(JOINED)),
    ("a count above", at(2_000_000_000)),
    ("shape", lambda counts: counts[:, :-1]),
    ("int32", Tensor.float),
]


@pytest.mark.parametrize("limits", [{"min_count": 4}, {"min_count": 4, "round_counts": 8}], ids=str)
def test_the_sites_filter_refuses_counts_that_were_not_declared(limits: dict[str, int], tiny: Any) -> None:
    """A site that rounds to twice its `min_count` shows no cell as empty."""
    federation, tried = decided(tiny, n=120, limits=limits), {}

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        scores = unpack(answer)
        if not isinstance(scores, Scores):
            return answer
        allowed = sites[site].answer(task).allowed
        check_reply(scores, allowed)
        emptied = ("too few images", lambda counts: counts.masked_fill(counts == 8, 0))
        for what, change in (*UNDECLARED, *[emptied] * ("round_counts" in limits)):
            wrong = {kind: change(counts) for kind, counts in scores.class_tensors.items()}
            with refused(what, by=RejectedUpdate):
                check_reply(replace(scores, class_tensors=wrong), allowed)
        half = {"positives": scores.class_tensors["positives"]}
        for wrong_reply in (
            replace(scores, class_tensors=half),
            replace(scores, labels=("Nobody", *scores.labels[1:])),
        ):
            with refused(by=RejectedUpdate):
                check_reply(wrong_reply, allowed)
        tried[site] = scores
        return answer

    sites, server = federation.sites(), federation.server()
    federate(server, Between(sites, lie))
    assert len(tried) == 3
    assert min(shown(tried)) == limits.get("round_counts", 4)
    assert server.fitted.decisions
    assert {"Mass", "Nodule"} <= set(server.fitted.decisions.pooled)


@pytest.mark.complete
def test_a_site_that_does_not_answer_uses_the_threshold_of_the_others(tiny: Any) -> None:
    """And figures of decisions that were not asked for are refused."""
    checked = []

    def silent(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if task.split == "test":
            allowed = sites[site].answer(task).allowed
            assert allowed
            with refused(by=RejectedUpdate):
                check_reply(unpack(answer), replace(allowed, task=replace(allowed.task, decisions={})))  # type: ignore[arg-type]
            checked.append(site)
        return None if (site, task.task) == ("alpha", "calibrate") else answer

    federation = decided(tiny)
    sites, server = federation.sites(), federation.server()
    federate(server, Between(sites, silent))
    assert len(checked) == 3
    results = record(server, "metrics.json")["decisions"]
    assert "alpha" not in results["sites"]
    shared = set(server.registry.members["alpha"].names) & set(results["pooled"])
    assert set(results["measured"]["alpha"]) == shared
    for found in results["measured"]["alpha"].values():
        assert found["own"] is None
        assert found["half"] is not None


# Groups


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
    server = run(with_sexes(decided(tiny, n=120)))
    found = record(server, "metrics.json")["decisions"]
    for site, classes in found["measured"].items():
        for name, one in classes.items():
            groups = one["groups"]
            assert set(groups) == {"F", "M"}
            numbers = [sum(g[kind] for g in groups.values()) for kind in ("positives", "negatives")]
            assert numbers == found["counts"][site][name]
            whole = (one["own"] or one["pooled"])["sensitivity"]
            hits = [g["positives"] * (g["sensitivity"] or 0) for g in groups.values()]
            assert sum(hits) == pytest.approx(whole * numbers[0], abs=1e-3)
    assert "By group" in render_report(server.record.folder)


@pytest.mark.complete
def test_a_group_that_the_site_has_not_named_is_refused(tiny: Any) -> None:
    def rename(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.split != "test":
            return answer
        text = json.dumps(answer.header).replace('"groups": {"F"', '"groups": {"John Doe"')
        assert "John Doe" in text
        return Packed(answer.tensors, json.loads(text))

    server = run(with_sexes(decided(tiny, n=120)), change=rename)
    assert "'John Doe'" in json.dumps(events(server))
    assert record(server, "metrics.json")["decisions"]["measured"] == {}


@pytest.mark.complete
def test_the_pooled_threshold_is_that_of_all_images_together(tiny: Any) -> None:
    """With every cell shown, it is a quantile of the scores up to the width of a cell."""
    from scipy.special import logit

    federation = decided(tiny, n=120)
    server = run(federation)
    model = open_model(server.record.folder / "model")
    for name, pooled in record(server, "metrics.json")["decisions"]["pooled"].items():
        scores = []
        for site in federation.sites().values():
            own, samples = site.trainer.data
            if name in own.names:
                part = samples["validation"]
                p = model(part.inputs["image"])[:, model.labels.index(name)]
                scores.append(p[part.y[:, own.index(name)] == 1].numpy())
        if threshold := pooled["thresholds"].get("sensitivity"):
            distance = logit(np.concatenate(scores)) - logit(threshold)
            assert (distance < -0.0625).mean() <= 0.2 <= (distance < 0.0625).mean() + 1e-9
