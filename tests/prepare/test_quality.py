"""suture_prepare.quality: all that is wrong, at once."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dicom_files import dicom
from suture.data.config import SiteConfig, load_site_config
from suture.models import ModelSpec
from suture_prepare.quality import Count, Findings, Words, check, render

ROWS = [
    "image,patient,split,Mass,Nodule",
    "0.png,P1,train,1,0",
    "1.png,P1,train,0,",
    "2.png,P2,train,0,0",
    "3.png,P3,validation,1,1",
    "4.png,P4,test,0,1",
    "5.png,P5,,0,0",
]


@pytest.fixture
def config(tmp_path: Path) -> SiteConfig:
    (tmp_path / "images").mkdir()
    for i in range(6):
        Image.new("L", (4, 4), i).save(tmp_path / f"images/{i}.png")
    (tmp_path / "labels.csv").write_text("\n".join(ROWS))
    path = tmp_path / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n')
    return load_site_config(path)


def printed(findings: Findings) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(render(findings))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_counts_by_class_and_split(config: SiteConfig) -> None:
    findings = check(config)
    assert findings.problems == ()
    assert findings.images == {"train": 3, "validation": 1, "test": 1}
    assert findings.patients == {"train": 2, "validation": 1, "test": 1}
    assert findings.counts["Mass"]["train"] == Count(positives=1, negatives=2, unknown=0)
    assert findings.counts["Nodule"]["train"] == Count(positives=0, negatives=2, unknown=1)
    assert findings.empty == ("Nodule",)
    assert any("not used: 1" in text for text in findings.warnings)
    text = printed(findings)
    assert "1 / 2 / 0" in text
    assert "'Nodule' has no positive label" in text
    assert "3 images, 2 patients" in " ".join(text.split())
    assert "1 images" not in text


def test_a_class_that_every_training_image_has_is_named(config: SiteConfig, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("train,0,", "train,1,"))
    warnings = check(config).warnings
    assert "class 'Mass' has no negative label among the training rows" in warnings


def test_split_leak_bad_cell_and_unreadable_image_are_told_together(
    config: SiteConfig, tmp_path: Path
) -> None:
    text = "\n".join(ROWS).replace("P3", "P1").replace("2.png,P2,train,0,0", "2.png,P2,train,0,maybe")
    (tmp_path / "labels.csv").write_text(text)
    (tmp_path / "images/4.png").write_bytes(b"damaged")
    findings = check(config)
    assert len(findings.problems) == 3
    for words in ("column 'Nodule': 'maybe'", "1 patient in two splits", "1 of 5 images cannot be used"):
        assert any(words in problem for problem in findings.problems)
    assert len(findings.unreadable) == 1
    assert "'4.png'" in findings.unreadable[0]
    assert "P1" not in printed(findings)
    assert all(f"problem {problem}" in printed(findings) for problem in findings.problems)


@pytest.mark.usefixtures("config")
def test_a_few_unreadable_images_are_a_warning(tmp_path: Path) -> None:
    toml = tmp_path / "suture.toml"
    toml.write_text(toml.read_text() + "[privacy]\nmax_faults = 0.3\n")
    (tmp_path / "images/4.png").unlink()
    findings = check(load_site_config(toml))
    assert findings.problems == ()
    assert any("1 of 5 images cannot be used" in text for text in findings.warnings)


@pytest.mark.parametrize("lost", ["labels.csv", "images"])
def test_what_cannot_be_read_at_all_is_a_problem(config: SiteConfig, tmp_path: Path, lost: str) -> None:
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    findings = check(config)
    assert len(findings.problems) == 1
    assert lost in findings.problems[0]
    assert lost in printed(findings)


def test_a_label_that_looks_like_another_is_pointed_out(config: SiteConfig, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("\n".join(ROWS).replace("Nodule", "Noduel"))
    assert any("'Noduel' and 'Nodule' look alike" in text for text in check(config).warnings)


def test_a_site_without_training_rows_can_only_evaluate(config: SiteConfig, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("\n".join(ROWS).replace("train", ""))
    findings = check(config)
    assert findings.problems == ()
    assert any("can only evaluate" in text for text in findings.warnings)


@pytest.mark.parametrize(
    ("first", "second", "torn"),
    [("00007", "7", True), ("7.0", "7", True), ("P7", "p7", True), ("7", "07", False), ("70", "7", None)],
)
def test_a_patient_written_in_two_ways_is_pointed_out(
    config: SiteConfig, tmp_path: Path, first: str, second: str, torn: bool | None
) -> None:
    table = tmp_path / "labels.csv"
    text = table.read_text().replace(",P1,", f",{first},")
    table.write_text(text.replace(",P4," if torn else ",P2,", f",{second},"))
    findings = check(config)
    said = [text for text in (*findings.problems, *findings.warnings) if "two spellings" in text]
    assert len(said) == (torn is not None)
    assert all(repr(first) in text and repr(second) in text for text in said)
    assert any("two spellings" in text for text in findings.problems) == bool(torn)


def test_documents_are_counted_with_their_lengths(tmp_path: Path) -> None:
    rows = [f"{i},P{i},{'train' if i else 'test'},{'no mass ' * i + '.'},{i % 2}" for i in range(11)]
    (tmp_path / "reports.csv").write_text("\n".join(["image,patient,split,report,Mass", *rows]))
    path = tmp_path / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\ntable = "reports.csv"\ntext_column = "report"\n')
    findings = check(load_site_config(path))
    assert findings.problems == ()
    assert findings.images == {"train": 10, "validation": 0, "test": 1}
    assert findings.words == Words(mean=11.0, p95=20, most=21, known=1.0)
    text = printed(findings)
    assert "10 documents" in text
    assert "patients" not in text
    assert "words of a document: 11.0 on average, 95 % have at most 20, the longest 21" in text
    assert "clinical knows 100.0% of them" in text


def of_texts(folder: Path, texts: list[str], split: list[str], labels: list[int]) -> SiteConfig:
    rows = [["id", "split", "report", "Mass"], *zip(range(9), split, texts, labels, strict=False)]
    with (folder / "reports.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    path = folder / "suture.toml"
    columns = 'text_column = "report"\nimage_column = "id"\npatient_column = "id"\n'
    path.write_text(f'[data]\ndataset = "hospital"\ntable = "reports.csv"\n{columns}')
    return load_site_config(path)


@pytest.mark.parametrize(
    ("texts", "spec", "known", "unread"),
    [
        (["قلب طبيعي, رئة, كبد", "heart, large"], None, 2 / 6, ["0"]),
        (["12.5 7/3", "heart large", "患者X线"], None, 3 / 6, ["0", "2"]),
        (["Größe", "Herz"], ModelSpec("lstm", vocabulary=("Herz", "Gr", "e")), 1 / 2, ["0"]),
        (["Größe", "Herz"], ModelSpec("lstm", vocabulary=("Herz", "Gr", "e"), tokeniser="pmfl"), 1.0, []),
        (["心影增大", "肺"], ModelSpec("lstm", vocabulary=("心", "大")), 2 / 5, ["1"]),
        (["HEART", "cœur"], ModelSpec("vectors"), 1 / 2, ["1"]),
        (["heart", "cœur"], ModelSpec("cnn"), 1 / 2, ["1"]),
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
    ("split", "labels", "said"),
    [
        (
            ["train", "train", "test", "test"],
            [1, 0, 1, 0],
            ["1 documents occur in two splits", "'0' and '2'"],
        ),
        (
            ["train", "train", "train", "test"],
            [1, 0, 1, 0],
            ["1 documents occur under two names", "'0' and '2'"],
        ),
        (["train", "train", "train", "test"], [1, 0, 0, 0], ["1 of the documents", "other classes"]),
        (["train", "train", "", "test"], [1, 0, 0, 0], []),
    ],
)
def test_equal_documents_are_told(
    tmp_path: Path, split: list[str], labels: list[int], said: list[str]
) -> None:
    found = check(of_texts(tmp_path, ["no mass", "a mass", "no  mass", "old mass"], split, labels))
    assert found.problems == ()
    warned = [text for text in found.warnings if "documents" in text]
    assert all(words in "".join(warned) for words in said)
    assert bool(warned) == bool(said)
    assert [[case.name for case in group] for group in found.twins] == [["0", "2"]] * bool(said)


def test_modalities_of_dicom_images_are_told(config: SiteConfig, tmp_path: Path) -> None:
    assert not any("DICOM" in text for text in (*check(config).notes, *check(config).warnings))
    rng = np.random.default_rng(0)
    for i, modality in enumerate(["DX"] * 5):
        content = dicom(rng.integers(0, 255, (4, 4), np.uint8), Modality=modality)
        (tmp_path / f"images/{i}.png").write_bytes(content)
    assert "DICOM images are of the modality DX (5)" in check(config).notes
    for i, modality in ((4, "CT"), (3, "")):
        content = dicom(rng.integers(0, 255, (4, 4), np.uint8), Modality=modality)
        (tmp_path / f"images/{i}.png").write_bytes(content)
    found = check(config)
    assert found.problems == ()
    [warning] = (text for text in found.warnings if "DICOM" in text)
    assert warning.startswith("DICOM images of several modalities: DX (3), not stated (1), CT (1); a job")
