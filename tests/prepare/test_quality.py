"""suture_prepare.quality: all that is wrong with a site, at once."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dicom_files import dicom
from suture.data.config import SiteConfig
from suture.models import ModelSpec
from suture_prepare.quality import Count, Findings, Words, check, render
from world import site_config, write_image, write_table

ROWS = """\
image,patient,split,Mass,Nodule
0.png,P1,train,1,0
1.png,P1,train,0,
2.png,P2,train,0,0
3.png,P3,validation,1,1
4.png,P4,test,0,1
5.png,P5,,0,0"""

DATA = {"dataset": "hospital", "root": "images", "table": "labels.csv"}


@pytest.fixture
def config(tmp_path: Path) -> SiteConfig:
    for i in range(6):
        write_image(tmp_path / f"images/{i}.png", i, (4, 4))
    (tmp_path / "labels.csv").write_text(ROWS)
    return site_config(tmp_path, data=DATA)


def printed(findings: Findings) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(render(findings))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_counts_by_class_and_split(config: SiteConfig) -> None:
    findings = check(config)
    assert findings.problems == ()
    assert findings.images == {"train": 3, "validation": 1, "test": 1}
    assert findings.patients == {"train": 2, "validation": 1, "test": 1}
    assert findings.counts["Mass"]["train"] == Count(positives=1, negatives=2, unknown=0)
    assert findings.counts["Nodule"]["train"] == Count(positives=0, negatives=2, unknown=1)
    assert findings.empty == ("Nodule",)
    assert any("not used: 1" in text for text in findings.warnings)
    assert not any("DICOM" in text for text in (*findings.notes, *findings.warnings))
    text = printed(findings)
    assert all(fact in text for fact in ("1 / 2 / 0", "'Nodule'", "3 images, 2 patients"))
    assert "1 images" not in text


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("train,0,", "train,1,", "'Mass' has no negative"),
        ("Nodule", "Noduel", "'Noduel' and 'Nodule'"),
        ("train", "", "can only evaluate"),
    ],
)
def test_what_a_person_should_look_at_is_a_warning(
    config: SiteConfig, tmp_path: Path, old: str, new: str, named: str
) -> None:
    (tmp_path / "labels.csv").write_text(ROWS.replace(old, new))
    findings = check(config)
    assert findings.problems == ()
    assert any(named in text for text in findings.warnings)


def test_split_leak_bad_cell_and_unreadable_image_are_told_together(
    config: SiteConfig, tmp_path: Path
) -> None:
    text = ROWS.replace("P3", "P1").replace("2.png,P2,train,0,0", "2.png,P2,train,0,maybe")
    (tmp_path / "labels.csv").write_text(text)
    (tmp_path / "images/4.png").write_bytes(b"damaged")
    findings = check(config)
    assert len(findings.problems) == 3
    for named in ("column 'Nodule': 'maybe'", "1 patient in two splits", "1 of 5 images"):
        assert any(named in problem for problem in findings.problems)
    (unreadable,) = findings.unreadable
    assert "'4.png'" in unreadable
    assert "P1" not in printed(findings)
    assert all(" ".join(problem.split()) in printed(findings) for problem in findings.problems)
    (tmp_path / "labels.csv").write_text(ROWS)
    tolerant = check(site_config(tmp_path, data=DATA, privacy={"max_faults": 0.3}))
    assert tolerant.problems == ()
    assert any("1 of 5 images" in text for text in tolerant.warnings)


def test_an_image_in_two_splits_is_a_problem(config: SiteConfig, tmp_path: Path) -> None:
    for twin, of in (("1.png", "2.png"), ("4.png", "0.png")):
        shutil.copy(tmp_path / "images" / of, tmp_path / "images" / twin)
    findings = check(config)
    (problem,) = findings.problems
    assert "1 image" in problem
    assert "'0.png' and '4.png'" in problem
    assert any("'1.png' and '2.png'" in text for text in findings.warnings)


@pytest.mark.parametrize("lost", ["labels.csv", "images"])
def test_what_cannot_be_read_at_all_is_a_problem(config: SiteConfig, tmp_path: Path, lost: str) -> None:
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    findings = check(config)
    (problem,) = findings.problems
    assert lost in problem
    assert lost in printed(findings)


@pytest.mark.parametrize(
    ("first", "second", "torn"),
    [("00007", "7", True), ("7.0", "7", True), ("P7", "p7", True), ("7", "07", False), ("70", "7", None)],
)
def test_a_patient_written_in_two_ways_is_pointed_out(
    config: SiteConfig, tmp_path: Path, first: str, second: str, torn: bool | None
) -> None:
    text = ROWS.replace(",P1,", f",{first},").replace(",P4," if torn else ",P2,", f",{second},")
    (tmp_path / "labels.csv").write_text(text)
    findings = check(config)
    named = [
        [repr(first) in text and repr(second) in text for text in of]
        for of in (findings.problems, findings.warnings)
    ]
    assert [any(of) for of in named] == [torn is True, torn is False]


def test_modalities_of_dicom_images_are_told(config: SiteConfig, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def write(i: int, modality: str) -> None:
        content = dicom(rng.integers(0, 255, (4, 4), np.uint8), Modality=modality)
        (tmp_path / f"images/{i}.png").write_bytes(content)

    for i in range(5):
        write(i, "DX")
    assert any("DX (5)" in note for note in check(config).notes)
    write(4, "CT")
    write(3, "")
    found = check(config)
    assert found.problems == ()
    [warning] = (text for text in found.warnings if "DICOM" in text)
    assert "DX (3), not stated (1), CT (1)" in warning


# Documents


def of_texts(folder: Path, texts: list[str], split: list[str], labels: list[int]) -> SiteConfig:
    rows = [["id", "split", "report", "Mass"], *zip(range(99), split, texts, labels, strict=False)]
    write_table(folder / "reports.csv", rows)
    columns = {"text_column": "report", "image_column": "id", "patient_column": "id"}
    return site_config(folder, data={"dataset": "hospital", "table": "reports.csv"} | columns)


def test_documents_are_counted_with_their_lengths(tmp_path: Path) -> None:
    texts, split = ["no mass " * i + "." for i in range(11)], ["test", *["train"] * 10]
    findings = check(of_texts(tmp_path, texts, split, [i % 2 for i in range(11)]))
    assert findings.problems == ()
    assert findings.images == {"train": 10, "validation": 0, "test": 1}
    assert findings.words == Words(mean=11.0, p95=20, most=21, known=1.0)
    text = printed(findings)
    assert all(fact in text for fact in ("10 documents", "11.0", "at most 20", "longest 21", "100.0%"))
    assert "patients" not in text


@pytest.mark.parametrize(
    ("texts", "spec", "known", "unread"),
    [
        (["قلب طبيعي, رئة, كبد", "heart, large"], None, 2 / 6, ["0"]),
        (["12.5 7/3", "heart large", "患者X线"], None, 3 / 6, ["0", "2"]),
        (["Größe", "Herz"], ModelSpec("lstm", vocabulary=("Herz", "Gr", "e")), 1 / 2, ["0"]),
        (["Größe", "Herz"], ModelSpec("lstm", vocabulary=("Herz", "Gr", "e"), tokeniser="pmfl"), 1.0, []),
        (["心影增大", "肺"], ModelSpec("lstm", vocabulary=("心", "大")), 2 / 5, ["1"]),
        (["HEART", "cœur"], ModelSpec("vectors"), 1 / 2, ["1"]),
        (["heart", "cœur"], ModelSpec("lstm", vocabulary="corpus"), 1 / 2, ["1"]),
    ],
)
def test_known_words_are_those_of_the_model_and_no_marks(
    tmp_path: Path, texts: list[str], spec: ModelSpec | None, known: float, unread: list[str]
) -> None:
    found = check(of_texts(tmp_path, texts, ["train"] * 3, [1, 0, 1]), spec)
    assert found.words is not None
    assert found.words.known == pytest.approx(known)
    said = [text for text in found.warnings if "without a word" in text]
    assert [repr(unread[0]) in text for text in said] == [True] * bool(unread)


@pytest.mark.parametrize(
    ("split", "labels", "named"),
    [
        (["train", "train", "test", "test"], [1, 0, 1, 0], ["two splits", "'0' and '2'"]),
        (["train", "train", "train", "test"], [1, 0, 1, 0], ["two names", "'0' and '2'"]),
        (["train", "train", "train", "test"], [1, 0, 0, 0], ["1 of the documents", "classes"]),
        (["train", "train", "", "test"], [1, 0, 0, 0], []),
    ],
)
def test_equal_documents_are_told(
    tmp_path: Path, split: list[str], labels: list[int], named: list[str]
) -> None:
    found = check(of_texts(tmp_path, ["no mass", "a mass", "no  mass", "old mass"], split, labels))
    assert found.problems == ()
    warned = "".join(text for text in found.warnings if "documents" in text)
    assert all(name in warned for name in named)
    assert bool(warned) == bool(named)
    assert [[case.name for case in group] for group in found.twins] == [["0", "2"]] * bool(named)
