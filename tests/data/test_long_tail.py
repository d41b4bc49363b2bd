"""suture.data.split: the groups of classes by how often they occur."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.data.readers import load_table
from suture.data.split import long_tail_groups, training_counts
from suture_papers.fedmas.hyperkvasir import FOLDS, HyperKvasirConfig


def test_head_medium_and_tail() -> None:
    counts = {"a": 701, "b": 700, "c": 70, "d": 69, "e": 0}
    assert long_tail_groups(counts) == {"head": ("a",), "medium": ("b", "c"), "tail": ("d", "e")}


@pytest.mark.data
@pytest.mark.parametrize("fold", range(5))
def test_the_groups_of_hyperkvasir_are_those_of_the_paper(data_root: Path, fold: int) -> None:
    """7, 9 and 7 classes: with these the printed means add up, and with the counts of all images they do not.

    Table 1, Fed-MAS, IID: head 94.3, medium 72.9, tail 15.9, balanced accuracy 62.08.
    """
    path = data_root / "hyperkvasir_splits" / f"{FOLDS}.gz"
    read = load_table(HyperKvasirConfig(root=path.parent, table=path, fold=fold))
    sizes = {name: len(own) for name, own in long_tail_groups(training_counts(read)).items()}
    assert sizes == {"head": 7, "medium": 9, "tail": 7}
    mean = sum(sizes[name] * v for name, v in (("head", 94.3), ("medium", 72.9), ("tail", 15.9))) / 23
    assert mean == pytest.approx(62.08, abs=0.05)
    whole = dict(zip(read.labels, (read.y == 1).sum(axis=0).tolist(), strict=True))
    assert [len(own) for own in long_tail_groups(whole).values()] == [8, 8, 7]
