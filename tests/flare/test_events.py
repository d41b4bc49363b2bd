"""FLARE's monitoring, metric files and tracking see a run: its rounds, and the figures of its folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.fuel.utils.log_utils import LoggerNameFilter
from nvflare.metrics.job_metrics_collector import JobMetricsCollector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from example_run import history_records, metrics_record, run_record, write_run
from rounds import conformant
from suture.core.errors import FederationError
from suture.federation.loop import Loop, federate
from suture.federation.server.record import describe
from suture.flare.controller import RunEvents, of_round, of_test, part_of_name
from suture.models import ModelSpec
from suture.protocol.records import read_history, read_metrics
from suture_synthetic.trial import Trial

pytestmark = pytest.mark.complete


class Job:
    """FLARE's engine of a server's job, with components that its events reach."""

    def __init__(self, folder: Path, *components: FLComponent) -> None:
        self.components, self.fired = components, list[tuple[str, int | None]]()
        self.workspace = SimpleNamespace(
            get_run_dir=lambda _: str(folder), get_result_root=lambda _: str(folder)
        )
        manager = FLContextManager(self, "server", "job-1")
        self.new_context = manager.new_context

    def get_workspace(self) -> Any:
        return self.workspace

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        self.fired.append((event_type, fl_ctx.get_prop(AppConstants.CURRENT_ROUND)))
        for component in self.components:
            component.handle_event(event_type, fl_ctx)


def run(trial: Trial, folder: Path, *components: FLComponent) -> Job:
    job = Job(folder, *components)
    describe(trial.server.record, trial.plan, trial.server.schedule)
    with job.new_context() as fl_ctx:
        job.fire_event(EventType.START_RUN, fl_ctx)
        trial.server.record.listen = RunEvents(FLComponent(), fl_ctx, trial.server.record.folder).take
        federate(trial.server, Loop(trial.sites))
        job.fire_event(EventType.END_RUN, fl_ctx)
    return job


@pytest.fixture
def trial() -> Any:
    with Trial(conformant("surgical"), ModelSpec("cnn", size=16), "multilabel", rounds=2) as made:
        yield made


def test_flares_components_see_rounds_and_figures(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Among them the receiver that `add_experiment_tracking(recipe, "tensorboard")` adds, and log_fl.txt."""
    collector, metrics = JobMetricsCollector({}), list[str]()
    monkeypatch.setattr(collector, "publish_metrics", lambda _m, name, *_: metrics.append(name))
    with caplog.at_level(logging.INFO):
        job = run(trial, tmp_path, collector, MetricsArtifactWriter(), TBAnalyticsReceiver())
    pair = (AppEventType.ROUND_STARTED, AppEventType.ROUND_DONE)
    rounds = [event for event in job.fired if event[0] in pair]
    assert rounds == [(name, number) for number in (1, 2) for name in pair]
    assert metrics.count("_round") == 2, "the collector's time of each round"
    history = trial.history()
    assert len(history) == 2
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    drawn = EventAccumulator(str(folder)).Reload()
    for tag, values in (
        ("validation/loss", [line["validation"]["loss"] for line in history]),
        ("sites/alpha/train_loss", [line["sites"]["alpha"]["train_loss"] for line in history]),
    ):
        found = [(scalar.step, scalar.value) for scalar in drawn.Scalars(tag)]
        assert found == [(1, pytest.approx(values[0])), (2, pytest.approx(values[1]))], "each once"
    (path,) = tmp_path.rglob("round_metrics.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in written][:2] == [1, 2]
    assert "validation/loss" in json.dumps(written[0])
    passes = LoggerNameFilter(["custom", "nvflare.app_common", "nvflare.app_opt"]).filter
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO and passes(r)]
    assert all(any(line.startswith(f"round {number}/2") for line in lines) for number in (1, 2))


def test_a_component_that_fails_does_not_fail_the_round(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise FederationError("the monitor is gone")

    monkeypatch.setattr(FLComponent, "fire_event", fail)
    run(trial, tmp_path)
    assert len(trial.history()) == 2
    assert "the monitor is gone" in caplog.text


def test_the_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run_record(), history_records(8), metrics_record())
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


@pytest.mark.parametrize("name", ["a/b", "..", " x", "Größe"])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    assert "/" not in part_of_name(name)
    assert not part_of_name(name).startswith((".", " "))
    assert part_of_name("Mass (left)") == "Mass _28_left_29_"


def test_a_round_is_sent_once_and_all_again_after_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(RunEvents, "_send", lambda _, step, __: sent.append(step))
    with Job(tmp_path).new_context() as fl_ctx:
        events = RunEvents(FLComponent(), fl_ctx, tmp_path)
        for rounds in (3, 3, 8, 2):
            write_run(tmp_path, run_record(), history_records(rounds))
            events.take({"event": "validated"})
    assert sent == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
