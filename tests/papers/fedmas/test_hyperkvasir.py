"""The reader of HyperKvasir: its official tables and folds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from public_tables import at_fault, change, moved, sizes
from suture.core.errors import ConfigError, DataError
from suture.core.labels import canonical
from suture.data.readers import load_table, read_table
from suture.data.table import SPLITS
from suture_papers.fedmas.hyperkvasir import FOLDS, LABELS, TRUTH, HyperKvasirConfig
from world import refused, write_table

# The classes as the folds and as the folders spell them.
SPELLINGS = {
    "barretts": "barretts",
    "short-segment-barretts": "barretts-short-segment",
    "bbps-0-1": "bbps-0-1",
    "bbps-2-3": "bbps-2-3",
    "normal-cecum": "cecum",
    "dyed-lifted-polyps": "dyed-lifted-polyps",
    "dyed-resection-margins": "dyed-resection-margins",
    "oesophagitis-a": "esophagitis-a",
    "oesophagitis-b-d": "esophagitis-b-d",
    "hemorroids": "hemorrhoids",
    "ileum": "ileum",
    "impacted-stool": "impacted-stool",
    "polyp": "polyps",
    "normal-pylorus": "pylorus",
    "retroflex-rectum": "retroflex-rectum",
    "retroflex-stomach": "retroflex-stomach",
    "ulcerative-colitis-grade-0-1": "ulcerative-colitis-grade-0-1",
    "ulcerative-colitis-grade-1": "ulcerative-colitis-grade-1",
    "ulcerative-colitis-grade-1-2": "ulcerative-colitis-grade-1-2",
    "ulcerative-colitis-grade-2": "ulcerative-colitis-grade-2",
    "ulcerative-colitis-grade-2-3": "ulcerative-colitis-grade-2-3",
    "ulcerative-colitis-grade-3": "ulcerative-colitis-grade-3",
    "normal-z-line": "z-line",
}

Row = tuple[str, str, str]

# Image, class and fold: ten images of each class, two in each fold.
ROWS: tuple[Row, ...] = tuple(
    (f"4bf58f1c-8233-41fc-9614-{i:012d}", word, str(i % 10 % 5))
    for i, word in enumerate(word for word in SPELLINGS for _ in range(10))
)


def of_folds(folder: Path, rows: tuple[Row, ...] = ROWS, **settings: Any) -> HyperKvasirConfig:
    lines = [(f"{image}.jpg" if image else "", word, fold) for image, word, fold in rows]
    table = write_table(folder / FOLDS, [["file-name", "class-name", "split-index"], *lines], ";")
    return HyperKvasirConfig(root=folder, table=table, **settings)


def of_truth(folder: Path, rows: tuple[Row, ...] = ROWS, **settings: Any) -> HyperKvasirConfig:
    lines = [(image, "Lower GI", SPELLINGS.get(word, word)) for image, word, _ in rows]
    table = write_table(folder / TRUTH, [["Video file", "Organ", "Finding"], *lines])
    return HyperKvasirConfig(root=folder, table=table, **settings)


def test_the_spellings_of_both_tables_are_one_class() -> None:
    assert {canonical(word) for word in SPELLINGS} == set(LABELS)
    assert all(canonical(fold) == canonical(folder) for fold, folder in SPELLINGS.items())
    assert (len(LABELS), LABELS.label_type) == (23, "multiclass")


def test_both_tables_say_the_same(tmp_path: Path) -> None:
    folds, truth = load_table(of_folds(tmp_path)), load_table(of_truth(tmp_path))
    assert (truth.labels, truth.images, truth.split) == (folds.labels, folds.images, folds.split)
    np.testing.assert_array_equal(truth.y, folds.y)
    assert folds.images[0] == "4bf58f1c-8233-41fc-9614-000000000000.jpg"
    assert folds.patients == folds.images
    assert folds.labels == LABELS
    assert folds.y.sum(axis=1).tolist() == [1] * 230
    assert folds.y[130].argmax() == LABELS.index("Pylorus")


@pytest.mark.parametrize("fold", [0, 4])
def test_one_fold_is_for_testing_and_a_tenth_of_the_others_for_validation(tmp_path: Path, fold: int) -> None:
    table = load_table(of_folds(tmp_path, fold=fold))
    assert [split == "test" for split in table.split] == [row[2] == str(fold) for row in ROWS]
    # Of eight images of a class seven train.
    assert [table.of(part).y.sum(axis=0).tolist() for part in SPLITS] == [[7] * 23, [1] * 23, [2] * 23]
    other = load_table(of_folds(tmp_path, fold=fold, seed=1))
    assert other.split != table.split
    assert [s == "test" for s in other.split] == [s == "test" for s in table.split]


def test_folds_may_be_counted_from_1_or_be_two(tmp_path: Path) -> None:
    shifted = tuple((image, word, str(int(fold) % 2 + 1)) for image, word, fold in ROWS)
    assert sizes(load_table(of_folds(tmp_path, shifted, fold=1)))[2] == 23 * 4
    with refused("fold = 2", FOLDS, "0 to 1", by=ConfigError):
        load_table(of_folds(tmp_path, shifted, fold=2))


def test_images_may_be_divided_instead(tmp_path: Path) -> None:
    table = load_table(of_truth(tmp_path, split="images"))
    assert [table.of(part).y.sum(axis=0).tolist() for part in SPLITS] == [[7] * 23, [1] * 23, [2] * 23]


def test_the_folds_may_lie_elsewhere_and_their_absence_is_named(tmp_path: Path) -> None:
    with refused(tmp_path / FOLDS, "lists", by=DataError):
        load_table(of_truth(tmp_path))
    lists = moved(of_folds(tmp_path).table, tmp_path / "lists")
    assert sizes(load_table(of_truth(tmp_path, lists=lists)))[2] == 46


def test_faults_name_their_rows(tmp_path: Path) -> None:
    """A word of no class, a blank one, an image without a name, one that is there twice, one of no fold."""
    rows = (("a", "poylp", "0"), ("b", "", "0"), *ROWS, ("", "polyp", "1"), ROWS[0])
    config = of_folds(tmp_path, rows, split="images")
    assert at_fault(config) == [f"{FOLDS} row {row}" for row in (2, 3, 234, 235)]
    assert np.isnan(read_table(config).table.y[:2]).all()
    with refused("'poylp'", "'Polyps'", by=DataError):
        load_table(config)
    of_folds(tmp_path, ROWS[1:])
    assert at_fault(of_truth(tmp_path)) == [f"{TRUTH} row 2"]
    assert at_fault(of_folds(tmp_path, ((*ROWS[0][:2], "x"), *ROWS[1:]))) == [f"{FOLDS} row 2"]


def test_a_torn_row_and_another_table_are_told(tmp_path: Path) -> None:
    config = of_folds(tmp_path)
    change(config.table, ";barretts;1", ";barretts")
    with refused(f"{FOLDS} row 3", by=DataError):
        load_table(config)
    write_table(config.table, [["picture", "patient"], ["a.png", 1]])
    with refused(FOLDS, TRUTH, by=DataError):
        load_table(config)
