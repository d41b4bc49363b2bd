"""`suture vocab`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from suture.cli import app
from suture.core.errors import ConfigError, DataError
from suture.data.text import clinical_vocabulary, read_vocabulary


def vocab(*words: object) -> Result:
    return CliRunner().invoke(app, ["vocab", *map(str, words)])


def hospital(folder: Path) -> Path:
    (folder / "reports.csv").write_text(
        "image,patient,split,report,Mass\n1,P1,train,No mass.,0\n2,P2,train,Mass.,1\n3,P3,test,Huge mass.,1\n"
    )
    path = folder / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\ntable = "reports.csv"\ntext_column = "report"\n')
    return path


def test_a_vocabulary_of_a_sites_training_documents(tmp_path: Path) -> None:
    out = tmp_path / "made" / "words.txt"
    done = vocab("--data", hospital(tmp_path), "--out", out)
    assert done.exit_code == 0
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass")
    assert "4 words of 4; they are 100.00% of the 5 tokens of 2 documents" in done.output
    vocab("--data", hospital(tmp_path), "--every", "--out", out)
    assert read_vocabulary(out).words == ("No", "mass", ".", "Mass", "Huge")


def test_a_vocabulary_of_a_file(tmp_path: Path) -> None:
    path, out = tmp_path / "texts.txt", tmp_path / "words.txt"
    path.write_text("b a\n\na c\n")
    done = vocab("--texts", path, "--out", out, "--minimum", "1", "--order", "frequency")
    assert read_vocabulary(out).words == ("a", "b", "c")
    done = vocab("--texts", path, "--out", out, "--minimum", 2)
    assert "1 words of 3; they are 50.00% of the 4 tokens of 2 documents" in done.output


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
    vocab("--data", path, "--every", "--minimum", 4, "--order", "frequency", "--out", out)
    assert read_vocabulary(out) == clinical_vocabulary()
