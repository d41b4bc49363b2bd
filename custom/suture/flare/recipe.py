"""A job as a FLARE recipe, which runs in the simulator, a POC or production and exports for the console."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe

from suture.core import VERSION
from suture.core.entry_points import METHOD_GROUP, PACKAGES
from suture.core.errors import ConfigError
from suture.core.files import read_json, write_json, writing
from suture.core.labels import check_sites
from suture.core.privacy import NO_ENCRYPTION
from suture.core.validation import changed, with_paths
from suture.execution.job import Job, check_federated
from suture.federation.plan import Plan, Schedule, needed_sites
from suture.flare import EXPERIMENT, PLAN, SCHEDULE, SHARED_WITH
from suture.flare.compat.plain_json import SIGNED
from suture.flare.controller import FederationController
from suture.flare.executor import EgressFilter, SiteExecutor
from suture.methods.source import Source, source_of
from suture.models import own_words

log = logging.getLogger(__name__)

_TASKS = ["handshake", "mask", "train", "calibrate", "evaluate"]
_POLL = 0.01
"""Seconds that a site sleeps after each poll, before it waits for the bell; FLARE's default is 2."""
_PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of the packages of this distribution."""

_HTTP = 4 * 2**20
"""Bytes of a message that a site's HTTP driver of FLARE takes; an app is one, and not compressed."""
_EACH = 800
"""Bytes of an app for each of its files: the entry in FLARE's archive, and the submitter's signatures."""

SITES_APP = "app_sites"
"""The app of all named sites in an exported job."""

_JOB_FILES = {"job.py", "job.toml"}
"""Files of a job in its own folder, of which it has one."""

_WRITTEN = {"meta.json", "app", *SIGNED}
"""What is written where no sites are named, and by FLARE's console when such a folder is submitted."""

_COMPILED = shutil.ignore_patterns("__pycache__")


class FederationRecipe(Recipe):
    """The FLARE job of a federation. The app of a site contains no label.

    Args:
        name: of the job.
        plan, schedule: of the federation.
        sites: names of the sites. Their app has no schedule. Where no sites are named, FLARE sends one app,
            which includes the server's part, to all parties.
        min_clients: number of clients that the job must be deployed to.
        bundle: whether this package, and that of a method from outside, travel with the job; otherwise they
            are installed at every party.
        shared_with: names of the users who may continue the experiment beside the submitter.
        bell: whether sites wait for the server's bell before they ask for a task.
        more: further entries of meta.json, as of `Job.flare`.
        unsettled: fields of the plan that the job leaves to its start, of ``experiment`` and ``code``; see
            `settled`.

    Raises:
        ConfigError: the schedule contains labels and no sites are named, a name is not valid for a site,
            or the method is in no installed package.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        schedule: Schedule,
        sites: Sequence[str] = (),
        min_clients: int = 1,
        bundle: bool = False,
        shared_with: Sequence[str] = (),
        bell: bool = True,
        more: Mapping[str, Any] | None = None,
        unsettled: Collection[str] = (),
    ) -> None:
        check_sites(sites)
        if not sites and (schedule.label_map or schedule.accept_labels or schedule.parents):
            raise ConfigError(
                "the job's label_map, accept_labels or parents name labels, which only the server may see. "
                "Name the sites (--sites a,b,c) so that they get an app of their own"
            )
        # So that `suture resume` finds the job of an experiment.
        named = {} if "experiment" in unsettled else {EXPERIMENT: plan.experiment}
        meta = {**named, SHARED_WITH: list(shared_with), **(more or {})}
        job = FedJob(name=name, min_clients=min_clients, meta_props=meta)
        targets = sites or [ALL_SITES]
        folder = _temporary(self)
        write_json(folder / PLAN, {k: v for k, v in plan.to_job().items() if k not in unsettled})
        write_json(folder / SCHEDULE, changed(schedule))
        job.add_file_to_server(str(folder / SCHEDULE), app_folder_type="config")
        for target in (SERVER_SITE_NAME, *targets):
            job.add_file_to(str(folder / PLAN), target, app_folder_type="config")
        job.to_server(FederationController(PLAN, SCHEDULE), id="controller")
        job.to_server({"server": {"task_request_interval": _POLL}})
        for target in targets:
            job.to(SiteExecutor(PLAN, schedule.rounds, bell), target, tasks=_TASKS)
            job.to(EgressFilter(), target, tasks=_TASKS, filter_type=FilterType.TASK_RESULT)
        source = source_of(type(plan.method))
        if bundle:
            self._bundle(job, plan, source, [SERVER_SITE_NAME, *targets])
        # They are in the bundle or installed: FLARE need not look for what each component imports.
        job.set_app_packages([*PACKAGES, *([source.package] if source else [])])
        super().__init__(job)

    def _bundle(self, job: FedJob, plan: Plan, source: Source | None, targets: Sequence[str]) -> None:
        """Add this package, and that of a method from outside, to the apps of a job."""
        folder = _temporary(self)
        _write_own_distribution(folder, plan)
        if source:
            _write_distribution(source, folder)
        for target in targets:
            job.add_file_to(str(folder), target, app_folder_type="custom")

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


def _temporary(recipe: Recipe) -> Path:
    """Return a folder that lives as long as the recipe: FLARE copies files when it is exported or run."""
    folder = Path(tempfile.mkdtemp(prefix="suture-job-"))
    weakref.finalize(recipe, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _write_distribution(source: Source, folder: Path) -> None:
    """Write the package of a method as it lies in a folder of installed packages.

    The metadata contains name, version and entry point, by which `suture.methods.outside` finds the method
    where FLARE puts the folder on the path.
    """
    if source.path.is_dir():
        shutil.copytree(source.path, folder / source.package, ignore=_COMPILED)
    else:
        shutil.copy(source.path, folder)
    points = f"[{METHOD_GROUP}]\n{source.method} = {source.entry}\n"
    _write_metadata(folder, source.distribution, source.version, points)


def _write_own_distribution(folder: Path, plan: Plan) -> None:
    """Write the packages of this distribution, with their entry points, as `_write_distribution` does.

    Files are left out that no site of the plan reads, see `_check_size`: the papers' tables, and priors that
    the plan does not name.
    """
    named = json.dumps(plan.to_dict())

    def left_out(within: str, names: list[str]) -> set[str]:
        tables = {name for name in names if Path(within).name == "tables" and not name.endswith(".py")}
        priors = {
            name for name in names if name.endswith(".safetensors") and f'"{Path(name).stem}"' not in named
        }
        return _COMPILED(within, names) | tables | priors

    for package in PACKAGES:
        shutil.copytree(_PACKAGES / package, folder / package, ignore=left_out)
    groups: dict[str, list[str]] = {}
    for point in distribution("suture").entry_points:
        if point.module.partition(".")[0] not in PACKAGES:
            continue  # it does not travel
        groups.setdefault(point.group, []).append(f"{point.name} = {point.value}\n")
    text = "".join(f"[{group}]\n{''.join(lines)}" for group, lines in groups.items())
    _write_metadata(folder, "suture", VERSION, text)


def _write_metadata(folder: Path, name: str, version: str, points: str) -> None:
    info = folder / f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)


def _plain(filter_: Filter) -> Filter:
    """Return the filter unchanged.

    Raises:
        ConfigError: it is one of FLARE's filters for homomorphic encryption.
    """
    if any(".he." in f"{kind.__module__}." for kind in type(filter_).__mro__):
        raise ConfigError(f"{type(filter_).__name__}: {NO_ENCRYPTION}")
    return filter_


def recipe_of(
    job: Job, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = False
) -> FederationRecipe:
    """Return the FLARE recipe of a job.

    Args:
        experiment: identifier under which the parties store their state; by default each submission of the
            job begins one. Only a job that names it, or carries the code, states the hash of the code.
        sites, bundle: as in `FederationRecipe`.

    Raises:
        ConfigError: its method cannot run in a federation.
    """
    check_federated(job.method)
    unsettled = () if experiment else ("experiment",) if bundle else ("experiment", "code")
    # Each party has the files that the job names in a folder of its own, see `workspace`.
    plan = with_paths(job.plan(experiment or job.name), lambda _key, path, _mark: Path(path).absolute().name)
    # Sites that are named are all needed, unless the job says how many are enough.
    least = max(needed_sites(job.min_sites, len(sites)), 1)
    return FederationRecipe(
        job.name,
        plan,
        job.schedule(),
        sites,
        least,
        bundle,
        shared_with=job.shared_with,
        more=_meta_of(job, sites),
        unsettled=unsettled,
    )


def _tidy(job: Path) -> None:
    """Write FLARE's files of a job alike at each export: it keeps the tasks of a filter in no order."""
    for path in (job / "meta.json", *job.glob("app*/config/*.json")):
        values = read_json(path)
        for entry in values.get("task_result_filters", ()):
            entry["tasks"] = _TASKS
        write_json(path, values)


def _share_app(job: Path, sites: Sequence[str]) -> None:
    """Give all sites of an exported job one app: theirs do not differ, and with `bundle` each has 4 MB."""
    if len(sites) < 2:
        return
    meta = read_json(job / "meta.json", "deploy_map")
    for site in sites[1:]:
        shutil.rmtree(job / f"app_{site}")
    (job / f"app_{sites[0]}").rename(job / SITES_APP)
    others = {app: targets for app, targets in meta["deploy_map"].items() if targets[0] not in sites}
    write_json(job / "meta.json", {**meta, "deploy_map": {**others, SITES_APP: list(sites)}})


def _meta_of(job: Job, sites: Sequence[str]) -> dict[str, Any]:
    """Return the entries of meta.json that `Job.flare` names; `gpus` is FLARE's resource of each site."""
    meta = dict(job.flare)
    if gpus := meta.pop("gpus", 0):
        own = meta.get("resource_spec", {})
        # Without names of sites, FLARE's default, which counts for the server too.
        every = {site: {"num_of_gpus": gpus} for site in sites or ["@default"]}
        meta["resource_spec"] = {**own, **{s: {**every[s], **own.get(s, {})} for s in every}}
    return meta


def _check_size(job: Path, scheme: str) -> None:
    """Check that FLARE can send the app of an exported job to its sites.

    Raises:
        ConfigError: over http, it cannot; where the scheme is not known, that is a warning.
    """
    for app in job.glob("app*"):
        size = sum(path.stat().st_size + _EACH for path in app.rglob("*") if path.is_file())
        if size > _HTTP and app.name != "app_server":
            text = (
                f"{app.name} of {job.name} has {size / 2**20:.1f} MiB, and FLARE's http loses messages of "
                "more than 4. Install the packages at every party and leave out --bundle, or provision with "
                "the scheme grpc or tcp"
            )
            if scheme == "http":
                raise ConfigError(text)
            if not scheme:
                log.warning("%s", text)


def export_job(
    job: Job,
    folder: Path,
    experiment: str | None = None,
    sites: Sequence[str] = (),
    bundle: bool = False,
    scheme: str = "",
) -> Path:
    """Write the job as a folder that FLARE's admin console accepts; return the folder.

    Args:
        folder: in which the job's folder is created. Where that holds nothing but the job's own file, the
            job is written beside it, and replaces one that was.
        experiment, sites, bundle: as in `recipe_of`.
        scheme: of the federation's connections (``grpc``, ``http``), where it is known.

    Raises:
        ConfigError: the folder already holds a job of that name, the method cannot run in a federation, or
            the job is too large for its connections.
        DiskError: the folder cannot be written; nothing is left of the job.
    """
    target = folder / job.name
    existing = {path.name for path in target.iterdir()} if target.is_dir() else set()
    # FLARE sends all that lies in the folder to the server: of data beside the job, too.
    if target.exists() and (sites or not (existing & _JOB_FILES and existing <= _JOB_FILES | _WRITTEN)):
        raise ConfigError(f"{target} already exists; choose another folder")
    if warning := own_words(job.model):
        log.warning("%s", warning)
    recipe = recipe_of(job, experiment, sites, bundle)
    with writing(target), tempfile.TemporaryDirectory() as temporary:
        recipe.export(temporary)
        exported = Path(temporary) / job.name
        _share_app(exported, sites)
        _tidy(exported)
        _check_size(exported, scheme)
        for name in existing & _WRITTEN:
            path = target / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            shutil.copytree(exported, target, dirs_exist_ok=True)
        except BaseException:
            if not existing:
                shutil.rmtree(target, ignore_errors=True)
            raise
    return target
