"""A job as a FLARE recipe, which runs in the simulator, a POC or production and exports for the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvflare.apis.filter import Filter
from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe

from suture.core.errors import ConfigError
from suture.core.names import check_sites
from suture.federation.plan import Plan, Schedule
from suture.flare.controller import FederationController
from suture.flare.event_feed import EXPERIMENT
from suture.flare.executor import SiteExecutor
from suture.flare.filters import EgressFilter
from suture.protocol.privacy import NO_ENCRYPTION

_TASKS = ["handshake", "train", "evaluate"]
_POLL = 0.1
_PACKAGE = Path(__file__).resolve().parent.parent


class FederationRecipe(Recipe):
    """The FLARE job of a federation. The app of a site contains no label.

    Args:
        name: of the job.
        plan, schedule: of the federation.
        sites: names of the sites. Each gets its own app, without the schedule. Where no sites are named,
            FLARE sends one app, which includes the server's part, to all parties.
        min_clients: number of clients that the job must be deployed to.
        bundle: whether the package travels with the job; otherwise it is installed at every party.

    Raises:
        ConfigError: the schedule contains labels and no sites are named, or a name is not valid for a site.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        schedule: Schedule,
        sites: Sequence[str] = (),
        min_clients: int = 1,
        bundle: bool = True,
    ) -> None:
        check_sites(sites)
        if not sites and (schedule.label_map or schedule.accept_labels):
            raise ConfigError(
                "the job's label_map or accept_labels names labels, which only the server may see; name the "
                "sites (--sites a,b,c) so that each gets its own app"
            )
        # So that `suture resume` finds the job of an experiment.
        job = FedJob(name=name, min_clients=min_clients, meta_props={EXPERIMENT: plan.experiment})
        job.to_server(FederationController(plan.to_dict(), schedule.to_dict()), id="controller")
        # Sites poll for tasks this often; with FLARE's default every round takes at least 2 s.
        job.to_server({"server": {"task_request_interval": _POLL}})
        for target in sites or [ALL_SITES]:
            job.to(SiteExecutor(plan.to_dict(), schedule.rounds), target, tasks=_TASKS)
            job.to(EgressFilter(), target, tasks=_TASKS, filter_type=FilterType.TASK_RESULT)
        if bundle:
            for target in [SERVER_SITE_NAME, *(sites or [ALL_SITES])]:
                job.add_file_to(str(_PACKAGE), target, dest_dir="suture", app_folder_type="custom")
        else:
            job.set_app_packages(["suture"])
        super().__init__(job)

    # FLARE's recipes switch homomorphic encryption on by these filters.

    def add_client_input_filter(
        self, filter: Filter, tasks: list[str] | None = None, clients: list[str] | None = None
    ) -> None:
        """As in FLARE; filters for homomorphic encryption are refused."""
        super().add_client_input_filter(_plain(filter), tasks, clients)

    def add_client_output_filter(
        self, filter: Filter, tasks: list[str] | None = None, clients: list[str] | None = None
    ) -> None:
        """As in FLARE; filters for homomorphic encryption are refused."""
        super().add_client_output_filter(_plain(filter), tasks, clients)

    def add_server_output_filter(self, filter: Filter, tasks: list[str] | None = None) -> None:
        """As in FLARE; filters for homomorphic encryption are refused."""
        super().add_server_output_filter(_plain(filter), tasks)

    def add_server_input_filter(self, filter: Filter, tasks: list[str] | None = None) -> None:
        """As in FLARE; filters for homomorphic encryption are refused."""
        super().add_server_input_filter(_plain(filter), tasks)


def _plain(filter_: Filter) -> Filter:
    """Return the filter unchanged.

    Raises:
        ConfigError: it is one of FLARE's filters for homomorphic encryption.
    """
    if any(".he." in f"{kind.__module__}." for kind in type(filter_).__mro__):
        raise ConfigError(f"{type(filter_).__name__}: {NO_ENCRYPTION}")
    return filter_
