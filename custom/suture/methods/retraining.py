"""Decoupling: after training the backbone rests, and a new head is trained on as many images of every class.

    Kang, Xie, Rohrbach, Yan, Gordo, Feng, Kalantidis. Decoupling Representation and Classifier for
    Long-Tailed Recognition. ICLR 2020 (classifier re-training, cRT). arXiv:1910.09217.

It is the last phase of a run. The head is reinitialised, at every site alike; sites train it with the plain
cross-entropy on class-aware batches (`suture.data.batch.class_aware`) of the classes that they have, without
any other term; and rows are aggregated as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.validation import LIMIT, STRICT
from suture.learning.training import LocalTraining
from suture.methods.base import Phase

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
"""Of SGD."""

RETRAINING = "retraining"
"""Name of the phase."""

RETRAINED_TYPES: tuple[LabelType, ...] = ("multiclass",)
"""The types of labels that a re-training is defined for."""


@validated(frozen=True, config=STRICT)
class Retraining:
    """How the head is re-trained: as published for one data set, but in rounds in place of epochs.

    Attributes:
        rounds: of the run, its last ones.
        epochs: of class-aware batches in each.
        lr: of SGD, at every site; it falls along half a cosine, which would reach 0 after the last round.
        batch_size: images a step; a site may set its own.
    """

    rounds: Annotated[int, Field(ge=1, le=LIMIT)] = 10
    epochs: Annotated[int, Field(ge=1, le=LIMIT)] = 1
    lr: Annotated[float, Field(gt=0)] = 0.2
    batch_size: Annotated[int, Field(ge=1, le=LIMIT)] = 512

    @property
    def local(self) -> LocalTraining:
        """The local training of a round, at the learning rate of the first."""
        return LocalTraining(
            lr=self.lr,
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimiser="sgd",
            weight_decay=WEIGHT_DECAY,
            momentum=MOMENTUM,
            sampling="class_aware",
        )


def then_retrained(
    phases: Callable[[int], tuple[Phase, ...]], retrain: Retraining | None, rounds: int
) -> tuple[Phase, ...]:
    """The phases of a run of `rounds` rounds, of which the last re-train the head where `retrain` says so.

    The result of the run is then one of the re-trained models.

    Args:
        phases: those of the rounds before.

    Raises:
        ConfigError: there are too few rounds.
    """
    if retrain is None:
        return phases(rounds)
    if rounds <= retrain.rounds:
        raise ConfigError(
            f"method.retrain.rounds={retrain.rounds} are taken from the rounds of the run, and it has "
            f"{rounds}. Set rounds to {retrain.rounds + 1} or more, or lower method.retrain.rounds"
        )
    before = (replace(phase, selectable=False) for phase in phases(rounds - retrain.rounds))
    head = Phase(RETRAINING, retrain.rounds, "head", retrain.lr, retrain.epochs, local=retrain.local)
    return (*before, replace(head, reinit_head=True, annealed=True))
