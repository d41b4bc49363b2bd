"""What leaves a site through its filter, and what its own policy holds back whatever a job brings along."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer
from one_site import POLICY, OneSite, toml_of, workspace

from suture.core.errors import RejectedUpdate
from suture.data.batch import moved
from suture.execution.job import load_job
from suture.flare import PLAN
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.flare.executor import ALLOWED, EgressFilter, SiteExecutor
from suture.flare.recipe import export_job
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import Abstain, SiteInfo, TaskData, Update, ones
from suture.protocol.packing import Packed, pack, unpack
from suture_admin.policy import CLASSES
from world import refused

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
SECRET = "patient 17"

# The filter


UPDATE = Update(1, ("Mass",), {"w": torch.arange(3.0)}, {"b": torch.ones(1)}, ones(("Mass",)))
PACKED = pack(UPDATE)
REPLY = AllowedReply(
    TaskData("train", 1, labels=("Mass",)),
    Egress({"w": ((3,), "torch.float32")}, {"b": ((), "torch.float32")}),
    ("Mass",),
)


def leaves(sent: Shareable, allowed: AllowedReply | None = REPLY) -> Shareable:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ALLOWED, allowed, private=True, sticky=False)
    return EgressFilter().process(sent, fl_ctx)


def with_meta() -> Shareable:
    dxo = from_shareable(to_shareable(PACKED))
    dxo.set_meta_prop("diary", SECRET)
    return dxo.to_shareable()


def test_what_was_declared_passes_unchanged_and_survives_flares_serialiser() -> None:
    """Rebuilt, so that no form of a value carries more than it: the digits of a text could say anything."""
    register()
    disguised = Packed(PACKED.tensors, {**PACKED.header, "weight": "1.00000000000000000", "round": "1"})
    for packed in (PACKED, disguised):
        out = from_shareable_(fobs.loads(fobs.dumps(leaves(to_shareable(packed)))))
        assert out.header == PACKED.header
        assert type(out.header["weight"]) is float
        assert torch.equal(out.tensors["shared/w"], UPDATE.shared["w"])


@pytest.mark.parametrize(
    ("sent", "allowed"),
    [
        (to_shareable(Packed({**PACKED.tensors, "shared/more": torch.ones(1)}, PACKED.header)), REPLY),
        (to_shareable(Packed({**PACKED.tensors, "shared/w": torch.ones(4)}, PACKED.header)), REPLY),
        (to_shareable(Packed(PACKED.tensors, {**PACKED.header, "note": SECRET})), REPLY),
        (with_meta(), REPLY),
        (DXO(DataKind.METRICS, {"loss": 1.0}).to_shareable(), REPLY),
        (to_shareable(pack(TaskData("train"))), REPLY),
        (Shareable({"raw": b"pixels"}), REPLY),
        (to_shareable(PACKED), None),  # nothing was asked
    ],
    ids=["tensor", "size", "field", "meta", "kind", "task", "raw", "unasked"],
)
def test_anything_undeclared_raises(sent: Shareable, allowed: AllowedReply | None) -> None:
    with refused(by=RejectedUpdate):
        leaves(sent, allowed)


def test_abstentions_and_flares_codes_pass_without_their_luggage() -> None:
    out = leaves(to_shareable(pack(Abstain("disk_full", "OSError"))), None)
    assert isinstance(unpack(from_shareable_(out)), Abstain)
    for code in (ReturnCode.EXECUTION_EXCEPTION, SECRET):
        reply: Any = make_reply(code)
        reply["text"] = SECRET
        out = leaves(reply)
        assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
        assert "text" not in out


def test_a_site_answers_that_its_task_was_aborted() -> None:
    """As FLARE's runner calls it: in a thread, with a signal that the run's abort triggers."""

    class Endless:
        def answer(self, task: TaskData) -> Any:
            while True:
                time.sleep(0.01)
                moved(torch.ones(1), "cpu")

    run, fl_ctx = Signal(), FLContext()
    executor = SiteExecutor(PLAN, 1, bell=False)
    executor._site = Endless()  # type: ignore[assignment]
    threading.Timer(0.1, lambda: run.trigger(True)).start()
    task = to_shareable(pack(TaskData("train", 1)))
    reply = executor.execute("train", task, fl_ctx, Signal(parent=run))
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED
    assert fl_ctx.get_prop(ALLOWED) is None
    assert leaves(reply, None).get_return_code() == ReturnCode.TASK_ABORTED


# The policy


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
        config = tmp_path / f"{name}.toml"
        config.write_text(toml_of(federation.configs["alpha"]))
        return OneSite(tmp_path / name, federation.plan, config, executor=executor(PLAN, 2), **more)

    return make


def test_the_policy_guards_a_job_without_a_filter(site: Any) -> None:
    for executor in (Leaking, Stranger):
        held = site(executor.__name__, executor).answer(TaskData("handshake"))
        assert held.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
        assert SECRET not in str(dict(held))
    through = site("unguarded", Leaking, policy=False).answer(TaskData("handshake"))
    assert SECRET in str(dict(through)), "without a policy and a filter nothing is held back"


def test_the_check_may_be_made_by_the_policy_by_the_job_and_by_both(site: Any, tiny: Any) -> None:
    sites = (
        site("once"),
        site("twice", job_filters=[EgressFilter()]),
        site("job", policy=False, job_filters=[EgressFilter()]),
    )
    servers = (tiny(METHOD, {"alpha": ("Mass", "Nodule")}).server(f"asks-{n}") for n in range(3))
    replies = (one.first_round(server) for one, server in zip(sites, servers, strict=True))
    once, *others = (pack(unpack(from_shareable_(reply))) for reply in replies)
    assert isinstance(unpack(once), Update)
    for other in others:
        assert other.header | {"ledger": None} == once.header | {"ledger": None}  # it is salted
        assert other.tensors.keys() == once.tensors.keys()
        assert all(t.equal(once.tensors[k]) for k, t in other.tensors.items())


def authorize(folder: Path, path: str) -> None:
    """FLARE's own check of a class that a job names, at a site with the policy's resources.json."""
    at = workspace(folder / "own", resources=POLICY / "resources.json")
    ComponentPathAuthorizer().authorize_component_config({"path": path}, workspace=at)


def test_a_filter_of_the_job_comes_after_the_sites_so_the_allow_list_must_refuse_it(
    site: Any, tmp_path: Path
) -> None:
    reply = site(job_filters=[Adding()]).answer(TaskData("handshake"))
    assert reply["diary"] == SECRET  # FLARE's order: the policy alone is not enough
    for path in (
        f"{__name__}.Adding",
        "nvflare.app_opt.he.model_encryptor.HEModelEncryptor",
        "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
        "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
        "nvflare.app_common.executors.statistics.statistics_executor.StatisticsExecutor",
        "nvflare.app_common.filters.exclude_vars.ExcludeVars",
        "suture.federation.site.site.Site",
        "suture.flare.executor.SiteExecutors",
        "subprocess.Popen",
    ):
        with pytest.raises(UnsafeComponentError):
            authorize(tmp_path, path)


def test_all_that_a_job_of_suture_names_is_what_strict_parties_allow(tmp_path: Path) -> None:
    folder = export_job(load_job("demo"), tmp_path / "jobs", "trial", ("alpha",), bundle=False)
    site, server = (
        json.loads((folder / app / "config" / f"config_fed_{role}.json").read_text())
        for app, role in (("app_alpha", "client"), ("app_server", "server"))
    )
    named = [site["executors"][0]["executor"], *site["task_result_filters"][0]["filters"]]
    assert (len(named), site["components"], site["task_data_filters"]) == (2, [], [])
    for component in named:
        authorize(tmp_path, component["path"])
    named = [*server["workflows"], *server["components"]]
    named += [f for kind in ("task_data_filters", "task_result_filters") for f in server[kind]]
    assert [component["path"] for component in named] == list(CLASSES["server"])


def test_a_job_cannot_choose_another_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = workspace(tmp_path, privacy=POLICY / "privacy.json")
    monkeypatch.setattr(PrivacyService, "manager", create_privacy_manager(at, names_only=False))
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
    assert not [right for right in ("byoc", "cat", "grep", "head", "tail", "ls") if may(right, "elsewhere")]
    assert may("show_stats", "elsewhere")


def test_logs_are_not_streamed(tmp_path: Path) -> None:
    workspace(tmp_path)
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_ROOT, str(tmp_path), private=True)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "alpha", private=False)
    assert is_log_streaming_allowed(fl_ctx)  # FLARE's default
    workspace(tmp_path, resources=POLICY / "resources.json")
    assert not is_log_streaming_allowed(fl_ctx)
