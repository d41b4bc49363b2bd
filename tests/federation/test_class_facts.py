"""What the server tells sites of each class: as declared, of the classes that a site sees, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rounds import context_of, reply_of
from suture.core.errors import ConfigError
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, ClassFacts, LabelStatistics, LabelUse, hyperparameters
from suture.methods.source import code_hash
from suture.models.classifier import Layout
from suture.protocol.egress import CLASSES, Channel, Egress, list_declared
from suture.protocol.messages import Abstain, TaskData, Update
from suture.protocol.packing import unpack

FACTS = (
    Channel("rank", "facts", (CLASSES,), why="place of the class"),
    Channel("apart", "facts", (CLASSES, CLASSES), why="distance of two classes"),
    Channel("unsaid", "facts", (CLASSES,), why="counted for other types of labels"),
)


@hyperparameters
class Ranked(LocalAveraging):
    """Tells each site where its classes stand among all, and how far they are apart."""

    about = About("ranked", "Ranked", "none")
    labels = LabelUse()
    channels: ClassVar[tuple[Channel, ...]] = FACTS

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=self.channels)

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        rank = torch.arange(1.0, len(statistics.labels) + 1)
        return ClassFacts({"rank": rank, "apart": rank[:, None] - rank})


@pytest.fixture
def ranked(tiny: Any) -> Any:
    """A federation of `Ranked`, whose packages every party has."""
    made = tiny(Ranked(local=LocalTraining(lr=1e-2, batch_size=8)), rounds=1)
    made.plan = replace(made.plan, code=code_hash(Ranked))
    return made


@pytest.mark.complete
def test_a_site_is_told_of_its_own_classes_on_every_axis(
    ranked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TaskData] = []
    answer = Site.answer
    monkeypatch.setattr(Site, "answer", lambda self, task: seen.append(task) or answer(self, task))
    server = ranked.run()
    trained = [task for task in seen if task.task == "train"]
    assert len(trained) == len(ranked.sites()) == len(server.collector.lines)
    assert "rank" not in server.model.channels
    for task in trained:
        rank = torch.tensor([server.registry.labels.index(name) + 1.0 for name in task.labels])
        assert task.channels.keys() == {"rank", "apart"}
        assert torch.equal(task.channels["rank"], rank)
        assert torch.equal(task.channels["apart"], rank[:, None] - rank)
    assert {len(task.labels) for task in trained} != {len(server.registry.labels)}


def test_the_report_names_them_and_that_they_come_from_the_server(ranked: Any) -> None:
    rows = {row["field"]: row for row in list_declared(ranked.plan.method.egress(Layout({}, {})))}
    assert rows["rank"]["shape"] == "from the server to the sites: a number for each class"
    assert rows["rank"]["why"] == "place of the class"


@pytest.mark.parametrize(
    ("channels", "wrong"),
    [
        ((), "'apart', that is not declared"),
        (FACTS[:1], "'apart', that is not declared"),
        ((FACTS[0], replace(FACTS[1], way="down")), "'apart', that is not declared"),
        ((replace(FACTS[0], dtype="torch.int64"), FACTS[1]), "'rank', that is .* instead of .* torch.int64"),
        ((FACTS[0], replace(FACTS[1], shape=(CLASSES,))), r"'apart', that is \(4, 4\) torch.float32 instead"),
    ],
)
def test_a_fact_that_is_not_declared_stops_the_run_before_a_round(
    channels: tuple[Channel, ...], wrong: str, ranked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranked, "channels", channels)
    with pytest.raises(ConfigError, match=rf"^Ranked has a fact of classes, {wrong}.* of its egress"):
        ranked.run()


def _twice(channels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**channels, "rank": channels["rank"].repeat(2)}


def _more(channels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**channels, "patients": torch.ones(3)}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (_twice, r"rank of round 1 is \(4,\) torch.float32 instead of \(2,\) torch.float32"),
        (_more, "patients of round 1 is not declared"),
    ],
)
def test_a_site_trains_on_no_other_channel(changed: Any, wrong: str, ranked: Any) -> None:
    """A server that sends more than its method declares is another version, or lies."""
    server, sites = ranked.server(), ranked.sites()
    tasks = server.handshake(sorted(sites))
    for name, packed in tasks.items():
        server.receiver()(name, sites[name].answer(unpack(packed)).packed)
    server.begin({})
    packed = server.assign()["alpha"]
    task, site = unpack(packed), sites["alpha"]
    assert isinstance(task, TaskData)
    reply = reply_of(site, replace(task, channels=changed(task.channels)))
    assert isinstance(reply, Abstain)
    assert reply.reason == "configuration"
    with pytest.raises(ConfigError, match=rf"^the server's {wrong}; run the same version"):
        context_of(site, replace(task, channels=changed(task.channels)))
    assert isinstance(reply_of(site, task), Update)
