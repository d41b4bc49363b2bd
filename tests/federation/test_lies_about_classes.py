"""A site that lies in its tensors of classes: what was not declared costs the site its own update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from rounds import conformant
from suture.core.errors import RejectedUpdate
from suture.federation.loop import federate
from suture.federation.server.norms import Measure, NormBound, Norms
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.protocol.check import check_reply
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.missing_labels.fedmlp import FedMLP, Tagging
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

FEDMLP = FedMLP(
    local=LocalTraining(lr=1e-2, batch_size=8), stage1=0.0, tagging=Tagging(negative=0.5, positive=0.5)
)
METHODS = {"fedmlp": FEDMLP, "fedalign": conformant("fedalign"), "creff": conformant("creff")}

# alpha annotates Mass and Nodule, the last two of Fibrosis, Hernia, Mass, Nodule, and has 18 training images.
LIES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "huge prototypes": ("fedmlp", "prototypes", lambda t: t * 1e30, "outside"),
    "no number": ("fedmlp", "prototypes", lambda t: t * torch.nan, "is not finite"),
    "negative counts": ("fedmlp", "prototype_images", lambda t: -t, r"outside \[0, 18\]"),
    "counts of 1e38": ("fedmlp", "prototype_images", lambda t: t.sign() * 1e38, r"outside \[0, 18\]"),
    "one image more": ("fedmlp", "degree_images", lambda t: t.sign() * 19, r"outside \[0, 18\]"),
    "a degree of 2": ("fedmlp", "learning_degree", lambda t: t + 2, r"outside \[0, 1\]"),
    "prototypes of others": (
        "fedmlp",
        "prototypes",
        torch.ones_like,
        "row of 'Fibrosis'; it is of classes of",
    ),
    "counts of others": ("fedmlp", "prototype_images", torch.ones_like, "row of 'Fibrosis'"),
    "a degree of its own": ("fedmlp", "learning_degree", torch.ones_like, "row of 'Mass'; .* of others"),
    "an F1 of 1e30": ("fedalign", "f1", lambda t: t + 1e30, r"outside \[0, 1\]"),
    "an F1 of others": ("fedalign", "f1", torch.ones_like, "row of 'Fibrosis'"),
    "measured at others": ("fedalign", "f1_measured", torch.ones_like, "row of 'Fibrosis'"),
    "huge gradients": ("creff", "class_gradients", lambda t: t * 1e30, "outside"),
    "gradients of others": ("creff", "class_gradients", torch.ones_like, "row of 'Fibrosis'"),
}


def lied(method: Method, change: Callable[[Update], Update] | None, **schedule: Any) -> tuple[Server, bytes]:
    """A federation in which alpha changes every update, or loses it; the server and its last state."""
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=3) as trial:
        server = trial.server
        server.schedule = replace(server.schedule, min_sites=2, **schedule)

        def lie(site: str, task: TaskData, answer: Packed) -> Packed | None:
            update = unpack(answer)
            if site != "alpha" or not isinstance(update, Update):
                return answer
            return pack(change(update)) if change else None

        federate(server, Between(trial.sites, lie))
        return server, (server.record.folder / "model" / "model.safetensors").read_bytes()


def in_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Update], Update]:
    return lambda u: replace(u, channels={**u.channels, name: change(u.channels[name])})


@pytest.mark.parametrize("kind", LIES)
def test_both_sides_refuse_what_is_outside_the_declaration(kind: str) -> None:
    chosen, name, change, why = LIES[kind]
    method = METHODS[chosen]
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=2) as trial:
        task = trial.payload("alpha")
        assert task.labels == ("Fibrosis", "Hernia", "Mass", "Nodule")
        update = trial.update("alpha")
        for expected in (
            trial.sites["alpha"].answer(task).allowed,
            trial.server.collector._allowed["alpha"],
        ):
            check_reply(update, expected)
            with pytest.raises(RejectedUpdate, match=f"channels/{name} .*{why}"):
                check_reply(in_tensor(name, change)(update), expected)


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["huge prototypes", "negative counts", "an F1 of others", "huge gradients"])
def test_the_result_is_that_of_the_other_sites(kind: str) -> None:
    chosen, name, change, _ = LIES[kind]
    assert lied(METHODS[chosen], in_tensor(name, change))[1] == lied(METHODS[chosen], None)[1]


@pytest.mark.complete
def test_prototypes_out_of_all_proportion_are_bounded_by_the_model() -> None:
    """A million times the honest ones is in range, and more than `max_update` times the model's norm."""
    lie = in_tensor("prototypes", lambda t: t * 1e6)
    server, model = lied(FEDMLP, lie)
    assert model == lied(FEDMLP, None)[1]
    assert server.collector.norms.keys() <= {"beta", "gamma"}


def test_norms_of_classes_by_hand() -> None:
    sent = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    update = Update(1, ("x", "y"), {}, {}, ones(("x", "y")), channels=sent)
    a = Channel("a", "up", (CLASSES,), range="alike")
    egress = Egress({}, {}, (a, Channel("b", "up", (CLASSES,), range=(0.0, 1.0))))
    assert Measure()(update, TaskData("train"), egress) == Norms(0.0, 0.0, {"a": 5.0})
    bound = NormBound(10.0, 1.0).after({"p": Norms(1.0, 1.0, {"a": 0.2}), "q": Norms(1.0, 1.0, {"a": 0.4})})
    bound.check("p", Norms(1.0, 1.0, {"a": 3.0}))  # the median is .3
    with pytest.raises(RejectedUpdate, match=r"^a of norm 3.1, more than 10 times the usual one, 0.3 "):
        bound.check("p", Norms(1.0, 1.0, {"a": 3.1}))
    bound.check("new", Norms(1.0, 1.0, {"a": 9.0}))
