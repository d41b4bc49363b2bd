"""Stale jobs: jobs that a server was running when it was killed.

FLARE 2.9.0: after a restart it lists them as RUNNING for ever, and they can be neither aborted nor deleted.
The state of their experiments is complete; `suture resume` submits them again.
Where: nvflare/private/fed/server/job_runner.py: handle_event
Expires with: test_flare_leaves_the_jobs_of_a_killed_server_as_running
"""

from __future__ import annotations

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext


class StaleJobs(FLComponent):
    """Marks stale jobs as FINISHED:ABNORMAL when the server starts.

    The server's administrator installs it in local/resources.json; see docs/deployment.md.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            runner = fl_ctx.get_engine().get_component(SystemComponents.JOB_RUNNER)
            runner.update_abnormal_finished_jobs([], fl_ctx)
