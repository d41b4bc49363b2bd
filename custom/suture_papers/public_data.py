"""Where the public data sets of a simulation lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from suture.core.errors import ConfigError


def data_folder(root: str | None, name: str, title: str) -> Path:
    """Return the folder `root`, or the folder `name` in SUTURE_DATA.

    Args:
        title: name of the data set, for the message.

    Raises:
        ConfigError: neither is given.
    """
    if root:
        return Path(root).expanduser().resolve()
    if shared := os.environ.get("SUTURE_DATA"):
        return (Path(shared) / name).resolve()
    raise ConfigError(
        f"{title} was not found: set SUTURE_DATA to the folder that contains {name}, or name the folder "
        "of its table with --set simulation.root=DIR"
    )


def images_in(root: Path) -> Path:
    """Return the images of a public data set: its archive, its folder of images, or else `root` itself."""
    names = ("images.tar", "images", "ISIC2018_Task3_Training_Input")
    return next((root / name for name in names if (root / name).exists()), root)


def lists_folder(given: str | None, root: Path, file: str, shared: str) -> Path:
    """Return the folder of a data set's official lists.

    Args:
        given: the folder that the user names; no other one is searched then.
        root: the folder of the images, which is searched first.
        file: the list that the folder must hold, gzipped or not.
        shared: the folder in SUTURE_DATA that is searched next.

    Raises:
        ConfigError: none of these has the file.
    """
    data = os.environ.get("SUTURE_DATA")
    folders = [Path(given).expanduser()] if given else [root, *([Path(data) / shared] if data else [])]
    for folder in folders:
        if any((folder / name).is_file() for name in (file, f"{file}.gz")):
            return folder.resolve()
    raise ConfigError(
        f"{' and '.join(map(str, folders))} lack {file}; name its folder with --set simulation.lists=DIR"
    )


def official(folder: Path, file: str) -> Path:
    """Return a file of an official release, gzipped or not.

    Raises:
        ConfigError: there is none.
    """
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"{folder} has no {file}; name its folder with --set simulation.lists=DIR")
