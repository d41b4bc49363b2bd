"""What public data sets have in common: where they lie on this machine, and tables of one class a row."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import ConfigError, nearest
from suture.data.reading import Sheet, rows_text


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


def table_in(root: Path, *patterns: str) -> Path:
    """Return the first table of a public data set in a folder, by the patterns of its name.

    Raises:
        ConfigError: there is none.
    """
    if found := [path for pattern in patterns for path in sorted(root.glob(pattern))]:
        return found[0]
    raise ConfigError(
        f"{root} has no {' and no '.join(patterns)}; name its folder with --set simulation.root=DIR"
    )


def one_class(
    sheet: Sheet, words: Sequence[str], column: Mapping[str, int], classes: Collection[str], what: str
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the labels [n, c] of rows of one class each, and a fault for each word that is no class.

    Args:
        words: of each row.
        column: the position of the class of each word.
        classes: all of them, by the names that a word is compared with.
        what: it is called in the fault.
    """
    y = np.full((len(words), len(classes)), np.nan, dtype=np.float32)
    bad: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        if word in column:
            y[row] = 0
            y[row, column[word]] = 1
        else:
            bad.setdefault(word, []).append(sheet.numbers[row])
    return y, [
        f"{sheet.path} {rows_text(numbers)}: unknown {what} {word!r}; {nearest(word, classes)}"
        for word, numbers in bad.items()
    ]


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
