"""The site's half of a federation as a FLARE executor, and the filter of its answers.

Nothing passes the filter that the method did not declare. It guards against mistakes of a method, and
against a job with changed code only where the package is installed at the site and jobs may not bring code
of their own; see docs/architecture.md.
"""

from __future__ import annotations

import logging
import time

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from suture.core.errors import Aborted, ConfigError, RejectedUpdate
from suture.core.escaping import printable
from suture.data.batch import abortable
from suture.data.config import find_site_config, load_site_config
from suture.federation.plan import Plan
from suture.federation.site.abstention import abstention, record_error
from suture.federation.site.ledger import Requester
from suture.federation.site.releases import SiteAnswer
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.flare import CODE, FINGERPRINT
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.bell import TaskNotifier
from suture.flare.compat.tensors import register
from suture.flare.scopes import check_scope
from suture.flare.workspace import (
    KitIdentity,
    check_allowed,
    claim_experiment,
    fingerprint,
    is_simulated,
    on_assigned,
    read_settings,
    settled,
    with_own_files,
    workspace_root,
)
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.messages import Abstain, Reply, TaskData
from suture.protocol.packing import pack, unpack

log = logging.getLogger(f"custom.{__name__}")
"""FLARE writes the INFO lines of loggers with this first name into log_fl.txt."""

ALLOWED = "suture.allowed"
"""Property of the FLARE context in which the executor leaves what is allowed for the site's filter."""


class SiteExecutor(Executor):
    """Runs the site's half of a federation.

    Args:
        plan: name of the file in the app's config folder; see `read_settings`.
        rounds: number of rounds of the run, as in the server's schedule.json.
        bell: whether the site waits for the server's bell before it asks for a task; not where sites take
            turns in one thread of the simulator.
    """

    def __init__(self, plan: str, rounds: int, bell: bool = True) -> None:
        super().__init__()
        self.plan = plan
        self.rounds = rounds
        self.bell = bell
        self._bell = TaskNotifier() if bell else None
        self._site: Site | None = None
        self._fingerprint = ""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            register()
        if self._bell:
            self._bell.handle_event(event_type, fl_ctx)

    def execute(
        self,
        task_name: str,
        shareable: Shareable,
        fl_ctx: FLContext,
        abort_signal: Signal,
    ) -> Shareable:
        task = unpack(from_shareable_(shareable))
        if not isinstance(task, TaskData) or task.task != task_name:
            raise RejectedUpdate(f"the task {task_name!r} carries something else")
        began = time.monotonic()
        try:
            with abortable(lambda: abort_signal.triggered):
                stated = shareable.get_header(FINGERPRINT), shareable.get_header(CODE)
                answer = self._answer(task, fl_ctx, *stated)
            log.info("%s of round %d: %.1f s", task.task, task.round, time.monotonic() - began)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception:  # noqa: BLE001 - the site has recorded it; FLARE would write its text into a log
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        fl_ctx.set_prop(ALLOWED, answer.allowed, private=True, sticky=False)
        return to_shareable(answer.packed)

    def _answer(
        self, task: TaskData, fl_ctx: FLContext, servers: str | None = None, code: str | None = None
    ) -> SiteAnswer:
        try:
            self._site = self._site or self._open(fl_ctx, code)
            if servers and self._fingerprint and servers != self._fingerprint:
                raise ConfigError(
                    f"plan.json of this site's app, or its number of rounds ({self.rounds}), is not the "
                    "server's. Export the job again, or change every app of the job alike. Rounds are in "
                    "schedule.json of the server and config_fed_client.json of the sites"
                )
        except Aborted:
            raise
        except Exception as error:
            record_error(workspace_root(fl_ctx) / "suture", fl_ctx.get_identity_name(), task, error)
            if abstained := abstention(error):
                return SiteAnswer(pack(abstained))
            raise
        return self._site.answer(task)

    def _open(self, fl_ctx: FLContext, code: str | None = None) -> Site:
        name = fl_ctx.get_identity_name()
        root = workspace_root(fl_ctx)
        # The site compares the hash with that of its own code, as one that the job itself states.
        settings = settled(read_settings(self.plan, fl_ctx), fl_ctx, lambda: str(code or "none"))
        self._fingerprint = fingerprint(settings, self.rounds)
        check_allowed(settings, fl_ctx)
        meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
        check_scope(name, root, str(meta.get(JobMetaKey.SCOPE.value) or ""))
        plan = Plan.from_dict(settings)
        config = on_assigned(load_site_config(find_site_config(name, root)), meta, name)
        own = "model.embedding", *(() if config.training.prior else ("method.prior.path",))
        plan = with_own_files(plan, config.storage.files, *own)
        folder = experiment_folder(config.storage.state, plan.experiment)
        claim_experiment(folder, fl_ctx)
        kits = plan.secure_aggregation is not None and not is_simulated()
        identity = KitIdentity(root) if kits else None
        submitter = printable(meta.get(JobMetaKey.SUBMITTER_NAME) or "", 80)
        requester = Requester(str(fl_ctx.get_job_id()), submitter)
        return Site(name, config, plan, self.rounds, folder, identity=identity, requester=requester)


RETURN_CODES = frozenset(value for name, value in vars(ReturnCode).items() if name.isupper())
"""FLARE's return codes: a return code is text, so any other text could leave in its place."""


class EgressFilter(Filter):
    """Checks a site's answer against what is allowed, and passes on only what it has checked."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the answer, rebuilt from its checked parts.

        The result passes the filter again: a site's policy and a job may both install it.

        Raises:
            RejectedUpdate: a tensor, field or size was not declared. FLARE then sends an error code in place
                of the answer, and writes this error into its log: so it names nothing of the answer.
        """
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in RETURN_CODES else ReturnCode.EXECUTION_EXCEPTION)
        try:
            # The executor has packed this answer already, and it is unpacked and packed a second time on
            # purpose. What leaves is the Shareable, into which other components of the job may have written,
            # so it is the Shareable that must be checked. And validation accepts more than one form of a
            # value (a number as text of any length, say), so the form itself could carry information: only a
            # message packed from the validated values carries nothing else. Tensors are not copied.
            return to_shareable(pack(_check(shareable, fl_ctx.get_prop(ALLOWED))))
        except Exception as error:  # noqa: BLE001 - FLARE would write its text into the log of errors
            log.warning("held back: %s", error)
        raise RejectedUpdate("an answer that was not declared is held back; log.txt of this site says why")


def _check(shareable: Shareable, allowed: object) -> Reply:
    reply = unpack(from_shareable_(shareable))
    if isinstance(reply, TaskData):
        raise RejectedUpdate("a payload does not leave a site")
    if not isinstance(reply, Abstain):
        if not isinstance(allowed, AllowedReply):
            raise RejectedUpdate("nothing was requested of this site")
        check_reply(reply, allowed)
    return reply
