"""Opening a server where its configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from suture.core.errors import ConfigError
from suture.data.config import ServerConfig, SiteConfig, StorageConfig, find_site_config, load_server_config
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.record import Record, now, versions
from suture.federation.server.registry import Member
from suture.federation.server.selection import HeldOut
from suture.federation.server.server import Server
from suture.models.classifier import Layout
from suture.protocol.egress import declared


def open_server(
    plan: Plan,
    schedule: Schedule,
    config: SiteConfig | None,
    default: Path,
    pooled: Mapping[str, Member] | None = None,
) -> Server:
    """The server of an experiment, with its labelled data if its configuration names some.

    Args:
        config: the server's own suture.toml, where it has data.
        default: folder for experiments where it has none.
        pooled: as in `Server`.

    Raises:
        ConfigError: the server runs other code than the job was made with.
        DataError: the server's data cannot be read.
    """
    torch.set_num_threads(1)
    code = code_hash(type(plan.method))
    if plan.code != code:
        raise ConfigError(
            f"the server runs another version of suture ({code}) than the job was made with "
            f"({plan.code}); install the same one"
        )
    held_out = HeldOut(config, plan) if config else None
    folder = config.storage.state if config else default
    server = Server(plan, schedule, folder / plan.experiment, held_out, pooled)
    describe(server.record, plan, schedule)
    return server


def find_server_config(workspace: Path) -> ServerConfig:
    """The server's own `suture.toml`; without one it keeps its experiments in suture/ of its workspace.

    Raises:
        ConfigError: there is one, and it is wrong.
    """
    try:
        path = find_site_config("server", workspace)
    except ConfigError:
        return ServerConfig(storage=StorageConfig(state=workspace / "suture"))
    return load_server_config(path)


def describe(record: Record, plan: Plan, schedule: Schedule) -> None:
    """Writes down what is about to be run."""
    described = plan.to_dict()
    begun = record.run.get("started") if record.run.get("status") == "running" else None
    record.update(
        job=schedule.job,
        title=schedule.title,
        env=record.run.get("env", "flare"),
        method={
            "name": plan.method.name,
            "title": plan.method.title,
            "paper": plan.method.paper,
            "hyperparameters": described["hyperparameters"],
            "personal": plan.method.personal,
            "pooled": plan.method.pooled,
        },
        model=described["model"],
        augmentation=described["augmentation"],
        rounds=schedule.rounds,
        seed=plan.seed,
        experiment=plan.experiment,
        code=plan.code,
        versions=versions(),
        egress=declared(plan.method.egress(Layout({}, {})), local=plan.method.keep_local),
        labels=[],
        sites={},
        threads={"server": 1},
        started=begun or now(),
        status="running",
        error=None,
        finished=None,
        selected_round=None,
        selection=schedule.selection,
    )
