"""What is put to a model: images or documents of files, folders, archives, tables and suture.toml files.

The path of a file identifies it, whatever it was found by: a folder, a table that names it, and the file
itself give the same list. Files of a folder or an archive come in the order of their paths, those of a table
in the order of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from suture.core.entry_points import hook
from suture.core.errors import ConfigError, DataError
from suture.core.files import open_regular, within_folder
from suture.data.config import load_site_config, site_files
from suture.data.decoding import SUFFIXES
from suture.data.images import ARCHIVES, ImageSource, masks_of
from suture.data.limits import MOST_ENCODED, MOST_TEXT, file_bytes
from suture.data.readers import read_table
from suture.data.reading import JSON, TABLES, read_form

Kind = Literal["image", "text"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {"image": SUFFIXES, "text": (".txt",)}
_MOST: dict[Kind, int] = {"image": MOST_ENCODED, "text": MOST_TEXT}
_NAMES: dict[Kind, str] = {"image": "image", "text": "document"}
_WHAT: dict[Kind, str] = {
    "image": "give an image, a folder or archive of images, a table that names them, or a suture.toml",
    "text": "give a .txt file, a folder or archive of them, a table or .jsonl of texts, or a suture.toml",
}

_OTHER: dict[Kind, str] = {
    "image": "not an image, by its suffix and its first bytes",
    "text": "not a document: its suffix is not .txt",
}

_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"II*\0", b"MM\0*")
"""The first bytes of PNG, JPEG and TIFF."""

_HEAD = 132
"""Bytes of a file that show whether it is an image; DICOM's mark is the last four (PS3.10, 7.1)."""

_OF_SYSTEMS = frozenset({"thumbs.db", "desktop.ini", "__macosx", "dicomdir"})
"""What systems and media add to a folder; a DICOMDIR begins like an image and holds none."""


@dataclass(frozen=True)
class Input:
    """An image or a document.

    Attributes:
        name: its path, which no other input has.
        read: returns its bytes, or raises a DataError or OSError that says why it cannot be read.
        at: the archive that holds it and the offset there, in whose order an archive is read fastest.
        bits: the true depth of an image that is stored with 16 bits; see `decode_image`.
        patient: whose it is; empty where what names the input does not say.
    """

    name: str
    read: Callable[[], bytes]
    at: tuple[str, int] = ("", 0)
    bits: int | None = None
    patient: str = ""


@dataclass
class Inputs:
    """What some paths hold.

    Attributes:
        found: each input once, by name.
        others: the reason why another file is none, by path.
        notes: what was taken for granted, for a person to look at.
    """

    found: dict[str, Input] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def find_inputs(
    sources: Sequence[Path],
    kind: Kind,
    column: str | None = None,
    root: Path | None = None,
    bits: int | None = None,
) -> Iterator[Inputs]:
    """Find what some paths hold; its bytes can be read within the block.

    Args:
        kind: what the model reads.
        column: the column of a table that names the images, or that holds the texts. By default the column
            whose cells name images that are there, or ``text``, or the one of many words.
        root: the folder or archive of a table's images. By default, the folder of the table.
        bits: the true depth of images that are stored with 16 bits. A suture.toml has its own.

    Raises:
        DataError: a path does not exist or holds nothing of that kind, or a table cannot be read.
        ConfigError: `column` or `root` without a table, or a faulty suture.toml.
    """
    given = [f"--{name}" for name, value in (("column", column), ("root", root)) if value is not None]
    if given and not any(_is_table(path, kind) for path in sources):
        raise ConfigError(f"{' and '.join(given)} is for tables, and no table is given; remove it")
    if root is not None and not (root.is_dir() or (root.is_file() and root.name.endswith(ARCHIVES))):
        raise DataError(f"--root {root} is neither a folder nor an archive ({', '.join(ARCHIVES)})")
    with ExitStack() as opened:
        search = _Search(kind, column, root, bits, opened)
        for source in sources:
            search.look(source)
        for what, names in search.by_bytes.items():
            others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
            search.inputs.notes.append(f"read as {what} by its first bytes: {names[0]}{others}")
        yield search.inputs


@dataclass
class _Search:
    kind: Kind
    column: str | None
    root: Path | None
    bits: int | None
    opened: ExitStack
    inputs: Inputs = field(default_factory=Inputs)
    by_bytes: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def look(self, source: Path) -> None:
        """Add what a path holds."""
        if not _exists(source):
            raise DataError(f"{str(source)[:200]} does not exist; {_WHAT[self.kind]}")
        before = len(self.inputs.found)
        if source.suffix == ".toml":
            self._site(source)
        elif sites := site_files(source):  # which say where the images are; the folder may hold a cache
            self.inputs.notes.append(
                f"{source}: the {_NAMES[self.kind]}s that {', '.join(map(str, sites))} describes"
            )
            for site in sites:
                self._site(site)
        elif _is_table(source, self.kind):
            self._table(source)
        elif source.is_dir():
            self._folder(source)
            self._drop_masks(before, source)
        elif source.name.endswith(ARCHIVES):
            self._archive(source)
            self._drop_masks(before, source)
        elif self.kind == "text" and source.suffix.lower() not in ("", *_SUFFIXES["text"]):
            raise DataError(f"{source} is not read as a document; {_WHAT[self.kind]}")
        else:
            self._add(str(source), partial(file_bytes, source, _MOST[self.kind]))
        if len(self.inputs.found) == before == 0:
            first = next(iter(self.inputs.others), None)
            other = f"; {first} is not one" if first else ""
            raise DataError(f"{source} contains no {_NAMES[self.kind]}{other}; {_WHAT[self.kind]}")

    def _add(
        self, name: str, read: Callable[[], bytes], at: tuple[str, int] = ("", 0), patient: str = ""
    ) -> None:
        if aside := self.texts.pop(name, ""):  # a path is that of the file, whatever a table calls a text
            self.inputs.found[aside] = replace(self.inputs.found.pop(name), name=aside)
        self.inputs.found.setdefault(name, Input(name, read, at, self.bits, patient))

    def _note_lost(self, name: str, reason: str) -> None:
        """Add an input that cannot be read."""
        self._add(name, partial(_fail, reason))

    def _folder(self, folder: Path) -> None:
        """The files below a folder, and those of the archives in it."""
        inside = within_folder(folder)
        unread: list[OSError] = []
        walked = list(os.walk(folder, onerror=unread.append))
        files = [Path(at, name) for at, _, names in walked for name in names]
        links = {Path(at, name) for at, names, _ in walked for name in names if Path(at, name).is_symlink()}
        for error in unread:
            self._note_lost(str(error.filename), f"the folder cannot be read: {error.strerror}")
        for path in sorted([*files, *links]):
            if _of_a_system(path.relative_to(folder).parts):
                continue
            if not inside(path):
                self._note_lost(
                    str(path), f"the link leads out of {folder}; remove it, or give the path of its file"
                )
            elif path in links:
                self.inputs.others[str(path)] = "a link to a folder inside the same folder"
            elif path.name.endswith(ARCHIVES):
                try:
                    self._archive(path)
                except DataError as error:  # the other files are as good as they were
                    self._note_lost(str(path), str(error))
            else:
                read = partial(file_bytes, path, _MOST[self.kind])
                self._file(str(path), read, ("", 0), _head(path))

    def _drop_masks(self, before: int, source: Path) -> None:
        """Leave out the masks among the images that a folder or an archive has added."""
        new = [name.removeprefix(f"{source}/") for name in islice(self.inputs.found, before, None)]
        for name in sorted(masks_of(new)) if self.kind == "image" else ():
            mask = str(source / name)
            del self.inputs.found[mask]
            self.inputs.others[mask] = "a mask of another image, by its name"

    def _archive(self, archive: Path) -> None:
        """The files of an archive."""
        source = self.opened.enter_context(ImageSource(archive))
        every = [name for name in source.files() if not _of_a_system(Path(name).parts)]
        self.inputs.others |= {f"{archive}/{name}": why for (_, name), why in source.left_out.items()}
        faults = {name: error for name in every if (error := source.missing(name))}
        for name, error in faults.items():
            self._note_lost(str(archive / name), str(error).replace("[data] root", "root"))
        members = [name for name in every if name not in faults]
        # In the order of the archive, because one that is gzipped is unpacked again to go back in it.
        heads = {
            name: _start(source, name)
            for name in sorted(members, key=source.position)
            if self.kind == "image" and not name.lower().endswith(SUFFIXES)
        }
        for name in sorted(members, key=lambda name: Path(name).parts):
            read = partial(source.raw, name)
            self._file(str(archive / name), read, source.position(name), heads.get(name, b""))

    def _file(self, name: str, read: Callable[[], bytes], at: tuple[str, int], head: bytes) -> None:
        """A file of a folder or an archive: an input, or one of the others."""
        if name.lower().endswith(_SUFFIXES[self.kind]):
            self._add(name, read, at)
        elif self.kind == "image" and (what := _format(head)):
            self._add(name, read, at)
            self.by_bytes.setdefault(what, []).append(name)
        else:
            self.inputs.others[name] = _OTHER[self.kind]

    def _site(self, path: Path) -> None:
        """The images or texts of a suture.toml, in all splits."""
        config = load_site_config(path).data
        reading = read_table(config)
        table = reading.table
        held: Kind = "image" if table.texts is None else "text"
        if held != self.kind:
            raise DataError(f"{path} describes {_NAMES[held]}s, and the model reads {_NAMES[self.kind]}s")
        if reading.faults:
            self.inputs.notes.append(f"{path}: {len(reading.faults)} faults; see suture data check")
        if reading.absent:
            self.inputs.notes.append(f"{path}: {reading.absent:,} rows without {_NAMES[held]} are left out")
        if table.texts is not None:
            self._texts(config.table, table.images, table.texts, table.patients)
            return
        source = self.opened.enter_context(ImageSource(table.root, table.follow_links))
        described = replace(self, bits=config.bits)
        for name, patient in zip(table.images, table.patients, strict=True):
            described._member(name, source, patient)

    def _table(self, path: Path) -> None:
        """The images that a table names, or the texts that it holds."""
        if self.kind == "text":
            found = hook("documents_of")(path, self.column)
            self.inputs.notes.append(f"{path}: column {found.column!r} holds the documents")
            self._texts(path, found.names, found.texts, found.patients)
            return
        named = hook("images_named")(path, self.column, self.root)
        source = self.opened.enter_context(ImageSource(named.root))
        self.inputs.notes += named.made
        if self.column is None and named.column != "image":
            self.inputs.notes.append(f"{path}: column {named.column!r} names the images")
        for number, name, patient in named.rows:
            there = source.root / name
            if not name:
                self._note_lost(
                    f"{path} row {number}", "the image name is blank; fill it in or remove the row"
                )
            elif there.is_file():
                self._add(str(there), partial(file_bytes, there), patient=patient)
            else:
                self._member(name, source, patient)

    def _member(self, name: str, source: ImageSource, patient: str = "") -> None:
        """An image of a root, by its path, or by its file name where that is unique."""
        error = source.missing(name)
        if error is not None:
            self._note_lost(str(source.root / name), str(error).replace("[data] root", "root"))
        else:
            at = source.position(name) if source.archives else ("", 0)
            self._add(source.path(name), partial(source.raw, name), at, patient)

    def _texts(self, path: Path, names: Sequence[str], texts: Sequence[str], patients: Sequence[str]) -> None:
        """The texts of a table; one of a name that another has gets its number too."""
        for number, (name, text, patient) in enumerate(zip(names, texts, patients, strict=True), 1):
            numbered = f"{name} (text {number} of {path})"
            unique = name if name not in self.inputs.found else numbered
            self._add(unique, text.encode, patient=patient)
            self.texts[unique] = numbered


def _fail(reason: str) -> bytes:
    raise DataError(reason)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text in place of a path, too long for a name
        return False


def _is_table(path: Path, kind: Kind) -> bool:
    """Whether a file is a table, or a list in JSON. One with the suffix of a document may hold several.

    The columns of such a table have names, and its rows as many cells as those; a document of several lines
    with the same number of commas or tabs begins with more words, or with a key and a colon.
    """
    if path.is_dir() or not path.name.lower().endswith((*TABLES, *JSON)):
        return False
    if kind == "image" or not path.name.lower().endswith(".txt"):
        return True
    try:
        form = read_form(path)
        hook("documents_of")(path)
    except DataError:
        return False
    names = form.sheet.header
    plain = all(0 < len(name.split()) < 4 and name[-1] not in ":.?!" for name in names)
    return len(names) > 1 and len(form.sheet.rows) > 1 and plain


def _of_a_system(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part.lower() in _OF_SYSTEMS for part in parts)


def _head(path: Path) -> bytes:
    """The first bytes of a file whose suffix does not say what it is; none where it cannot be read."""
    try:
        if path.name.lower().endswith(SUFFIXES) or not path.is_file():
            return b""
        with open_regular(path) as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _start(source: ImageSource, name: str) -> bytes:
    try:
        return source.raw(name)[:_HEAD]
    except DataError:
        return b""


def _format(head: bytes) -> str | None:
    if head[_HEAD - 4 :] == b"DICM":
        return "DICOM"
    return "an image" if head.startswith(_MAGIC) else None
