"""suture_papers.fedmas.hyperkvasir: the official tables and folds of HyperKvasir."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError
from suture.core.labels import canonical
from suture.data.config import load_site_config
from suture.data.readers import load_table, read_table
from suture_papers.fedmas.hyperkvasir import FOLDS, LABELS, TRUTH, HyperKvasirConfig

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
    (f"4bf58f1c-8233-41fc-9614-{i:012d}", word, str(n % 5))
    for i, (word, n) in enumerate((word, n) for word in SPELLINGS for n in range(10))
)


def write_folds(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    lines = ["file-name;class-name;split-index", *(f"{i}.jpg;{word};{fold}" for i, word, fold in rows)]
    (folder / FOLDS).write_text("\n".join(lines) + "\n")
    return folder / FOLDS


def write_truth(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    lines = ["Video file,Organ,Finding,Classification"]
    lines += [f"{i},Lower GI,{SPELLINGS.get(word, word)},anatomical-landmarks" for i, word, _ in rows]
    (folder / TRUTH).write_text("\n".join(lines) + "\n")
    return folder / TRUTH


def config(path: Path, **more: Any) -> HyperKvasirConfig:
    return HyperKvasirConfig(root=path.parent, table=path, **more)


def test_the_spellings_of_both_tables_are_one_class() -> None:
    assert {canonical(word) for word in SPELLINGS} == set(LABELS)
    assert all(canonical(fold) == canonical(folder) for fold, folder in SPELLINGS.items())
    assert (len(LABELS), LABELS.label_type) == (23, "multiclass")


def test_both_tables_say_the_same(tmp_path: Path) -> None:
    folds = load_table(config(write_folds(tmp_path)))
    truth = load_table(config(write_truth(tmp_path)))
    assert (truth.labels, truth.images, truth.split) == (folds.labels, folds.images, folds.split)
    np.testing.assert_array_equal(truth.y, folds.y)
    assert folds.images[0] == "4bf58f1c-8233-41fc-9614-000000000000.jpg"
    assert folds.patients == folds.images
    assert folds.labels == LABELS
    assert folds.y.sum(axis=1).tolist() == [1] * 230
    assert folds.y[130].argmax() == LABELS.index("Pylorus")


@pytest.mark.parametrize("fold", range(5))
def test_one_fold_is_for_testing_and_a_tenth_of_the_others_for_validation(tmp_path: Path, fold: int) -> None:
    table = load_table(config(write_folds(tmp_path), fold=fold))
    for row, split in zip(ROWS, table.split, strict=True):
        assert (split == "test") == (row[2] == str(fold))
    # Of eight images of a class seven train.
    for name, n in (("train", 7), ("validation", 1), ("test", 2)):
        assert (table.y[np.array(table.split) == name].sum(axis=0) == n).all()
    other = load_table(config(write_folds(tmp_path), fold=fold, seed=1))
    assert other.split != table.split
    assert [s == "test" for s in other.split] == [s == "test" for s in table.split]


def test_folds_may_be_counted_from_1_or_be_two(tmp_path: Path) -> None:
    shifted = tuple((image, word, str(int(fold) % 2 + 1)) for image, word, fold in ROWS)
    path = write_folds(tmp_path, shifted)
    assert load_table(config(path, fold=1)).split.count("test") == 23 * 4
    with pytest.raises(ConfigError, match=r"\[data\] fold = 2: .*5_fold_split.csv has 2 folds; .*0 to 1"):
        load_table(config(path, fold=2))


def test_a_class_of_three_images_trains(tmp_path: Path) -> None:
    few = tuple(row for i, row in enumerate(ROWS) if row[1] != "ileum" or i % 10 < 3)
    table = load_table(config(write_folds(tmp_path, few)))
    ileum = table.y[:, LABELS.index("Ileum")] == 1
    assert Counter(np.array(table.split)[ileum].tolist()) == {"test": 1, "train": 2}


def test_images_may_be_divided_instead(tmp_path: Path) -> None:
    table = load_table(config(write_truth(tmp_path), split="images"))
    for name, n in (("train", 7), ("validation", 1), ("test", 2)):
        assert (table.y[np.array(table.split) == name].sum(axis=0) == n).all()
    with pytest.raises(ValueError, match=r"fold has no effect with split = .images.; remove it"):
        config(tmp_path / TRUTH, split="images", fold=1)
    toml = tmp_path / "suture.toml"
    toml.write_text('[data]\ndataset = "nih"\nroot = "."\ntable = "a.csv"\nfold = 3\n')
    with pytest.raises(ConfigError, match="fold is a key of dataset 'hyperkvasir', not of 'nih'"):
        load_site_config(toml)


def test_the_folds_may_lie_elsewhere_and_their_absence_is_named(tmp_path: Path) -> None:
    path = write_truth(tmp_path)
    with pytest.raises(DataError) as caught:
        load_table(config(path))
    for words in (f"{tmp_path / FOLDS} is missing", "[data] lists", "take it as table", 'split = "images"'):
        assert words in str(caught.value)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / f"{FOLDS}.gz").write_bytes(gzip.compress(write_folds(tmp_path).read_bytes()))
    (tmp_path / FOLDS).unlink()
    assert load_table(config(path, lists=lists)).split.count("test") == 46


def test_an_image_of_no_fold_is_a_fault(tmp_path: Path) -> None:
    write_folds(tmp_path, ROWS[1:])
    faults = read_table(config(write_truth(tmp_path))).faults
    assert faults == (
        (
            f"{tmp_path / TRUTH} row 2: not in any fold of {tmp_path / FOLDS}; use the official file or "
            '[data] split = "images"'
        ),
    )
    path = write_folds(tmp_path, ((*ROWS[0][:2], "x"), *ROWS[1:]))
    assert "row 2: not in any fold of" in read_table(config(path)).faults[0]


def test_an_unknown_word_a_blank_and_a_repeated_image_are_faults(tmp_path: Path) -> None:
    rows = (
        ("a", "poylp", "0"),
        ("b", "", "0"),
        *ROWS,
        ("", "polyp", "1"),
        ROWS[0],
    )
    (tmp_path / FOLDS).write_text(write_folds(tmp_path, rows).read_text().replace("\n.jpg;", "\n;"))
    reading = read_table(config(tmp_path / FOLDS, split="images"))
    assert [fault.partition(FOLDS)[2] for fault in reading.faults[:2]] == [
        " row 2: unknown class 'poylp'; did you mean 'Polyps'?",
        " row 3: unknown class ''; known: " + ", ".join(sorted(LABELS)),
    ]
    assert reading.faults[2].partition(FOLDS)[2].startswith(" row 234: the image name")
    assert reading.faults[3].partition(FOLDS)[2].startswith(" row 235: a repeated image")
    assert np.isnan(reading.table.y[:2]).all()


def test_a_torn_row_and_another_table_are_told(tmp_path: Path) -> None:
    path = write_folds(tmp_path)
    path.write_text(path.read_text().replace(";barretts;1", ";barretts", 1))
    with pytest.raises(DataError, match="row 3 has 2 cells where the header has 3"):
        load_table(config(path))
    path.write_text("picture,patient\na.png,1\n")
    with pytest.raises(DataError, match=f"the columns neither of {FOLDS} nor of {TRUTH}"):
        load_table(config(path))
    path.write_text("file-name;class-name\na.jpg;polyp\n")
    with pytest.raises(DataError, match=r"column 'split-index'|is missing"):
        load_table(config(path))


def test_a_site_may_annotate_some_of_the_classes(tmp_path: Path) -> None:
    table = load_table(config(write_folds(tmp_path), labels=("polyp", "Z-line")))
    assert table.labels.names == ("Polyps", "Z-line")
    assert table.y.sum(axis=0).tolist() == [10, 10]
    assert len(table) == 230


@pytest.mark.data
def test_the_real_folds_are_read(data_root: Path) -> None:
    folder = data_root / "hyperkvasir_splits"
    table = load_table(config(folder / f"{FOLDS}.gz", fold=4))
    counts = dict(zip(LABELS, table.y.sum(axis=0).astype(int).tolist(), strict=True))
    assert (len(table), max(counts.values()), min(counts.values())) == (10_662, 1148, 6)
    assert (counts["BBPS 2-3"], counts["Hemorrhoids"], counts["Ileum"]) == (1148, 6, 9)
    assert Counter(table.split) == {"train": 7640, "validation": 848, "test": 2174}
    # Every class is in every test fold and in training.
    assert all((table.of(part).y.sum(axis=0) > 0).all() for part in ("train", "test"))
    two = load_table(config(folder / "2_fold_split.csv.gz", fold=1))
    assert Counter(two.split)["test"] == 5338
    assert set(two.images) == set(table.images)
