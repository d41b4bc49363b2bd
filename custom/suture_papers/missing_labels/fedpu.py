"""FedPU: an image that a site could not label is, to that site, of another class.

    Lin et al. Federated Learning with Positive and Unlabeled Data. ICML 2022. FedPU in Table 2 of Deng et al.
    (FedLSM), MICCAI 2023, where every image of a class of I_k is labelled.

One label an image. Site k annotates the classes I_k of all M; P are the labelled images of a batch, U the
others, p a softmax over all M, y the label.

    at site k:   minimise  L = CE(P) + lambda [ mean_{i in I_k} mean_U l_i
                                                + rho mean_{i not in I_k} mean_P l_i - mean_P pi_y l_y ]
                 l_i = -ln(1 - p_i + 1e-6)
    server:      w = sum_k n_k w_k / sum_k n_k, all rows of the head too

pi_i is the share of class i among the site's unlabelled images: those are of I_k after all, and the last mean
takes them back. Nobody knows it without their labels, from which the published program counts it. Here it is
a number that the job gives, the same for all classes, and rho is the same number (in the program: pi of the
first class of I_k). It is 0 where a site labels every image of its classes; only the first mean then remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.data.batch import Batch
from suture.learning.training import LocalRound, SiteContext
from suture.methods.averaging import own_rows
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, LossTerm, Requirements, Step, Value, all_labelled

_SMOOTH = 1e-6
"""Of the published program: l_i is finite where p_i is 1."""

LABELLED, UNLABELLED = "labelled images", "unlabelled images"
"""Names of the numbers of these images among a batch's inputs, ``[m]``."""


def unlabelled_risk(
    p: Tensor, y: Tensor, images: Mapping[str, Tensor], own: Tensor, others: Tensor, pi: Tensor, rho: float
) -> Tensor:
    """What stands in the brackets of L.

    Args:
        p: probabilities, ``[n, c]``.
        y: one-hot labels, ``[n, c]``; a row of zeros is unlabelled.
        images: the numbers of the `LABELLED` and the `UNLABELLED` ones.
        own, others: the numbers of the classes of I_k, and of all others.
        pi: ``[c]``, 0 but for I_k.

    Returns:
        a scalar; the mean of no images, or of no classes, is 0.
    """
    wrong, labelled = -torch.log(1 - p + _SMOOTH), images[LABELLED]
    of_unlabelled = _mean(wrong[images[UNLABELLED]][:, own])
    of_labelled = _mean(wrong[labelled][:, others])
    taken_back = _mean((pi * y * wrong).sum(dim=1)[labelled])
    return of_unlabelled + rho * of_labelled - taken_back


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(values.numel(), 1)


@validated(frozen=True, config=STRICT)
class PositiveUnlabelled(LossTerm):
    """What unlabelled images teach of the classes that the site annotates.

    Attributes:
        weight: lambda.
        prior: pi of every class of I_k, and rho; 0 where all images of these classes are labelled.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multiclass",),
        view="all",
        unknown="negative",
        why="compares the classes that the site annotates with all others",
    )

    weight: Annotated[float, Field(ge=0)] = 1.0
    prior: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def active(self) -> bool:
        return self.weight > 0

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        labelled = torch.where(batch.known, batch.y, 0.0).sum(dim=1) > 0
        return {LABELLED: labelled.nonzero().flatten(), UNLABELLED: (~labelled).nonzero().flatten()}

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        """The term in one round; 0 at a site without unlabelled images, where pi has no meaning.

        Raises:
            ConfigError: the site's classes would have more than all of its unlabelled images.
        """
        if all_labelled(site):
            return lambda step: step.logits.new_zeros(())
        mine = own_rows(site)
        n, own, others = int(mine.sum()), mine.nonzero().flatten(), (mine == 0).nonzero().flatten()
        if self.prior * n > 1:
            raise ConfigError(
                f"{site.name} annotates {n} classes, and prior={self.prior} assigns each of them that "
                f"share of its unlabelled images; lower it to {1 / n:.3f} or less"
            )
        # As numbers: a mask has to be read wherever it is used, and a GPU waited for.
        mine, own, others = mine.to(site.device), own.to(site.device), others.to(site.device)

        def value(step: Step) -> Tensor:
            labels = torch.where(step.batch.known, step.batch.y, 0.0)
            p = torch.softmax(step.logits, dim=1)
            pi = self.prior * mine.to(p)
            return self.weight * unlabelled_risk(p, labels, step.batch.inputs, own, others, pi, self.prior)

        return value


@hyperparameters
class FedPU(Composed):
    """FedPU; see `Composed` for the other fields.

    Attributes:
        positive_unlabelled: what is added to the cross-entropy of labelled images, a softmax over all
            classes; with the weight 0 it is FedAvg.
    """

    about = About(
        "fedpu",
        "FedPU",
        "Lin et al., ICML 2022; Deng et al., MICCAI 2023",
        mixes_patients="takes means over the positives of a batch",
    )
    positive_unlabelled: PositiveUnlabelled = field(default_factory=PositiveUnlabelled)
