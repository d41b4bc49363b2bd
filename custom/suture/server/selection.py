"""Which round's model is kept, and the labelled data that may lie at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from suture.config import SiteConfig
from suture.data.batch import columns
from suture.data.site import load_samples
from suture.data.table import Split
from suture.data.transforms import Augmentation
from suture.evaluation.metrics import ClassScore, mean_defined, score_classes
from suture.labels import LabelSet
from suture.measuring import overall, ranking
from suture.methods.contract import GlobalModel
from suture.plan import Plan
from suture.server.global_model import classifier
from suture.training import Workbench, predict


@dataclass(frozen=True)
class Best:
    """The best round so far and its value; more is better."""

    round: int
    value: float


def better(best: Best | None, candidate: Best) -> Best:
    """The better of two; the earlier one where they are equal."""
    return candidate if best is None or candidate.value > best.value else best


@dataclass
class Standings:
    """The best round so far, of the federation and of each site by itself.

    Attributes:
        best: by the rule of the job.
        own: by each site's validation loss, where every site has a model of its own.
    """

    best: Best | None = None
    own: dict[str, Best] = field(default_factory=dict)

    def note(self, candidate: Best) -> None:
        """A round that may be the best."""
        self.best = better(self.best, candidate)

    def note_own(self, round_: int, losses: Mapping[str, float]) -> None:
        """A round that may be the best of some sites."""
        for site, loss in losses.items():
            self.own[site] = better(self.own.get(site), Best(round_, -loss))

    def over(self, measured: int, patience: int | None) -> bool:
        """Whether so many rounds up to the last one measured have been no better than the best."""
        return patience is not None and self.best is not None and measured - self.best.round >= patience

    def of(self, site: str) -> int:
        """The round that a site is to keep; 0 while there is none."""
        found = self.own.get(site, self.best)
        return found.round if found else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the state."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Standings:
        """What `to_dict` gave."""
        best = Best(**values["best"]) if values["best"] else None
        return cls(best, {site: Best(**own) for site, own in values["own"].items()})


class HeldOut:
    """Labelled data at the server, evaluated where it lies.

    Args:
        config: the server's own suture.toml.
        plan: for what its model reads.
    """

    def __init__(self, config: SiteConfig, plan: Plan) -> None:
        self._device = torch.device(config.training.device)
        self._plan = plan
        self.labels, self._samples = load_samples(config, plan.model, "server")

    def has(self, split: Split) -> bool:
        """Whether there is anything in a split."""
        return split in self._samples and len(self._samples[split]) > 0

    def count(self, split: Split) -> int:
        """Images of a split."""
        return len(self._samples[split]) if self.has(split) else 0

    def scores(self, model: GlobalModel, split: Split, bootstrap: int = 0) -> Mapping[str, ClassScore]:
        """AUROC of every class that both the model and the data know."""
        samples, ranked = self._samples[split], ranking(self._logits(model, split), model.task)
        shared = [name for name in model.labels if name in self.labels]
        return score_classes(
            tuple(shared),
            samples.y[:, [self.labels.index(name) for name in shared]].numpy(),
            ranked[:, [model.labels.index(name) for name in shared]].numpy(),
            samples.patients,
            bootstrap,
            self._plan.seed,
        )

    def overall(self, model: GlobalModel, split: Split) -> Mapping[str, float | None]:
        """Accuracy and its like, of a multiclass task; {} for multilabel."""
        part = columns(self._samples[split], self.labels, LabelSet(model.labels, model.task))
        return overall(part, self._logits(model, split), model.task)

    def _logits(self, model: GlobalModel, split: Split) -> Tensor:
        network = classifier(model, self._plan).to(self._device)
        bench = Workbench(
            "server", network, self._samples, self._plan.model.preprocessing, Augmentation(), self._device
        )
        return predict(bench, self._samples[split])

    def mean_auroc(self, model: GlobalModel, split: Split) -> float | None:
        """Mean over the classes where it is defined."""
        return mean_defined(score.auroc for score in self.scores(model, split).values())
