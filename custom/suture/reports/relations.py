"""Whether a model calls related findings of different sites together (MIDL 2023, Appendix E)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.saved_models import evaluate
from suture.reports.contingency import RELATED, Contingency, contingency, youden_thresholds


def relate(
    model: Path,
    configs: Sequence[SiteConfig],
    split: Split,
    pairs: Sequence[tuple[str, str]] = RELATED,
    device: str = "cpu",
) -> list[Contingency]:
    """Contingency matrices of a model's predictions of pairs of classes.

    Args:
        configs: the first one's images are predicted. A class's threshold is Youden's on the first data set
            that defines one: NIH does not label a lung lesion, so CheXpert has to say where its threshold is.

    Raises:
        ConfigError: there is no model.
        LabelError: the model does not know a class.
        DataError: the data cannot be read.
    """
    done = [evaluate(model, config, split, device) for config in configs]
    thresholds: dict[str, float] = {}
    for one in done:
        for name, value in youden_thresholds(one.labels, one.y, one.scores).items():
            if math.isnan(thresholds.get(name, math.nan)):
                thresholds[name] = value
    first = done[0]
    return [contingency(first.labels, first.scores, thresholds, a, b) for a, b in pairs]
