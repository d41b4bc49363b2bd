"""suture_results.trained_images: figures of images that the run was trained on are called too good."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import suture
from small_hospitals import small_study
from suture.cli import app
from suture.data.config import SiteConfig, StorageConfig, load_site_config, parse_data, write_site_config
from suture.data.readers import read_table
from suture.data.table import Table
from suture_results.trained_images import remark


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_study(tmp_path_factory.mktemp("trained") / "study", images=60)


@pytest.fixture(scope="module")
def run(study: Path) -> Path:
    return suture.run(study, out=study.parent / "run", rounds=1).folder


@pytest.fixture(scope="module")
def gamma(study: Path) -> Table:
    return read_table(load_site_config(study / "gamma" / "suture.toml").data).table


def labelled(gamma: Table, folder: Path, splits: bool = False) -> Path:
    """A table of the images of gamma, as they lie in a folder."""
    path = folder.parent / f"{folder.name}.csv"
    rows = []
    for name, split, y in zip(gamma.images, gamma.split, gamma.y, strict=True):
        values = ["" if np.isnan(v) else int(v) for v in y]
        rows.append([str(folder / name), name, *([split] if splits else []), *values])
    with path.open("w", newline="") as file:
        header = ["image", "patient", *(["split"] if splits else []), *gamma.labels]
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def copied(gamma: Table, tmp_path: Path) -> Path:
    shutil.copytree(gamma.root, tmp_path / "copies")
    return tmp_path / "copies"


@pytest.mark.complete
def test_a_table_of_the_hospital_itself_is_counted_and_the_remedy_measures_new_images(
    run: Path, gamma: Table
) -> None:
    trained = gamma.split.count("train")
    assert 0 < trained < 60
    done = suture.evaluate(run, labelled(gamma, gamma.root))
    assert f"trained on {trained} of these 60 images" in done.remark
    words = shlex.split(done.remark.rpartition(": ")[2])[1:]
    assert words[-2:] == ["--split", "test"]
    new = suture.evaluate(words[1], words[2], "test")
    assert (len(new.patients), new.remark) == (gamma.split.count("test"), "")


@pytest.mark.complete
def test_copies_are_known_by_their_bytes_and_other_images_of_the_same_names_are_not(
    run: Path, gamma: Table, copied: Path
) -> None:
    table = labelled(gamma, copied)
    assert f"trained on {gamma.split.count('train')} of these 60" in suture.evaluate(run, table).remark
    first = next(n for n, split in zip(gamma.images, gamma.split, strict=True) if split == "train")
    others = [name for name, split in zip(gamma.images, gamma.split, strict=True) if split != "train"]
    for name in gamma.images:
        if name != first:  # the name of an image of the training, and the bytes of another
            shutil.copyfile(gamma.root / others[0], copied / name)
    assert "trained on 1 of these 60" in suture.evaluate(run, table).remark


def test_only_the_images_that_are_measured_count(run: Path, gamma: Table, copied: Path) -> None:
    table = labelled(gamma, copied, splits=True)
    assert suture.evaluate(run, table).remark == ""
    n = gamma.split.count("train")
    assert f"trained on {n} of these {n} images" in suture.evaluate(run, table, "train").remark


def test_where_the_images_of_the_training_are_not_here_a_table_without_splits_says_so(
    run: Path, gamma: Table, copied: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    whole = suture.evaluate(tmp_path / "model", labelled(gamma, copied))
    assert "cannot be told here" in whole.remark
    assert "--split" in whole.remark
    assert suture.evaluate(tmp_path / "model", labelled(gamma, copied), "all").remark == ""
    assert suture.evaluate(tmp_path / "model", labelled(gamma, copied, splits=True)).remark == ""


def test_the_terminal_the_file_and_the_other_commands_say_it(
    run: Path, gamma: Table, copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, out = labelled(gamma, copied), tmp_path / "figures.json"
    assert CliRunner().invoke(app, ["evaluate", str(run), str(table), "-o", str(out)]).exit_code == 0
    assert json.loads(out.read_text())["remark"] == caplog.messages[0]
    caplog.clear()
    suture.compare(run, run, table)
    assert [message.partition(", so")[0] for message in caplog.messages] == [
        f"the model was trained on {gamma.split.count('train')} of these 60 images"
    ]
    caplog.clear()
    suture.decide(run, table)
    assert len(caplog.messages) == 1


def test_documents_are_known_by_name_and_text(tmp_path: Path) -> None:
    def config(path: Path, last: str) -> SiteConfig:
        path.parent.mkdir(parents=True)
        rows = [[f"d{i}", f"p{i}", "train" if i < 6 else "test", f"report {i}", i % 2] for i in range(8)]
        rows[0][3] = last
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["name", "patient", "split", "text", "Mass"], *rows])
        columns = {"image_column": "name", "patient_column": "patient", "split_column": "split"}
        data = {"dataset": "hospital", "table": str(path), "text_column": "text", **columns}
        return SiteConfig(data=parse_data(data, "t"), storage=StorageConfig(state=tmp_path, cache=tmp_path))

    run = tmp_path / "run"
    own = config(run / "sites" / "a" / "t.csv", "report 0")
    write_site_config(run / "sites" / "a" / "suture.toml", own)
    (run / "run.json").write_text("{}")
    assert "trained on 6 of these 8 documents" in remark(run / "model", own, "all", divided=True)
    other = config(tmp_path / "other" / "t.csv", "another report")
    assert "trained on 5 of these 8 documents" in remark(run / "model", other, "all", divided=True)
    assert remark(run / "model", other, "test", divided=True) == ""
