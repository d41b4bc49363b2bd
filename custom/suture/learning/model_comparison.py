"""Two saved models on the same images, class by class (MIDL 2023, Appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from suture.core.errors import DataError
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.paired_bootstrap import AurocComparison, compare_auroc
from suture.learning.saved_models import evaluate
from suture.protocol.messages import ClassScore


@dataclass(frozen=True)
class Compared:
    """One class: both models' AUROC with their intervals, and the paired difference."""

    a: ClassScore
    b: ClassScore
    difference: AurocComparison


def compare(
    a: Path, b: Path, config: SiteConfig, split: Split, device: str = "cpu", draws: int = 1000
) -> dict[str, Compared]:
    """Compares two models on every class that both have learned and the data know.

    Raises:
        ConfigError: a folder holds no model.
        DataError: the data cannot be read, or there is no such class.
    """
    one, two = (evaluate(folder, config, split, device) for folder in (a, b))
    names = [name for name in one.tested if name in two.tested]
    if not names:
        raise DataError(f"{a} and {b} have learned no class of {config.data.table} in common")
    found = {}
    for name in names:
        i, j = one.labels.index(name), two.labels.index(name)
        difference = compare_auroc(one.y[:, i], one.scores[:, i], two.scores[:, j], one.patients, draws)
        found[name] = Compared(one.classes[name], two.classes[name], difference)
    return found
