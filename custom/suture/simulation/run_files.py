"""Which files of a run folder a run has written: only these are ever deleted."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from suture.core.errors import ConfigError
from suture.core.files import atomic_write, is_temporary, make_folder, note_own, own_note
from suture.core.printable import printable

LOCK, PREPARING = ".lock", ".preparing"
"""The lock of a run folder, and the mark of a run that is not described yet: it is begun anew."""

MADE = ".folder.json"
"""Names the folder in which a run was begun, by its inode: in a copy, or a folder of somebody else, it is
another one."""

REPLACED = ".replaced"
"""Folder of the run that is being replaced, until the new one is described."""

_OWN = re.compile(
    r"\.server\.lock|flare\.log|report\.html|(run|job|metrics|tuned)\.json"
    r"|(events|history|diagnostics|errors)\.jsonl|model/(README\.md|model_card\.html|model\.(json|safetensors|sig))"
    r"|(sites/[^/]+|state/spool|state/updates|flare|\.messages|targets)/.+"
    r"|state/([a-z]+-\d{6}\.safetensors|constant\.safetensors|\.?ledgers\.json(\.lock)?|mask(\.key|-lists\.json))",
    re.DOTALL,
)


def begin_here(out: Path) -> None:
    """Record that a run begins in this folder, and that it is not described yet."""
    note_own(out / MADE)
    atomic_write(out / PREPARING, b"")  # in place of a link, which `touch` follows


def set_aside(out: Path, files: list[Path]) -> None:
    """Move the files of a run to `REPLACED`. Where that is broken off, `put_back` finds no `PREPARING`."""
    for path in files:
        make_folder((to := out / REPLACED / path.relative_to(out)).parent)
        path.replace(to)
    delete(out, [])


def put_back(out: Path) -> None:
    """Delete what was begun in place of the run that was set aside, and move that run back.

    It may be broken off anywhere and repeated: without `PREPARING` nothing is deleted.
    """
    if (out / PREPARING).exists():
        delete(out, [path for path in files_of_run(out)[0] if out / REPLACED not in path.parents])
        (out / PREPARING).unlink()
    for path in [path for path in (out / REPLACED).rglob("*") if not path.is_dir()]:
        make_folder((to := out / path.relative_to(out / REPLACED)).parent)
        path.replace(to)
    delete(out, [])


def files_of_run(out: Path) -> tuple[list[Path], list[str]]:
    """Return the files that a run has written in a folder, and the names of the others, but for its marks.

    Raises:
        ConfigError: no run was begun in this folder, or it holds a link.
    """
    refuse_links(out)
    own: list[Path] = []
    temporary, others = 0, list[str]()
    for root, folders, files in os.walk(out):
        for path in (Path(root, name) for name in (*files, *folders)):
            name = path.relative_to(out).as_posix()
            if name in (LOCK, PREPARING, MADE) or path.is_dir():
                continue
            half = any(map(is_temporary, name.split("/")))
            temporary += half
            if half or _OWN.fullmatch(name.removeprefix(f"{REPLACED}/")):
                own.append(path)
            else:
                others.append(printable(name))
    if not made_here(out) and len(own) + len(others) > temporary:
        raise ConfigError(
            f"{out} is not empty, but no run was started in it: its files were copied. "
            "Remove those that you do not need, or choose another --out"
        )
    return own, sorted(others)


def refuse_links(out: Path) -> None:
    """Refuse a folder with links: a run makes none, and would write or delete what they lead to.

    Raises:
        ConfigError: it holds one; names it.
    """
    for root, folders, files in os.walk(out):
        for path in (Path(root, name) for name in (*files, *folders)):
            if path.is_symlink():
                name = printable(path.relative_to(out).as_posix())
                raise ConfigError(f"{out} contains the link {name}; remove it, because a run could follow it")


def claim(folder: Path) -> None:
    """Make a folder for what a simulation writes, or take one that an earlier call has made.

    Raises:
        ConfigError: it holds something else, which would be replaced, or a link.
    """
    refuse_links(folder)
    if folder.exists() and any(folder.iterdir()) and not made_here(folder):
        raise ConfigError(f"{folder} is not empty, and is not a simulation; choose another --out")
    make_folder(folder)
    note_own(folder / MADE)


def made_here(out: Path) -> bool:
    """Whether a run was begun in this folder, and not in one that it is a copy of."""
    return own_note(out / MADE) is not None


def delete(out: Path, files: list[Path]) -> None:
    """Delete files of a folder, and the folders below it that are then empty."""
    for path in files:
        path.unlink(missing_ok=True)
    for root, folders, _ in os.walk(out, topdown=False):
        for name in folders:
            with suppress(OSError):  # not empty, or a link
                Path(root, name).rmdir()
