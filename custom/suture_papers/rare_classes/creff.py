"""CReFF: sites send the gradients of a second head, and the server re-trains it on features that match them.

    Shang, Lu, Huang, Wang. Federated Learning on Heterogeneous and Long-Tailed Data via Classifier
    Re-Training with Federated Features. IJCAI 2022.

    at site k:   G_kc = mean over 10 draws of up to 32 images of class c of the gradient of the cross-entropy
                        by the head psi~, on features of the received backbone, one augmentation a draw
                 then as FedAvg from the merged head psi
    server:      w, psi as FedAvg;   G_c = mean of G_kc over the sites that have class c
                 features V_c that match G_c under psi~, and psi~ trained anew on them (federated_features.py)

The next round starts from psi; what predicts is psi~. A site without images of a class, or with fewer than
its `min_count`, sends zeros for it. A class that nobody sent keeps its features; one that nobody ever sent
has none: it is left out of the re-training, and its row of psi~ is that of psi.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.seeds import generator_for, seed_for
from suture.core.validation import LIMIT, STRICT
from suture.learning.training import LocalRound, SiteContext, ready_inputs
from suture.methods.averaging import WeightedMean
from suture.methods.base import About, GlobalModel, RoundContext, hyperparameters
from suture.methods.class_weights import ClassWeights
from suture.methods.composed import Composed
from suture.methods.roles import Component, Requirements, class_counts
from suture.models import ModelSpec
from suture.models.classifier import Layout
from suture.models.heads import head_rows
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import TaskData, Update, align_rows
from suture_papers.rare_classes.federated_features import FederatedFeatures, head_gradient
from suture_papers.rare_classes.siamese import siamese

GRADIENTS, RETRAINED, FEATURES = "class_gradients", "retrained", "features"
"""Names of G, up, of psi~, down, and of V, at the server; zeros for a class that has none."""


@validated(frozen=True, config=STRICT)
class ClassGradients(Component):
    """The gradients of the head that a site measures.

    Attributes:
        draws: of images of each class.
        images: the most images of a draw.
    """

    needs: ClassVar[Requirements] = Requirements(
        label_types=("multiclass",), view="all", why="are compared over the classes of all sites"
    )
    draws: Annotated[int, Field(ge=1, le=LIMIT)] = 10
    images: Annotated[int, Field(ge=1, le=LIMIT)] = 32

    @torch.no_grad()
    def of(self, site: SiteContext, rows: Tensor, seed: int) -> Tensor:
        """G_kc of every class, ``[c, c, d + 1]``, by a head ``[c, d + 1]``; zeros where there is none.

        What is drawn of a class depends on the seed and on its name.
        """
        site.model.eval()
        train, size = site.samples["train"], len(rows)
        rows = rows.to(site.device)
        gradients = torch.zeros(size, *rows.shape)
        for c in (class_counts(site) >= max(site.min_count, 1)).nonzero().flatten().tolist():
            having, y = train.y[:, c].eq(1).nonzero().flatten(), F.one_hot(torch.tensor([c]), size).to(rows)
            generator = generator_for(seed, site.model.labels.names[c])
            for _ in range(self.draws):
                drawn = having[torch.randperm(len(having), generator=generator)[: self.images]]
                batch = ready_inputs(site, train.batch(drawn))
                features = site.model.features({"image": siamese(batch.inputs["image"], generator)})
                gradients[c] += head_gradient(features, y, rows).cpu() / self.draws
        return gradients


@hyperparameters
class CReFF(Composed):
    """CReFF; see `Composed` for the fields of FedAvg.

    Attributes:
        class_gradients: what a site measures before it trains.
        federated_features: what the server makes of it after each round.
    """

    about = About(
        "creff",
        "CReFF",
        "Shang et al., IJCAI 2022",
        question="classes rare",
        images_only=True,
        pixels="draws its own views of the images",
        mixes_patients="sends gradients of the features of classes",
    )
    class_weights: ClassWeights = "none"
    class_gradients: ClassGradients = field(default_factory=ClassGradients)
    federated_features: FederatedFeatures = field(default_factory=FederatedFeatures)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retrain:
            raise ConfigError(
                "CReFF predicts with the head that the server re-trains, so a head re-trained at the "
                "sites would be unused; leave method.retrain out"
            )

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        spec = super().adapted(spec)
        if spec.head != "linear" or spec.second_head:
            raise ConfigError("CReFF re-trains one linear head; set model.head=linear and second_head=false")
        return spec

    def egress(self, layout: Layout) -> Egress:
        egress, d = super().egress(layout), layout.features
        channels = (
            Channel(GRADIENTS, "up", (CLASSES, CLASSES, d + 1), rows="own", why=_WHY),
            Channel(RETRAINED, "down", (CLASSES, d + 1)),
            Channel(FEATURES, "server", (CLASSES, self.federated_features.per_class, d)),
        )
        return replace(egress, channels=(*egress.channels, *channels))

    def predictor(
        self, tensors: Mapping[str, Tensor], channels: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        rows = retrained_rows(tensors, channels)
        return {"head.weight": rows[:, :-1].contiguous(), "head.bias": rows[:, -1].contiguous()}

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        draws = seed_for(round_.seed, site.name, round_.round, GRADIENTS)
        rows = retrained_rows(received.head, received.channels)
        gradients = self.class_gradients.of(site, rows, draws)
        update, kept = super().train(site, received, round_)
        return replace(update, channels={GRADIENTS: gradients}), kept

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        merged = super().aggregate(previous, updates, ctx)
        target, sent = mean_gradients(previous, updates)
        used = retrained_rows(previous.head, previous.channels).double()
        features = previous.channels[FEATURES].clone()
        if len(sent):
            start = torch.stack([self._features(previous, c, ctx.seed) for c in sent.tolist()])
            features[sent] = self.federated_features.matched(start, sent, used, target[sent]).float()
        rows = joined(merged.head)
        classes = features.flatten(1).any(dim=1).nonzero().flatten().tolist()
        classes.sort(key=previous.labels.__getitem__)  # batches are drawn from them in their order
        if classes:
            rows[classes] = self._retrained(previous, features, classes, ctx)
        return replace(merged, channels={RETRAINED: rows, FEATURES: features})

    def _features(self, previous: GlobalModel, c: int, seed: int) -> Tensor:
        """V_c where the last round left it; at first from N(0, 1)."""
        held = previous.channels[FEATURES][c]
        if held.any():
            return held.double()
        generator = generator_for(seed, f"{FEATURES}/{previous.labels[c]}")
        return torch.randn(held.shape, generator=generator, dtype=torch.float64)

    def _retrained(
        self, previous: GlobalModel, features: Tensor, classes: list[int], ctx: RoundContext
    ) -> Tensor:
        """The rows of psi~ of classes that have features, ``[s, d + 1]``."""
        names = LabelSet(tuple(previous.labels[c] for c in classes), previous.label_type)
        fresh = head_rows(names, features.shape[2], seed_for(ctx.seed, RETRAINED, ctx.round))
        order = generator_for(ctx.seed, RETRAINED, ctx.round)
        having = features[classes].double()
        return self.federated_features.retrained(having, joined(fresh).double(), order).float()


_WHY = (
    "mean gradient of the re-trained head on the site's images of each class: reveals to the server "
    "which classes the site has and, approximately, the mean features of their images"
)


def mean_gradients(previous: GlobalModel, updates: Iterable[Update]) -> tuple[Tensor, Tensor]:
    """G_c, the mean over the sites that sent one, ``[M, M, d + 1]``, and the classes that one sent, ``[s]``.

    A gradient that is all zeros is none: it is what a site sends of a class that it does not have.
    """
    labels, rows = previous.labels, joined(previous.head).double()
    mean = WeightedMean(labels, {}, {GRADIENTS: rows.new_zeros(len(rows), *rows.shape)})
    for update in updates:
        sent = update.channels[GRADIENTS]
        has = sent.flatten(1).any(dim=1)
        mean.add_rows(update.labels, {GRADIENTS: align_rows(sent, update.labels, labels, axis=1)}, has)
    return mean.head()[GRADIENTS], mean.class_weights.nonzero().flatten()


def retrained_rows(head: Mapping[str, Tensor], channels: Mapping[str, Tensor]) -> Tensor:
    """psi~, ``[c, d + 1]``: before there is one, and for a class that is new, the row of the head itself."""
    rows = channels[RETRAINED]
    return torch.where(rows.any(dim=1, keepdim=True), rows, joined(head))


def joined(head: Mapping[str, Tensor]) -> Tensor:
    """The rows of a linear head with their biases, ``[c, d + 1]``."""
    return torch.cat([head["head.weight"], head["head.bias"].unsqueeze(1)], dim=1)
