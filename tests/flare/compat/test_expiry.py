"""What FLARE does without the files of `suture.flare.compat`: where a test fails, its file may go.

The docstring of each file names its tests: here, and in job_guard_cases.py.
"""

from __future__ import annotations

import ast
import json
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, RunProcessKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.task_manager import TaskCheckStatus
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.job_def import RunStatus
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import EncKey, EncType
from nvflare.fuel.utils.json_scanner import JsonScanner
from nvflare.fuel.utils.wfconf import resolve_var_refs
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey, new_cell_message
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner
from nvflare.private.fed.app.simulator.simulator_worker import ClientTaskWorker
from nvflare.private.fed.client.client_executor import JobExecutor
from nvflare.private.fed.client.client_runner import ClientRunner
from nvflare.private.fed.client.client_status import ClientStatus
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_commands import GetTaskCommand
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.server_runner import ServerRunner
from nvflare.tool.deploy import deploy_common
from nvflare.tool.poc import poc_commands
from test_plain_json import deploy, exported, strict, zipped
from test_signals import Store

import suture
from flare_job import context
from suture.core.errors import FederationError
from suture.flare import compat
from suture.flare.compat import check_flare
from suture.flare.compat.job_packages import installed
from suture.flare.compat.task_client import client_of
from suture.flare.components import SiteRowsFilter

PACKAGE = Path(suture.__file__).parent
SIMULATOR = [PACKAGE / "execution" / name for name in ("simulator.py",)]
FILES = [*sorted((PACKAGE / "flare" / "compat").glob("[!_]*.py")), *SIMULATOR]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_what_it_works_around_where_and_until_when(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(r"^FLARE 2\.9\.\d: \S", text, re.MULTILINE)
    assert re.search(r"^Where: ", text, re.MULTILINE)
    assert compat._gone(path.read_text()) == ""
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    tests = re.findall(r"^Expires with: (test_\w+)$", text, re.MULTILINE)
    assert tests
    assert [name for name in tests if f"\ndef {name}(" not in here] == []


@pytest.mark.parametrize(
    ("gone", "refused"),
    [("", False), ("bell", False), ("job_guard", True), ("plain_json", True), ("task_client", True)],
)
def test_a_newer_flare_is_refused_only_without_a_place_of_a_workaround_for_safety(
    gone: str, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_flare()
    assert caplog.text == ""
    monkeypatch.setattr(compat, "version", lambda _: "3.0.0")
    text = next((path.read_text() for path in FILES if path.stem == gone), None)
    monkeypatch.setattr(compat, "_gone", lambda source, really=compat._gone: really(moved(source, text)))
    with pytest.raises(FederationError) if refused else nullcontext() as caught:
        check_flare()
    said = str(caught.value) if caught else caplog.text
    assert "NVFLARE 3.0.0" in said
    assert [path.stem for path in FILES if f"{path.stem}.py has no place" in said] == [gone] * bool(gone)
    assert ("moved.py" in said) == bool(gone)


def moved(source: str, text: str | None) -> str:
    """A file of compat, of which FLARE has moved what it works around if it is the one of that text."""
    return (
        re.sub(r"^Where: \S+", "Where: nvflare/moved.py:", source, flags=re.M) if source == text else source
    )


# cells.py


def test_flare_leaves_the_threads_of_a_cell_that_is_only_starting() -> None:
    cell: Any = SimpleNamespace(running=False, communicator=Mock())
    CoreCell.stop(cell)
    assert not cell.communicator.stop.called, "cells.py may go"


# registration.py


def test_a_registration_without_a_certificate_tells_who_is_disabled_and_registers_nobody() -> None:
    manager = ClientManager("trial")
    manager.disabled_clients.add("harbor")

    def register(site: str) -> Any:
        headers = {CellMessageHeaderKeys.CLIENT_NAME: site, CellMessageHeaderKeys.PROJECT_NAME: "trial"}
        fl_ctx = FLContext()
        fl_ctx.set_prop(FLContextKey.SECURE_MODE, True)
        assert manager.authenticate(new_cell_message(headers, Shareable()), fl_ctx) is None
        return fl_ctx.get_prop(FLContextKey.UNAUTHENTICATED)

    manager.clients["session"] = own = Client("lakeside", "session")
    assert register("harbor") == "Client 'harbor' is disabled"
    assert register("lakeside") is None
    assert manager.clients == {"session": own}


# bell.py


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long FLARE sleeps, without doing so; threads that an earlier test has left do sleep."""
    found: list[float] = []
    test, sleep = threading.get_ident(), time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda s: (found.append if threading.get_ident() == test else sleep)(s)
    )
    return found


def test_a_site_of_flare_sleeps_after_a_poll_that_finds_nothing(sleeps: list[float]) -> None:
    abort = Signal()
    runner: Any = SimpleNamespace(
        run_abort_signal=abort,
        default_task_fetch_interval=2.0,
        get_task_timeout=None,
        log_debug=lambda *_: None,
        _send_job_heartbeat=lambda: None,
        engine=SimpleNamespace(new_context=FLContext, get_task_assignment=lambda *_: None),
    )
    runner.fetch_and_run_one_task = lambda fl_ctx: ClientRunner.fetch_and_run_one_task(runner, fl_ctx)
    worker, fl_ctx = ClientTaskWorker(), FLContext()
    fl_ctx.set_prop(FLContextKey.RUNNER, runner)
    worker.fire_event = lambda *_: None
    client = SimpleNamespace(client_name="a", run_manager=SimpleNamespace(new_context=lambda: fl_ctx))
    worker.do_one_task(client, Namespace(task_name="task_exec"))
    assert sleeps == [0.5, 0.5], "FLARE's simulator needs no bell.py"
    runner.engine.get_task_assignment = lambda *_: abort.trigger(True)
    ClientRunner._try_run(runner)
    assert sleeps[2:] == [2.0], "FLARE's federations need no bell.py"


# heartbeats.py


@pytest.mark.parametrize("token", ["old", "new"])
def test_flare_does_not_report_a_site_that_registers_again(token: str) -> None:
    """One that lives on under the old token, with its job dead, is reported."""
    reported: list[Any] = []
    of_the_job = {RunProcessKey.PARTICIPANTS: {"old": Client("harbor", "old")}}
    runner = SimpleNamespace(get_client_outcome_jobs=list)
    engine = SimpleNamespace(run_processes={"j": of_the_job}, job_runner=runner, exception_run_processes={})
    server: Any = SimpleNamespace(
        engine=engine,
        _job_reported_clients={"j": {"old"}},
        _job_reported_clients_lock=threading.Lock(),
        _notify_dead_job=lambda *facts: reported.append(facts),
    )
    FederatedServer._sync_client_jobs(server, Message({CellMessageHeaderKeys.JOB_IDS: []}), token)
    assert bool(reported) == (token == "old"), "heartbeats.py may go"


# job_guard.py


def test_flare_sets_a_flag_and_no_signal_when_it_ends_a_job() -> None:
    engine: Any = SimpleNamespace()
    ServerEngine.ask_to_stop(engine)
    assert vars(engine) == {"asked_to_stop": True}, "asked_to_stop of job_guard.py may go"


# launcher.py


@pytest.mark.complete
def test_flare_reports_a_killed_process_as_a_failure_of_the_job(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    process.send_signal(signal.SIGKILL)
    sent: list[Any] = []
    client = SimpleNamespace(client_name="a")
    client.send_request_before_shutdown = lambda request, **_: sent.append(request.payload)
    executor, fl_ctx = JobExecutor(client, ""), FLContext()
    handle = ProcessHandle(process=process)
    executor.run_processes["j"] = {
        RunProcessKey.JOB_HANDLE: handle,
        RunProcessKey.STATUS: ClientStatus.STARTED,
    }
    fl_ctx.get_engine = lambda: SimpleNamespace(fire_event=lambda *_: None)
    executor._wait_child_process_finish(client, "j", None, "", None, str(tmp_path), fl_ctx)
    assert [payload[JobFailureMsgKey.CODE] for payload in sent] == [ProcessExitCode.EXCEPTION], (
        "launcher.py may go"
    )


# plain_json.py


def test_flare_reads_variables_of_the_party_in_a_jobs_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUTURE_TEST_SECRET", "rosebud")
    job = exported(tmp_path)
    meta = json.loads((job / "meta.json").read_text())
    (job / "meta.json").unlink()
    (job / "meta.conf").write_text(json.dumps({**meta, "note": 0})[:-2] + "${SUTURE_TEST_SECRET} }")
    valid, error, read = JobMetaValidator().validate(job.name, zipped(job, job.parent))
    assert (valid, error) == (True, "")
    assert read["note"] == "rosebud", "Refusing of plain_json.py may go"


def test_flare_replaces_what_is_in_braces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUTURE_TEST_SECRET", "rosebud")
    config = {"title": "of {$SUTURE_TEST_SECRET}"}
    resolve_var_refs(JsonScanner(config), {})
    assert config == {"title": "of rosebud"}, "references of plain_json.py may go"


# allow_list.py


def test_flare_deploys_an_app_with_a_component_that_is_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = exported(tmp_path) / "app_alpha"
    assert "suture." in (app / "config" / "config_fed_client.json").read_text()
    root = strict(tmp_path / "party", "other.")
    assert deploy(app, root, monkeypatch, None) == "", "unlisted of allow_list.py may go"


# stale_jobs.py


def test_flare_leaves_the_jobs_of_a_killed_server_as_running() -> None:
    store = Store(old=RunStatus.RUNNING)
    store.tell(JobRunner(""), EventType.SYSTEM_START)
    assert store.jobs == {"old": RunStatus.RUNNING}, "stale_jobs.py may go"


# task_client.py


def test_flare_gives_a_task_to_a_site_that_states_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's own code, from a request with the client of its token to the task."""
    communicator, task = WFCommServer(), Task("train", Shareable())
    manager = SimpleNamespace(check_task_send=lambda *_: TaskCheckStatus.SEND)
    task.props["___mgr"] = manager
    communicator._tasks.append(task)
    runner: Any = object.__new__(ServerRunner)
    runner.__dict__ |= {
        "status": "started",
        "job_id": "job",
        "wf_lock": threading.RLock(),
        "abort_signal": Signal(),
        "_processing_tasks": {},
        "_processing_tasks_lock": threading.Lock(),
        "config": SimpleNamespace(task_data_filters={}, task_request_interval=0.0),
        "current_wf": SimpleNamespace(id="train", controller=SimpleNamespace(communicator=communicator)),
    }
    for silenced in ("fire_event", "log_debug", "log_info", "_report_client_active"):
        monkeypatch.setattr(ServerRunner, silenced, lambda *_, **__: None)
    fl_ctx, stated = context("beta"), context("beta").get_peer_context()
    fl_ctx.set_prop(ReservedKey.ENGINE, Mock(spec=ServerEngineSpec), private=True, sticky=False)
    fl_ctx.set_prop(FLContextKey.RUNNER, runner, private=True, sticky=False)
    request = Shareable()
    request.set_peer_context(stated)
    request.set_header(ServerCommandKey.FL_CLIENT, Client("alpha", "token"))
    given = GetTaskCommand().process(request, fl_ctx)
    assert given.get_header(ServerCommandKey.TASK_NAME) == "train", "FLARE needs no task_client.py"
    assert fl_ctx.get_peer_context().get_identity_name() == "beta"
    assert client_of(given, fl_ctx) == "alpha"


# tensors.py, tensor_files.py


def test_flare_offers_a_small_tensor_for_download() -> None:
    manager = DatumManager(fobs_ctx={FOBSContextKey.CELL: object()})
    found = TensorDecomposer().decompose(torch.ones(1), manager)
    assert found[EncKey.TYPE] == EncType.REF, "tensors.py may go"


def test_a_message_of_flare_has_all_bytes_of_its_tensors() -> None:
    tensor = torch.ones(2**20)
    found = TensorDecomposer().decompose(tensor, DatumManager(fobs_ctx={}))
    assert len(found[EncKey.DATA]) >= tensor.nbytes, "tensor_files.py may go"


# provisioning.py


def test_flare_deletes_the_folder_in_which_it_prepares_a_poc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "poc" / "data" / "image.png"
    data.parent.mkdir(parents=True)
    data.write_text("image")
    monkeypatch.setattr(poc_commands, "prepare_poc_provision", lambda *_: {"name": "p"})
    monkeypatch.setattr(poc_commands, "save_startup_kit_dir_config", lambda *_: None)
    assert poc_commands._prepare_poc([], 0, str(tmp_path / "poc"), force=True)
    assert not data.exists(), "provisioning.py may go"


# suture.execution.simulator and .simulator


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the processes that FLARE's simulator has started; each has ended at once."""
    commands: list[list[str]] = []

    def start(words: list[str], **_: Any) -> Any:
        commands.append(words)
        return SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(subprocess, "Popen", start)
    connection = SimpleNamespace(send=lambda _: None)
    monkeypatch.setattr(SimulatorClientRunner, "_create_connection", lambda *_, **__: connection)
    return commands


def simulator(workspace: Path) -> SimulatorClientRunner:
    """FLARE's simulator of one site."""
    for name in ("startup", "local"):
        (workspace / "a" / name).mkdir(parents=True)
    args = Namespace(workspace=str(workspace), set=[], threads=1, log_config="x", end_run_for_all=False)
    cell = SimpleNamespace(get_root_url_for_child=lambda: "u", get_internal_listener_url=lambda: "u")
    client = SimpleNamespace(client_name="a", token="t", cell=cell, simulate_running=False)
    return SimulatorClientRunner("", args, [client], None, args, {})


def test_flares_simulator_does_not_start_the_process_of_a_site_again(
    started: list[list[str]], sleeps: list[float], tmp_path: Path
) -> None:
    simulator(tmp_path).run_client_thread(1, None, threading.Lock(), False)
    assert len(started) == 1, "suture.execution.simulator may go"


def test_flares_simulator_divides_its_commands_at_blanks(
    started: list[list[str]], sleeps: list[float], tmp_path: Path
) -> None:
    simulator(tmp_path / "a b").run_client_thread(1, None, threading.Lock(), False)
    assert str(tmp_path / "a") in started[0], "check_paths of suture.execution.simulator may go"


# deployed.py


def test_flare_deploys_without_the_policy_in_resources_json(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "resources.json.default").write_text('{"components": []}')
    (local / "resources.json").write_text('{"components": [], "class_allow_list": ["suture."]}')
    deploy_common._patch_resources(tmp_path, "docker_launcher", deploy_common.DOCKER_CLIENT_LAUNCHER, {})
    assert not (local / "resources.json").exists(), "change_policy need not write resources.json.default"
    assert "class_allow_list" not in json.loads((local / "resources.json.default").read_text())


# job_packages.py


@pytest.mark.complete
def test_a_recipe_copies_installed_packages_into_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("client.py").touch()
    for name in ("plain", "told"):
        model = {"class_path": "torch.nn.Identity"}
        recipe = FedAvgRecipe(name=name, model=model, min_clients=1, train_script="client.py")
        recipe.add_server_output_filter(SiteRowsFilter(), tasks=["train"])
        if name == "told":
            installed(recipe)
        recipe.export("jobs")
    copied = {path.parts[1] for path in Path("jobs").rglob("suture")}
    assert copied == {"plain"}, "suture.flare.compat.job_packages may go"
