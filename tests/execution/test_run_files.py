"""`--overwrite`, and a run that is begun anew, delete what a run has written in this folder, and no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from small_job import SMALL
from suture.cli.app import app
from suture.core.errors import ConfigError
from suture.execution import run as running
from suture.execution.job import with_settings
from suture.execution.run import MADE, files_of_run, run_job

JOB = with_settings(SMALL, ["rounds=1"])


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mark", [None, "{}", '{"inode": 1}', '{"inode": null}', "[", '{"inode": "x"}'])
@pytest.mark.parametrize("planted", ["run.json", ".preparing"])
def test_files_beside_planted_ones_stay(planted: str, mark: str | None, tmp_path: Path) -> None:
    """A folder from elsewhere, in which only the marks are those of a run."""
    out = tmp_path / "thesis"
    for name in ("model/model.safetensors", "sites/a/labels.csv", "history.jsonl", "thesis.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / planted).write_text(json.dumps({"job": JOB.name, "status": "finished", "rounds": 1}))
    if mark is not None:
        (out / MADE).write_text(mark)
    before = content(out)
    for overwrite in (True, False):
        with pytest.raises(ConfigError, match=r"no run was started in it|choose another --out"):
            run_job(JOB, out=out, overwrite=overwrite)
        assert content(out) == before


@pytest.mark.complete
def test_a_copy_of_a_run_is_not_deleted(tmp_path: Path) -> None:
    out = run_job(JOB, out=tmp_path / "r")
    copy = Path(shutil.copytree(out, tmp_path / "copy" / "r"))
    before = content(copy)
    with pytest.raises(ConfigError, match="its files were copied"):
        run_job(JOB, out=copy, overwrite=True)
    assert content(copy) == before
    assert run_job(JOB, out=out.rename(tmp_path / "moved"), overwrite=True)


@pytest.mark.complete
def test_what_a_user_has_added_to_a_run_stays_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = run_job(JOB, out=tmp_path / "r")
    own, others = files_of_run(out)
    assert not others, "every file of a run is known as one"
    assert len(own) > 10
    added = ["notes.txt", "model/mine.txt", "sites/mine.csv", "state/round-1.txt", "slides/a/b.txt"]
    for name in added:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    run_job(JOB, out=out, overwrite=True)
    assert all((out / name).read_text() == "mine" for name in added)
    assert f"files that no run wrote, and keeps them: {', '.join(sorted(added))}" in caplog.text


@pytest.mark.complete
@pytest.mark.parametrize(
    "settings",
    [
        ["model.train=head", "model.weights=random"],
        ["method=afl", "model.weights=random"],
        ["transport=int8"],
        ["method=vanilla", "secure_aggregation={}"],
    ],
)
def test_every_file_of_a_run_is_known_as_one(settings: list[str], tmp_path: Path) -> None:
    """A frozen encoder is stored once, AFL's updates and a mask key are kept: `--overwrite` replaces all."""
    out = run_job(with_settings(JOB, settings), out=tmp_path / "r")
    assert files_of_run(out)[1] == []
    own = [path for path in out.rglob("*") if {"state", "cache"} & {*path.parts} and path.is_file()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in own if not path.name.endswith("lock")}
    assert {"ledger.jsonl", "counts.json", "left_out.json"} < modes.keys()
    assert set(modes.values()) == {0o600}, "patients and keys"
    assert {path.stat().st_mode & 0o777 for path in out.glob("sites/*/cache")} == {0o700}


@pytest.mark.complete
@pytest.mark.parametrize("name", ["model", "sites", "state", "sites/extra", "photos"])
def test_a_link_is_not_followed(name: str, tmp_path: Path) -> None:
    out = run_job(JOB, out=tmp_path / "r")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("mine")
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).symlink_to(elsewhere)
    before = content(out)
    with pytest.raises(ConfigError, match=f"contains the link {name}"):
        run_job(JOB, out=out, overwrite=True)
    assert content(out) == before
    assert (elsewhere / "model.safetensors").read_text() == "mine"


@pytest.mark.complete
def test_a_run_that_cannot_be_prepared_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run_job(JOB, out=tmp_path / "r")
    (out / "notes.txt").write_text("mine")
    before = content(out)

    def broken(*_: object) -> None:
        raise ConfigError("no sites")

    monkeypatch.setattr(running, "_begin", broken)
    with pytest.raises(ConfigError, match="no sites"):
        run_job(JOB, out=out, overwrite=True)
    assert content(out) == before
    with pytest.raises(ConfigError, match="no sites"):
        run_job(JOB, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.complete
def test_simulated_sites_replace_no_folder_of_a_user(tmp_path: Path) -> None:
    out = tmp_path / "hospitals"
    (out / "harbor").mkdir(parents=True)
    (out / "harbor" / "suture.toml").write_text("mine")
    words = ["data", "simulate", "demo", "--out", str(out), "--set", "images=20", "--set", "held_out=30"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code
    assert "is not a simulation" in str(done.exception)
    assert content(out) == {"harbor/suture.toml": b"mine"}
    shutil.rmtree(out)
    for _ in range(2):
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user beside that of the run."""
    folder = tmp_path / "elsewhere"
    (folder / "a").mkdir(parents=True)
    for name in ("a/suture.toml", "a/scan.png", "diary.txt"):
        (folder / name).write_text("a line without an end")
    return folder


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *[(name, "diary.txt") for name in (".lock", ".preparing", ".folder.json", "events.jsonl")],
        ("history.jsonl", "diary.txt"),
        *[(name, "") for name in ("sites", "sites/server", "state", "model", ".x.999999.deadbeef.tmp")],
    ],
)  # fmt: skip
def test_a_run_is_not_continued_through_a_link(
    name: str, target: str, elsewhere: Path, tmp_path: Path
) -> None:
    out = run_job(JOB, out=tmp_path / "r")
    path = out / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(elsewhere / target)
    before = content(out) | content(elsewhere)
    for words in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=f"contains the link {name}; remove it"):
            run_job(with_settings(SMALL, ["rounds=2"]), out=out, **words)
        assert content(out) | content(elsewhere) == before


@pytest.mark.parametrize("mark", [".lock", ".preparing", MADE])
def test_a_folder_with_a_mark_that_is_a_link_is_not_begun_in(
    mark: str, elsewhere: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    (out / ".lock").touch()
    (out / mark).unlink(missing_ok=True)
    for target in ("diary.txt", "new.txt"):
        (out / mark).symlink_to(elsewhere / target)
        before = content(elsewhere)
        with pytest.raises(ConfigError, match="contains the link"):
            run_job(JOB, out=out)
        assert content(elsewhere) == before
        (out / mark).unlink()


@pytest.mark.complete
def test_a_run_without_its_mark_is_continued(tmp_path: Path) -> None:
    """As it was before there were marks: only what would be deleted must have been made here."""
    out = run_job(JOB, out=tmp_path / "r")
    (out / MADE).unlink()
    run_job(with_settings(SMALL, ["rounds=2"]), out=out, resume=True)
    assert json.loads((out / "run.json").read_text())["rounds"] == 2


def test_simulated_sites_are_not_written_through_a_link(elsewhere: Path, tmp_path: Path) -> None:
    out = tmp_path / "hospitals"
    words = ["data", "simulate", "demo", "--out", str(out), "--set", "images=20", "--set", "held_out=30"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    site = next(path.parent for path in out.glob("*/suture.toml"))
    shutil.rmtree(site)
    site.symlink_to(elsewhere / "a")
    before = content(elsewhere)
    done = CliRunner().invoke(app, words)
    assert f"contains the link {site.name}" in str(done.exception)
    assert content(elsewhere) == before
