"""A site of FLARE in this process: its own runner, policy and filters; only the network is missing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.client.client_engine_executor_spec import TaskAssignment
from nvflare.private.fed.client.client_runner import ClientRunner, ClientRunnerConfig, TaskRouter

from job_app import place_app
from suture.data.config import SiteConfig
from suture.federation.plan import Plan
from suture.federation.server.server import Server
from suture.flare import PLAN
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.executor import SiteExecutor
from suture.protocol.messages import TaskData
from suture.protocol.packing import pack, unpack

POLICY = Path(__file__).resolve().parents[2] / "poc_workspace" / "policy"
JOB = "job-1"


class Engine:
    """What a runner needs of FLARE's engine, without a network."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.events: list[Any] = []

    def get_workspace(self) -> Workspace:
        return self._workspace

    def register_aux_message_handler(self, topic: str, message_handle_func: Any) -> None:
        """No message comes."""

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keeps what FLARE would hand to every component, some of which send it on."""
        self.events.append(str(fl_ctx.get_prop(FLContextKey.EVENT_DATA)))


class OneSite:
    """One site that runs one job.

    Args:
        folder: of the site; its policy is installed from poc_workspace/policy.
        job_filters: those that the job brings along.
        policy: whether the site has one.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        config: Path,
        *,
        rounds: int = 2,
        job_filters: Sequence[Filter] = (),
        policy: bool = True,
        executor: Any = None,
    ) -> None:
        local = folder / "local"
        (folder / "startup").mkdir(parents=True)
        local.mkdir()
        if config.exists():
            shutil.copy(config, local / "suture.toml")
        if policy:
            shutil.copy(POLICY / "privacy.json", local)
        workspace = Workspace(str(folder), "alpha")
        self.scope = create_privacy_manager(workspace, names_only=False).get_scope("")
        self.engine = Engine(workspace)
        router = TaskRouter()
        tasks = ["handshake", "train", "evaluate"]
        router.add_executor(tasks, executor or SiteExecutor(PLAN, rounds))
        filters = {f"{task}{FilterKey.DELIMITER}{FilterKey.OUT}": list(job_filters) for task in tasks}
        settings = ClientRunnerConfig(router, {}, filters)
        self.runner = ClientRunner({}, settings, JOB, self.engine)
        private = {FLContextKey.SCOPE_OBJECT: self.scope, FLContextKey.WORKSPACE_OBJECT: workspace}
        self._contexts = FLContextManager(self.engine, "alpha", JOB, {}, private)
        place_app(self._contexts.new_context(), plan)

    def answer(self, task: TaskData) -> Shareable:
        """What the site sends for a task: FLARE's runner, from the executor through all filters."""
        with self._contexts.new_context() as fl_ctx:
            server = FLContext()
            server.set_prop(ReservedKey.RUN_NUM, JOB, private=False)
            fl_ctx.set_peer_context(server)
            assignment = TaskAssignment(task.task, "task-1", to_shareable(pack(task)))
            return self.runner._process_task(assignment, fl_ctx)

    def first_round(self, server: Server) -> Shareable:
        """What the site sends in the first round of a server that has no other site."""
        asked = unpack(server.handshake(["alpha"])["alpha"])
        assert isinstance(asked, TaskData)
        server.collector.receive("alpha", from_shareable_(self.answer(asked)))
        server.begin({})
        task = unpack(server.assign()["alpha"])
        assert isinstance(task, TaskData)
        return self.answer(task)


def workspace(folder: Path, party: str = "alpha", **files: Path | str) -> Workspace:
    """FLARE's workspace of a party; in its folder local these files, by their stems: contents or sources."""
    for name in ("local", "startup"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        path = folder / "local" / f"{stem}{'.toml' if stem == 'suture' else '.json'}"
        path.write_text(content.read_text() if isinstance(content, Path) else content)
    return Workspace(str(folder), party)


def process_of(
    at: Workspace, party: str, submitter: tuple[str, str] | None = None, job: str = "job", **meta: Any
) -> FLContext:
    """FLARE's context of a job's process at a party, with the metadata that its server has written."""
    if submitter:
        meta |= {"submitter_name": submitter[0], "submitter_org": submitter[1]}
    engine = SimpleNamespace(get_workspace=lambda: at)
    private = {FLContextKey.WORKSPACE_OBJECT: at, FLContextKey.JOB_META: meta}
    return FLContextManager(engine, party, job, {}, private).new_context()


def toml_of(config: SiteConfig, **storage: str) -> str:
    """A suture.toml of the same data, which withholds nothing."""
    lines = "".join(f'{key} = "{value}"\n' for key, value in storage.items())
    own = config.data
    return (
        f'[data]\ndataset = "hospital"\nroot = "{own.root}"\ntable = "{own.table}"\n'
        f"[privacy]\nmin_count = 0\nmin_loss = 0\n[storage]\n{lines}"
    )
