"""What a channel declares is what leaves and comes: lies in either direction are refused by both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from parties import METHOD, abstains, begun, exported, limited, run, says
from torch import Tensor

from between import Between
from one_step import equal
from rounds import conformant, reply_of
from strangers.scaffold import Scaffold
from suture.core.errors import ConfigError, RejectedUpdate
from suture.federation.loop import federate
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, ClassFacts, GlobalModel, LabelStatistics, LabelUse, hyperparameters
from suture.models.classifier import Layout
from suture.privacy.differential_privacy import Noise
from suture.protocol.check import check_reply
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import Packed, pack
from suture_papers.missing_labels.fedmlp import FedMLP, Tagging
from suture_synthetic.method_checks import SMALL, aggregation_returns_the_channels, subject_of
from suture_synthetic.trial import Trial
from world import refused

SCAFFOLD = Scaffold(local=LocalTraining(lr=0.05, batch_size=8, optimiser="sgd", momentum=0.0))


def test_a_site_with_noise_takes_no_part_in_what_noise_does_not_cover(tiny: Any) -> None:
    site = limited(tiny(SCAFFOLD), "alpha", clip=1.0, noise=0.5).sites()["alpha"]
    for task in (TaskData("handshake"), TaskData("train", 1)):
        abstains(site, task, "configuration", "change")
    update = Update(1, (), {}, {}, ones(()), channels={"change/w": torch.ones(2)})
    with refused("change/w", by=ConfigError):
        Noise(1.0, 0.5).apply(update, TaskData("train", 1))


Tensors = dict[str, Tensor]
SUBJECTS: dict[str, Any] = {
    "scaffold": SCAFFOLD,
    "fedmlp": FedMLP(local=METHOD.local, stage1=0.0, tagging=Tagging(negative=0.5, positive=0.5)),
    "fedalign": conformant("fedalign"),
    "creff": conformant("creff"),
}
# alpha annotates Mass and Nodule, the last two of Fibrosis, Hernia, Mass, Nodule, and has 18 training images.
LIES: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("fedmlp", "prototypes", lambda t: t[:, :-1], "shape"),
    ("fedmlp", "prototypes", Tensor.double, "float64"),
    ("fedmlp", "prototypes", lambda t: t * torch.nan, "finite"),
    ("fedmlp", "prototypes", lambda _: None, "missing"),
    ("fedmlp", "prototypes", lambda t: t * 1e30, "outside"),
    ("fedmlp", "prototypes", torch.ones_like, "'Fibrosis'"),
    ("fedmlp", "more", lambda t: t, "declared"),
    ("fedmlp", "prototype_images", Tensor.neg, "[0, 18]"),
    ("fedmlp", "prototype_images", torch.ones_like, "'Fibrosis'"),
    ("fedmlp", "degree_images", lambda t: t.sign() * 19, "[0, 18]"),
    ("fedmlp", "learning_degree", lambda t: t + 2, "[0, 1]"),
    ("fedmlp", "learning_degree", torch.ones_like, "'Mass'"),
    ("fedalign", "f1", lambda t: t + 1e30, "[0, 1]"),
    ("fedalign", "f1", torch.ones_like, "'Fibrosis'"),
    ("fedalign", "f1_measured", torch.ones_like, "'Fibrosis'"),
    ("creff", "class_gradients", lambda t: t * 1e30, "outside"),
    ("creff", "class_gradients", torch.ones_like, "'Fibrosis'"),
    ("scaffold", "change/head.bias", lambda t: t.repeat(2), "shape"),
    ("scaffold", "change/head.bias", lambda _: None, "missing"),
    ("scaffold", "change/head.bias", lambda t: t + 1e30, "outside"),
    ("scaffold", "control/head.bias", lambda t: t, "declared"),
    ("scaffold", "change/backbone.norm1.running_mean", lambda t: t, "declared"),
]
"""The method, what alpha makes of a channel, which may be another's, and what is wrong with it."""


def other(name: str, change: Callable[[Tensor], Tensor | None], channels: Mapping[str, Tensor]) -> Tensors:
    told = {**channels, name: change(channels.get(name, torch.zeros(2)))}
    return {key: tensor for key, tensor in told.items() if tensor is not None}


@pytest.mark.parametrize(("chosen", "name", "change", "why"), LIES, ids=lambda value: str(value)[:20])
def test_both_sides_refuse_what_is_outside_the_declaration(
    chosen: str, name: str, change: Callable[[Tensor], Tensor | None], why: str
) -> None:
    method = SUBJECTS[chosen]
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=2) as trial:
        task = trial.payload("alpha")
        update = trial.update("alpha")
        lie = replace(update, channels=other(name, change, update.channels))
        for expected in (trial.sites["alpha"].answer(task).allowed, trial.server.collector._allowed["alpha"]):
            check_reply(update, expected)
            with refused(f"channels/{name}", why, by=RejectedUpdate):
                check_reply(lie, expected)


def lied(method: Any, lie: Callable[[Any], Packed] | None) -> tuple[Server, bytes]:
    """A federation in which alpha changes every update, or loses it; the server and its model."""
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=3) as trial:
        trial.server.schedule = replace(trial.server.schedule, min_sites=2)
        federate(trial.server, Between(trial.sites, says("alpha", Update, lie)))
        return trial.server, exported(trial.server)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("chosen", "name", "change"),
    [
        ("fedmlp", "prototypes", lambda t: t * 1e30),
        # In range, and more than `max_update` times the model's norm.
        ("fedmlp", "prototypes", lambda t: t * 1e6),
        ("fedalign", "f1", torch.ones_like),
    ],
)
def test_the_result_is_that_of_the_other_sites(chosen: str, name: str, change: Any) -> None:
    def lie(update: Update) -> Packed:
        return pack(replace(update, channels=other(name, change, update.channels)))

    server, model = lied(SUBJECTS[chosen], lie)
    assert model == lied(SUBJECTS[chosen], None)[1]
    assert server.collector.norms.keys() <= {"beta", "gamma"}


@pytest.mark.parametrize(
    "change",
    [lambda _: {}, lambda c: {**c, "more": torch.zeros(1)}, lambda c: {k: t[:1] for k, t in c.items()}],
)
def test_the_server_keeps_what_is_declared(
    change: Callable[[Tensors], Tensors], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = Scaffold.aggregate

    def careless(self: Scaffold, *given: Any) -> GlobalModel:
        model = aggregate(self, *given)
        return replace(model, channels=change(dict(model.channels)))

    monkeypatch.setattr(Scaffold, "aggregate", careless)
    with refused("SCAFFOLD", "channel", by=ConfigError):
        tiny(SCAFFOLD, rounds=1).run()
    with refused("channel", by=AssertionError):
        aggregation_returns_the_channels(subject_of(SCAFFOLD))


# Facts of classes


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


RANKED = Ranked(local=METHOD.local)


@pytest.mark.complete
def test_a_site_is_told_of_its_own_classes_on_every_axis(tiny: Any) -> None:
    trained: list[TaskData] = []

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        trained.extend([task] if task.task == "train" else [])
        return answer

    server = run(tiny(RANKED, rounds=1), change=note)
    assert len(trained) == len(server.collector.lines) == 3
    assert "rank" not in server.model.channels
    for task in trained:
        rank = torch.tensor([server.registry.labels.index(name) + 1.0 for name in task.labels])
        assert equal(task.channels, {"rank": rank, "apart": rank[:, None] - rank})
    assert {len(task.labels) for task in trained} != {len(server.registry.labels)}


@pytest.mark.parametrize(
    ("channels", "named"),
    [
        (FACTS[:1], ("'apart'",)),
        ((FACTS[0], replace(FACTS[1], way="down")), ("'apart'",)),
        ((replace(FACTS[0], dtype="torch.int64"), FACTS[1]), ("'rank'", "torch.int64")),
        ((FACTS[0], replace(FACTS[1], shape=(CLASSES,))), ("'apart'", "(4, 4)")),
    ],
)
def test_a_fact_that_is_not_declared_stops_the_run_before_a_round(
    channels: tuple[Channel, ...], named: tuple[str, ...], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranked, "channels", channels)
    with refused("Ranked", *named, by=ConfigError):
        tiny(RANKED).run()


@pytest.mark.parametrize(
    ("method", "change", "named"),
    [
        (SCAFFOLD, lambda _: {}, ("control/", "missing")),
        (RANKED, lambda c: {**c, "rank": c["rank"].repeat(2)}, ("rank", "(4,)", "(2,)")),
        (RANKED, lambda c: {**c, "patients": torch.ones(3)}, ("patients",)),
    ],
)
def test_a_site_trains_on_no_other_channel(
    method: Any, change: Any, named: tuple[str, ...], tiny: Any
) -> None:
    """A server that sends more than its method declares is another version, or lies."""
    _, sites, tasks = begun(tiny(method))
    task = tasks["alpha"]
    abstains(
        sites["alpha"], replace(task, channels=change(task.channels)), "configuration", "round 1", *named
    )
    assert isinstance(reply_of(sites["alpha"], task), Update)
