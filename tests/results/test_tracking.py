"""The history of a run in TensorBoard and MLflow."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from example_run import history_records, metrics_record, run_record, write_run
from suture.core.errors import ConfigError
from suture.protocol.records import read_history, read_metrics
from suture.simulation.tracking import facts, of_round, of_test
from suture_results import trackers
from suture_results.trackers import tracked, tracking_of


def run_folder(folder: Path, rounds: int = 8, status: str = "finished") -> Path:
    run = run_record() | {"status": status, "code": "c0de"}
    return write_run(folder, run, history_records(rounds), metrics_record() if status == "finished" else None)


class Remembering:
    """A sink that keeps what it was told."""

    def __init__(self) -> None:
        self.begun = 0
        self.steps: list[int] = []
        self.closed: list[str] = []

    def begin(self, facts: trackers.Facts) -> None:
        self.begun += 1
        self.steps = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self, status: str) -> str:
        self.closed.append(status)
        return "here"


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    found = Remembering()
    monkeypatch.setattr(trackers, "open_sink", lambda *_: found)
    return found


def event(folder: Path, kind: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2026-10-09T13:02:11+00:00", "event": kind}) + "\n")


def test_the_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    line, metrics = read_history(folder)[0], read_metrics(folder)
    assert metrics is not None
    found = of_round(line)
    assert found["validation/loss"] == line.validation.loss
    assert found["sites/harbour/train_loss"] == line.sites["harbour"].train_loss
    assert found["round/bytes_up"] == line.bytes_up
    tested = of_test(metrics)
    assert tested["test/mean_auroc"] == metrics.mean_auroc
    assert tested["test/auroc/Edema"] == metrics.auroc["Edema"]
    assert "test/auroc/Hernia" not in tested  # it is undefined, and no number stands for it
    assert facts(folder).settings["method.lr"] == "0.0001"
    assert facts(folder).tags["suture.code"] == "c0de"


@pytest.mark.parametrize("name", ["a/b", "..", "Mass (left)", " x", "Größe"])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    part = trackers.part_of_name(name)
    assert "/" not in part
    assert not part.startswith((".", " "))
    assert "(" not in part


def test_a_round_is_written_once_and_all_again_after_a_step_back(tmp_path: Path, sink: Remembering) -> None:
    folder = run_folder(tmp_path, 3, "running")
    found = tracking_of(folder, "tensorboard")
    found.update()
    found.update()
    written = [line["round"] for line in history_records(3) if line["status"] == "committed"]
    assert (sink.begun, sink.steps) == (1, written)
    run_folder(tmp_path, 8, "running")
    found.update()
    assert sink.begun == 1
    assert sorted(set(sink.steps)) == sink.steps
    run_folder(tmp_path, 2, "running")
    found.update()
    assert sink.begun == 2
    assert len(sink.steps) <= 2


def test_a_run_is_followed(tmp_path: Path, sink: Remembering) -> None:
    with tracked(tmp_path, "tensorboard"):
        run_folder(tmp_path)
        event(tmp_path, "begin")
    assert sink.closed == ["finished"]
    assert sink.steps


def test_a_run_that_did_not_begin_is_not_tracked(tmp_path: Path, sink: Remembering) -> None:
    run_folder(tmp_path)
    with pytest.raises(ConfigError), tracked(tmp_path, "tensorboard"):
        raise ConfigError("this folder holds a run")
    assert (sink.begun, sink.closed) == (0, [])


def test_a_tracker_that_fails_does_not_fail_the_run(
    tmp_path: Path, sink: Remembering, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(sink, "begin", refuse)
    with tracked(tmp_path, "mlflow"):
        run_folder(tmp_path)
        event(tmp_path, "begin")
        event(tmp_path, "validated")
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "nobody is there" in message
    assert f"suture track {tmp_path} mlflow" in message


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_missing_extra_is_one_line(tmp_path: Path, tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'suture\[{tracker}\]'$"):
        tracking_of(tmp_path, tracker)


@pytest.mark.complete
def test_event_files_hold_each_round_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> dict[str, list[tuple[int, float]]]:
        files = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        assert "settings/text_summary" in files.Tags()["tensors"]
        return {tag: [(one.step, one.value) for one in files.Scalars(tag)] for tag in files.Tags()["scalars"]}

    folder = run_folder(tmp_path)
    tracking_of(folder, "tensorboard").finish()
    once = read()
    committed = [line for line in read_history(folder) if line.status == "committed"]
    assert once["round/seconds"] == [(line.round, pytest.approx(line.seconds)) for line in committed]
    assert once["test/auroc/Edema"] == [(6, pytest.approx(0.862))]
    tracking_of(folder, "tensorboard").finish()
    assert read() == once


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for MLflow's client, with the same methods, has been told."""
    runs: dict[str, Any] = {}

    class Client:
        def __init__(self, uri: str) -> None:
            runs["uri"] = uri

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
            return f"experiment {name}"

        def create_run(self, experiment: str, start_time: int, tags: dict[str, str], run_name: str) -> Any:
            name = f"run{len(runs)}"
            runs[name] = {"tags": tags, "metrics": [], "params": {}, "name": run_name}
            return SimpleNamespace(info=SimpleNamespace(run_id=name))

        def delete_run(self, name: str) -> None:
            del runs[name]

        def log_batch(self, name: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            assert len(metrics) <= 1000
            runs[name]["metrics"] += [(one.key, one.step, one.value) for one in metrics]
            runs[name]["params"] |= {one.key: one.value for one in params}

        def set_terminated(self, name: str, status: str) -> None:
            runs[name]["status"] = status

    def record(*names: str) -> Callable[..., SimpleNamespace]:
        return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))

    modules = {
        "mlflow": {},
        "mlflow.entities": {
            "Metric": record("key", "value", "timestamp", "step"),
            "Param": record("key", "value"),
        },
        "mlflow.exceptions": {"MlflowException": KeyError},
        "mlflow.tracking": {"MlflowClient": Client},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    return runs


def test_a_run_is_one_run_of_mlflow_however_often_it_is_written(
    tmp_path: Path, mlflow: dict[str, Any]
) -> None:
    folder = run_folder(tmp_path)
    tracking_of(folder, "mlflow").finish()
    assert mlflow.pop("uri") == f"sqlite:///{folder / 'mlflow.db'}"
    (first,) = mlflow.values()
    first = dict(first)
    tracking_of(folder, "mlflow").finish()
    del mlflow["uri"]
    assert list(mlflow.values()) == [first]
    assert first["status"] == "FINISHED"
    assert first["name"] == first["tags"]["suture.experiment"] == "chest-2026-10"
    assert first["params"]["rounds"] == "8"
    rounds = [step for key, step, _ in first["metrics"] if key == "validation/loss"]
    assert sorted(set(rounds)) == rounds


def test_a_run_folder_that_came_from_elsewhere_becomes_a_new_run(
    tmp_path: Path, mlflow: dict[str, Any]
) -> None:
    folder = run_folder(tmp_path)
    (folder / "mlflow.json").write_text('{"run_id": "of another server"}')
    tracking_of(folder, "mlflow").finish()
    assert list(mlflow) == ["uri", json.loads((folder / "mlflow.json").read_text())["run_id"]]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_run_of_mlflow_that_a_copied_folder_names_stays(tmp_path: Path, mlflow: dict[str, Any]) -> None:
    folder = run_folder(made(tmp_path / "r"))
    tracking_of(folder, "mlflow").finish()
    first = json.loads((folder / "mlflow.json").read_text())["run_id"]
    tracking_of(Path(shutil.copytree(folder, tmp_path / "copy")), "mlflow").finish()
    assert first in mlflow


@pytest.mark.complete
@pytest.mark.parametrize("name", ["tensorboard", "mlflow.db", "mlruns"])
def test_nothing_is_tracked_through_a_link(name: str, tmp_path: Path, mlflow: dict[str, Any]) -> None:
    folder, elsewhere = run_folder(made(tmp_path / "r")), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "events.out.tfevents.1.mine").write_text("mine")
    (folder / name).symlink_to(elsewhere)
    tracker: Any = "tensorboard" if name == "tensorboard" else "mlflow"
    with pytest.raises(
        ConfigError, match=f"{name} is a link, and Suture does not follow links here; remove it"
    ):
        tracking_of(folder, tracker).finish()
    assert [path.name for path in elsewhere.iterdir()] == ["events.out.tfevents.1.mine"]


@pytest.mark.complete
def test_only_own_event_files_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not those of another program, nor those that the note of a copied folder names."""
    folder = run_folder(made(tmp_path / "r"))
    (folder / "tensorboard").mkdir()
    mine = folder / "tensorboard" / "events.out.tfevents.1.mine"
    mine.write_text("mine")
    for _ in range(2):
        tracking_of(folder, "tensorboard").finish()
        assert len(list(mine.parent.glob("events*"))) == 2
        assert mine.read_text() == "mine"
        assert f"files that this command did not write, and keeps them: {mine.name}" in caplog.text
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    before = {path.name for path in (copy / "tensorboard").iterdir()}
    tracking_of(copy, "tensorboard").finish()
    assert before < {path.name for path in (copy / "tensorboard").iterdir()}
