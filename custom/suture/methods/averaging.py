"""The weighted mean of updates, and what the methods that train locally and average share.

Each such method is then what its paper changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

import torch
from torch import Tensor

from suture.data.batch import Batch
from suture.learning.training import Fitted, LocalRound, LocalTraining, Objective, SiteContext, fit
from suture.methods.base import GlobalModel, Method, RoundContext, hyperparameters
from suture.models.classifier import Classifier, Layout, NormPolicy, frozen_copy, split_state
from suture.protocol.egress import Egress, strip_prefix
from suture.protocol.messages import Labels, TaskData, Update, ones

_BLOCK = 2**16
"""Numbers of a tensor to which all updates are added before the next ones: the cache holds their sums."""

_TOGETHER, _WAITING = 8, 128 * 2**20
"""Updates that wait to be added together at most, and their bytes."""


class WeightedMean:
    """A mean that takes one update at a time; its memory does not grow with the number of sites.

    Sums are float64 and updates are added in the order given, so the same updates in the same order give the
    same bytes. The tensors of an update must not change before the mean was read.

    Args:
        labels: the classes of the head's rows.
        shared: the previous shared tensors; one that gets no weight stays as it was.
        head: the previous rows; a class that gets no weight keeps its row.
    """

    def __init__(self, labels: Labels, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> None:
        self._index = {name: i for i, name in enumerate(labels)}
        self._previous = (shared, head)
        self._waiting: list[tuple[Mapping[str, Tensor], float]] = []
        self._bytes = 0  # of those that wait
        self._shared: dict[str, Tensor] = {}  # the sums of those that no longer wait; empty before
        self._head = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in head.items()}
        self.weight = 0.0
        self.class_weights = torch.zeros(len(labels), dtype=torch.float64)

    def add(self, update: Update) -> None:
        """Adds one site: its tensors times `weight`, its rows times `class_weights`."""
        sent = {name: update.shared[name].reshape(-1) for name in self._previous[0]}
        self._waiting.append((sent, update.weight))
        self._bytes += sum(tensor.nbytes for tensor in sent.values())
        self.weight += update.weight
        self.add_rows(update.labels, update.head, update.class_weights)
        if len(self._waiting) > _TOGETHER or self._bytes > _WAITING:
            self._sum()

    def add_rows(self, labels: Labels, rows: Mapping[str, Tensor], weights: Tensor) -> None:
        """Adds rows ``[c, ...]`` of the named classes, each times its weight ``[c]``."""
        where = torch.tensor([self._index[name] for name in labels], dtype=torch.long)
        w = weights.to(torch.float64)
        self.class_weights.index_add_(0, where, w)
        for name, total in self._head.items():
            weighted = rows[name].to(torch.float64) * w.view(-1, *[1] * (total.dim() - 1))
            total.index_add_(0, where, weighted)

    def shared(self) -> dict[str, Tensor]:
        """The mean of the shared tensors, in their own type."""
        previous = self._previous[0]
        if self.weight <= 0:
            return dict(previous)
        if self._shared:
            self._sum()  # in its place, and so once
        means = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in previous.items()}
        for name, mean in means.items():
            for start in range(0, mean.numel(), _BLOCK):
                mean.view(-1)[start : start + _BLOCK] = self._sum_of(name, start) / self.weight
        return means

    def head(self) -> dict[str, Tensor]:
        """The mean of the rows; the previous row for a class of no weight, never NaN."""
        sent = self.class_weights > 0
        divisor = torch.where(sent, self.class_weights, torch.ones_like(self.class_weights))
        merged = {}
        for name, total in self._head.items():
            previous = self._previous[1][name]
            shape = (-1, *[1] * (total.dim() - 1))
            mean = (total / divisor.view(shape)).to(previous.dtype)
            merged[name] = torch.where(sent.view(shape), mean, previous)
        return merged

    def applied_to(self, previous: GlobalModel) -> GlobalModel:
        """The model with the means in the place of its tensors; what was not averaged stays."""
        return previous.moved_to({**self.shared(), **self.head()})

    def _sum(self) -> None:
        """Add those that wait to the sums."""
        if not self._shared:
            shared = self._previous[0]
            self._shared = {k: torch.zeros(v.numel(), dtype=torch.float64) for k, v in shared.items()}
        for name, sums in self._shared.items():
            for start in range(0, sums.numel(), _BLOCK):
                self._sum_of(name, start)
        self._waiting, self._bytes = [], 0

    def _sum_of(self, name: str, start: int) -> Tensor:
        """The sum of a block of a tensor, those that wait included; where there are sums, in their place."""
        block = slice(start, start + _BLOCK)
        size = min(_BLOCK, self._previous[0][name].numel() - start)
        total = self._shared[name][block] if self._shared else torch.zeros(size, dtype=torch.float64)
        for sent, weight in self._waiting:
            # Converted first: torch adds mixed types four times slower.
            total.add_(sent[name][block].double(), alpha=weight)
        return total


def weighted_mean(previous: GlobalModel, updates: Iterable[Update]) -> WeightedMean:
    """The running mean of all updates, each shared tensor by site weight and each row by class weight."""
    mean = WeightedMean(previous.labels, previous.shared, previous.head)
    for update in updates:
        mean.add(update)
        del update  # before the next one is read
    return mean


def mean_of_channel(updates: Iterable[Update], name: str, labels: Labels) -> dict[str, Tensor]:
    """The mean over the sites of a channel that has a tensor for each of the model's, by their names.

    Sites and rows count as in the mean of the model; a class that nobody sent gets zeros.

    Args:
        labels: the classes of the result's rows.
    """
    mean: WeightedMean | None = None
    for update in updates:
        shared, head = split_state(strip_prefix(name, update.channels))
        if mean is None:
            rows = {key: rows.new_zeros(len(labels), *rows.shape[1:]) for key, rows in head.items()}
            mean = WeightedMean(labels, {key: torch.zeros_like(t) for key, t in shared.items()}, rows)
        mean.add(replace(update, shared=shared, head=head))
    return {**mean.shared(), **mean.head()} if mean else {}


WHY = {
    "shared": "backbone weights, averaged over sites",
    "head": "rows of the site's classes, averaged over the sites that send them",
    "weight": "weight of the site in the mean",
    "class_weights": "weight of the site in the mean of each row",
    "train_loss": "progress of local training",
    "metrics": "the received global model on the site's validation data; selects the best round",
}


@hyperparameters
class LocalAveraging(Method):
    """Local training and a weighted mean; by itself FedAvg over the rows that the sites send.

    A method overrides what its paper changes: the `objective` of a step, the weights of a site and of its
    rows, or `aggregate`.

    Attributes:
        local: learning rate 5e-5, one epoch a round, batches of 64 (Kulkarni et al. 2024, Sec. 3.4), by Adam,
            as in its published program: the paper names no optimiser.
        batch_norm: ``average`` (FedAvg); ``frozen`` (FedBN+: a pretrained backbone's batch norm stays as it
            is and is sent once); ``local`` (FedBN), where models stay at the sites.
    """

    merges_by_mean = True
    local: LocalTraining = field(default_factory=LocalTraining)
    batch_norm: NormPolicy = "average"

    def egress(self, layout: Layout) -> Egress:
        personal = self.sharing.personal
        unused = {"nothing": (), "head": ("head",), "model": tuple(WHY.keys() - {"metrics"})}[personal]
        why = {name: text for name, text in WHY.items() if name not in unused}
        return Egress(shared=layout.shared, head=layout.head, why=why)

    def objective(self, model: Classifier, batch: Batch, reference: Classifier) -> Tensor:
        """What a local step minimises, a scalar; by default the loss over known labels.

        Args:
            reference: the received model, frozen, in eval mode.
        """
        return self.loss(model(batch.inputs), batch.y, batch.known, model.labels.label_type)

    def weight(self, site: SiteContext) -> float:
        """How much the site counts in the mean of each shared tensor; `egress` declares its range."""
        return 1.0

    def row_weights(self, site: SiteContext, received: TaskData) -> Tensor:
        """How much it counts in the mean of each row, ``[c]``; `egress` declares the range."""
        return self.weight(site) * ones(received.labels)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        fitted = fit(site, self.objective_at(site), round_)
        return self.weigh(site, received, round_, fitted), fitted.optimiser_state

    def weigh(self, site: SiteContext, received: TaskData, round_: LocalRound, fitted: Fitted) -> Update:
        """The update of a trained model, with the weights of the site and of its rows."""
        update = train_update(site, received, round_, fitted)
        weight, rows = self.weight(site), self.row_weights(site, received).to(torch.float64)
        return replace(update, weight=weight, class_weights=rows)

    def objective_at(self, site: SiteContext) -> Objective:
        """The objective of a round at a site, whose model is the received one."""
        # A copy of the received model takes memory and time: made only for a method that may look at it.
        custom = type(self).objective is not LocalAveraging.objective
        reference = frozen_copy(site.model) if custom else site.model
        return lambda model, batch: self.objective(model, batch, reference)

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        sent = previous if self.sharing.personal == "nothing" else replace(previous, head={})
        return weighted_mean(sent, updates).applied_to(previous)


def train_update(site: SiteContext, received: TaskData, round_: LocalRound, fitted: Fitted) -> Update:
    """The update of a trained model: all that was received, the site and each of its rows counting once."""
    shared, head = split_state(site.model.state_dict())
    return update_of(
        received,
        round_,
        fitted,
        {name: shared[name].detach().cpu() for name in received.shared},
        {name: head[name].detach().cpu() for name in received.head},
    )


def update_of(
    received: TaskData, round_: LocalRound, fitted: Fitted, shared: dict[str, Tensor], head: dict[str, Tensor]
) -> Update:
    """The update of these tensors, the site and each of its rows counting once.

    Every method makes its update here, so that none lacks what was measured of the round.
    """
    of, labels = round_.round, received.labels
    return Update(of, labels, shared, head, ones(labels), train_loss=fitted.loss)


def own_rows(site: SiteContext) -> Tensor:
    """``[c]``: 1 for each class that the site annotates, else 0."""
    if site.identified is None:
        return ones(site.model.labels.names)
    return site.identified.to(ones(()).dtype)
