"""Local differential privacy of updates: clipping and noise at the sites that request them, and their ε.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557.

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

Two clipped updates differ by up to 2 C, so one update is a Gaussian mechanism with noise of z / 2 times the
most that the site's data change.

Here delta is the change of all parameters that the site has received, as one vector, or its gradient.

Every update has new noise from the system's source of secrets: two answers to one task have
nothing in common that could be subtracted. A round that is repeated needs no second draw, because the site
keeps the answer that it has sent (`suture.federation.site.releases`).

The ε of what a site has released composes Gaussian mechanisms, of all its data or of Poisson samples of
patients:

Dong, Roth, Su. Gaussian Differential Privacy. arXiv:1905.02383, Cor. 3.3 (composition);
Balle & Wang. Improving the Gaussian Mechanism. ICML 2018, Thm. 8 (ε of a Gaussian mechanism);
Gopi, Lee, Wutschitz. Numerical Composition of Differential Privacy. NeurIPS 2021 (sampled ones; opacus).
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from suture.core.entry_points import needed
from suture.core.errors import ConfigError
from suture.learning.dp_sgd import Draw, gaussian
from suture.learning.steps import NonFiniteLoss
from suture.protocol.egress import add_prefix, strip_prefix
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import VARIANCE

_LOOSE, _MANY = 64.0, 20_000
"""Above this ε, or for more steps, a looser bound must do: the tight one would fill the memory."""


class Mechanism(NamedTuple):
    """Gaussian mechanisms of one kind.

    Attributes:
        multiplier: standard deviation of the noise, in units of the most that a patient changes; 0 for none.
        rate: q, the probability with which each sees a patient.
        steps: how many.
    """

    multiplier: float
    rate: float = 1.0
    steps: int = 1


def epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float | None:
    """Return the ε of mechanisms together, in three digits, rounded up; None, for infinity, without noise."""
    total = compose(mechanisms, delta)
    return None if total is None else rounded_up(total)


def compose(mechanisms: Iterable[Mechanism], delta: float) -> float | None:
    """Return the ε of mechanisms together, whatever was made of the earlier answers; None for infinity.

    With samples this is proven for multipliers, rates and steps that were fixed before the first answer; of
    whole data also where they were chosen by earlier ones (Koskela, Tobaben, Honkela. arXiv:2209.15596).

    Raises:
        ConfigError: one has samples, and opacus is not installed.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for one in mechanisms:
        steps[one.multiplier, one.rate] += one.steps
    groups = [(sigma, rate, n) for (sigma, rate), n in sorted(steps.items()) if n]
    if any(not sigma for sigma, _, _ in groups):
        return None
    whole = math.hypot(*(math.sqrt(n) / sigma for sigma, rate, n in groups if rate == 1))
    sampled = tuple(one for one in groups if one[1] < 1)
    if not sampled:
        return _whole(whole, delta)
    return _sampled_rdp((*sampled, (1 / whole, 1.0, 1)) if whole else sampled, delta)


def _whole(mu: float, delta: float) -> float | None:
    """Return the ε of a μ-Gaussian mechanism.

    With u = ε/μ - μ/2, its δ is Φ(-u) - exp(ε) Φ(-u - μ) = exp(-u²/2) (erfcx(u/√2) - erfcx((u + μ)/√2)) / 2,
    in which nothing overflows and nothing large is subtracted.
    """
    from scipy.optimize import brentq
    from scipy.special import erfcx

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
    return float(mu * (u + mu / 2))


@lru_cache(maxsize=256)
def _sampled_rdp(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Return an upper bound on the ε of sampled Gaussian mechanisms; one may see all patients."""
    prv, rdp = _accountants()
    rough, tight = rdp(), prv()
    rough.history = tight.history = list(history)
    # They warn of an order beyond those tried, and of the logarithm of 1 - q = 0, whose limit they take.
    with warnings.catch_warnings(action="ignore"):
        bound, _ = rough.get_privacy_spent(delta=delta)
        if bound > _LOOSE or sum(n for _, _, n in history) > _MANY:
            return float(bound)
        return float(min(bound, tight.get_epsilon(delta)))


@cache
def _accountants() -> tuple[Any, Any]:
    """Return opacus' tight accountant, and a looser one that is always quick."""
    needed("opacus.accountants", "[privacy] epsilon", "privacy")
    from opacus.accountants import PRVAccountant, RDPAccountant
    from opacus.accountants.analysis import rdp
    from opacus.accountants.analysis.prv import prvs

    # Nine tenths of the time; it does not depend on the number of steps, so each round computes it again.
    rdp._compute_rdp = prvs._compute_rdp = lru_cache(maxsize=2**14)(rdp._compute_rdp)
    return PRVAccountant, RDPAccountant


def multiplier_for(target: float, delta: float, planned: Iterable[Mechanism], count: Mechanism) -> float:
    """Return the least noise with which mechanisms have an ε of `target` at most, to 1 % of ε.

    Args:
        planned: their rates and steps; their multipliers do not count.
        count: a mechanism with noise of its own, which counts, too.

    Returns:
        a multiplier within `MULTIPLIERS`; infinity where their largest has a larger ε.
    """
    from scipy.optimize import brentq

    planned = tuple(planned)

    def above(log_multiplier: float) -> float:
        noisy = (one._replace(multiplier=math.exp(log_multiplier)) for one in planned)
        epsilon = compose([*noisy, count], delta)
        return math.log(math.inf if epsilon is None else max(epsilon, 1e-9)) - math.log(0.995 * target)

    low, high = map(math.log, MULTIPLIERS)
    if above(high) > 0:
        return math.inf
    if above(low) <= 0:
        return MULTIPLIERS[0]
    exponent: float = brentq(above, low, high, xtol=2e-3)
    while above(exponent) > math.log(1 / 0.995):
        exponent += 1e-3
    return math.exp(exponent)


MULTIPLIERS = 0.3, 100.0
"""The least and the most noise of a step, in units of the clip: more would leave nothing to learn."""


def rounded_up(value: float) -> float:
    """Return the number in three digits, never a smaller one."""
    return float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(value))


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
