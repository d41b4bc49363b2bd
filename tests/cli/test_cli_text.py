"""`suture vocab`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from suture.cli import app
from suture.core.errors import ConfigError, DataError
from suture.data.text import clinical_vocabulary, read_vocabulary
from suture.execution.job import load_job

PMFL = ("--patients", 1, "--tokeniser", "pmfl")


def vocab(*words: object) -> Result:
    return CliRunner().invoke(app, ["vocab", *map(str, words)])


def hospital(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reports.csv").write_text(
        "image,patient,split,report,Mass\n1,P1,train,No mass.,0\n2,P2,train,Mass.,1\n3,P3,test,Huge mass.,1\n"
    )
    path = folder / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\ntable = "reports.csv"\ntext_column = "report"\n')
    return path


def test_a_vocabulary_of_a_sites_training_documents(tmp_path: Path) -> None:
    out = tmp_path / "made" / "words.txt"
    done = vocab("--data", hospital(tmp_path), "--out", out, "--patients", 1)
    assert done.exit_code == 0
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass")
    assert "4 of 4 words; they are 100.00% of the words of 2 documents" in done.output
    vocab("--data", hospital(tmp_path), "--every", "--out", out, "--patients", 1)
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass", "Huge")


@pytest.mark.parametrize("how", ["patients", "names", "texts"])
def test_a_name_in_private_notes_is_no_word(tmp_path: Path, how: str) -> None:
    """By default, a word needs five patients, however often it occurs; without patients, five documents."""
    out, path = tmp_path / "words.txt", hospital(tmp_path)
    notes = [
        ("No mass." if i % 3 else "Mr Kowalski, no mass.", i % 3 if how == "patients" else i)
        for i in range(12)
    ]
    rows = [f'{i},P{who},train,"{text}",0\n' for i, (text, who) in enumerate(notes)]
    (tmp_path / "reports.csv").write_text("".join(["image,patient,split,report,Mass\n", *rows]))
    if how == "patients":  # of three patients, nothing is said
        assert isinstance(vocab("--data", path, "--out", out).exception, ConfigError)
        done = vocab("--data", path, "--out", out, "--patients", 2)
    elif how == "names":
        done = vocab("--data", path, "--out", out)
    else:
        (tmp_path / "notes.txt").write_text("".join(f"{text}\n" for text, _ in notes))
        done = vocab("--texts", tmp_path / "notes.txt", "--out", out)
    assert {"mass", "."} <= {*read_vocabulary(out).words}
    assert "Kowalski" not in read_vocabulary(out).words
    assert read_vocabulary(out).own is ("every party" in done.output) is (how != "texts")


def test_a_vocabulary_of_a_sites_own_documents_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from suture.flare.recipe import export_job
    from suture_prepare.actions import check

    vocab(
        "--data", hospital(tmp_path / "study" / "a"), "--out", tmp_path / "study" / "w.txt", "--patients", 1
    )
    job = tmp_path / "study" / "job.toml"
    job.write_text('rounds = 1\n[method]\nname = "surgical"\n[model]\nname = "lstm"\nvocabulary = "w.txt"\n')
    for own in (True, False):
        caplog.clear()
        warned = [text for text in check(tmp_path / "study").together.warnings if "own documents" in text]
        export_job(load_job(job), tmp_path / f"out{own}")
        assert len(warned) == own
        assert ("own documents" in caplog.text) == own
        (tmp_path / "study" / "w.txt").write_text("mass\nNo\n")


def test_a_vocabulary_of_a_file(tmp_path: Path) -> None:
    path, out = tmp_path / "texts.txt", tmp_path / "words.txt"
    path.write_text("b a\n\na c\n")
    done = vocab("--texts", path, "--out", out, "--patients", 1, "--order", "frequency")
    assert read_vocabulary(out).words == ("a", "b", "c")
    done = vocab("--texts", path, "--out", out, "--minimum", 2, "--patients", 1)
    assert "1 of 3 words; they are 50.00% of the words of 2 documents" in done.output


def test_what_cannot_be_done_is_one_clear_error(tmp_path: Path) -> None:
    out, empty = tmp_path / "words.txt", tmp_path / "texts.txt"
    empty.write_text("\n")
    wrong = [
        ((), ConfigError, "--data or --texts"),
        (("--texts", empty, "--data", hospital(tmp_path)), ConfigError, "either --data or --texts"),
        (("--texts", empty), DataError, "no document"),
        (("--texts", tmp_path / "nowhere"), DataError, "nowhere cannot be read"),
    ]
    for words, kind, says in wrong:
        error = vocab(*words, "--out", out).exception
        assert isinstance(error, kind)
        assert says in str(error)
    assert not out.exists()


def test_images_make_no_vocabulary(tmp_path: Path) -> None:
    path = hospital(tmp_path)
    path.write_text(path.read_text().replace('text_column = "report"', 'root = "."\nlabels = ["Mass"]'))
    error = vocab("--data", path, "--out", tmp_path / "words.txt").exception
    assert isinstance(error, DataError)
    assert "data are images" in str(error)


@pytest.mark.complete
@pytest.mark.data
def test_the_vocabulary_of_the_package_is_made_again(data_root: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "suture.toml", tmp_path / "clinical_words.txt"
    path.write_text(f'[data]\ndataset = "mtsamples"\ntable = "{data_root}/mtsamples/mtsamples.csv.gz"\n')
    vocab("--data", path, "--every", "--minimum", 4, "--order", "frequency", "--out", out, *PMFL)
    assert read_vocabulary(out) == clinical_vocabulary()
