"""FedAvg over the union of all classes, every site counting with its number of images.

    McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017;
    as the baseline of Deng et al. (FedLSM), MICCAI 2023, Tables 1 to 3. `rows="owners"` is their FedAvg*,
    the task-dependent aggregation of Dong et al. (FPSL), IEEE TMI 2022.

    at site k:   minimise  L = 1/(N M) sum_i sum_c -w_c y_c ln p_c - (1 - y_c) ln(1 - p_c)
                 with y_c = 0 for c not in I_k; in a multiclass task the cross-entropy of labelled images
    server:      w     = sum_k n_k w_k / sum_k n_k
                 psi_c = the same over all sites, or over those that identify class c

What a site does not know is taught as absent. With `rows="owners"` that harms the backbone alone: rows of the
head come from the sites that know them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from suture.core.labels import LabelType
from suture.learning.losses import balanced_ce, weighted_bce
from suture.learning.training import LocalRound, SiteContext, fit, on_known
from suture.methods.averaging import WHY, LocalAveraging, owned, trained
from suture.methods.base import About, ClassFacts, LabelStatistics, LabelUse, hyperparameters, loss_of
from suture.methods.class_weights import ClassWeights, class_weights, counted, received_weights, why_counted
from suture.models.classifier import Layout
from suture.protocol.egress import IMAGES, OWNERS, WEIGHT, Egress
from suture.protocol.messages import Payload, Update, ones


@hyperparameters
class FedAvg(LocalAveraging):
    """FedAvg.

    It has a `train` of its own, which uses no hook of `LocalAveraging`: a variant with another objective
    derives from that class.

    Attributes:
        local, batch_norm: see `LocalAveraging`.
        rows: of the head, the mean of ``all`` sites, or of the ``owners`` of each class (FedAvg*).
        class_weights: of positives in the binary cross-entropy; see `class_weights.py`.
        softmax: of a multiclass task: ``plain``, or ``balanced`` by the site's own counts (Ren et al. 2020),
            the baseline of Fed-MAS.
        keep_local: see `FedMAS`.
    """

    about = About("fedavg", "FedAvg", "McMahan et al., AISTATS 2017; Deng et al., MICCAI 2023")
    labels = LabelUse(view="all", unknown="negative")

    rows: Literal["all", "owners"] = "all"
    class_weights: ClassWeights = "known"
    softmax: Literal["plain", "balanced"] = "plain"
    keep_local: bool = False

    def egress(self, layout: Layout) -> Egress:
        return Egress(
            shared=layout.shared,
            head=layout.head,
            weight=IMAGES,
            class_weight=OWNERS if self.rows == "owners" else WEIGHT,
            counts=counted(self.class_weights),
            why=_WHY | why_counted(self.class_weights),
        )

    def train(
        self, site: SiteContext, received: Payload, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        label_type, images = site.model.labels.label_type, float(len(site.samples["train"]))
        weight = received_weights(received, self.class_weights, label_type)
        counts = torch.nan_to_num(site.samples["train"].y).sum(dim=0)

        def loss(logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
            if label_type == "multiclass" and self.softmax == "balanced":
                return balanced_ce(logits, y, known, counts.to(logits))
            if weight is None:
                return self.loss(logits, y, known, label_type)
            each = weighted_bce(logits, y, weight.to(logits.device))
            return torch.where(known, each, 0.0).sum() / known.sum().clamp(min=1)

        fitted = fit(site, on_known(loss_of(loss, label_type)), round_)
        update = trained(site, received, round_, fitted)
        rows = owned(site) if self.rows == "owners" else ones(received.labels)
        return replace(update, weight=images, class_weights=images * rows), fitted.optimiser_state

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        return class_weights(statistics, self.class_weights)


_WHY = WHY | {
    "head": "rows of all classes",
    "weight": "n_k, how much the site counts in the mean",
    "class_weights": "n_k, or 0 for a class that the site does not know: how much its row counts",
}
