"""The site's own policy: what it holds back whatever a job brings along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer
from one_site import POLICY, OneSite

from suture.execution.job import load_job
from suture.flare import PLAN
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.flare.executor import EgressFilter, SiteExecutor
from suture.flare.recipe import export_job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_admin.policy import CLASSES

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
SECRET = "patient 17"


class Leaking(SiteExecutor):
    """A changed executor: one field more in every answer."""

    def execute(self, *args: Any) -> Shareable:
        packed = from_shareable_(super().execute(*args))
        return to_shareable(Packed(packed.tensors, {**packed.header, "diary": SECRET}))


class Stranger(SiteExecutor):
    """Another program's executor, which says nothing of what it was asked."""

    def execute(self, *args: Any) -> Shareable:
        return to_shareable(pack(SiteInfo(("Mass",), {"train": 1}, 1, "code")))


class Adding(Filter):
    """A filter of a job, which FLARE runs after the site's."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        shareable["diary"] = SECRET
        return shareable


@pytest.fixture
def site(tiny: Any, tmp_path: Path) -> Callable[..., OneSite]:
    register()
    federation = tiny(METHOD)

    def make(name: str = "site", executor: type[SiteExecutor] = SiteExecutor, **more: Any) -> OneSite:
        own = federation.configs["alpha"]
        config = tmp_path / f"{name}.toml"
        config.write_text(
            f'[data]\ndataset = "hospital"\nroot = "{own.data.root}"\ntable = "{own.data.table}"\n'
            "[privacy]\nmin_count = 0\nmin_loss = 0\n"
        )
        made = executor(PLAN, 2)
        return OneSite(tmp_path / name, federation.plan, config, executor=made, **more)

    return make


def trained(site: OneSite, tiny: Any, asks: str = "asks") -> Shareable:
    """The site's answer to the first round's task of a server."""
    server = tiny(METHOD, {"alpha": ("Mass", "Nodule")}).server(asks)
    asked = unpack(server.handshake(["alpha"])["alpha"])
    assert isinstance(asked, TaskData)
    server.collector.receive("alpha", from_shareable_(site.answer(asked)))
    server.begin({})
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    return site.answer(task)


def test_the_policy_guards_a_job_without_a_filter(site: Any, tiny: Any) -> None:
    reply = trained(site(), tiny)
    assert reply.get_return_code() == ReturnCode.OK
    assert isinstance(unpack(from_shareable_(reply)), Update)
    held = site("leaking", Leaking).answer(TaskData("handshake"))
    assert held.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert SECRET not in str(dict(held))
    through = site("unguarded", Leaking, policy=False).answer(TaskData("handshake"))
    assert SECRET in str(dict(through)), "without a policy and a filter nothing is held back"


def test_the_check_may_be_made_twice(site: Any, tiny: Any) -> None:
    sites = (
        site("once"),
        site("twice", job_filters=[EgressFilter()]),
        site("job", policy=False, job_filters=[EgressFilter()]),
    )
    replies = (trained(one, tiny, f"asks-{n}") for n, one in enumerate(sites))
    once, *others = (unpack(from_shareable_(reply)) for reply in replies)
    for other in others:
        assert pack(other).header | {"ledger": None} == pack(once).header | {"ledger": None}  # it is salted
        assert pack(other).tensors.keys() == pack(once).tensors.keys()
        assert all(t.equal(pack(once).tensors[k]) for k, t in pack(other).tensors.items())


def test_another_executor_sends_nothing(site: Any) -> None:
    reply = site(executor=Stranger).answer(TaskData("handshake"))
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR


def test_a_filter_of_the_job_comes_after_the_sites_so_the_allow_list_must_refuse_it(
    site: Any, tmp_path: Path
) -> None:
    reply = site(job_filters=[Adding()]).answer(TaskData("handshake"))
    assert reply["diary"] == SECRET  # FLARE's order: the policy alone is not enough
    with pytest.raises(UnsafeComponentError, match="not in allow_list"):
        authorize(tmp_path, f"{__name__}.Adding")


def authorize(folder: Path, path: str) -> None:
    """FLARE's own check of a class that a job names, at a site with the policy's resources.json."""
    local = folder / "own" / "local"
    local.mkdir(parents=True, exist_ok=True)
    (folder / "own" / "startup").mkdir(exist_ok=True)
    shutil.copy(POLICY / "resources.json", local)
    workspace = Workspace(str(folder / "own"), "alpha")
    ComponentPathAuthorizer().authorize_component_config({"path": path}, workspace=workspace)


@pytest.mark.parametrize(
    "path",
    [
        "nvflare.app_opt.he.model_encryptor.HEModelEncryptor",
        "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
        "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
        "nvflare.app_common.executors.statistics.statistics_executor.StatisticsExecutor",
        "nvflare.app_common.filters.exclude_vars.ExcludeVars",
        "suture.federation.site.site.Site",
        "suture.flare.executor.SiteExecutors",
        "subprocess.Popen",
    ],
)
def test_a_job_may_name_no_other_class(path: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeComponentError, match="not in allow_list"):
        authorize(tmp_path, path)


def test_all_that_a_job_of_suture_names_is_allowed(tmp_path: Path) -> None:
    folder = export_job(load_job("demo"), tmp_path / "jobs", "trial", ("alpha",), bundle=False)
    config = json.loads((folder / "app_alpha" / "config" / "config_fed_client.json").read_text())
    named = [config["executors"][0]["executor"], *config["task_result_filters"][0]["filters"]]
    assert not config["components"]
    assert not config["task_data_filters"]
    assert len(named) == 2
    for component in named:
        authorize(tmp_path, component["path"])


def test_all_that_the_servers_part_names_is_what_a_strict_server_allows(tmp_path: Path) -> None:
    folder = export_job(load_job("demo"), tmp_path / "jobs", "trial", ("alpha",))
    config = json.loads((folder / "app_server" / "config" / "config_fed_server.json").read_text())
    named = [*config["workflows"], *config["components"]]
    named += [f for kind in ("task_data_filters", "task_result_filters") for f in config[kind]]
    assert [component["path"] for component in named] == list(CLASSES["server"])


def test_a_job_cannot_choose_another_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "startup").mkdir()
    shutil.copy(POLICY / "privacy.json", tmp_path / "local")
    manager = create_privacy_manager(Workspace(str(tmp_path), "alpha"), names_only=False)
    monkeypatch.setattr(PrivacyService, "manager", manager)
    assert PrivacyService.is_scope_allowed("")
    assert not PrivacyService.is_scope_allowed("public")
    (only,) = PrivacyService.get_scope("").task_result_filters["out"]
    assert type(only) is EgressFilter


@pytest.mark.parametrize("role", ["project_admin", "org_admin", "lead", "member"])
def test_no_role_may_bring_code_and_no_other_house_may_read_the_sites_files(role: str) -> None:
    authorizer = FLAuthorizer("hospital", json.loads((POLICY / "authorization.json").read_text()))

    def may(right: str, org: str) -> bool:
        who = Person("someone", org, role)
        return bool(authorizer.authorize(AuthzContext(user=who, submitter=who, right=right))[0])

    assert not may("byoc", "hospital")
    assert not may("byoc", "elsewhere")
    for command in ("cat", "grep", "head", "tail", "ls"):
        assert not may(command, "elsewhere")
    assert may("show_stats", "elsewhere")


def test_logs_are_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "startup").mkdir()
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_ROOT, str(tmp_path), private=True)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "alpha", private=False)
    assert is_log_streaming_allowed(fl_ctx)  # FLARE's default
    shutil.copy(POLICY / "resources.json", tmp_path / "local")
    assert not is_log_streaming_allowed(fl_ctx)
