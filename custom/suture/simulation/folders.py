"""Where the public data sets of a simulation are."""

from __future__ import annotations

import os
from pathlib import Path

from suture.core.errors import ConfigError


def data_folder(root: str | None, name: str, title: str) -> Path:
    """The folder that is named, or that of `name` in SUTURE_DATA.

    Raises:
        ConfigError: neither is given.
    """
    if root:
        return Path(root).expanduser().resolve()
    if shared := os.environ.get("SUTURE_DATA"):
        return (Path(shared) / name).resolve()
    raise ConfigError(
        f"where is {title}? Set SUTURE_DATA to the folder that holds {name}, or name the folder of its table "
        "with --set simulation.root=DIR"
    )


def cache_folder(site: Path, images: Path) -> Path:
    """Where a simulated site keeps its cache: SUTURE_CACHE, if that is set, for all sites of all runs.

    An entry is named by what it is made of, so sites can share a folder. One whose images were made for this
    run alone keeps a cache of its own: no other run would look there.
    """
    shared = os.environ.get("SUTURE_CACHE")
    if shared and not images.is_relative_to(site):
        return Path(shared).expanduser().resolve()
    return site / "cache"


def images_in(root: Path) -> Path:
    """The images of a public data set: its one archive, its folder of images, or all of it."""
    places = ("images.tar", "images", "ISIC2018_Task3_Training_Input")
    return next((root / name for name in places if (root / name).exists()), root)
