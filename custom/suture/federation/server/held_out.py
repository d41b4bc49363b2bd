"""Labelled data at the server: they measure models there, in each round and at the end."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from torch import Tensor

from suture.core.devices import check_device
from suture.core.errors import ConfigError, check_known
from suture.core.labels import LabelSet, canonical
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan
from suture.federation.server.classes import one_name, statements
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import SiteRegistry
from suture.learning.evaluation import (
    among_annotated,
    by_attribute,
    class_scores,
    entropy,
    mean_interval,
    overall,
)
from suture.learning.features import FeatureStore
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.methods.base import GlobalModel
from suture.protocol.messages import Labels, Metrics


class HeldOut:
    """Labelled data at the server, evaluated there.

    Args:
        config: the server's own suture.toml.
        plan: its model determines how samples are read.

    Attributes:
        labels: the classes of the data.
        groups: the classes of each group, under canonical names.
    """

    def __init__(self, config: SiteConfig, plan: Plan) -> None:
        check_device(config.training.device, "server")
        self._device = torch.device(config.training.device)
        self._plan = plan
        self._codes = config.data.stated_codes()
        self.labels, self._samples = load_samples(config, plan.model, "server")
        self._folder = config.storage.feature_folder
        self._read = not plan.model.reads_features  # whether the samples are as the model reads them
        self.groups: dict[str, tuple[str, ...]] = {
            group: tuple(canonical(name, config.data.synonyms) for name in names)
            for group, names in config.data.groups.items()
        }

    def take_names(self, registry: SiteRegistry) -> None:
        """Give the federation's names to the classes, by the names that sites have for them and by codes.

        Raises:
            ClassConflict: their codes contradict those of the federation.
            LabelError: two of them become one.
        """
        called, every = registry.names, (*self.labels, *chain(*self.groups.values()))
        own = {name: called.get(name, name) for name in every}
        codes = {own[name]: codes for name, codes in self._codes.items()}
        said = [*statements(codes, "the server's data"), *statements(registry.codes, "the sites")]
        classes = one_name(said, registry.labels)
        names = {name: classes.get(one, one) for name, one in own.items()}
        self.labels = LabelSet.of([names[name] for name in self.labels], label_type=self.labels.label_type)
        self.groups = {group: tuple(names[name] for name in of) for group, of in self.groups.items()}

    def check_groups(self, labels: Labels) -> None:
        """Check before any training that the groups consist of the federation's classes.

        Raises:
            ConfigError: a group names another class, or two groups name the same.
        """
        named = Counter(chain.from_iterable(self.groups.values()))
        for name, times in named.items():
            check_known("class under [data.groups] of the server's suture.toml", name, labels)
            if times > 1:
                raise ConfigError(
                    f"the server's suture.toml names {name!r} twice under [data.groups]; a class "
                    "belongs to one group"
                )

    def has(self, split: Split) -> bool:
        """Whether a split has any samples."""
        return split in self._samples and len(self._samples[split]) > 0

    def measured(self, split: Split) -> Labels:
        """The classes whose AUROC a split defines: they have a positive and a negative there."""
        if not self.has(split):
            return ()
        y = self._samples[split].y
        both = (y == 1).any(dim=0) & (y == 0).any(dim=0)
        return tuple(name for name, some in zip(self.labels, both.tolist(), strict=True) if some)

    def tested(
        self, model: GlobalModel, of_round: int, bootstrap: int
    ) -> tuple[Metrics, tuple[float, float] | None]:
        """Evaluate the model on the test split, on every class that both the model and the data have.

        Returns:
            the metrics, and the 95 % interval of the mean AUROC.
        """
        part, logits, labels, names = self._predicted(model, "test")
        seed = self._plan.seed
        metrics = Metrics(
            of_round,
            "test",
            len(part),
            entropy(part, logits, labels.label_type),
            class_scores(part, logits, labels, names, bootstrap=bootstrap, seed=seed),
            overall(part, logits, labels.label_type),
            by_attribute(part, logits, labels, names),
        )
        return metrics, mean_interval(part, logits, labels, metrics.classes, bootstrap, seed)

    def validate(self, model: GlobalModel) -> dict[str, dict[str, float]]:
        """Return the AUROC of each class that defines it and, for multiclass labels, the recall, by the name
        of their mean.
        """
        part, logits, labels, names = self._predicted(model, "validation")
        scores = class_scores(part, logits, labels, names)
        found = {"server_auroc": {n: s.auroc for n, s in scores.items() if s.auroc is not None}}
        if labels.label_type == "multiclass":
            recalls = {name: s.recall for name, s in scores.items() if s.recall is not None}
            found["server_balanced_accuracy"] = recalls
        return found

    def _predicted(self, model: GlobalModel, split: Split) -> tuple[Samples, Tensor, LabelSet, Labels]:
        """Return the samples of a split under the model's classes, its logits, the model's classes, and those
        that the data have too.
        """
        labels = LabelSet(model.labels, model.label_type)
        network = classifier(model, self._plan).to(self._device)
        if not self._read:
            store = FeatureStore(network, self._plan.model, self._samples, self._folder, "server")
            self._samples, self._read = dict(store.samples), True
        part = columns(self._samples[split], self.labels, labels)
        context = SiteContext(
            "server", network, {split: part}, self._plan.model.preprocessing, Augmentation(), self._device
        )
        logits = among_annotated(predict(context, part), part.y, labels.label_type)
        return part, logits, labels, tuple(n for n in model.labels if n in self.labels)
