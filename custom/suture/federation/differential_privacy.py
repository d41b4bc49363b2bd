"""Local differential privacy of updates: clipping and noise at the sites that request them, and their ε.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557.

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

Two clipped updates differ by up to 2 C, so one update is a Gaussian mechanism with noise of z / 2 times the
most that the site's data change: `suture.federation.accounting` composes them.

Here delta is the change of all parameters that the site has received, as one vector, or its gradient.

Every update has new noise from the system's source of secrets: two answers to one task have
nothing in common that could be subtracted. A round that is repeated needs no second draw, because the site
keeps the answer that it has sent (`suture.federation.site.releases`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from suture.core.errors import ConfigError
from suture.core.noise import Draw, gaussian
from suture.core.privacy import PrivacyConfig
from suture.learning.optimisers import NonFiniteLoss
from suture.protocol.disclosure import training_loss
from suture.protocol.egress import add_prefix, strip_prefix
from suture.protocol.messages import TaskData, Trait, Update, fields_with, rounded
from suture.protocol.precision import VARIANCE


@dataclass(frozen=True)
class Noise:
    """Clipping and noise of an update.

    Attributes:
        clip: C, the largest L2 norm of what a site sends.
        multiplier: z, the noise's standard deviation in units of C; 0 adds none.
    """

    clip: float
    multiplier: float = 0.0

    def apply(self, update: Update, received: TaskData, draw: Draw = os.urandom) -> Update:
        """Return the update with its shared tensors and rows clipped together, and noise on each.

        Weights, scalars and metrics are unchanged. A batch norm variance that the noise has made negative
        becomes 0.

        Args:
            received: the payload relative to which the change of the parameters is computed.
            draw: the source of the noise.

        Raises:
            ConfigError: the update has tensors that the noise does not cover.
            NonFiniteLoss: the update has no finite norm, so that it cannot be clipped.
        """
        _refuse_uncovered(update)
        gradient = update.kind == "gradient"
        sent = add_prefix("shared", update.shared) | add_prefix("head", update.head)
        base = {} if gradient else add_prefix("shared", received.shared) | add_prefix("head", received.head)
        deltas = {n: t.double() - base[n].double() if base else t.double() for n, t in sorted(sent.items())}
        norm = math.sqrt(sum(float(d.square().sum()) for d in deltas.values()))
        if not math.isfinite(norm):
            raise NonFiniteLoss("the update diverged and cannot be clipped; lower the learning rate")
        factor = min(1.0, self.clip / max(norm, 1e-300))
        done = {}
        for name, delta in deltas.items():
            noise = gaussian(tuple(delta.shape), draw) if self.multiplier else 0.0
            changed = delta * factor + noise * self.multiplier * self.clip
            value = (changed + base[name].double() if base else changed).to(sent[name].dtype)
            done[name] = value.clamp_min(0) if name.endswith(VARIANCE) and not gradient else value
        return replace(update, shared=strip_prefix("shared", done), head=strip_prefix("head", done))


def _refuse_uncovered(update: Update) -> None:
    tensors = [*update.shared.items(), *update.head.items()]
    stray = [*update.channels, *(name for name, t in tensors if not t.is_floating_point())]
    if stray:
        raise ConfigError(
            f"[privacy] clip does not cover {min(stray)}, which this method sends besides weights; "
            "remove clip and noise, or use another method"
        )


def protected(
    update: Update, received: TaskData, privacy: PrivacyConfig, losses: Collection[str], samples: int
) -> Update:
    """Return the update that may leave a site under its [privacy]: clipped, with noise, figures rounded.

    Args:
        received: the payload that the update answers.
        losses: names of the update's scalars that are losses.
        samples: number of samples behind the losses; below `min_loss` the losses are withheld.
    """
    scalars = {
        name: training_loss(value, samples, privacy) if name in losses else rounded(value)
        for name, value in update.scalars.items()
    }
    own = fields_with(Update, Trait.LOSS)
    found: dict[str, Any] = {name: training_loss(getattr(update, name), samples, privacy) for name in own}
    found["scalars"] = {name: value for name, value in scalars.items() if value is not None}
    shown = replace(update, **found)
    if privacy.clip is None or privacy.epsilon is not None:  # with ε, each step of training has its noise
        return shown
    return Noise(privacy.clip, privacy.noise).apply(shown, received)
