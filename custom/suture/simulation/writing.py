"""A simulated site's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from suture.core.errors import unknown
from suture.data.config import (
    DataConfig,
    ServerConfig,
    SiteConfig,
    StorageConfig,
    write_site_config,
)
from suture.methods.base import Method
from suture.protocol.privacy import PrivacyConfig
from suture.simulation.folders import cache_folder
from suture.simulation.machine import this_machine
from suture.simulation.partition import SERVER


def write_sites(
    folder: Path,
    runs: Path,
    sites: Mapping[str, DataConfig],
    method: type[Method] | Method,
    learning_rates: Mapping[str, float],
) -> list[str]:
    """Writes the suture.toml of each site, and of the server; data are public, so no count is withheld.

    All of them compute on `this_machine`.

    Args:
        folder: where to, a folder for each site.
        runs: where the server keeps its experiments.
        sites: the data of each, the server's among them where it has some.
        method: what it needs to see, a simulated site permits.
        learning_rates: of sites that have one of their own.

    Returns:
        the names of the sites, without the server's.

    Raises:
        ConfigError: a learning rate names no site, or this machine has no such device.
    """
    for name in learning_rates:
        if name not in sites:
            raise unknown("site of simulation.learning_rates", name, sites)
    machine = this_machine()
    for name, data in sites.items():
        config = SiteConfig(
            data=data,
            training=machine.model_copy(update={"learning_rate": learning_rates.get(name)}),
            privacy=PrivacyConfig(label_view=method.label_view, min_count=0, min_loss=0),
            storage=StorageConfig(
                state=runs if name == SERVER else folder / name / "state",
                cache=cache_folder(folder / name, data.root),
                diagnostics=name != SERVER,
            ),
        )
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_site_config(folder / name / "suture.toml", config)
    if SERVER not in sites:
        (folder / SERVER).mkdir(parents=True, exist_ok=True)
        storage = StorageConfig(state=runs, cache=folder / SERVER / "cache")
        write_site_config(folder / SERVER / "suture.toml", ServerConfig(storage=storage))
    return [name for name in sites if name != SERVER]
