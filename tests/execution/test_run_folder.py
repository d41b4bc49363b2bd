"""The folder of a run: what is replaced, continued, kept and refused there, wherever a process is killed."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_job import SMALL
from suture.core import VERSION
from suture.core.errors import ConfigError
from suture.core.files import is_temporary
from suture.execution.job import with_settings
from suture.execution.run import (
    LOCK,
    MADE,
    PREPARING,
    REPLACED,
    begin_here,
    check_folder,
    files_of_run,
    preparing,
    run_job,
)
from world import DAMAGE, refused, suture

JOB = replace(SMALL, rounds=3)


def facts(status: str, **more: object) -> dict[str, str]:
    return {"run.json": json.dumps({"job": JOB.name, "rounds": 2, "status": status} | more)}


OLD = facts("finished") | {
    name: name
    for name in ("history.jsonl", "model/model.json", "sites/a/images/1.png", "state/best-000002.safetensors")
}
NEW = facts("running") | {"sites/b/images/1.png": "new"}
MINE = ("notes.txt", "model/mine.txt", "sites/mine.csv", "state/round.txt", "slides/a/b.txt")
ADDED = dict.fromkeys(MINE, "mine")
HOW = ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True})


def content(out: Path) -> dict[str, str]:
    """What is in a folder, but for the marks of a run."""
    names = (path.relative_to(out) for path in out.rglob("*") if path.is_file())
    return {name.as_posix(): (out / name).read_text() for name in names if name.name not in (LOCK, MADE)}


def write(out: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    return out


def begun(out: Path) -> Path:
    """A folder in which a run was begun and described."""
    out.mkdir(exist_ok=True)
    begin_here(out)
    (out / PREPARING).unlink()
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished run, with files that a user has added."""
    return write(begun(tmp_path / "r"), OLD | ADDED)


def replace_it(out: Path, error: BaseException | None = None) -> None:
    with preparing(out, JOB, resume=False, overwrite=True):
        assert not (out / "run.json").exists()
        write(out, NEW)
        if error:
            raise error


def test_a_run_is_replaced_and_what_a_user_has_added_stays_and_is_named(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_it(out)
    assert content(out) == NEW | ADDED
    assert ", ".join(sorted(ADDED)) in caplog.text


@pytest.mark.parametrize("error", [ConfigError("a typo"), KeyboardInterrupt()])
def test_what_fails_before_it_is_described_leaves_what_was_there(
    error: BaseException, out: Path, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        replace_it(out, error)
    assert content(out) == OLD | ADDED
    (tmp_path / "new").mkdir()
    with pytest.raises(type(error)):
        replace_it(tmp_path / "new", error)
    assert not (tmp_path / "new").exists()


class Killed(BaseException):
    """In place of a signal."""


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """From the given change of a file on, nothing is changed any more."""
    done: list[str] = []

    def guarded(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            done.append(name)
            if len(done) >= number:
                raise Killed
            return change(*given, **named)

        return call

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "unlink", "rmdir"):
            patched.setattr(Path, name, guarded(name, getattr(Path, name)))
        patched.setattr(shutil, "rmtree", guarded("rmtree", shutil.rmtree))
        yield done


@pytest.mark.complete
@pytest.mark.parametrize("fails", [False, True])
def test_a_kill_at_any_place_loses_nothing(
    fails: bool, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = set()
    for number in range(1, 100):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = begun(shutil.copytree(out, tmp_path / "copy"))
        with killed_at(number, monkeypatch) as done, suppress(Killed, ConfigError):
            replace_it(copy, ConfigError("a typo") if fails else None)
        described = not fails and not (copy / REPLACED).exists() and "rename" in done
        if (copy / PREPARING).exists() and described:  # the new run begins anew
            replace_it(copy)
        elif not described:
            without = preparing(copy, JOB, resume=False, overwrite=False)
            with refused("run of small", by=ConfigError), without:
                pass
        kept = {
            name: text for name, text in content(copy).items() if not any(map(is_temporary, name.split("/")))
        }
        assert kept == (NEW if described else OLD) | ADDED, number
        ways.add(described)
        if len(done) < number:
            break
    assert number > 10
    assert ways == ({False} if fails else {False, True})


@pytest.mark.parametrize("history", ["", '{"round": 1, "status": "failed"}\n', '{"round": 1}\n'])
def test_a_run_that_failed_before_its_first_round_makes_room_for_the_next(history: str, out: Path) -> None:
    """As where a table has an unknown word: the same command runs once it is corrected."""
    (out / "model" / "model.json").unlink()
    initial = {"state/ledgers.json": "{}", "state/round-000000.safetensors": "the initial model"}
    write(out, facts("failed") | initial | {"history.jsonl": history})
    with preparing(out, JOB, resume=False, overwrite=False):
        write(out, NEW)
    assert content(out) == NEW | ADDED


@pytest.mark.parametrize(
    ("status", "history", "model"),
    [
        ("failed", '{"round": 1, "status": "committed"}\n', 0),
        ("failed", "", 1),  # the history is lost
        ("failed", "", 12),
        *((status, "", 0) for status in ("running", "interrupted", "finished")),
    ],
)
def test_any_other_run_is_kept_unless_told(status: str, history: str, model: int, out: Path) -> None:
    write(out, facts(status) | {"history.jsonl": history, f"state/round-{model:06d}.safetensors": "a model"})
    before = content(out)
    with refused("--out", "--resume", by=ConfigError):
        check_folder(out, JOB, resume=False, overwrite=False)
    assert content(out) == before
    for how in HOW:
        check_folder(out, JOB, **how)
    (out / MADE).unlink()
    check_folder(out, JOB, **HOW[0])  # only what would be deleted must have been made here


def test_what_is_not_a_run_to_continue_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "thesis", {"thesis.tex": "years of work"})
    for folder, job, how, named in (
        (tmp_path / "file", JOB, HOW[1], "file"),
        (tmp_path / "nothing", JOB, HOW[0], "--out"),
        *((tmp_path / "thesis", JOB, how, "not a run of suture") for how in HOW),
        (out, replace(JOB, name="other"), HOW[0], "other"),
        (out, replace(JOB, rounds=2), HOW[0], "2 rounds"),
        (out, replace(JOB, simulation=None), HOW[1], "small"),
    ):
        with refused(named, by=ConfigError):
            run_job(job, out=folder, **how)
    assert content(tmp_path / "thesis") == {"thesis.tex": "years of work"}
    with (out / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for how in HOW:
            with refused(out, by=ConfigError):
                run_job(JOB, out=out, **how)
    assert content(out) == OLD | ADDED


@pytest.mark.parametrize("mark", [None, "{}", '{"inode": 1}', '{"inode": null}', "[", '{"inode": "x"}'])
@pytest.mark.parametrize("planted", ["run.json", PREPARING])
def test_files_beside_planted_ones_stay(planted: str, mark: str | None, tmp_path: Path) -> None:
    """A folder from elsewhere, or a copy, in which only the marks are those of a run."""
    files = OLD | ADDED | {planted: facts("finished")["run.json"]} | ({} if mark is None else {MADE: mark})
    out = write(tmp_path / "thesis", files)
    before = content(out)
    for overwrite in (True, False):
        with refused("--out", by=ConfigError):
            run_job(JOB, out=out, overwrite=overwrite)
        assert content(out) == before


def test_a_copy_of_a_run_is_not_deleted_and_one_that_was_moved_is(out: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(out, tmp_path / "copy")
    with refused(copy, by=ConfigError):
        check_folder(copy, JOB, resume=False, overwrite=True)
    check_folder(out.rename(tmp_path / "moved"), JOB, resume=False, overwrite=True)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user beside that of the run."""
    return write(tmp_path / "elsewhere", dict.fromkeys(("a/suture.toml", "a/scan.png", "diary.txt"), "mine"))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "diary.txt") for name in (LOCK, PREPARING, MADE, "events.jsonl", "history.jsonl")),
        *((name, "") for name in ("sites", "sites/server", "state", "model", "photos")),
        (".x.999999.deadbeef.tmp", ""),
    ],
)
def test_a_link_in_a_run_is_not_followed(
    name: str, target: str, out: Path, elsewhere: Path, tmp_path: Path
) -> None:
    path = out / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(elsewhere / target)
    before = content(out) | content(elsewhere)
    for how in HOW:
        with refused(f"the link {name}", by=ConfigError):
            run_job(JOB, out=out, **how)
        assert content(out) | content(elsewhere) == before
    new = tmp_path / "new"
    if name in (LOCK, PREPARING, MADE):
        new.mkdir()
        (new / LOCK).touch()
        (new / name).unlink(missing_ok=True)
        for file in ("diary.txt", "new.txt"):
            (new / name).symlink_to(elsewhere / file)
            with refused(f"the link {name}", by=ConfigError):
                run_job(JOB, out=new)
            assert not (elsewhere / "new.txt").exists()
            (new / name).unlink()


def test_simulated_sites_replace_no_folder_of_a_user_nor_what_a_link_leads_to(
    tmp_path: Path, elsewhere: Path
) -> None:
    small = ("--set", "images=20", "--set", "held_out=30")
    with refused(elsewhere, by=ConfigError):
        suture("data", "simulate", "demo", "--out", elsewhere, *small)
    out = tmp_path / "hospitals"
    for _ in range(2):
        suture("data", "simulate", "demo", "--out", out, *small)
    site = next(path.parent for path in out.glob("*/suture.toml"))
    shutil.rmtree(site)
    site.symlink_to(elsewhere / "a")
    before = content(elsewhere)
    with refused(f"the link {site.name}", by=ConfigError):
        suture("data", "simulate", "demo", "--out", out, *small)
    assert content(elsewhere) == before


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
    out = run_job(with_settings(SMALL, ["rounds=1", *settings]), out=tmp_path / "r")
    assert files_of_run(out)[1] == []
    own = [path for path in out.rglob("*") if {"state", "cache"} & {*path.parts} and path.is_file()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in own if not path.name.endswith("lock")}
    assert {"ledger.jsonl", "counts.json", "left_out.json"} < modes.keys()
    assert set(modes.values()) == {0o600}, "patients and keys"
    assert {path.stat().st_mode & 0o777 for path in out.glob("sites/*/cache")} == {0o700}


PLAN = JOB.plan("x").to_dict()


@pytest.mark.parametrize("harm", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("name", ["run.json", "job.json"])
def test_a_damaged_run_is_not_continued_and_may_be_replaced(name: str, harm: bytes, tmp_path: Path) -> None:
    out = write(begun(tmp_path / "x"), facts("interrupted") | {"job.json": json.dumps({"plan": PLAN})})
    check_folder(out, JOB, resume=True, overwrite=False)
    (out / name).write_bytes(harm)
    with refused("another --out", by=ConfigError):
        check_folder(out, JOB, resume=True, overwrite=False)
    check_folder(out, JOB, resume=False, overwrite=True)


@pytest.mark.parametrize("version", ["0.0.7", VERSION])
def test_a_plan_of_other_keys_is_of_another_version_or_damaged(version: str, tmp_path: Path) -> None:
    """Neither is a reason to delete the rounds of a run."""
    former = {key: value for key, value in PLAN.items() if key != "transport"}
    for plan in (5, None, [], {"model": 5}, {"method": {}, "model": []}, former):
        for code in (PLAN["code"], "other"):
            own = {"versions": {"suture": version}, "code": code, "rounds": "many"}
            out = write(tmp_path, facts("interrupted", **own) | {"job.json": json.dumps({"plan": plan})})
            for resume in (True, False):
                with pytest.raises(ConfigError, match="another --out") as caught:
                    check_folder(out, JOB, resume=resume, overwrite=False)
                said, other = str(caught.value), (version, code) != (VERSION, PLAN["code"])
                assert "--overwrite" not in said
                assert not resume or (f"version {version} " in said) is other
