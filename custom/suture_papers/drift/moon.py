"""MOON: features stay near those of the received model, and away from those of the site's own last one.

    Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021; Eqs. 1 and 3, Algorithm 1. As a baseline:
    Deng et al. (FedLSM), MICCAI 2023, Tables 1 and 2 (with owners' rows); Elbatel et al. (Fed-MAS), MICCAI
    2023, Tables 1, 6 and 8.

The head reads z = P(g(x)): backbone g and the neck P = Linear, ReLU, Linear to 256, which is shared like g.

    at site k:   minimise  L = L_sup + mu mean l_con                                      (Eq. 3)
                 l_con = -ln [ e^(s_glob/tau) / (e^(s_glob/tau) + e^(s_prev/tau)) ]       (Eq. 1)
    server:      as FedAvg

s_glob and s_prev are the cosines of z with z_glob and with z_prev: z_glob is of the received model, z_prev of
the one that the site sent last time, before the merge, which it keeps. Both are frozen and in eval mode. A
site that has sent none has no term: with z_prev = z_glob it would be mu ln 2, and its gradient 0.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.training import LocalRound, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, LossTerm, Step, Value
from suture.models import ModelSpec
from suture.models.classifier import Classifier, Layout, frozen_copy, load_tensors, split_state
from suture.protocol.egress import Channel, add_prefix, strip_prefix

_NECK = 256
"""Width of the neck in the authors' program."""

_PREVIOUS = "previous"


@validated(frozen=True, config=STRICT)
class Contrastive(LossTerm):
    """mu times the mean of l_con over a batch.

    Attributes:
        mu: its weight: 1 in the authors' program; they advise 0.001 to 10.
        tau: temperature (Sec. 4.1).
    """

    mu: Annotated[float, Field(ge=0)] = 1.0
    tau: Annotated[float, Field(gt=0)] = 0.5

    @property
    def active(self) -> bool:
        return self.mu > 0

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, neck=spec.neck or _NECK, projection=0)

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        previous = _previous(site, round_)
        if previous is None:
            return lambda step: step.features.new_zeros(())
        return lambda step: self._of(step, previous)

    def _of(self, step: Step, previous: Classifier) -> Tensor:
        with torch.no_grad():
            before = previous.features(step.batch.inputs)
        return self.mu * contrast(step.features, step.received_features, before, self.tau)

    def channels(self, layout: Layout) -> tuple[Channel, ...]:
        """The trained model without the rows of its heads: features do not depend on them."""
        return (Channel(_PREVIOUS, "site", Layout(layout.shared, {})),) if self.active else ()

    def kept(self, model: Classifier) -> dict[str, Tensor]:
        return add_prefix(_PREVIOUS, split_state(model.state_dict())[0])


def contrast(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """Return the mean of l_con (Eq. 1), a scalar.

    Args:
        z, received, previous: features under the model in training, the received and the previous one,
            ``[n, d]``.
        tau: temperature.
    """
    near, far = F.cosine_similarity(z, received), F.cosine_similarity(z, previous)
    return F.softplus((far - near) / tau).mean()  # -ln e^a / (e^a + e^b) = ln(1 + e^(b - a))


def _previous(site: SiteContext, round_: LocalRound) -> Classifier | None:
    """The model that the site sent last time, frozen and in eval mode; None if it has not sent any."""
    kept = strip_prefix(_PREVIOUS, round_.kept)
    if not any(tensor.any() for tensor in kept.values()):
        return None
    previous = frozen_copy(site.model)
    load_tensors(previous, kept)
    return previous


@hyperparameters
class MOON(Composed):
    """MOON; see `Composed` for the other fields.

    Attributes:
        contrastive: the term.
    """

    about = About(
        "moon",
        "MOON",
        "Li et al., CVPR 2021, Eqs. 1 and 3",
        question="sites differ",
        mixes_patients="weighs sites by their numbers of images",
    )
    contrastive: Contrastive = field(default_factory=Contrastive)
