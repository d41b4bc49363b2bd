"""State on disk: one file a round, the newest few kept, each written whole or not at all."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from suture.core.errors import SutureError
from suture.protocol.packing import Packed, load, save

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

        A round that was kept and is written again, after a step back, is no longer the one that was kept.

        Raises:
            OSError: nothing was written; the states that were there are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.path(round_), state)
        self.kept(round_).unlink(missing_ok=True)
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
        broken: SutureError | None = None
        for number, path in sorted(self._files().items(), reverse=True):
            if not_later_than is not None and number > not_later_than:
                continue
            try:
                return number, load(path)
            except SutureError as error:
                log.warning("%s; falling back to the round before", error)
                broken = error
        if broken:
            raise SutureError(
                f"{broken}, and no earlier state is whole; bring {self.folder} back from a backup, or begin "
                "a new experiment"
            ) from broken
        return None

    def latest(self, not_later_than: int) -> int | None:
        """The newest round on disk that is not later than this one, whole or not; None if there is none."""
        return max((number for number in self._files() if number <= not_later_than), default=None)

    def rounds(self) -> list[int]:
        """The rounds on disk, in order."""
        return self._numbers(_FILE)

    def holds(self, round_: int) -> bool:
        """Whether the state of a round is on disk, whole or not."""
        return round_ in self._files()

    def _files(self) -> dict[int, Path]:
        return {r: self.kept(r) for r in self._numbers(_KEPT)} | {r: self.path(r) for r in self.rounds()}

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := pattern.fullmatch(p.name)))

    def keep(self, round_: int) -> None:
        """Keeps the best round beyond the newest ones, as a link to its file.

        What was the best before stays until no round on disk is as old: whoever falls back to an older round
        finds the best of its time. A later one is the best of a time that was taken back.
        """
        if not self.kept(round_).exists():
            os.link(self.path(round_), self.kept(round_))
        on_disk, kept = self.rounds(), self._numbers(_KEPT)
        outlived = [r for r in kept if r <= round_ and on_disk and r < on_disk[0]][:-1]
        taken_back = [r for r in kept if r > round_ and r in on_disk]
        for other in (*outlived, *taken_back):
            self.kept(other).unlink()

    def kept(self, round_: int) -> Path:
        """The file of the round that is kept."""
        return self.folder / f"best-{round_:06d}.safetensors"

    def path(self, round_: int) -> Path:
        """The file of a round."""
        return self.folder / f"round-{round_:06d}.safetensors"
