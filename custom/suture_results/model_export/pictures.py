"""Pictures of images beside the maps of where a model looks, and the table of them."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, DataError
from suture.core.escaping import as_cell, printable
from suture.core.files import (
    atomic_write,
    make_folder,
    note_own,
    own_note,
    replacing,
    sha256_of,
    temporary_beside,
    writing,
)
from suture.data.decoding import Pixels, open_image, readable
from suture_results.inputs import Input, find_inputs
from suture_results.inspection import size_notes
from suture_results.model_export.explanation import GRAD_CAM, MAPS, Explained, check_maps, explain
from suture_results.prediction import Model, open_model

SHEET = 20
"""Images of a contact sheet; more have several sheets."""

_COLUMNS_OF_SHEET = 8
"""Images and maps in a row of a sheet, where those of several images fit."""

TABLE = "pictures.csv"
_LIST = ".pictures.json"
"""The files that the last call has written in a folder, with their digests."""

_COLUMNS = ("picture", "contact sheet", "image", "map", "class", "probability")
_PICTURE = re.compile(r"(\d{3,} .*|contact sheet( \d+)?)\.png", re.DOTALL)
"""The names of the pictures that this module writes."""


def write_explained(rows: Mapping[str, Explained], path: Path, inches: float = 2.6) -> None:
    """Write images as one PNG, each beside its maps: one in a row, or of few maps several.

    Args:
        rows: by the title of the image.
        inches: side of a picture.

    Raises:
        DiskError: it cannot be written.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    columns = 1 + max(len(found.maps) for found in rows.values())
    beside = min(len(rows), max(1, _COLUMNS_OF_SHEET // columns))
    lines = math.ceil(len(rows) / beside)
    figure = Figure(figsize=(inches * columns * beside, (inches + 0.2) * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns * beside, squeeze=False)
    for at in axes.flat:
        at.set_axis_off()
    for row, (title, found) in zip(axes.reshape(-1, columns), rows.items(), strict=False):
        _draw(row, title, found, 9 if inches > 2 else 6, round(14 * inches))
    if columns > 1:
        scale = ScalarMappable(Normalize(0, 1), "magma")
        bar = figure.colorbar(scale, ax=axes[0], shrink=0.5, aspect=40, location="top", ticks=[0, 1])
        bar.ax.set_xticklabels(["nothing", "most"], fontsize=9)
        bar.set_label("speaks for the class", size=9, labelpad=-8)
        if (kind := next(iter(rows.values())).kind) != GRAD_CAM:
            figure.suptitle(MAPS[kind], size=10)
    with replacing(path, private=True) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _draw(row: Any, title: str, found: Explained, size: int, letters: int) -> None:
    gray = {"cmap": "gray", "vmin": 0, "vmax": 255}
    row[0].imshow(found.pixels, **gray)
    row[0].set_title(_wrap(title, letters), fontsize=size, parse_math=False)
    for at, (name, map_) in zip(row[1:], found.maps.items(), strict=False):
        at.imshow(found.pixels, **gray)
        at.imshow(map_, cmap="magma", vmin=0, vmax=1, alpha=0.7 * map_)
        title = _wrap(f"{name}, {found.probabilities[name]:.2f}", letters)
        at.set_title(title, fontsize=size, parse_math=False)


def _wrap(title: str, letters: int) -> str:
    """Break a title into lines that are no wider than its picture; of a long one only both ends stay."""
    if len(title) > 2 * letters:
        title = f"{title[: letters - 1]}… {title[-letters:]}"
    return "\n".join(textwrap.wrap(title, letters))


def _read(one: Input, model: Model) -> Pixels:
    opened = open_image(one.read(), one.name, one.bits, model.spec.modalities)
    with readable(one.name):
        return opened.pixels(model.prepare.color)


@dataclass(frozen=True)
class Drawn:
    """What became of the images.

    Attributes:
        failed: why an image has no picture, by its name.
        beyond: how many images were not looked at.
        notes: what of the images a person should look at.
    """

    written: tuple[Path, ...]
    failed: dict[str, str]
    beyond: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Picture:
    """A picture of an image: its title, the name and the size of the image, and what is drawn."""

    title: str
    image: str
    size: tuple[int, int]
    found: Explained


def explain_files(
    folder: Path,
    sources: Sequence[Path],
    out: Path,
    classes: tuple[str, ...] = (),
    most: int = 20,
    kind: str = GRAD_CAM,
) -> Drawn:
    """Write a PNG of each image beside its maps, ``001 NAME.png``, ``contact sheet.png`` of all, and `TABLE`.

    They replace those of an earlier call once all are drawn. What an earlier call wrote, by `_LIST`, and
    this one does not make, is deleted; nothing else is deleted or replaced.

    Args:
        folder, sources: of the saved model; as of `suture_results.inputs.find_inputs`.
        classes, kind: see `explain`.
        most: number of images that are drawn.

    Raises:
        ConfigError: no matplotlib; no model, one of text or without a class; an unknown kind; or another's
            file in `out` has the name of a picture or of the table.
        DataError: there is no image, or none can be read.
        DiskError: a picture cannot be written.
    """
    needed("matplotlib", "suture explain", "plots")
    _refuse_others(out, [TABLE], _earlier(out)[1])  # before hours of work
    model = open_model(folder)
    check_maps(model, classes, kind)
    apart = temporary_beside(out.absolute() / "pictures")
    try:
        with find_inputs(sources, "image", None, None, None) as inputs:
            found = list(inputs.found.values())
            drawn, failed = _draw_each(model, found[:most], apart, classes, kind)
        kept = _publish(apart, out, _write_sheets(drawn, apart))
    finally:
        shutil.rmtree(apart, ignore_errors=True)
    sizes = [(one.image, *one.size) for one in drawn]
    written = tuple(out / f"{one.title}.png" for one in drawn)
    stays = [f"{out / name} was changed since it was written, and is kept" for name in kept]
    return Drawn(written, failed, len(found[most:]), (*size_notes(sizes, model.prepare.size), *stays))


def _draw_each(
    model: Model, images: Sequence[Input], folder: Path, classes: tuple[str, ...], kind: str
) -> tuple[list[_Picture], dict[str, str]]:
    """Write a picture of each image; return them, and why another has none, by its name."""
    drawn: list[_Picture] = []
    failed: dict[str, str] = {}
    for number, one in enumerate(images, 1):
        name = (
            printable(Path(one.name).stem, 80).encode()[:150].decode(errors="ignore")
        )  # a file name has 255
        try:
            pixels = _read(one, model)
        except (DataError, OSError) as error:
            failed[one.name] = str(error)
            continue
        make_folder(folder)
        found, (height, width) = explain(model, pixels, classes, kind=kind), pixels.shape[:2]
        picture = _Picture(f"{number:03d} {name}", one.name, (width, height), found)
        write_explained({name: picture.found}, folder / f"{picture.title}.png")
        drawn.append(picture)
    if not drawn:
        raise DataError(
            f"none of the {len(failed):,} images can be read; the first: {next(iter(failed.values()))}"
        )
    return drawn, failed


def _write_sheets(drawn: Sequence[_Picture], folder: Path) -> str:
    """Write the contact sheets; return the table."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for first in range(0, len(drawn), SHEET):
        part = drawn[first : first + SHEET]
        sheet = "contact sheet" + (f" {first // SHEET + 1}" if len(drawn) > SHEET else "") + ".png"
        write_explained({one.title: one.found for one in part}, folder / sheet, inches=1.3)
        for one in part:
            names = (f"{one.title}.png", sheet, as_cell(one.image), MAPS[one.found.kind])
            for name, p in one.found.probabilities.items():
                table.writerow([*names, as_cell(name), f"{p:.6f}"])
    return text.getvalue()


def _earlier(out: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """Return what the list of a folder says, names with digests, and the names whose files are still those.

    A list that was written in another folder counts for nothing; of this one, only the names that this module
    gives count, and no link.
    """
    try:
        listed = {(str(name), str(digest)) for name, digest in (own_note(out / _LIST) or {}).get("files", [])}
    except (TypeError, ValueError):  # not a list of this module
        listed = set()
    ours = {(n, d) for n, d in listed if n == TABLE or (_PICTURE.fullmatch(n) and "/" not in n)}
    paths = {name: out / name for name, _ in ours}
    there = {name: path for name, path in paths.items() if path.is_file() and not path.is_symlink()}
    return ours, {name for name, path in there.items() if (name, sha256_of(path)) in ours}


def _refuse_others(out: Path, names: Iterable[str], own: Collection[str]) -> None:
    """Refuse to replace files that no earlier call has written as they are.

    Raises:
        ConfigError: there is one; names it.
    """
    for name in names:
        if os.path.lexists(out / name) and name not in own:
            raise ConfigError(
                f"{out / name} was not written by suture explain, or was changed since; choose another "
                "folder with -o"
            )


def _publish(apart: Path, out: Path, table: str) -> list[str]:
    """Move the pictures to their folder, delete those of earlier calls, and write the table.

    Returns:
        the pictures of earlier calls that stay, because they were changed since.

    Raises:
        ConfigError: something else has the name of a picture; nothing is written.
    """
    atomic_write(apart / TABLE, table.encode(), private=True)
    made = {path.name: path for path in sorted(apart.iterdir())}
    listed, own = _earlier(out)
    _refuse_others(out, made, own)
    new = {(name, sha256_of(path)) for name, path in made.items()}
    with writing(out):
        note_own(out / _LIST, files=sorted(listed | new))  # first: a call that is killed owns its files
        for name, path in made.items():
            os.replace(path, out / name)
        for name in own - made.keys():
            (out / name).unlink(missing_ok=True)
        note_own(out / _LIST, files=sorted(new))
    return sorted(name for name, _ in listed if name not in own and os.path.lexists(out / name))
