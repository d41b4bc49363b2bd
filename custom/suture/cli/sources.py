"""Several data sets on one command line, told apart by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from suture.core.errors import ConfigError
from suture.data.config import SiteConfig, load_site_config


def load_sources(paths: Iterable[Path]) -> dict[str, SiteConfig]:
    """The configuration of each data set by its name: that of the file, or of the folder of a `suture.toml`.

    Raises:
        ConfigError: two data sets have one name, or a configuration cannot be read.
    """
    places: dict[str, Path] = {}
    for path in paths:
        name = path.stem if path.stem != "suture" else path.resolve().parent.name
        if name in places:
            raise ConfigError(
                f"{places[name]} and {path} are both called {name!r} in what is drawn; rename one of the "
                "files (or of the folders, where the file is suture.toml)"
            )
        places[name] = path
    return {name: load_site_config(path) for name, path in places.items()}
