"""`suture vocab`: the words of a site's documents, or of a file, and whose words are kept out."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.text import clinical_vocabulary, read_vocabulary
from suture.execution.job import load_job
from suture.flare.recipe import export_job
from suture_prepare.actions import check
from world import refused, suture, write_table

PMFL = ("--patients", 1, "--tokeniser", "pmfl")
HEAD = ["image", "patient", "split", "report", "Mass"]


def hospital(folder: Path, *rows: list[object]) -> Path:
    """A site whose reports are these, with image, patient and split."""
    reports = (("train", "No mass."), ("train", "Mass."), ("test", "Huge mass."))
    own = [[i, f"P{i}", split, text, 1] for i, (split, text) in enumerate(reports)]
    write_table(folder / "reports.csv", [HEAD, *(rows or own)])
    path = folder / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\ntable = "reports.csv"\ntext_column = "report"\n')
    return path


def test_a_vocabulary_of_a_sites_training_documents_or_of_a_file(tmp_path: Path) -> None:
    out, texts = tmp_path / "made" / "words.txt", tmp_path / "texts.txt"
    texts.write_text("b a\n\na c\n")
    site = ("--data", hospital(tmp_path), "--out", out, "--patients", 1)
    assert "4 of 4 words" in suture("vocab", *site)
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass")
    suture("vocab", "--every", *site)
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass", "Huge")
    file = ("--texts", texts, "--out", out, "--patients", 1)
    suture("vocab", *file, "--order", "frequency")
    assert read_vocabulary(out).words == ("a", "b", "c")
    said = suture("vocab", *file, "--minimum", 2)
    assert "1 of 3 words; they are 50.00% of the words of 2 documents" in said


@pytest.mark.parametrize("how", ["patients", "names", "texts"])
def test_a_name_in_private_notes_is_no_word(tmp_path: Path, how: str) -> None:
    """By default, a word needs five patients, however often it occurs; without patients, five documents."""
    out, private = tmp_path / "words.txt", tmp_path / "notes.txt"
    notes = ["No mass." if i % 3 else "Mr Kowalski, no mass." for i in range(12)]
    whose = [i % 3 if how == "patients" else i for i in range(12)]
    path = hospital(tmp_path, *([i, f"P{whose[i]}", "train", text, 0] for i, text in enumerate(notes)))
    private.write_text("".join(f"{text}\n" for text in notes))
    words = ("--texts", private) if how == "texts" else ("--data", path)
    if how == "patients":  # of three patients, nothing is said
        with refused(by=ConfigError):
            suture("vocab", *words, "--out", out)
        words = (*words, "--patients", 2)
    said = suture("vocab", *words, "--out", out)
    found = read_vocabulary(out)
    assert {"mass", "."} <= {*found.words}
    assert "Kowalski" not in found.words
    assert found.own is ("every party" in said) is (how != "texts")


def test_a_vocabulary_of_a_sites_own_documents_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = tmp_path / "study"
    suture("vocab", "--data", hospital(study / "a"), "--out", study / "w.txt", "--patients", 1)
    job = study / "job.toml"
    job.write_text('rounds = 1\n[method]\nname = "surgical"\n[model]\nname = "lstm"\nvocabulary = "w.txt"\n')
    for own in (True, False):
        caplog.clear()
        warned = [text for text in check(study).together.warnings if "own documents" in text]
        export_job(load_job(job), tmp_path / f"out{own}")
        assert len(warned) == own == ("own documents" in caplog.text)
        (study / "w.txt").write_text("mass\nNo\n")


def test_what_has_no_documents_makes_no_vocabulary(tmp_path: Path) -> None:
    out, empty, path = tmp_path / "words.txt", tmp_path / "texts.txt", hospital(tmp_path)
    empty.write_text("\n")
    images = tmp_path / "images.toml"
    images.write_text(path.read_text().replace('text_column = "report"', 'root = "."\nlabels = ["Mass"]'))
    for words, by, named in (
        ((), ConfigError, "--data"),
        (("--texts", empty, "--data", path), ConfigError, "--data"),
        (("--texts", empty), DataError, "document"),
        (("--texts", tmp_path / "nowhere"), DataError, "nowhere"),
        (("--data", images), DataError, "images"),
    ):
        with refused(named, by=by):
            suture("vocab", *words, "--out", out)
    assert not out.exists()


@pytest.mark.complete
@pytest.mark.data
def test_the_vocabulary_of_the_package_is_made_again(data_root: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "suture.toml", tmp_path / "clinical_words.txt"
    path.write_text(f'[data]\ndataset = "mtsamples"\ntable = "{data_root}/mtsamples/mtsamples.csv.gz"\n')
    words = ("--every", "--minimum", 4, "--order", "frequency", *PMFL)
    suture("vocab", "--data", path, "--out", out, *words)
    assert read_vocabulary(out) == clinical_vocabulary()
