"""Robust merges: what a few lying sites cannot move far, in place of the mean of the sites' updates.

Let x be what m sites received, u_k what site k sends, v the last change of the global model (0 in the first
round of a phase), and f the number of liars to withstand.

    median     of each number the middle one of the sites', of an even m the mean of the middle two
    trimmed    of each number the mean without the f smallest and the f largest
    clip       x + 1/m sum_k c_k (u_k - x),            c_k = min(1, r / |u_k - x|)
    centered   x + v + 1/m sum_k c_k (u_k - x - v),    c_k = min(1, r / |u_k - x - v|)
    krum       the mean of the m - f sites with the smallest sums of squared distances to their m - f - 2
               nearest ones

    median, trimmed   Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning. ICML 2018.
    clip              Sun, Kairouz, Suresh, McMahan. arXiv:1911.07963, 2019.
    centered          Karimireddy, He, Jaggi. Learning from History for Byzantine Robust Optimization. ICML
                      2021, one step of the iteration; local training replaces the sites' momentum.
    krum              Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS
                      2017 (multi-Krum).

Norms and distances are those of all shared parameters as one vector and, for each class, of its row over
the sites that send it. The radius r is the median of the norms, but at most twice and at least half that of
the round before, so that the updates of one round alone do not set it. Statistics of batch norm have no
direction: clip, centered and krum take their trimmed mean. So a variance lies between those of the sites,
never below 0.

A site says itself how much it counts: a weighted median would follow whoever announces most. Here every
site with a weight above 0 counts once.

Marks in the history of a run are of sites whose updates were unlike those of the others, or were rejected.
All marks compare the sites of a round with its median and with the mean of the others. So they say the same
of a few liars among honest sites, and of an honest site among liars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import LIMIT, STRICT
from suture.methods.base import GlobalModel, Method
from suture.protocol.egress import Layout
from suture.protocol.messages import Labels, Update
from suture.protocol.records import SiteRound

OPPOSED = -0.1
"""A cosine below this is marked: that of two unrelated updates is nearer to 0. So is none above half of the
lowest one of its round: one liar of three is a third of every mean, and so honest sites oppose it too.
"""

LONG = 10.0
"""A norm is marked that is more than this many times the median of the round's."""

SHORT = 0.01
"""A norm is marked that is less than this many times the median: a site that sends back what it received."""

FEWEST = 3
"""Updates of a round that can show which one is unlike the others."""


def outlying(sent: Mapping[str, SiteRound]) -> dict[str, dict[str, float]]:
    """Return the sites whose update of one round is marked, with the figures that mark it.

    Args:
        sent: the accepted updates of the round.
    """
    if len(sent) < FEWEST:
        return {}
    usual = usual_norm(sent)
    limit = min(OPPOSED, min((s.cosine for s in sent.values() if s.cosine is not None), default=0.0) / 2)
    marked: dict[str, dict[str, float]] = {}
    for name, site in sent.items():
        if site.cosine is not None and site.cosine < limit:
            marked[name] = {"cosine": site.cosine}
        if usual and not SHORT <= (ratio := (site.norm or 0.0) / usual) <= LONG:
            marked[name] = marked.get(name, {}) | {"norm": ratio}
    return marked


def usual_norm(sent: Mapping[str, SiteRound]) -> float:
    """Return the median norm of the updates of one round."""
    return median(site.norm or 0.0 for site in sent.values())


MEMORY = 128 * 2**20
"""Bytes of the sites' numbers that are compared at a time; for the next ones the updates are read again."""


@validated(frozen=True, config=STRICT)
class RobustMerge:
    """What takes the place of the mean of the sites' updates, so that a few liars cannot move it far.

    Attributes:
        kind: of each number the ``median`` or the ``trimmed`` mean; ``clip`` shortens long updates,
            ``centered`` those far from the last change of the model; ``krum`` leaves out the sites farthest
            from the others.
        liars: number of lying sites to withstand. It takes more than twice as many sites, ``krum`` two more.
            A row that fewer sites send is merged by the plain mean, and listed as unprotected.
    """

    kind: Literal["median", "trimmed", "clip", "centered", "krum"] = "median"
    liars: Annotated[int, Field(ge=1, le=LIMIT)] = 1

    @property
    def fewest(self) -> int:
        """The number of sites that it needs."""
        return 2 * self.liars + (3 if self.kind == "krum" else 1)


@dataclass(frozen=True)
class Merged:
    """The updates of a round after a robust merge.

    Attributes:
        updates: of the same sites, each with the merged tensors and rows and counting once: their mean, which
            the method takes, is the robust merge.
        radii: the radius of each class, and of the shared parameters under "", where the kind has one.
        plain: the classes whose rows too few sites sent; "" stands for the shared tensors.
        kept: c_k of the shared parameters, or 1 and 0 for sites that krum takes and leaves out, in the order
            of the updates; None for other kinds, and a site of weight 0.
    """

    updates: Iterable[Update]
    radii: Mapping[str, float] = field(default_factory=dict)
    plain: Labels = ()
    kept: Sequence[float | None] = ()


def unmergeable(method: Method) -> str | None:
    """Why a robust merge cannot take the place of the method's mean; None where it can."""
    if method.about.local_only:
        return method.about.local_only
    if not method.merges_by_mean:
        return "makes more of the updates than their weighted mean"
    if method.labels.view == "target":
        return "trains another class at each site, so that honest updates need not agree"
    if up := method.egress(Layout({}, {})).going("up"):
        return f"also merges {', '.join(channel.name for channel in up)}, which would stay a plain mean"
    return None


def robustly_merged(
    robust: RobustMerge,
    previous: GlobalModel,
    before: GlobalModel | None,
    updates: Iterable[Update],
    radii: Mapping[str, float],
) -> Merged:
    """The merge of a round's updates, which are read several times and compared in parts of `MEMORY`.

    Args:
        previous: the model that the sites received.
        before: that of the round before, if it is of the same phase; `centered` alone looks at it.
        updates: weights, not gradients.
        radii: of the round before, if it is of the same phase.
    """
    sent, head = [], {}
    for update in updates:
        head = {name: previous.head[name] for name in update.head}  # none where it stays at the site
        sent.append(replace(update, shared={}, head={}))
    before = before if robust.kind == "centered" else None
    merging = _Merging(robust, replace(previous, head=head), before, updates, sent, radii)
    model = replace(previous, shared=merging.shared(), head=merging.rows() if head else {})
    return Merged(Counted(tuple(sent), model), merging.found, tuple(merging.plain), merging.kept)


@dataclass(frozen=True)
class Counted:
    """The updates of sites with the tensors and rows of one model, each site counting once."""

    sent: tuple[Update, ...]
    model: GlobalModel

    def __iter__(self) -> Iterator[Update]:
        for update in self.sent:
            rows, own = self.model.rows(update.labels), (update.class_weights > 0).double()
            weight, shared = float(update.weight > 0), dict(self.model.shared)
            yield replace(update, shared=shared, head=rows, class_weights=own, weight=weight)


_Part = list[tuple[str, slice]]

_Blocks = Iterable[tuple[Tensor, Tensor]]
"""A vector in parts: what the sites sent, float64 ``[m, n]``, and the centre of `centered`, ``[n]``."""


@dataclass(frozen=True)
class _Numbers:
    """The numbers of some shared tensors in parts; each walk through them reads the updates again."""

    parts: Sequence[_Part]
    previous: GlobalModel
    before: GlobalModel | None
    updates: Iterable[Update]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.parts:
            centre = _numbers(self.previous.shared, part)
            if self.before:
                centre = 2 * centre - _numbers(self.before.shared, part)
            yield torch.stack([_numbers(u.shared, part) for u in self.updates if u.weight > 0]), centre


_SHARED = ""
"""In place of a class: the shared tensors."""


@dataclass
class _Merging:
    """One merge. See `robustly_merged` for what it is given, and `Merged` for what it finds."""

    robust: RobustMerge
    previous: GlobalModel
    before: GlobalModel | None
    updates: Iterable[Update]
    sent: Sequence[Update]
    radii: Mapping[str, float]
    found: dict[str, float] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    kept: list[float | None] = field(default_factory=list)

    def shared(self) -> dict[str, Tensor]:
        """Merge the shared tensors: the parameters as one vector, and the statistics of batch norm."""
        previous, before = self.previous, self.before
        counted = [i for i, update in enumerate(self.sent) if update.weight > 0]
        weights = torch.tensor([self.sent[i].weight for i in counted], dtype=torch.float64)
        merged = {n: t.clone(memory_format=torch.contiguous_format) for n, t in previous.shared.items()}
        self.kept = [None] * len(self.sent)
        for statistics in (False, True) if counted else ():
            lengths = {n: t.numel() for n, t in merged.items() if (n in previous.buffers) == statistics}
            if not (parts := list(_parts(lengths, MEMORY // (8 * len(counted))))):
                continue
            blocks = _Numbers(parts, previous, before, self.updates)
            found, factors = self._merge(_SHARED, blocks, weights, along=not statistics)
            for part, numbers in zip(parts, found, strict=True):
                pieces = torch.split(numbers, [where.stop - where.start for _, where in part])
                for (name, where), values in zip(part, pieces, strict=True):
                    merged[name].view(-1)[where] = values.to(merged[name].dtype)
            for i, factor in zip(counted, factors, strict=False):
                self.kept[i] = round(factor, 3)
        return merged

    def rows(self) -> dict[str, Tensor]:
        """Merge the row of each class over the sites that send it."""
        previous, before, names = self.previous, self.before, sorted(self.previous.head)
        merged = _matrix(previous.head, names)
        centre, sites = merged.clone(), len(self.sent)
        if before:
            known = [label for label in previous.labels if label in before.labels]
            at = previous.where(tuple(known))
            centre[at] += centre[at] - _matrix(before.rows(tuple(known)), names)
        together = max(MEMORY // (8 * sites * merged.shape[1]), 1)
        for start in range(0, len(merged), together):
            where = {label: i for i, label in enumerate(previous.labels[start : start + together])}
            rows = torch.zeros(sites, len(where), merged.shape[1], dtype=torch.float64)
            weights = torch.zeros(sites, len(where), dtype=torch.float64)
            for site, update in enumerate(self.updates):
                here = [i for i, label in enumerate(update.labels) if label in where]
                there = [where[update.labels[i]] for i in here]
                rows[site, there] = _matrix(update.head, names)[here]
                weights[site, there] = update.class_weights[here].double()
            for label, i in where.items():
                owners = weights[:, i] > 0
                if owners.any():
                    block = [(rows[owners, i], centre[start + i])]
                    (merged[start + i],), _ = self._merge(label, block, weights[owners, i])
        parts = torch.split(merged, [previous.head[name][0].numel() for name in names], dim=1)
        like = [(name, previous.head[name]) for name in names]
        return {name: p.reshape(t.shape).to(t.dtype) for p, (name, t) in zip(parts, like, strict=True)}

    def _merge(
        self, name: str, blocks: _Blocks, weights: Tensor, *, along: bool = True
    ) -> tuple[list[Tensor], list[float]]:
        """Merge a vector over the sites that send it.

        Args:
            weights: of these sites, ``[m]``.
            along: whether it is the direction of an update; else each number is merged by itself.

        Returns:
            its parts, and what is kept of each site, where the kind has such a factor.
        """
        robust, sites = self.robust, len(weights)
        if sites < robust.fewest:
            self.plain += [name] if along else []
            return [(weights / weights.sum()) @ values for values, _ in blocks], []
        if not along or robust.kind in ("median", "trimmed"):
            cut = (sites - 1) // 2 if robust.kind == "median" else robust.liars
            return [values.sort(0).values[cut : sites - cut].mean(0) for values, _ in blocks], []
        gram = torch.zeros(sites, sites, dtype=torch.float64)
        for values, centre in blocks:
            gram += (values - centre) @ (values - centre).T
        norms = gram.diagonal().clamp(min=0).sqrt()
        if robust.kind == "krum":
            squares = norms[:, None] ** 2 + norms**2 - 2 * gram
            near = squares.fill_diagonal_(math.inf).sort(1).values[:, : sites - robust.liars - 2]
            taken = near.sum(1).sort(stable=True).indices[: sites - robust.liars]
            factors = torch.zeros(sites, dtype=torch.float64).index_fill_(0, taken, 1.0)
            share = factors / len(taken)
        else:
            radius = median(norms.tolist())
            if last := self.radii.get(name):
                radius = min(max(radius, last / 2), 2 * last)
            self.found[name] = radius
            factors = torch.where(norms > radius, radius / norms, 1.0)
            share = factors / sites
        return [share @ v + (1 - share.sum()) * centre for v, centre in blocks], factors.tolist()


def _parts(lengths: Mapping[str, int], most: int) -> Iterator[_Part]:
    """Where the numbers of all tensors are, in parts of at most `most` numbers.

    Args:
        lengths: numbers of each tensor.
    """
    most, end, begins = max(most, 1), 0, dict[str, int]()
    for name, length in lengths.items():
        begins[name], end = end, end + length
    for begin in range(0, end, most):
        cuts = ((n, max(begin - at, 0), min(begin + most - at, lengths[n])) for n, at in begins.items())
        yield [(name, slice(start, stop)) for name, start, stop in cuts if start < stop]


def _numbers(tensors: Mapping[str, Tensor], part: _Part) -> Tensor:
    """The numbers of a part, float64 ``[n]``."""
    return torch.cat([tensors[name].reshape(-1)[where].double() for name, where in part])


def _matrix(head: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The rows of all tensors of a head beside one another, float64 ``[c, d]``."""
    flat = [rows.reshape(len(rows), math.prod(rows.shape[1:])) for rows in (head[name] for name in names)]
    return torch.cat(flat, dim=1).double()
