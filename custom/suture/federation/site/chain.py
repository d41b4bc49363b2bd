"""The chain of a ledger: each line carries a digest of all lines before it, and a salt.

A line that was changed, removed or put in from another site does not fit the digests after it. A ledger that
was rolled back, emptied or deleted is whole in itself, but lacks a digest that others have noted: the site in
the folder of each experiment (`Anchor`), and the server, which receives the newest digest with each answer.
The salt, 128 random bits that no message carries, keeps a server from guessing lines by their digests.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import from_json, to_jsonable_python

from suture.core.errors import ConfigError
from suture.core.files import append_line, replacing
from suture.core.plain import open_regular, read_regular
from suture.core.validation import OPEN, STRICT
from suture.protocol.messages import Count, Digest

log = logging.getLogger(__name__)

T = TypeVar("T")

ANCHOR = "ledger.json"
"""File of the `Anchor` in the folder of an experiment."""


@validated(frozen=True, config=STRICT)
class Mark:
    """A line of the ledger that is no release.

    Attributes:
        mark: ``accepted``: the administrator has accepted that lines before it are missing or changed;
            ``labels``: what the site's classes are called and contain from here on.
        missing: number of these, as far as it is known.
        why: what the administrator accepted, in sentences.
        known: digests that others hold of lines that the ledger has lost.
        names: of ``labels``: the site's own table of spellings, with the class that each one means.
        parents: of ``labels``: the direct parents of the site's classes, and of these, by its atlas.
        digest: BLAKE3 of `names` and `parents`.
    """

    time: str
    mark: Literal["accepted", "labels"]
    missing: Count = 0
    why: list[str] = field(default_factory=list)
    known: list[Digest] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    parents: dict[str, list[str]] = field(default_factory=dict)
    digest: Digest | None = None


@validated(frozen=True, config=OPEN)
class Anchor:
    """What an experiment's folder notes of the ledger.

    Attributes:
        digest, lines: of the ledger after the experiment's newest answer.
        held: the digest that the experiment's server sent and the ledger lacked, if there was one.
        name: of the experiment in the ledger, where that is not the folder's.
    """

    digest: Digest | None = None
    lines: Count = 0
    held: Digest | None = None
    name: str = ""


def read_anchor(folder: Path) -> Anchor:
    """Read the anchor of an experiment; an empty one where there is none that can be read.

    It is not synchronised to the disk, so a power failure may damage it: that is not a break.
    """
    try:
        return _ANCHOR.validate_json(read_regular(folder / ANCHOR))
    except FileNotFoundError:
        return Anchor()
    except (OSError, ValidationError):
        log.warning("%s cannot be read, so the ledger is not compared with it", folder / ANCHOR)
        return Anchor()


def write_anchor(folder: Path, anchor: Anchor) -> None:
    """Write the anchor of an experiment.

    Raises:
        DiskError: it cannot be written; the one before stays.
    """
    with replacing(folder / ANCHOR, durable=False, private=True) as temporary:
        temporary.write_text(json.dumps(asdict(anchor)))


_ANCHOR = TypeAdapter(Anchor)
_MARK = TypeAdapter(Mark)


class Chain(Generic[T]):
    """The lines of a ledger, as far as they were read.

    Attributes:
        lines: number of lines.
        broken: why the lines do not follow from one another; empty where they do, or a later mark accepts it.
        missing: number of releases that the marks say are missing or changed.
        accepted: what the marks accept, in sentences.
        labels: the last mark of that sort.

    Args:
        path: of the ledger.
        parse: validates a line that is no mark.
    """

    def __init__(self, path: Path, parse: TypeAdapter[T]) -> None:
        self._path, self._parse = path, parse
        self._hash, self._digests = blake3(), set[str]()
        self._read = 0
        self._file: int | None = None  # its inode, once it was read
        self.lines, self.missing = 0, 0
        self.broken = ""
        self.accepted: list[str] = []
        self.labels: Mark | None = None

    @property
    def digest(self) -> str:
        """The digest of all lines."""
        return self._hash.hexdigest()

    def holds(self, digest: str | None) -> bool:
        """Whether a digest, if there is one, is of a line that the ledger has, or whose loss was accepted."""
        return digest is None or digest in self._digests

    def replaced(self) -> bool:
        """Whether the file is another one than was read, or a shorter one."""
        now = self._path.stat() if self._path.exists() else None
        # An editor, or a restored backup, puts another file in its place; lines that were read may be gone.
        inode, size = (now.st_ino, now.st_size) if now else (None, 0)
        return inode != self._file or size < self._read

    def read(self) -> Iterator[T]:
        """Yield what was added since; an incomplete last line, of a process that was killed, is none.

        Raises:
            ConfigError: it is no file.
        """
        if not self._path.exists():
            return
        if not self._path.is_file():
            raise ConfigError(f"{self._path} is not a file; move it away, because the ledger is stored there")
        with open_regular(self._path) as file:
            if self._file is None:
                self._file = os.fstat(file.fileno()).st_ino
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        for line in whole.split(b"\n") if whole else ():
            item = self._take(line)
            self._read += len(line) + 1
            # Over a damaged line too: what follows it is compared with the lines as they are.
            self._hash.update(line + b"\n")
            self._digests.add(self.digest)
            if item is not None:
                yield item

    def _take(self, line: bytes) -> T | None:
        """Return the release of a line; of a mark, and of a line that is damaged, there is none."""
        self.lines += 1
        try:
            values = from_json(line)
            after = values.pop("after", None)
            values.pop("salt", None)
            mark = _MARK.validate_python(values) if "mark" in values else None
            item = None if mark else self._parse.validate_python(values)
        except (ValueError, AttributeError, TypeError):  # a ValidationError is a ValueError
            self.broken = self.broken or f"line {self.lines} is damaged"
            return None
        if after == self.digest:
            self._mark(mark)
        else:
            self.broken = self.broken or (
                f"line {self.lines} does not match the lines before it: some were removed or changed, "
                "or belong to another site"
            )
        return item

    def _mark(self, mark: Mark | None) -> None:
        if mark and mark.mark == "labels":
            self.labels = mark
        elif mark:
            self._digests.update(mark.known)
            self.broken = ""
            self.missing += mark.missing
            self.accepted += [f"{why} (accepted {mark.time[:10]})" for why in mark.why]

    def append(self, line: object) -> None:
        """Append a release or a mark to the ledger, whose lines were all read.

        Raises:
            DiskError: the disk is full or the file cannot be written; its lines are unchanged.
        """
        values: dict[str, Any] = to_jsonable_python(line)
        chained = {**values, "after": self.digest, "salt": secrets.token_hex(16)}
        append_line(self._path, chained, durable=True)


def breaks(chain: Chain[Any], anchors: Iterable[tuple[str, Anchor]]) -> tuple[list[str], int, list[str]]:
    """Return in which ways a ledger is not whole.

    Args:
        anchors: of the experiments, by name.

    Returns:
        a sentence for each break, how many releases are missing or changed at least, and the digests that the
        ledger lacks.
    """
    why, missing, unknown = [chain.broken] if chain.broken else [], bool(chain.broken) * 1, []
    for name, anchor in anchors:
        if anchor.digest is not None and not chain.holds(anchor.digest):
            unknown.append(anchor.digest)
            missing = max(missing, 1, anchor.lines - chain.lines)
            why.append(
                f"experiment {name} noted line {anchor.lines} with its last answer, but the ledger has "
                f"{chain.lines} lines"
            )
        if anchor.held is not None and not chain.holds(anchor.held):
            unknown.append(anchor.held)
            missing = max(missing, 1)
            why.append(f"the server of {name} has the digest of a line that is missing here")
    return why, missing, unknown
