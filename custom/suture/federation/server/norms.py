"""The bound on the norm of an update, relative to the model and to what was sent before.

Sun, Kairouz, Suresh, McMahan. Can You Really Backdoor Federated Learning? arXiv:1911.07963, 2019
(norm thresholding). The threshold here is relative: honest updates have another norm in every job.

Where an update points, beside the others of its round, is compared in memory that no model makes larger:
random signs fold the change of all parameters into 2,048 numbers, which keep the angle between two updates:
the cosine is right to about 0.02 (Charikar, Chen, Farach-Colton. Finding Frequent Items in Data Streams.
ICALP 2002). To compare whole updates, each would have to be read from disk once more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.core.labels import canonical
from suture.core.runtime import generator_for
from suture.methods.base import GlobalModel
from suture.protocol.egress import SCALE_OF_MODEL, Egress
from suture.protocol.messages import Labels, TaskData, Update

_WIDTH = 2048


@lru_cache(maxsize=4096)
def _signs(name: str, count: int) -> Tensor:
    """``[count]``, 1 or -1 each, float64."""
    return torch.randint(0, 2, (count,), generator=generator_for("direction", name)).double() * 2 - 1


@lru_cache(maxsize=8)
def class_signs(labels: Labels) -> Tensor:
    """``[c]``, 1 or -1 for each class, the same at every site that has it."""
    return torch.cat([_signs(canonical(label), 1) for label in labels]) if labels else torch.ones(0).double()


class Direction:
    """The direction of one update, folded as its numbers pass by."""

    def __init__(self) -> None:
        self._folded = torch.zeros(_WIDTH, dtype=torch.float64)

    def add(self, name: str, start: int, block: Tensor) -> None:
        """Fold the numbers of a tensor from `start` on, a multiple of 2,048: ``[n]``."""
        first, rows = start // _WIDTH, block.numel() // _WIDTH
        signs, rest = _signs(name, -(-(start + block.numel()) // _WIDTH)), block[rows * _WIDTH :]
        if rows:
            self._fold(block[: rows * _WIDTH].view(rows, _WIDTH), signs[first : first + rows])
        if len(rest):
            self._folded[: len(rest)].add_(rest, alpha=float(signs[first + rows]))

    def add_rows(self, name: str, signs: Tensor, rows: Tensor) -> None:
        """Fold rows of classes, which every site has in another order: ``[c]`` and ``[c, d]``."""
        for start in range(0, rows.shape[1], _WIDTH):
            self._fold(rows[:, start : start + _WIDTH], signs * _signs(f"{name}/{start}", 1))

    def _fold(self, rows: Tensor, signs: Tensor) -> None:
        self._folded[: rows.shape[1]] += signs.to(rows.dtype) @ rows

    def unit(self) -> Tensor:
        """Return the direction with a length of 1, float32 ``[2048]``; zeros where nothing has changed."""
        largest = float(self._folded.abs().max())
        scaled = self._folded / (largest or 1.0)  # first, as squares of the largest floats overflow
        length = float(torch.linalg.vector_norm(scaled))
        return scaled.div_(length or 1.0).float()


def cosines(units: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return for each site the cosine of its update to the mean of the others' directions; None without one.

    Every direction counts once there, however long the update: else one liar would be the mean of the others.
    """
    total = sum(units.values(), torch.zeros(()))
    by_site: dict[str, float | None] = {}
    for site, unit in units.items():
        others = total - unit
        length = float(torch.linalg.vector_norm(others)) * float(torch.linalg.vector_norm(unit))
        by_site[site] = round(float(unit @ others) / length, 3) if len(units) > 1 and length > 1e-6 else None
    return by_site


LARGEST_UPDATE = 100.0
"""Largest norm of a masked update, in norms of the received model: as the default of `max_update`."""

_BLOCK = 2**15
"""Numbers of a tensor that are compared at a time: they stay in a core's own cache."""


@dataclass(frozen=True)
class Norms:
    """L2 norms of one update.

    Attributes:
        update: of its change to the parameters received, shared tensors and rows as one vector; or of its
            gradient.
        model: of these parameters.
        channels: of each channel that is `SCALE_OF_MODEL`: they have no common measure with one another.
        direction: of the update; see `Direction.unit`.
    """

    update: float
    model: float
    channels: Mapping[str, float] = field(default_factory=dict)
    direction: Tensor = field(default_factory=lambda: torch.zeros(0), compare=False, repr=False)


class Measure:
    """Measures the updates of one exchange. What several sites have received is measured once."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[Tensor, float]] = {}  # by identity, which a tensor that is kept keeps

    def __call__(self, update: Update, received: TaskData, egress: Egress) -> Norms:
        """Return the norms of an update, reading one block of a tensor at a time."""
        sent = {**update.shared, **update.head}
        base = {k: t for k, t in {**received.shared, **received.head}.items() if k in sent}
        base = {k: t for k, t in base.items() if t.is_floating_point()}  # a method need not send the model
        gradient, direction, block_norms = update.kind == "gradient", Direction(), []
        signs = class_signs(update.labels)
        for name, tensor in base.items():
            row = math.prod(tensor.shape[1:]) if name in received.head else 0
            for start, block, norm in _blocks(sent[name], None if gradient else tensor, row or 1):
                block_norms.append(norm)
                if row:
                    rows = block.view(-1, row)
                    direction.add_rows(name, signs[start // row :][: len(rows)], rows)
                else:
                    direction.add(name, start, block)
        channels = [channel for channel in egress.going("up") if channel.range == SCALE_OF_MODEL]
        alike = {c.name: math.hypot(*(_norm(update.channels[name]) for name in c.forms)) for c in channels}
        model = math.hypot(*map(self._norm_received, base.values()))
        return Norms(math.hypot(*block_norms), model, alike, direction.unit())

    def _norm_received(self, tensor: Tensor) -> float:
        if id(tensor) not in self._received:
            self._received[id(tensor)] = tensor, _norm(tensor)
        return self._received[id(tensor)][1]


def _norm(tensor: Tensor, other: Tensor | None = None) -> float:
    """Of a tensor, or of its difference to another one."""
    return math.hypot(*(norm for _, _, norm in _blocks(tensor, other)))


def _blocks(tensor: Tensor, other: Tensor | None, row: int = 1) -> Iterator[tuple[int, Tensor, float]]:
    """Yield the numbers of a tensor, or of its difference to another one, with their places and norms.

    They are float64 where float32 has no room for their squares.

    Args:
        row: no block ends within so many numbers.
    """
    # In blocks that stay in the cache: whole tensors take several times as long.
    numbers, taken_off = tensor.reshape(-1), None if other is None else other.reshape(-1)
    size = max(_BLOCK // row, 1) * row
    usual = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32
    for start in range(0, numbers.numel(), size):
        for dtype in (usual, torch.float64):
            block = numbers[start : start + size].to(dtype)
            if taken_off is not None:
                block = block - taken_off[start : start + size].to(dtype)
            norm = float(torch.linalg.vector_norm(block))
            if math.isfinite(norm):
                break
        yield start, block, norm


@dataclass(frozen=True)
class NormBound:
    """The largest norm that a site's update may have: never a matter of the other updates of its round.

    Else sites that send next to nothing could have an honest one rejected.

    Attributes:
        factor: times the norm of the model, and times what was sent before; None bounds nothing.
        initial: norm of the model that the experiment began with, as the server has made it; None before
            it has. Updates could shrink the received model until nothing fits it.
        encoder: norm of the encoder's parameters that are not trained: channels of features have its scale.
        phase: the phase of training that `largest` is of.
        largest: the largest norms that were accepted of each site, by channel; "" is the update.
        radii: of a robust merge in the last round; see `suture.privacy.robust.Merged`.
    """

    factor: float | None = None
    initial: float | None = None
    encoder: float = 0.0
    phase: str = ""
    largest: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    radii: Mapping[str, float] = field(default_factory=dict)

    def check(self, site: str, norms: Norms) -> None:
        """Refuse an update that is out of all proportion.

        Raises:
            RejectedUpdate: says to what.
        """
        if self.factor is None:
            return
        for name, norm in self._sent(norms).items():
            model, usual = self.model(norms), self._usual(site, name)
            whole = math.hypot(model, self.encoder) if name else model
            for limit, of in ((whole, "the model's"), (usual, "the usual one")):
                # What is no longer than the model itself cannot destroy it: small updates of before, as of a
                # stricter clip, do not shut a site out.
                if limit > 0 and norm > max(self.factor * limit, model):
                    raise RejectedUpdate(
                        f"{name or 'an update'} of norm {norm:.3g}, more than {self.factor:g} times {of}, "
                        f"{limit:.3g} (max_update)"
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
        return self if phase == self.phase else replace(self, phase=phase, largest={}, radii={})

    def after(self, accepted: Mapping[str, Norms]) -> NormBound:
        """Return the bound after the updates of a round."""
        largest = dict(self.largest)
        for site, norms in accepted.items():
            before = largest.get(site, {})
            largest[site] = {n: max(norm, before.get(n, 0.0)) for n, norm in self._sent(norms).items()}
        return replace(self, largest=largest)

    @staticmethod
    def _sent(norms: Norms) -> dict[str, float]:
        return {"": norms.update, **norms.channels}


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
