"""FedLSM: unknown labels are guessed by a teacher, and the guesses decide whose row of the head counts.

    Deng, Luo, Chen. Scale Federated Learning for Label Set Mismatch in Medical Image Classification.
    MICCAI 2023.

Site k identifies the classes I_k and does not know U_k; its n_k images are the data D_k.

    before:      w_c = negatives / positives over the sites that count class c            (`class_weights`)
    at site k:   rank D_k by the entropy H of the received model (Eq. 3): D^l the lowest, D^h the highest
                 teacher and student begin as the received model; each step, of 60 + 4 images:
                   60 of D_k without D^h:  the teacher labels a weak view, the student learns a strong one
                                           L_I + L_U                                       (Eqs. 4 and 5)
                   4 pairs of D^l and D^h: x = b x_l + (1 - b) x_h, y alike; b ~ Beta(a, a)        (Eq. 6)
                                           lambda L_UDE
                   teacher <- 0.999 teacher + 0.001 student
                 q_c^k: how often class c was drawn positive, by a label or a pseudo-label
    server:      backbone  theta   = sum_k n_k theta_k / sum_k n_k
                 head      psi_c   = sum_k q_c^k psi_kc / sum_k q_c^k                              (Eq. 7)

A class that nobody counted keeps its row. Every site sees the names of all classes. In the paper q_c^k counts
images of the data, here, as in its published program, those that were drawn.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import torch
from torch import Tensor

from suture.core.labels import LabelType
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit
from suture.methods.averaging import WHY, LocalAveraging, own_rows, train_update
from suture.methods.base import About, ClassFacts, LabelStatistics, LabelUse, hyperparameters
from suture.methods.class_weights import ClassWeights, class_weights, received_weights, with_counts
from suture.models.classifier import Layout
from suture.protocol.egress import NUM_SAMPLES, OWNED_CLASSES, Egress
from suture.protocol.messages import TaskData, Update
from suture_papers.fedlsm.mean_teacher import MeanTeacher, Teaching

_COUNTED = (0.0, 1e9)


@hyperparameters
class FedLSM(LocalAveraging):
    """FedLSM.

    Attributes:
        local: Adam, learning rate 1e-4, betas .9 and .99, weight decay 5e-4 (the paper's "lr_decay"), 200
            steps of 64 images (its Task 1; 30 steps in Task 2). A site may take smaller batches, not larger
            ones.
        batch_norm: ``average`` or ``frozen``; running statistics are averaged like weights.
        teaching: pseudo-labels and what goes with them.
        class_weights: of positives in the binary cross-entropy; see `suture.methods.class_weights`.
        proxies: whose rows of the head count: as ``counted`` in Eq. 7 (AWPA); ``bounded``, counted, but at a
            site that does not know a class no more than it would have if the class were as frequent there as
            where it is known (ours); or those of the ``owners`` by their numbers of images (the ablation
            without AWPA).
    """

    about = About(
        "fedlsm",
        "FedLSM",
        "Deng et al., MICCAI 2023",
        images_only=True,
        mixes_patients="weighs sites by their numbers of images, and its thresholds are of all images",
    )
    labels = LabelUse(view="all", pseudo=True)

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(lr=1e-4, iterations=200, weight_decay=5e-4, betas=(0.9, 0.99))
    )
    teaching: Teaching = field(default_factory=Teaching)
    class_weights: ClassWeights = "known"
    proxies: Literal["counted", "bounded", "owners"] = "counted"

    @property
    def _most(self) -> float:
        """The largest count of a class: every image of a round where that is a number of steps."""
        steps = None if self.local.warmup_epochs else self.local.iterations
        return float(steps * self.local.batch_size) if steps else _COUNTED[1]

    def egress(self, layout: Layout) -> Egress:
        egress = Egress(
            shared=layout.shared,
            head=layout.head,
            weight=NUM_SAMPLES,
            class_weight=OWNED_CLASSES if self.proxies == "owners" else (0.0, self._most),
            scalars={"pseudo_positive": _COUNTED, "pseudo_negative": _COUNTED},
            why=_WHY,
        )
        return with_counts(egress, self.class_weights, self.labels.types)

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        if label_type == "multiclass":  # a labelled image is known not to be of any other class either
            y, known = torch.where(known, y, 0.0), torch.ones_like(known)
        return super().loss(logits, y, known, label_type)

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        batch_size = min(round_.local.batch_size, self.local.batch_size)
        round_ = replace(round_, local=replace(round_.local, batch_size=batch_size))
        weight = received_weights(received, self.class_weights, site.model.labels.label_type)
        teacher = MeanTeacher(self.teaching, site, round_, weight)
        fitted = fit(
            site, teacher.objective, round_, batches=teacher.batches, after_step=teacher.follow_student
        )
        images = len(site.samples["train"])
        update = replace(
            train_update(site, received, round_, fitted),
            weight=float(images),
            class_weights=self._proxies(teacher, site, weight),
            scalars={"pseudo_positive": teacher.positive, "pseudo_negative": teacher.negative},
        )
        return update, fitted.optimiser_state

    def _proxies(self, teacher: MeanTeacher, site: SiteContext, weight: Tensor | None) -> Tensor:
        """How much the site's row of each class counts, ``[c]``."""
        if self.proxies == "owners":
            return len(site.samples["train"]) * own_rows(site)
        if self.proxies == "counted" or weight is None:
            return teacher.drawn
        expected = teacher.images / (1 + weight.double().cpu())  # w = negatives / positives where it is known
        return torch.where(own_rows(site) > 0, teacher.drawn, torch.minimum(teacher.drawn, expected))

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        return class_weights(statistics, self.class_weights)


_WHY = WHY | {
    "head": "rows of all classes",
    "weight": "n_k, the weight of the site in the mean of the backbone",
    "class_weights": "q_c^k, sampled positives of a class, labels and pseudo-labels: the weight of its row",
    "pseudo_positive": "positive pseudo-labels among the sampled images; progress",
    "pseudo_negative": "negative pseudo-labels among the sampled images; progress",
}
