"""State on disk: one file a round, the newest few kept, each written whole or not at all."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from suture.errors import SutureError
from suture.packing import Packed, load, save

log = logging.getLogger(__name__)

KEPT = 3
"""Committed rounds that are kept: a file that has rotted costs a round, not the run."""

_FILE = re.compile(r"round-(\d{6})\.safetensors")
_KEPT = re.compile(r"best-(\d{6})\.safetensors")


@dataclass(frozen=True)
class Rounds:
    """The states of one party in one folder.

    The newest `KEPT` that the server has committed are kept, and the one on top of them. So a round that the
    server never committed can be taken back and leaves no trace, and a corrupt file has one before it.
    """

    folder: Path

    def save(self, round_: int, state: Packed, committed: int) -> None:
        """Writes the state of a round, then drops all others but the newest that are committed.

        Raises:
            OSError: nothing was written; the states that were there are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.path(round_), state)
        base = [r for r in self.rounds() if r <= committed][-KEPT:]
        for other in self.rounds():
            if other not in (round_, *base):
                self.path(other).unlink(missing_ok=True)

    def newest(self, not_later_than: int | None = None) -> tuple[int, Packed] | None:
        """The newest state, or the newest one that is not later than a round; None if there is none.

        A round that is kept counts too. A corrupt file is passed over for the one before it, with a warning.

        Raises:
            SutureError: every file is corrupt.
        """
        files = {r: self.kept(r) for r in self._numbers(_KEPT)} | {r: self.path(r) for r in self.rounds()}
        fit = sorted((r for r in files if not_later_than is None or r <= not_later_than), reverse=True)
        broken: SutureError | None = None
        for number in fit:
            try:
                return number, load(files[number])
            except SutureError as error:
                log.warning("%s; falling back to the round before", error)
                broken = error
        if broken:
            raise broken
        return None

    def rounds(self) -> list[int]:
        """The rounds on disk, in order."""
        return self._numbers(_FILE)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := pattern.fullmatch(p.name)))

    def keep(self, round_: int) -> None:
        """Keeps one round beyond the newest, as a link to its file; the one kept before goes."""
        if not self.kept(round_).exists():
            os.link(self.path(round_), self.kept(round_))
        for other in self.folder.glob("best-*.safetensors"):
            if other != self.kept(round_):
                other.unlink()

    def kept(self, round_: int) -> Path:
        """The file of the round that is kept."""
        return self.folder / f"best-{round_:06d}.safetensors"

    def path(self, round_: int) -> Path:
        """The file of a round."""
        return self.folder / f"round-{round_:06d}.safetensors"
