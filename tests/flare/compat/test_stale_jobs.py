"""A server that starts again leaves no job as RUNNING that nobody runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.job_def import RunStatus
from nvflare.private.fed.server.job_runner import JobRunner

from suture.flare.compat.stale_jobs import StaleJobs


class Store:
    """A job store, as far as the runner asks it."""

    def __init__(self, **jobs: RunStatus) -> None:
        self.jobs: dict[str, Any] = dict(jobs)

    def get_jobs_by_status(self, statuses: list[RunStatus], fl_ctx: Any) -> list[Any]:
        return [SimpleNamespace(job_id=name) for name, status in self.jobs.items() if status in statuses]

    def set_status(self, job_id: str, status: RunStatus, fl_ctx: Any) -> None:
        self.jobs[job_id] = status


def test_running_jobs_of_an_earlier_life_end_and_others_stay() -> None:
    store = Store(old=RunStatus.RUNNING, sent=RunStatus.DISPATCHED, new=RunStatus.SUBMITTED)
    runner = JobRunner("")
    components = {"job_runner": runner, "job_manager": store}
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_component=components.get))
    StaleJobs().handle_event(EventType.SYSTEM_END, fl_ctx)
    assert store.jobs["old"] is RunStatus.RUNNING
    StaleJobs().handle_event(EventType.SYSTEM_START, fl_ctx)
    ended = RunStatus.FINISHED_ABNORMAL
    assert store.jobs == {"old": ended, "sent": ended, "new": RunStatus.SUBMITTED}
