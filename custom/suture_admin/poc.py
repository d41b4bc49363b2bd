"""A federation of processes on this machine (FLARE's POC): certificates, data and policy, ready to start."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from suture.core.errors import ConfigError, unknown
from suture.core.files import atomic_write, make_folder, read_regular, replacing
from suture.data.config import CONFIG, SiteConfig, load_server_config
from suture.execution.job import Job
from suture.execution.study import SERVER, StudySites
from suture.flare.compat.provisioning import provision
from suture.flare.kit import Kit, kits_in, poc_folder
from suture.methods import entry_of
from suture.methods.source import list_entry
from suture_admin.policy import (
    allow_classes,
    allow_packages,
    keep_logs,
    make_strict,
    plain_json,
    survive,
)
from suture_admin.processes import STARTED

log = logging.getLogger(__name__)

_DATA = "data"


def project_template() -> Path:
    """Return the path of poc_workspace/project.yml, which the package has by a link."""
    return Path(__file__).with_name("project.yml").resolve()


def project_of(template: Path, sites: Sequence[str], port: int) -> dict[str, Any]:
    """Return a project of FLARE with the sites of a job in place of the template's, and the server's port.

    Raises:
        ConfigError: the template is absent or no project file.
    """
    try:
        project: dict[str, Any] = yaml.safe_load(read_regular(template))
        others = [dict(p) for p in project["participants"] if p["type"] != "client"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{template} is not a project file of FLARE: {error}; name one with --project"
        ) from error
    for participant in others:
        if participant["type"] == "server":
            participant["fed_learn_port"] = port
    # FLARE's names of organisations have no hyphen.
    clients = [{"name": name, "type": "client", "org": name.replace("-", "_")} for name in sites]
    return {**project, "participants": [*others, *clients]}


def free_port(wanted: int) -> int:
    """Return the port that is wanted, or the next one above it that is not in use.

    Not one of the system's choice: it may give the same to a connection before the server listens.

    Raises:
        ConfigError: none of the next hundred is free.
    """
    last = min(wanted + 100, 2**16)
    for port in range(wanted, last):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"no port from {wanted} to {last - 1} is free on this machine; choose another with --port"
    )


def parties(kits: dict[str, Kit]) -> tuple[Kit, dict[str, Kit]]:
    """Return the server's kit, and those of the sites by name.

    Raises:
        ConfigError: the number of servers is not one.
    """
    servers = [kit for kit in kits.values() if kit.role == "server"]
    if len(servers) != 1:
        raise ConfigError(f"a federation has one server, this one has {len(servers)}; provision it again")
    return servers[0], {name: kit for name, kit in kits.items() if kit.role == "site"}


def is_provisioned(folder: Path) -> bool:
    """Return whether the folder already holds startup kits."""
    return any(folder.glob("*/prod_*/*/startup"))


def prepare(
    job: Job, folder: Path, template: Path, port: int, *, loose: bool = False, overwrite: bool = False
) -> dict[str, Kit]:
    """Provision a federation of a job's simulated sites, and give each party its data and its policy.

    Args:
        folder: of the POC; existing kits stay if they belong to these sites.
        loose: whether jobs may bring code, and sites have no filter of their own.
        overwrite: whether to replace an existing federation.

    Returns:
        the kits by party.

    Raises:
        ConfigError: the job simulates no sites, or the folder holds a federation of other sites.
    """
    names, data = simulate(job, folder)
    if overwrite:
        clear(folder)
    if not is_provisioned(folder):
        project = project_of(template, names, free_port(port))
        path = folder / "project.yml"
        atomic_write(path, yaml.safe_dump(project, sort_keys=False).encode())
        provision(path, folder)
    kits = kits_in(folder)
    place_configs(job, names, data, kits)
    _set_policies(job, kits, loose=loose)
    return kits


def _set_policies(job: Job, kits: dict[str, Kit], *, loose: bool) -> None:
    """Let every party run a job with the installed packages: this one, and that of a method from outside.

    The sites keep their logs: FLARE's default sends them to the server, and an error may name a file.
    """
    server, sites = parties(kits)
    point = entry_of(job.method.about.name)
    for kit in (server, *sites.values()):
        if loose:
            allow_classes(kit)
            plain_json(kit)
            if kit.role == "site":
                keep_logs(kit)
        else:
            make_strict(kit)
        allow_packages(kit, [list_entry(point)] if point else [])
        survive(kit)


def clear(folder: Path) -> None:
    """Remove a federation: its project, its record of processes and its startup kits. All else stays.

    Raises:
        ConfigError: the folder holds something else.
    """
    rest = [path for path in folder.iterdir() if path.name != _DATA]
    if rest and not (folder / "project.yml").exists():
        raise ConfigError(
            f"{folder} holds {rest[0].name}, and no federation (project.yml); choose another --dir"
        )
    kits = {path.parents[2] for path in folder.glob("*/prod_*/*/startup")}
    for path in rest:
        if path in kits and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name in ("project.yml", STARTED):
            path.unlink()
        else:
            log.warning("%s is of no federation, and stays", path)


def simulate(job: Job, folder: Path) -> tuple[list[str], Path]:
    """Write the data of a job's simulated sites below the POC's folder.

    Returns:
        the names of the sites, and the folder of their data.

    Raises:
        ConfigError: the job simulates no sites.
    """
    if job.simulation is None:
        raise ConfigError(
            f"{job.name} simulates no sites, and no folder beside its file has a suture.toml; write them "
            "with `suture init`, or each site's local/suture.toml yourself"
        )
    sites = job.simulation
    if isinstance(sites, StudySites):
        sites = replace(sites, limits=True)  # a POC is a federation, where figures leave the sites
    data = data_of(job, folder)
    make_folder(data)
    return sites.prepare(data, data / "runs", job.seed, job.method), data


def data_of(job: Job, folder: Path) -> Path:
    """Return the folder of the data of a job's simulated sites in a POC."""
    return folder.resolve() / _DATA / job.name


def place_configs(job: Job, names: Sequence[str], data: Path, kits: dict[str, Kit]) -> None:
    """Copy each party's suture.toml to where the party looks for it: local/ of its kit.

    Args:
        names, data: the values that `simulate` returns.

    Raises:
        ConfigError: the federation has other sites than the job.
    """
    server, sites = parties(kits)
    if set(names) != set(sites):
        raise ConfigError(
            f"{server.folder.parent} has the sites {', '.join(sorted(sites))}, and {job.name} has "
            f"{', '.join(sorted(names))}; replace it with --overwrite, or choose another --dir"
        )
    for name, kit in {SERVER: server, **sites}.items():
        source, target = data / name / "suture.toml", kit.folder / "local" / "suture.toml"
        if source.exists():
            with replacing(target) as temporary:
                shutil.copy2(source, temporary)
        else:
            target.unlink(missing_ok=True)


def check_study(job: Job, folder: Path, sites: Sequence[str] = ()) -> None:
    """Check that a POC runs a study on the sites and the data that its folder describes now.

    Args:
        job: nothing is checked where its sites are not those of a study on this machine.
        folder: of the POC.
        sites: those that take part; by default all.

    Raises:
        ConfigError: the POC has other sites, or one has other data or settings.
    """
    study = job.simulation
    if not isinstance(study, StudySites) or not study.find_sites():
        return
    configs, (server, here) = study.configs(), parties(kits_in(folder))
    again = f"suture poc up {study.folder}"
    for name in sites:
        if name not in configs.keys() | here.keys():
            raise unknown("site", name, configs)
    if (set(sites) or configs.keys() | here.keys()) - (configs.keys() & here.keys()):
        raise ConfigError(
            f"{server.folder.parent} has the sites {', '.join(sorted(here))}, and {study.folder} has "
            f"{', '.join(configs)}; {again} --overwrite, or choose --sites"
        )
    described = {name: configs[name] for name in sites or configs} | {SERVER: study.held_out()}
    for name, config in described.items():
        path = (server if name == SERVER else here[name]).folder / "local" / CONFIG
        placed = load_server_config(path).held_out if path.is_file() else None
        if _without_storage(placed) != _without_storage(config):
            raise ConfigError(f"{path} is not what {study.folder}/{name}/{CONFIG} says now; {again}")


def _without_storage(config: SiteConfig | None) -> SiteConfig | None:
    """Where a party keeps the states of a run is no part of what it trains on."""
    return config and config.model_copy(update={"storage": None})


def chosen_folder(folder: Path | None) -> Path:
    """Return the POC's folder: the one that is named, else the one that FLARE's own commands use."""
    return (folder or poc_folder()).expanduser().resolve()
