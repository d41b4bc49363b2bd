"""A job as a FLARE recipe: runs in the simulator, a POC or production, and exports for the console."""

from __future__ import annotations

from pathlib import Path

from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from suture.flare.controller import FederationController
from suture.flare.executor import SiteExecutor
from suture.flare.filters import EgressFilter
from suture.plan import Plan, Schedule

_TASKS = ["hello", "train", "evaluate"]
_PACKAGE = Path(__file__).resolve().parent.parent


class FederationRecipe(Recipe):
    """The FLARE job of a federation. No site's app names a label.

    Args:
        name: of the job.
        plan, schedule: what is about to be done; the sites' apps get the plan alone.
        min_clients: clients that the job must be deployed to.
        bundle: whether the package travels with the job; otherwise it is installed at every party.
    """

    def __init__(
        self, name: str, plan: Plan, schedule: Schedule, min_clients: int = 1, bundle: bool = True
    ) -> None:
        job = FedJob(name=name, min_clients=min_clients)
        job.to_server(FederationController(plan.to_dict(), schedule.to_dict()), id="controller")
        # Sites ask for work this often; FLARE's default of 2 s would be the floor of every round.
        job.to_server({"server": {"task_request_interval": 0.02}})
        job.to_clients(SiteExecutor(plan.to_dict(), schedule.rounds), tasks=_TASKS)
        job.to_clients(EgressFilter(), filter_type="task_result_filters", tasks=_TASKS)
        if bundle:
            job.add_file_to_server(str(_PACKAGE), dest_dir="suture", app_folder_type="custom")
            job.add_file_to_clients(str(_PACKAGE), dest_dir="suture", app_folder_type="custom")
        else:
            job.job.app_packages = ["suture"]
        super().__init__(job)
