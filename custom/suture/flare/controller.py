"""The server's half of a federation as a FLARE controller, with one FLARE task per site.

FLARE's plain `Controller`, not its `ModelController`, has return codes and the clients' names.

It also tells the course of a run as FLARE's events at its server, for monitoring, metric files and
tracking. They carry what the run folder holds, and stay at the server: no site streams anything.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from suture.core.entry_points import if_installed
from suture.core.errors import Aborted, DiskError, RejectedUpdate, SutureError
from suture.core.escaping import printable
from suture.core.files import hold, make_folder, replacing, whole_lines
from suture.data.batch import abortable
from suture.data.config import find_server_config
from suture.execution.job import check_federated
from suture.execution.progress import Progress
from suture.execution.simulator import tell_over
from suture.federation.loop import federate
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.collector import Receiver
from suture.federation.server.record import LEDGERS, SERVER_LOCK, SERVER_TAKEOVER
from suture.federation.server.server import Server, open_server
from suture.federation.state_files import experiment_folder
from suture.flare import CODE, FINGERPRINT, STATS_GROUP
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.bell import ring
from suture.flare.compat.heartbeats import on_heartbeat
from suture.flare.compat.job_guard import JobGuard, asked_to_stop
from suture.flare.compat.tensor_files import written_once
from suture.flare.compat.tensors import LARGE, register
from suture.flare.workspace import (
    KitIdentity,
    check_allowed,
    claim_experiment,
    fingerprint,
    is_simulated,
    read_settings,
    settled,
    with_own_files,
    workspace_root,
)
from suture.methods import method_class
from suture.protocol.messages import TaskName
from suture.protocol.packing import Packed
from suture.protocol.records import Metrics, Round, read_history, read_metrics, read_run

log = logging.getLogger(__name__)

_OTHER = re.compile(r"[^\w\- .]|^\.|^ ")
"""What a part of a name may not have; MLflow refuses it."""

event_log = logging.getLogger(f"custom.{__name__}")
"""FLARE writes the INFO lines of loggers with this first name into log_fl.txt."""


class RunEvents:
    """Fires FLARE's events of a run: ROUND_STARTED, ROUND_DONE, and each figure of a round as analytics.

    Args:
        component: of the job; it fires the events.
        folder: of the run; figures come from its history and metrics, each once.
    """

    def __init__(self, component: FLComponent, fl_ctx: FLContext, folder: Path) -> None:
        self._component, self._fl_ctx, self._folder = component, fl_ctx, folder
        self._progress = Progress("", "")
        self._sent: list[Round] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Follow an event of the record; a failure is logged, and does not fail the round."""
        try:
            if line := self._progress.take(dict(event)):
                event_log.info("%s", line)
            kind = event["event"]
            if kind == "round":
                self._fire(AppEventType.ROUND_STARTED, event["round"])
            elif kind in ("committed", "unchanged"):
                self._fire(AppEventType.ROUND_DONE, event["round"])
            elif kind in ("validated", "rolled_back"):
                self._send_rounds()
            elif kind == "finished":
                self._send_rounds()
                run, metrics = read_run(self._folder), read_metrics(self._folder)
                if metrics and run.status != "running":
                    self._send(metrics.selected_round or run.rounds, of_test(metrics))
        except Exception as error:  # noqa: BLE001 - a widget of the job may raise anything
            event_log.warning("FLARE's events of the run failed (%s: %s)", type(error).__name__, error)

    def _send_rounds(self) -> None:
        """Send the committed rounds that are new; all of them where the run went back to an earlier one."""
        rounds = [line for line in read_history(self._folder) if line.status == "committed"]
        new = len(self._sent) if rounds[: len(self._sent)] == self._sent else 0
        for line in rounds[new:]:
            self._send(line.round, of_round(line))
        self._sent = rounds

    def _send(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, number in scalars.items():
            data = AnalyticsData(name, number, AnalyticsDataType.SCALAR, global_step=step)
            figure = data.to_dxo().to_shareable()
            self._fl_ctx.set_prop(FLContextKey.EVENT_DATA, figure, private=True, sticky=False)
            self._component.fire_event(ANALYTIC_EVENT_TYPE, self._fl_ctx)
        model = FLModel(metrics=dict(scalars), current_round=step)
        self._fl_ctx.set_prop(AppConstants.AGGREGATION_RESULT, model, private=True, sticky=False)
        self._fire(AppEventType.AFTER_AGGREGATION, step)

    def _fire(self, event_type: str, round_: int) -> None:
        self._fl_ctx.set_prop(AppConstants.CURRENT_ROUND, round_, private=True, sticky=True)
        self._component.fire_event(event_type, self._fl_ctx)


def part_of_name(name: str) -> str:
    """Return a name as a part of a path that MLflow takes: ``Mass (left)`` is ``Mass _28_left_29_``."""
    return _OTHER.sub(lambda found: f"_{ord(found[0]):x}_", name)


def of_round(line: Round) -> dict[str, float]:
    """Return the numbers of a committed round by name: its validation, costs, and those of each site."""
    accepted = sum(site.status == "accepted" for site in line.sites.values())
    numbers = {
        **_named("validation", vars(line.validation)),
        **_named("round", {"seconds": line.seconds, "accepted": accepted}),
        **_named("round", {"bytes_down": line.bytes_down, "bytes_up": line.bytes_up}),
    }
    for name, site in line.sites.items():
        numbers |= _named(f"sites/{part_of_name(name)}", {**site.scalars, **vars(site)})
    return numbers


def of_test(metrics: Metrics) -> dict[str, float]:
    """Return the final figures by name: over all classes, by class, group and site."""
    figures = {
        **_named("test", {"mean_auroc": metrics.mean_auroc, "loss": metrics.loss}),
        **_named("test/auroc", metrics.auroc),
        **_named("test/recall", metrics.recall),
        **_named("test/groups", metrics.groups),
        **_named("test/overall", metrics.overall),
    }
    for site, values in metrics.sites.items():
        figures |= _named(f"test/sites/{part_of_name(site)}", values)
    return figures


def _named(prefix: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers among some values, by name."""
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
    return {f"{prefix}/{part_of_name(key)}": number for key, number in numbers.items()}


_LOOK = 0.1
"""Seconds between two looks at what else than an answer ends an exchange."""

_NEWEST = 100
"""Largest number of events in one reply."""

RESULTS = ("run.json", "history.jsonl", "events.jsonl", "metrics.json", "report.html", "model")
"""The part of a run folder that FLARE's job download contains."""


class FederationController(Controller):
    """Runs the server's half of a federation.

    Args:
        plan, schedule: names of the files in the app's config folder; see `read_settings`.
    """

    def __init__(self, plan: str, schedule: str) -> None:
        super().__init__()
        self.plan = plan
        self.schedule = schedule
        self._stated: dict[str, str] = {}
        self._feed: EventFeed | None = None
        self._lock: IO[str] | None = None  # held while the process of this job lives

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._feed:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info(STATS_GROUP, self._feed.recent())
        elif event_type == EventType.ABOUT_TO_END_RUN:
            # From now on FLARE answers a request for a task with the end of the run.
            ring([client.name for client in fl_ctx.get_engine().get_clients()], fl_ctx)

    def start_controller(self, fl_ctx: FLContext) -> None:
        register()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            server = self._open(fl_ctx)
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitter reads this panic
            self.system_panic(_describe("failed", error), fl_ctx)
            return
        self._feed = EventFeed(server.record.folder / "events.jsonl")
        server.record.listen = RunEvents(self, fl_ctx, server.record.folder).take
        transport = FlareTransport(self, fl_ctx, abort_signal, server.schedule.round_timeout, self._stated)
        guard: JobGuard | None = None
        try:
            on_heartbeat(self.communicator, server.collector.attendance.heard)
            guard = JobGuard(fl_ctx.get_engine(), transport.refuse)
            with abortable(transport.is_aborted):
                federate(server, transport)
        except Exception as error:  # noqa: BLE001 - without a record, it would look like a run that goes on
            aborted = abort_signal.triggered or isinstance(error, Aborted)
            status = "interrupted" if aborted else "failed"
            why = _describe(status, error)
            server.record.give_up(status, why)
            self.system_panic(why, fl_ctx)
        finally:
            if guard:
                guard.close()
            if_installed("try_report")(server.record.folder)
            self._publish(server.record.folder, fl_ctx)
            tell_over()

    def process_result_of_unknown_task(
        self,
        client: Client,
        task_name: str,
        client_task_id: str,
        result: Shareable,
        fl_ctx: FLContext,
    ) -> None:
        log.warning("an answer of %s to %r came too late and is dropped", client.name, task_name)

    def _open(self, fl_ctx: FLContext) -> Server:
        settings = read_settings(self.plan, fl_ctx)
        check_allowed(settings, fl_ctx)
        settings = settled(settings, fl_ctx, lambda: code_hash(method_class(str(settings.get("method")))))
        config = find_server_config(workspace_root(fl_ctx))
        plan = with_own_files(
            Plan.from_dict(settings), config.storage.files, "model.weights", "model.name_vectors"
        )
        state = config.storage.state
        # A simulation's server works in the run folder, which the user names.
        folder = state / plan.experiment if is_simulated() else experiment_folder(state, plan.experiment)
        claim_experiment(folder, fl_ctx)
        self._lock = hold(folder / SERVER_LOCK, SERVER_TAKEOVER)
        check_federated(plan.method)  # the file may have been edited
        schedule = Schedule.from_dict(read_settings(self.schedule, fl_ctx))
        self._stated = {CODE: plan.code, FINGERPRINT: fingerprint(settings, schedule.rounds)}
        ledgers = None if is_simulated() else state / LEDGERS
        kit = plan.secure_aggregation is not None and not is_simulated()
        identity = KitIdentity(workspace_root(fl_ctx)) if kit else None
        return open_server(plan, schedule, config.held_out, folder.parent, ledgers=ledgers, identity=identity)

    def _publish(self, folder: Path, fl_ctx: FLContext) -> None:
        """Copy the results to where FLARE's job download finds them."""
        target = Path(fl_ctx.get_engine().get_workspace().get_result_root(fl_ctx.get_job_id()))
        try:
            make_folder(target)
            copy_results(folder, target)
        except DiskError as error:
            log.error("the results stay in %s: %s", folder, error)
            self.system_panic(f"the results could not be offered for download: {error}", fl_ctx)


def _describe(status: str, error: Exception) -> str:
    """Log why a run ended; return it."""
    expected = isinstance(error, (SutureError, OSError))
    why = str(error) if expected else f"{type(error).__name__}: {error}"
    log.error("%s: %s", status, why, exc_info=not expected)
    return why


class EventFeed:
    """Reads the events that the server records of its run, for whoever requests FLARE's statistics.

    Args:
        events: the run's events.jsonl. Events that are already in it belong to an earlier job.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._earlier = len(whole_lines(self._events))

    def recent(self) -> dict[str, Any]:
        """Return the newest events of this job, the index of the first in the file, and the last begin."""
        lines = whole_lines(self._events)
        first = max(self._earlier, len(lines) - _NEWEST)
        begun = [json.loads(line) for line in lines[self._earlier :] if '"event": "begin"' in line]
        events = [json.loads(line) for line in lines[first:]]
        return {"first": first, "events": events, "begin": begun[-1] if begun else None}


def copy_results(folder: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy the files of `RESULTS` from a run folder into another one; each is whole, or as it was.

    Raises:
        DiskError: one of them could not be written; names it.
    """
    for name in RESULTS:
        source, to = folder / name, target / name
        if name in without or not source.exists():
            continue
        if source.is_dir():
            make_folder(to)
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            with replacing(to / path.name if source.is_dir() else to) as temporary:
                shutil.copy2(path, temporary)


class FlareTransport:
    """Carries tasks to FLARE's clients and their answers back.

    Args:
        stated: headers of each task.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort: Signal,
        timeout: int,
        stated: Mapping[str, str],
    ) -> None:
        self._controller = controller
        self._stated = stated
        self._fl_ctx = fl_ctx
        self._abort = abort
        self._timeout = timeout
        self._tasks: dict[str, Task] = {}
        self._answers: _Answers | None = None

    @property
    def sites(self) -> list[str]:
        """The clients of the job."""
        return sorted(client.name for client in self._fl_ctx.get_engine().get_clients())

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        """Send one task per site, because payloads differ; see `Transport`.

        Raises:
            Aborted: the job was aborted, or its server has died.
        """
        with written_once([packed.tensors for packed in payloads.values()], LARGE):
            return self._exchange(task, payloads, receive)

    def _exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        deadline = time.monotonic() + self._timeout
        answers = self._answers = _Answers(payloads, receive)
        tasks = self._tasks = {site: self._task(task, packed, answers) for site, packed in payloads.items()}
        for site, work in tasks.items():
            # Not broadcast, which would copy the payload for its one site.
            self._controller.send(work, self._fl_ctx, targets=[site])
        ring(list(tasks), self._fl_ctx)
        # FLARE retires finished tasks only five times a second, so the answers themselves are counted too.
        while answers.waiting() and self._controller.get_num_standing_tasks():
            if receive.enough(answers.waiting()):
                break
            if self.is_aborted():
                raise Aborted("the job was aborted" if self._abort.triggered else "the server has died")
            receive.waits(answers.waiting())
            answers.wait(_LOOK)
        why = "the task ended without an answer"
        if time.monotonic() >= deadline:
            why = f"no answer within {self._timeout} s"
        elif receive.enough(answers.waiting()):
            why = "not waited for: enough others had answered"
        self._tasks = {}  # their payloads are as large as the model
        missing = dict(answers.missing)
        for site in missing:
            # An answer to a cancelled task goes to `process_result_of_unknown_task`.
            self._controller.cancel_task(tasks[site], fl_ctx=self._fl_ctx)
        return {site: reason or receive.note_loss(site) or why for site, reason in missing.items()}

    def refuse(self, site: str, why: str) -> None:
        """End the open task of a site whose answer cannot be used; see `JobGuard`."""
        log.warning("refused: %s: %s", site, why)
        answers, task = self._answers, self._tasks.get(site)
        if answers and task and site in answers.missing:
            answers.missing[site] = why
            self._controller.cancel_task(task, fl_ctx=self._fl_ctx)

    def _task(self, name: TaskName, packed: Packed, answers: _Answers) -> Task:
        data = to_shareable(packed)
        for name_, value in self._stated.items():
            data.set_header(name_, value)
        return Task(
            name,
            data,
            timeout=self._timeout,
            before_task_sent_cb=answers.note_fetch,
            result_received_cb=answers.take,
        )

    def is_aborted(self) -> bool:
        """Whether the job was aborted, or its server has died."""
        return self._abort.triggered or asked_to_stop(self._fl_ctx.get_engine())


class _Answers:
    """Passes the answers of one exchange to a receiver.

    Attributes:
        missing: the sites without a usable answer, with the reason where it is known.
    """

    def __init__(self, sites: Iterable[str], receive: Receiver) -> None:
        self.missing = dict.fromkeys(sites, "")
        self._receive = receive
        self._news = threading.Event()

    def waiting(self) -> list[str]:
        """The sites that may still answer."""
        return [site for site, reason in list(self.missing.items()) if not reason]

    def wait(self, seconds: float) -> None:
        """Wait until another answer has come, at most some seconds."""
        self._news.wait(seconds)
        self._news.clear()

    def note_fetch(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Note that a site fetches its task, as FLARE's callback."""
        self._receive.note_fetch(client_task.client.name)

    def take(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Take the result of a task, as FLARE's callback."""
        try:
            self._take(client_task)
        finally:
            self._news.set()

    def _take(self, client_task: ClientTask) -> None:
        # FLARE's own name of the client, never one that the message claims.
        site, result = client_task.client.name, client_task.result
        client_task.result = None
        try:
            code = result.get_return_code()
            if code != ReturnCode.OK:
                self.missing[site] = f"FLARE answered {printable(code, 80)}"
                return
            self._receive(site, from_shareable_(result))
        except RejectedUpdate as error:
            self.missing[site] = str(error)
            return
        except Exception as error:  # noqa: BLE001 - FLARE would end the task without a reason
            self.missing[site] = f"the answer could not be read ({type(error).__name__})"
            return
        self.missing.pop(site, None)
