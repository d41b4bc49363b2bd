"""Where the public data sets of a simulation are."""

from __future__ import annotations

import os
from pathlib import Path

from suture.errors import ConfigError


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


def images_in(root: Path) -> Path:
    """The images of a public data set: its one archive, its folder of images, or all of it."""
    places = ("images.tar", "images", "ISIC2018_Task3_Training_Input")
    return next((root / name for name in places if (root / name).exists()), root)
