"""The bound on the norm of an update, relative to the model and to what was sent before.

Sun, Kairouz, Suresh, McMahan. Can You Really Backdoor Federated Learning? arXiv:1911.07963, 2019
(norm thresholding). The threshold here is relative: honest updates have another norm in every job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.methods.base import GlobalModel
from suture.protocol.egress import ALIKE, Egress
from suture.protocol.messages import Payload, Update

_BLOCK = 2**15
"""Numbers of a tensor that are compared at a time: as float64 they stay in a core's own cache."""


@dataclass(frozen=True)
class Norms:
    """L2 norms of one update.

    Attributes:
        update: of its change to the parameters received, shared tensors and rows as one vector; or of its
            gradient.
        model: of these parameters.
        classes: of each tensor of classes without a range of its own: they have no common measure with one
            another.
    """

    update: float
    model: float
    classes: Mapping[str, float] = field(default_factory=dict)


class Measure:
    """Measures the updates of one exchange. What several sites have received is measured once."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[Tensor, float]] = {}  # by identity, which a tensor that is kept keeps

    def __call__(self, update: Update, received: Payload, egress: Egress) -> Norms:
        """Return the norms of an update, in float64, reading one block of a tensor at a time."""
        sent = {**update.shared, **update.head}
        base = {k: t for k, t in {**received.shared, **received.head}.items() if t.is_floating_point()}
        gradient = update.kind == "gradient"
        moved = (_norm(sent[k], None if gradient else t) for k, t in base.items())
        alike = {k: _norm(t) for k, t in update.class_tensors.items() if egress.class_ranges.get(k) == ALIKE}
        return Norms(math.hypot(*moved), math.hypot(*map(self._norm_received, base.values())), alike)

    def _norm_received(self, tensor: Tensor) -> float:
        if id(tensor) not in self._received:
            self._received[id(tensor)] = tensor, _norm(tensor)
        return self._received[id(tensor)][1]


def _norm(tensor: Tensor, other: Tensor | None = None) -> float:
    """Of a tensor, or of its difference to another one."""
    # In blocks that stay in the cache: whole tensors as float64 take several times as long.
    numbers, taken_off = tensor.reshape(-1), None if other is None else other.reshape(-1)
    found = []
    for start in range(0, numbers.numel(), _BLOCK):
        block = numbers[start : start + _BLOCK].to(torch.float64, copy=taken_off is not None)
        if taken_off is not None:
            block -= taken_off[start : start + _BLOCK].to(torch.float64)  # torch is slow with mixed types
        found.append(float(torch.linalg.vector_norm(block)))
    return math.hypot(*found)


@dataclass(frozen=True)
class NormBound:
    """The largest norm that a site's update may have: never a matter of the other updates of its round.

    Else sites that send next to nothing could have an honest one rejected.

    Attributes:
        factor: times the norm of the model, and times what was sent before; None bounds nothing.
        initial: norm of the model that the experiment began with, as the server has made it; None where a
            former version did not keep it. Updates could shrink the received model until nothing fits it.
        phase: the phase of training that `largest` is of.
        largest: the largest norms that were accepted of each site, by tensor of classes; "" is the update.
    """

    factor: float | None = None
    initial: float | None = None
    phase: str = ""
    largest: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def check(self, site: str, norms: Norms) -> None:
        """Refuse an update that is out of all proportion.

        Raises:
            RejectedUpdate: says to what.
        """
        if self.factor is None:
            return
        for name, norm in self._sent(norms).items():
            what = name or "an update"
            for limit, of in ((self.model(norms), "the model's"), (self._usual(site, name), "the usual one")):
                if limit > 0 and norm > self.factor * limit:
                    raise RejectedUpdate(
                        f"{what} of norm {norm:.3g}, more than {self.factor:g} times {of}, {limit:.3g} "
                        "(max_update)"
                    )

    def model(self, norms: Norms) -> float:
        """Return the norm of the model, the initial one or the received one; 0 where it began at 0."""
        return 0.0 if self.initial == 0 else max(self.initial or 0.0, norms.model)

    def _usual(self, site: str, name: str) -> float:
        """Return the largest norm that the site has sent, or the median of all sites' if that is larger."""
        if not (own := self.largest.get(site, {}).get(name)):
            return 0.0
        return max(own, median(n for of in self.largest.values() if (n := of.get(name))))

    def in_phase(self, phase: str) -> NormBound:
        """Return the bound in a phase: what is usual in another one says nothing of it."""
        return self if phase == self.phase else replace(self, phase=phase, largest={})

    def after(self, accepted: Mapping[str, Norms]) -> NormBound:
        """Return the bound after the updates of a round."""
        largest = dict(self.largest)
        for site, norms in accepted.items():
            before = largest.get(site, {})
            largest[site] = {n: max(norm, before.get(n, 0.0)) for n, norm in self._sent(norms).items()}
        return replace(self, largest=largest)

    @staticmethod
    def _sent(norms: Norms) -> dict[str, float]:
        return {"": norms.update, **norms.classes}


def untrainable(norms: Mapping[str, float], unable: Collection[str]) -> str | None:
    """Return the site with the largest update in a model that no other site can train; None where one can.

    All others must be unable, at least two of them, so that none can have the site excluded by a claim of its
    own; or all of two sites. Of a site that is alone nothing is said.

    Args:
        norms: of the updates that the model was made of.
        unable: the sites that abstained because of a loss that is not finite.
    """
    if not norms:
        return None
    largest = max(norms, key=lambda site: (norms[site], site))
    others = norms.keys() - {largest}
    sure = others <= set(unable) and (len(others) >= 2 or (len(others) == 1 and largest in unable))
    return largest if sure else None


def norm_of(*tensors: Mapping[str, Tensor]) -> float:
    """Return the L2 norm of the parameters of some tensors by name."""
    return math.hypot(*(_norm(t) for some in tensors for t in some.values() if t.is_floating_point()))


def distance(one: GlobalModel, other: GlobalModel) -> float:
    """Return the L2 norm of what a step of the server has changed in the parameters of a model."""
    before = {**other.shared, **other.head}
    moved = {k: t for k, t in {**one.shared, **one.head}.items() if t.is_floating_point()}
    return math.hypot(*(_norm(t, before[k]) for k, t in moved.items()))
