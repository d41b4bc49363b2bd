"""The site info, whose counts a site sends once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rounds import reply_of
from suture.core.errors import SutureError
from suture.core.labels import LabelSet
from suture.federation.site.site import Site
from suture.federation.site.store import FIRST_COUNTS, FirstCounts
from suture.learning.evaluation import NOTHING
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import build
from suture.models.classifier import split_state
from suture.protocol.messages import ClassScore, Evaluation, Metrics, SiteInfo, TaskData

LOCAL = LocalTraining(lr=1e-2, batch_size=8)


def asked(site: Site) -> SiteInfo:
    info = reply_of(site, TaskData("handshake"))
    assert isinstance(info, SiteInfo)
    return info


def test_a_second_handshake_reveals_nothing_new_of_data_that_changed(tiny: Any) -> None:
    """One more patient with a Mass: the numbers of the first answer stand, in this process or another."""
    federation = tiny(FedAvg(local=LOCAL))
    first = asked(federation.sites()["alpha"])
    table: Path = federation.configs["alpha"].data.table
    lines = table.read_text().splitlines()
    changed = [line.rsplit(",", 2)[0] + ",1,1" if "train" in line else line for line in lines]
    assert changed != lines
    table.write_text("\n".join(changed) + "\n")
    assert asked(federation.sites()["alpha"]) == first
    another = federation.sites("another_experiment")["alpha"]
    assert asked(another).counts != first.counts


def test_a_class_that_is_new_is_counted_and_the_others_stand(tmp_path: Path) -> None:
    one = FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": (7, 8)})
    both = FirstCounts(tmp_path).of(LabelSet(("Edema", "Mass")), {"Edema": (9, 6), "Mass": (8, 7)})
    assert (one, both) == ({"Mass": (7, 8)}, {"Edema": (9, 6), "Mass": (7, 8)})
    assert FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": (1, 1)}) == one
    assert json.loads((tmp_path / FIRST_COUNTS).read_text())["counts"].keys() == {"Edema", "Mass"}


def test_two_that_answer_for_one_folder_know_of_one_another(tmp_path: Path) -> None:
    one, other, mass = FirstCounts(tmp_path), FirstCounts(tmp_path), LabelSet(("Mass",))
    assert other.of(LabelSet(("Edema",)), {"Edema": (1, 2)}) == {"Edema": (1, 2)}
    assert one.of(mass, {"Mass": (5, 5)}) == {"Mass": (5, 5)}
    assert other.of(mass, {"Mass": (6, 5)}) == {"Mass": (5, 5)}
    assert json.loads((tmp_path / FIRST_COUNTS).read_text())["counts"] == {"Edema": [1, 2], "Mass": [5, 5]}


def test_a_count_that_was_withheld_stays_withheld(tmp_path: Path) -> None:
    """Else the round in which a class reaches the limit would say how often it occurs."""
    assert FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": None}) == {"Mass": None}
    assert FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": (5, 9)}) == {"Mass": None}


def test_a_method_that_asks_for_no_counts_leaves_no_trace_of_them(tiny: Any) -> None:
    site = tiny(SurgicalAggregation(local=LOCAL)).sites()["alpha"]
    assert asked(site).counts == {}
    assert not (site.folder / FIRST_COUNTS).exists()


def test_counts_of_a_split_stand_as_they_were_first_sent(tiny: Any) -> None:
    """One validation patient more with a Mass, between two rounds: the second answer has the first counts."""
    federation = tiny(SurgicalAggregation(local=LOCAL))
    task = evaluation(federation)
    first = measured(federation.sites()["alpha"], task)
    table: Path = federation.configs["alpha"].data.table
    lines = table.read_text().splitlines()
    changed = [line.rsplit(",", 2)[0] + ",1,0" if "validation" in line else line for line in lines]
    assert changed != lines
    table.write_text("\n".join(changed) + "\n")
    again = measured(federation.sites()["alpha"], replace(task, round=1))
    assert again.loss != first.loss
    assert {n: (s.positives, s.negatives) for n, s in again.classes.items()} == {
        n: (s.positives, s.negatives) for n, s in first.classes.items()
    }
    fresh = measured(federation.sites("another_experiment")["alpha"], task)
    assert fresh.classes["Mass"].positives == 5


def test_a_class_withheld_in_one_round_stays_withheld(tmp_path: Path) -> None:
    few = Metrics(1, "validation", 30, None, {"Mass": NOTHING})
    enough = Metrics(2, "validation", 31, None, {"Mass": ClassScore(0.8, None, None, 5, 26)})
    assert FirstCounts(tmp_path).within(few) == few
    assert FirstCounts(tmp_path).within(enough).classes == {"Mass": NOTHING}
    other_split = replace(enough, split="test")
    assert FirstCounts(tmp_path).within(other_split) == other_split


def evaluation(federation: Any) -> TaskData:
    """The initial model, to be measured on the validation data."""
    labels = ("Mass", "Nodule")
    model = build(federation.plan.model, LabelSet(labels), 1, pretrained=False)
    shared, head = split_state(model.state_dict())
    return TaskData("evaluate", labels=labels, shared=shared, head=head)


def measured(site: Site, task: TaskData) -> Metrics:
    answer = reply_of(site, task)
    assert isinstance(answer, Evaluation)
    return answer.metrics


@pytest.mark.parametrize(
    "content",
    [
        *(b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"counts": [1]}', b'{"counts": {"Mass": "17"}}'),
        *(b'{"counts": {"Mass": [1, 1e999]}}', b'{"counts": {"Mass": [1, -2]}}'),
    ],
)
def test_damaged_counts_are_named_and_not_replaced(content: bytes, tmp_path: Path) -> None:
    """New ones would reveal what changed since."""
    (tmp_path / FIRST_COUNTS).write_bytes(content)
    with pytest.raises(SutureError, match=FIRST_COUNTS):
        FirstCounts(tmp_path).of(LabelSet(("Mass",)), {"Mass": (7, 8)})
    assert (tmp_path / FIRST_COUNTS).read_bytes() == content
