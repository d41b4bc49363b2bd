"""A run that is replaced is lost only once the new one is described, wherever the process is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import ConfigError
from suture.core.files import is_temporary
from suture.execution.job import Job
from suture.execution.run import LOCK, MADE, PREPARING, REPLACED, begin_here, check_folder, preparing
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_synthetic.phantom_hospitals import PhantomSites

JOB = Job(
    name="small",
    title="a small federation",
    method=SurgicalAggregation(),
    model=ModelSpec("cnn"),
    rounds=2,
    simulation=PhantomSites(),
)
OLD = {"run.json": json.dumps({"job": "small", "rounds": 2, "status": "finished"})}
OLD |= {
    name: name
    for name in ("history.jsonl", "model/model.json", "sites/a/images/1.png", "state/best-000002.safetensors")
}
NEW = {
    "run.json": json.dumps({"job": "small", "rounds": 2, "status": "running"}),
    "sites/b/images/1.png": "new",
}


class Killed(BaseException):
    """In place of a signal."""


def content(out: Path) -> dict[str, str]:
    names = (path.relative_to(out) for path in out.rglob("*") if path.is_file())
    return {name.as_posix(): (out / name).read_text() for name in names if name.name not in (LOCK, MADE)}


def write(out: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    begin_here(folder)
    (folder / PREPARING).unlink()
    write(folder, {**OLD, "notes.txt": "mine"})
    return folder


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


def replace_it(out: Path) -> None:
    with preparing(out, JOB, resume=False, overwrite=True):
        assert not (out / "run.json").exists()
        write(out, NEW)


def test_a_run_is_replaced(out: Path) -> None:
    replace_it(out)
    assert content(out) == {**NEW, "notes.txt": "mine"}


def fails_after_some_files(out: Path, error: BaseException) -> None:
    with preparing(out, JOB, resume=False, overwrite=True):
        write(out, {"sites/a/images/1.png": "new", "sites/b/images/1.png": "new"})
        raise error


@pytest.mark.parametrize("error", [ConfigError("a typo"), KeyboardInterrupt()])
def test_what_fails_before_it_is_described_leaves_the_former_run(out: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        fails_after_some_files(out, error)
    assert content(out) == {**OLD, "notes.txt": "mine"}


FAILED = {"run.json": json.dumps({"job": "small", "rounds": 2, "status": "failed"})}
COMMITTED = json.dumps({"round": 1, "status": "committed"})


@pytest.mark.parametrize("history", ["", json.dumps({"round": 1, "status": "failed"}), '{"round": 1}'])
def test_a_run_that_failed_before_its_first_round_makes_room_for_the_next(history: str, out: Path) -> None:
    """As where a table has an unknown word: the same command runs once it is corrected."""
    (out / "model" / "model.json").unlink()
    write(out, {**FAILED, "history.jsonl": f"{history}\n" * bool(history), "state/ledgers.json": "{}"})
    write(out, {"state/round-000000.safetensors": "the initial model"})
    with preparing(out, JOB, resume=False, overwrite=False):
        write(out, NEW)
    assert content(out) == {**NEW, "notes.txt": "mine"}


@pytest.mark.parametrize(
    ("status", "history"), [("failed", COMMITTED), ("running", ""), ("interrupted", ""), ("finished", "")]
)
def test_any_other_run_is_kept(status: str, history: str, out: Path) -> None:
    write(out, {"run.json": json.dumps({"job": "small", "rounds": 2, "status": status})})
    write(out, {"history.jsonl": f"{history}\n" * bool(history)})
    before = content(out)
    with pytest.raises(ConfigError, match="or continue it with --resume"):
        check_folder(out, JOB, resume=False, overwrite=False)
    assert content(out) == before


@pytest.mark.parametrize("number", [1, 12])
def test_a_committed_round_is_kept_where_the_history_is_lost(number: int, out: Path) -> None:
    write(out, {**FAILED, "history.jsonl": "", f"state/round-{number:06d}.safetensors": "a model"})
    before = content(out)
    with pytest.raises(ConfigError, match="or continue it with --resume"):
        check_folder(out, JOB, resume=False, overwrite=False)
    assert content(out) == before


@pytest.mark.complete
@pytest.mark.parametrize("fails", [False, True])
def test_a_kill_at_any_place_loses_nothing(
    fails: bool, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = set()
    for number in range(1, 100):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(out, copy := tmp_path / "copy")
        begin_here(copy)  # a copy is another folder
        (copy / PREPARING).unlink()
        with killed_at(number, monkeypatch) as done:
            try:
                with preparing(copy, JOB, resume=False, overwrite=True):
                    write(copy, NEW)
                    if fails:
                        raise ConfigError("a typo")
            except (Killed, ConfigError):
                pass
        described = not fails and not (copy / REPLACED).exists() and "rename" in done
        if (copy / PREPARING).exists() and described:  # the new run begins anew
            replace_it(copy)
        elif not described:
            without = preparing(copy, JOB, resume=False, overwrite=False)
            with pytest.raises(ConfigError, match="contains a run of small"), without:
                pass
        kept = {
            name: text for name, text in content(copy).items() if not any(map(is_temporary, name.split("/")))
        }
        assert kept == {**(NEW if described else OLD), "notes.txt": "mine"}, number
        ways.add(described)
        if len(done) < number:
            break
    assert number > 10
    assert ways == ({False} if fails else {False, True})
