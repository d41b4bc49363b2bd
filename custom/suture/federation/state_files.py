"""The states of one party on disk: one file per round, of which the newest few and the best are retained."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from suture.core.errors import ConfigError, SutureError
from suture.core.files import writing
from suture.protocol.messages import Update
from suture.protocol.packing import Packed, load, pack, save

log = logging.getLogger(__name__)

EXPERIMENTS = "experiments"
"""Folder of the experiments' folders in a party's state folder: so none has the name of another file."""

RETAINED = 3
"""Number of committed rounds that are retained, so that a damaged file costs one round and not the run."""

FORMAT = 1
"""Format of the states. Increase it whenever a state of the version before can no longer be read."""

UPDATES = "updates"
"""Folder of the kept updates, beside the states: one folder for each round."""

_ROUND = re.compile(r"round-(\d{6,})\.safetensors")
_BEST = re.compile(r"best-(\d{6,})\.safetensors")


def experiment_folder(state: Path, name: str) -> Path:
    """Return the folder of an experiment in a party's state folder."""
    return state / EXPERIMENTS / name


@dataclass(frozen=True)
class Rounds:
    """The states of one party in one folder.

    The newest `RETAINED` rounds that the server has committed stay on disk, and so does the round after
    them. Hence a round that the server never committed can be repeated, and a corrupt file has a
    predecessor.

    Attributes:
        constant: how the names of the tensors begin that no round changes, such as those of a frozen encoder;
            one file holds them for all rounds. Empty for none.
    """

    folder: Path
    constant: str = ""

    def save(self, round_: int, state: Packed, committed: int, *, durable: bool = True) -> None:
        """Write the state of a round, then delete all other rounds but the newest committed ones.

        The tensors that no round changes are written before the first one.
        A best round that is written again, after a step back, is no longer the best one.

        Raises:
            DiskError: nothing was written; the states on disk are unchanged.
        """
        constant: dict[str, Tensor] = {}
        if self.constant:
            constant = {n: t for n, t in state.tensors.items() if n.startswith(self.constant)}
        if constant and not (self._files() and self.constant_path.exists()):
            save(self.constant_path, Packed(constant, {}), durable)
        tensors = {n: t for n, t in state.tensors.items() if n not in constant}
        save(self.path(round_), Packed(tensors, {"format": FORMAT, **state.header}), durable)
        # A best round of this number is of a time that was taken back: another model is stored under it now.
        self.best_path(round_).unlink(missing_ok=True)
        rounds = self.rounds()
        # Later rounds than this one go too: they were never committed.
        base = [r for r in rounds if r <= committed][-RETAINED:]
        for other in rounds:
            if other not in (round_, *base):
                self.path(other).unlink(missing_ok=True)

    def _read(self, path: Path) -> Packed:
        state = read_state(path)
        if not self.constant:
            return state
        constant = {} if not self.constant_path.exists() else load(self.constant_path).tensors
        return replace(state, tensors={**constant, **state.tensors})

    def step_back(self, round_: int, state: Packed) -> None:
        """Write the state of an earlier round again, and delete all later ones.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        self.save(round_, state, committed=round_)
        for later in (r for r in self._numbers(_BEST) if r > round_):
            self.best_path(later).unlink()

    def newest(self, not_later_than: int | None = None) -> tuple[int, Packed] | None:
        """Read the newest state (not later than a round), best rounds included; None where there is none.

        A corrupt file is skipped, with a warning, in favour of the round before.

        Raises:
            SutureError: every file is corrupt.
            ConfigError: another version of Suture wrote the state.
        """
        broken: SutureError | None = None
        for number, path in sorted(self._files().items(), reverse=True):
            if not_later_than is not None and number > not_later_than:
                continue
            try:
                return number, self._read(path)
            except ConfigError:
                raise
            except SutureError as error:
                log.warning("%s; the previous round is used instead", error)
                broken = error
        if broken:
            raise SutureError(
                f"{broken}, and no earlier state is intact; restore {self.folder} from a backup, or "
                "begin a new experiment"
            ) from broken
        return None

    def read_best(self, number: int) -> Packed:
        """Read the state of the best round.

        Raises:
            SutureError: its file is corrupt; says how to continue without it.
            ConfigError: another version of Suture wrote it.
        """
        try:
            return self._read(self.best_path(number))
        except ConfigError:
            raise
        except SutureError as error:
            raise SutureError(
                f"{error}, and it is the selected round; delete the files of round {number} in "
                f"{self.folder} and continue the experiment; the newest round is then used"
            ) from error

    def latest(self, not_later_than: int) -> int | None:
        """Return the newest round on disk that is not later than this one, corrupt or not."""
        return max((number for number in self._files() if number <= not_later_than), default=None)

    def rounds(self) -> list[int]:
        """Return the rounds on disk in order, without best rounds that only `keep` has retained."""
        return self._numbers(_ROUND)

    def holds(self, round_: int) -> bool:
        """Whether the state of a round is on disk, corrupt or not."""
        return round_ in self._files()

    def is_whole(self, round_: int) -> bool:
        """Whether the state of a round is on disk and can be read."""
        try:
            return self.path(round_).exists() and bool(read_state(self.path(round_)))
        except SutureError:
            return False

    def _files(self) -> dict[int, Path]:
        # Of a round with both files the newer one counts.
        return {r: self.best_path(r) for r in self._numbers(_BEST)} | {r: self.path(r) for r in self.rounds()}

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(m[1]) for name in names if (m := pattern.fullmatch(name)))

    def keep(self, round_: int) -> None:
        """Retain the best round beyond the newest ones, as a hard link to its file.

        The former best round stays until every round on disk is newer, because a party that falls back to
        an older round needs the best round of that time. A later best round was taken back with its time.
        """
        if not self.best_path(round_).exists():
            with writing(self.best_path(round_)):
                os.link(self.path(round_), self.best_path(round_))
        on_disk, best = self.rounds(), self._numbers(_BEST)
        outlived = [r for r in best if r <= round_ and on_disk and r < on_disk[0]][:-1]
        taken_back = [r for r in best if r > round_ and r in on_disk]
        for other in (*outlived, *taken_back):
            self.best_path(other).unlink()

    def best_path(self, round_: int) -> Path:
        """Return the path of a round that `keep` retains."""
        return self.folder / f"best-{round_:06d}.safetensors"

    @property
    def constant_path(self) -> Path:
        """The path of the tensors that no round changes."""
        return self.folder / "constant.safetensors"

    def path(self, round_: int) -> Path:
        """Return the path of a round."""
        return self.folder / f"round-{round_:06d}.safetensors"


def read_state(path: Path) -> Packed:
    """Read a state that `Rounds.save` has written, without its format number.

    Raises:
        SutureError: the file is corrupt.
        ConfigError: another version of Suture wrote it.
    """
    state = load(path)
    header = dict(state.header)
    if header.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} was written by another version of suture, whose states this version cannot read. "
            "Continue the experiment with that version, or begin a new one (another --out, or `suture "
            "export --experiment`)"
        )
    return replace(state, header=header)


def keep_updates(states: Path, round_: int, updates: Iterable[tuple[str, Update]]) -> None:
    """Keep the updates of a round that is about to be committed, under the federation's class names.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    folder = states / UPDATES / f"{round_:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    for site, update in updates:
        save(folder / f"{site}.safetensors", pack(replace(update, metrics=None, spent=None, ledger=None)))


def drop_updates(states: Path, round_: int) -> None:
    """Delete the updates of all rounds but the one that was committed."""
    for folder in (states / UPDATES).iterdir():
        if folder.name != f"{round_:06d}":
            shutil.rmtree(folder)
