"""Sites that a user has: a folder for each, with a suture.toml beside, or pointing at, its own data."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import StrictBool
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, unknown
from suture.core.labels import check_sites
from suture.core.validation import JOB_PATH, STRICT
from suture.data.config import (
    CONFIG,
    ServerConfig,
    SiteConfig,
    StorageConfig,
    load_server_config,
    load_site_config,
    write_site_config,
)

if TYPE_CHECKING:  # a study is written and checked without torch
    from suture.methods.base import Method


SERVER = "server"
"""The name of the server among the sites of a simulation."""


@validated(frozen=True, config=STRICT)
class StudySites:
    """The sites of a study folder, on this machine.

    A site trains on its data where they lie, as its own suture.toml says; its state between rounds is part of
    the run, and its ledger lies where its suture.toml says. The folder ``server``, if there is one, describes
    the server's labelled data.

    Attributes:
        folder: of the study; each of its folders with a suture.toml is a site. A relative one starts at the
            folder of the job's file, and in Python at the working directory.
        sites: the sites that take part; all of them by default.
        limits: apply the sites' limits of disclosure (label_view, min_count, min_loss and round_counts of
            [privacy]), as in a federation. Otherwise figures are exact and sites see all class names.
    """

    folder: Annotated[str, JOB_PATH] = "."
    sites: tuple[str, ...] = ()
    limits: StrictBool = False

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:  # noqa: ARG002
        """Write the suture.toml of each site of a run, with absolute paths and the state within the run.

        Raises:
            ConfigError: there is no site, a name cannot be used, or a suture.toml is wrong; then nothing is
                written.
        """
        sites = self.here()
        configs: dict[str, SiteConfig | ServerConfig] = {
            name: config.model_copy(update={"storage": _storage(config, folder / name / "state")})
            for name, config in sites.items()
        }
        configs[SERVER] = self._server(folder, runs)
        for name, config in configs.items():
            write_site_config(folder / name / CONFIG, config)
        return list(sites)

    def here(self) -> dict[str, SiteConfig]:
        """Return `configs` as they apply on this machine."""
        return self.configs() if self.limits else exact(self.configs())

    def configs(self) -> dict[str, SiteConfig]:
        """Return the configuration of each site by name, as it applies in a federation.

        Raises:
            ConfigError: as `prepare`.
        """
        root, present = self._root(), self.find_sites()
        if not present:
            if not root.exists():
                raise ConfigError(f"{root} does not exist; name the folder of a study")
            if (root / CONFIG).exists():
                raise ConfigError(f"{root} is one site; name the folder of its study, {root.parent}")
            make = f"suture init STUDY --site NAME={shlex.quote(str(root))}"
            raise ConfigError(f"{root} contains no site; a site is a folder with a {CONFIG}: {make}")
        for name in self.sites:
            if name not in present:
                raise unknown("site of simulation.sites", name, present)
        names = list(self.sites) or present
        check_names(names)
        return {name: load_site_config(root / name / CONFIG) for name in names}

    def find_sites(self) -> list[str]:
        """Return the names of the folders with a suture.toml, but for the server's."""
        folders = (path.parent.name for path in self._root().glob(f"*/{CONFIG}"))
        return sorted(name for name in folders if name != SERVER)

    def _root(self) -> Path:
        return Path(self.folder).expanduser().resolve()

    def held_out(self) -> SiteConfig | None:
        """Return the configuration of the server's labelled data, if it has any.

        Raises:
            ConfigError: its suture.toml is wrong.
        """
        path = self._root() / SERVER / CONFIG
        return load_server_config(path).held_out if path.is_file() else None

    def _server(self, folder: Path, runs: Path) -> SiteConfig | ServerConfig:
        own = self.held_out()
        if own is None:
            return ServerConfig(storage=StorageConfig(state=runs, cache=folder / SERVER / "cache"))
        return own.model_copy(update={"storage": _storage(own, runs)})


def exact(configs: Mapping[str, SiteConfig]) -> dict[str, SiteConfig]:
    """Return the configurations without their limits of disclosure."""
    return {site: one.model_copy(update={"privacy": one.privacy.exact()}) for site, one in configs.items()}


def check_names(names: Iterable[str]) -> None:
    """Check the names of a study's sites, which are the same in every environment.

    Raises:
        ConfigError: one cannot be used, by FLARE's rule for clients or by ours, or is that of the server.
    """
    names = list(names)
    check_sites(names)
    for name in names:
        if "." in name:
            raise ConfigError(f"{name!r} cannot be a site name, because FLARE does not accept '.'; write '-'")
        if name == SERVER:
            raise ConfigError(f"{name!r} is the folder of the server's data; name the site otherwise")


def _storage(config: SiteConfig, state: Path) -> StorageConfig:
    ledger = config.storage.ledger or config.storage.state
    return config.storage.model_copy(update={"state": state, "ledger": ledger, "diagnostics": True})
