"""The bound on the norm of an update, relative to the other updates of the round and to the model.

Sun, Kairouz, Suresh, McMahan. Can You Really Backdoor Federated Learning? arXiv:1911.07963, 2019
(norm thresholding). The threshold here is relative: honest updates have another norm in every job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from suture.protocol.egress import ALIKE, Egress
from suture.protocol.messages import Payload, Update

_FEWEST = 3
"""Number of updates from which on their median says what is usual: of two, either could be the lie."""

_BLOCK = 2**15
"""Numbers of a tensor that are compared at a time: as float64 they stay in a core's own cache."""


@dataclass(frozen=True)
class Norms:
    """L2 norms of one update.

    Attributes:
        update: of its change to the parameters received, shared tensors and rows as one vector; or of its
            gradient.
        model: of these parameters.
        classes: of each tensor of classes that is bounded by those of other sites: they have no common
            measure with one another, and none in what the site received.
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


def too_large(norms: Mapping[str, Norms], factor: float | None) -> dict[str, str]:
    """Return the sites whose update is out of all proportion, each with the reason.

    Args:
        norms: of the usable updates of one round, by site.
        factor: the largest ratio of an update to the round's median, where there are three or more, and to
            the received model; None bounds nothing.
    """
    if factor is None:
        return {}
    usual = median(n.update for n in norms.values()) if len(norms) >= _FEWEST else 0.0
    found = {}
    for site, norm in norms.items():
        for limit, what in ((usual, "the round's median"), (norm.model, "that of the received model")):
            if limit > 0 and norm.update > factor * limit:
                found[site] = (
                    f"an update of norm {norm.update:.3g}, more than {factor:g} times {what}, {limit:.3g} "
                    "(max_update)"
                )
                break
    for name in {name for n in norms.values() for name in n.classes}:
        sent = {site: n.classes[name] for site, n in norms.items() if n.classes.get(name)}
        usual = median(sent.values()) if len(sent) >= _FEWEST else math.inf
        for site in (site for site, norm in sent.items() if norm > factor * usual):
            what = f"{factor:g} times the round's median, {usual:.3g} (max_update)"
            found.setdefault(site, f"{name} of norm {sent[site]:.3g}, more than {what}")
    return found


def destroyer(norms: Mapping[str, float], unable: Collection[str]) -> str | None:
    """Return the site whose update has made a committed model unusable; None where the model is usable.

    It is the site with the largest update, if no other site that had a part in the model can train on it: at
    least two of them, so that none can have the site excluded by a claim of its own; or all of two sites. A
    site that is alone is never excluded.

    Args:
        norms: of the updates that the model was made of.
        unable: the sites that abstained because of a loss that is not finite.
    """
    if not norms:
        return None
    largest = max(norms, key=lambda site: (norms[site], site))
    others = norms.keys() - {largest}
    sure = others <= set(unable) and (len(others) >= 2 or (len(others) == 1 and largest in unable))
    return largest if sure and norms[largest] > 0 else None
