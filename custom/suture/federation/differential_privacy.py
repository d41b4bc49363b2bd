"""Local differential privacy of updates: clipping and noise at the sites that request them, and their ε.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557;
    Dong, Roth, Su. Gaussian Differential Privacy. arXiv:1905.02383, Cor. 3.3 (composition);
    Balle & Wang. Improving the Gaussian Mechanism. ICML 2018, Thm. 8 (ε of a mechanism).

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

where delta is the change of all parameters that the site has received, as one vector, or its gradient.

Every update has new noise from the system's source of secrets: two answers to one task have
nothing in common that could be subtracted. A round that is repeated needs no second draw, because the site
keeps the answer that it has sent (`suture.federation.site.releases`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np

from suture.core.errors import ConfigError
from suture.core.privacy import PrivacyConfig
from suture.learning.patient_privacy import Draw, gaussian
from suture.learning.step_losses import NonFiniteLoss
from suture.protocol.disclosure import training_loss
from suture.protocol.egress import prefixed, within
from suture.protocol.messages import Spent, TaskData, Trait, Update, fields_with, rounded
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

    @classmethod
    def of(cls, config: PrivacyConfig) -> Noise | None:
        """Return what a site's configuration requests; None where it requests nothing."""
        return None if config.clip is None else cls(config.clip, config.noise)

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
        sent = prefixed("shared", update.shared) | prefixed("head", update.head)
        base = {} if gradient else prefixed("shared", received.shared) | prefixed("head", received.head)
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
        return replace(update, shared=within("shared", done), head=within("head", done))


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
    shown, noise = replace(update, **found), Noise.of(privacy)
    return noise.apply(shown, received) if noise else shown


def epsilon(multipliers: Iterable[float], delta: float) -> float | None:
    """Return the ε of local differential privacy of some updates together, in three digits, rounded up.

    It is None, for infinity, where an update had no noise.

    Two clipped updates differ by up to 2 C, so one update with noise of z C is a 2/z-Gaussian mechanism, and
    several are a μ-Gaussian mechanism with μ² = Σ (2/z)², whatever was made of the earlier answers. With
    u = ε/μ - μ/2, its δ is Φ(-u) - exp(ε) Φ(-u - μ) = exp(-u²/2) (erfcx(u/√2) - erfcx((u + μ)/√2)) / 2,
    in which nothing overflows and nothing large is subtracted.

    Args:
        multipliers: z of each update.
    """
    from scipy.optimize import brentq
    from scipy.special import erfcx

    mu = math.hypot(*(2 / z if z else math.inf for z in multipliers))
    if not 0 < mu < 1e150:  # no update; or an ε beyond the numbers of a computer
        return None if mu else 0.0
    mu = max(mu, 1e-6)  # ε grows with μ, and below this the difference would be one of rounding errors

    def excess(u: float) -> float:
        tails = erfcx(u / math.sqrt(2)) - erfcx((u + mu) / math.sqrt(2))
        return float(np.log(tails) - u * u / 2 - math.log(2) - math.log(delta))

    low = max(-mu / 2, -37.0)  # ε = 0; erfcx overflows before
    if excess(low) <= 0:
        return 0.0
    u = brentq(excess, low, 40.0, xtol=1e-12) + 1e-9
    return rounded_up(mu * (u + mu / 2))


def rounded_up(value: float) -> float:
    """Return the number in three digits, never a smaller one."""
    return float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(value))


def describe_spent(
    protection: Mapping[str, Mapping[str, float]], stated: Mapping[str, Spent | None]
) -> list[str]:
    """Say for each site that clips its updates what its releases have spent of its privacy, as it states.

    Args:
        protection: clip, noise and delta of each protected site.
        stated: the newest statement of each site.
    """
    return [_describe(site, own, stated.get(site)) for site, own in sorted(protection.items())]


def _describe(site: str, own: Mapping[str, float], spent: Spent | None) -> str:
    text = f"{site} clips its updates to a norm of {own['clip']:g} and adds "
    text += f"noise of {own['noise']:g} times that" if own["noise"] else "no noise"
    if spent is None:
        return f"{text}; it did not report its spent ε."
    if spent.epsilon is None:
        why = f"{spent.unprotected} of its {spent.updates} updates were sent without noise"
        return f"{text}: ε = ∞, because {why}. {_uncovered(spent)}"
    if spent.missing:
        return (
            f"{text}: ε ≥ {spent.epsilon:g} at δ = {own['delta']:g}, a lower bound: its administrator has "
            f"accepted that at least {spent.missing} lines of its ledger are missing or changed. "
            f"{_uncovered(spent)}"
        )
    return (
        f"{text}: ε ≤ {spent.epsilon:g} at δ = {own['delta']:g} over all its {spent.updates} updates in "
        f"{spent.experiments} experiment{'s' if spent.experiments != 1 else ''}, by its own ledger (local "
        f"differential privacy of its tensors; not per patient). {_uncovered(spent)}"
    )


def _uncovered(spent: Spent) -> str:
    return (
        f"Not protected by noise: the {spent.figures} figures of classes and {spent.numbers} other numbers "
        "(losses, counts, weights) that have left it."
    )
