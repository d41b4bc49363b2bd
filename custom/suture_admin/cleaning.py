"""What finished work has left on a disk: folders of jobs, states of experiments, features of encoders.

Only what FLARE or Suture has written for a job is listed, by its name. Ledgers, owners, counts that were
sent, results and Suture's logs stay, and so does every state of a run that has not finished.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from os import stat_result
from pathlib import Path
from uuid import UUID

import psutil

from suture.core.errors import ConfigError, SutureError
from suture.core.files import hold, read_json
from suture.data.config import find_server_config, find_site_config, load_site_config
from suture.execution.sites import shared_features
from suture.federation.server.record import SERVER_LOCK
from suture.federation.site.site import SITE_LOCK
from suture.federation.state_files import EXPERIMENTS
from suture.flare import PLAN
from suture.flare.kit import read_kit

_STATES = ("round-*.safetensors", "best-*.safetensors", "constant.safetensors", "encoder.safetensors")
_KEPT = ("answers/*/*.safetensors", "updates/*/*.safetensors")
"""What a party stores to go on with an experiment: states, answers of a site, updates at the server."""


@dataclass(frozen=True)
class Leftover:
    """What can be deleted together.

    Attributes:
        what: for a person.
        files: of it.
        lock: who works with the files holds it; None where nobody can.
    """

    what: str
    files: tuple[Path, ...]
    lock: Path | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return size_of(self.files)


def leftovers(workspace: Path | None, days: float) -> list[Leftover]:
    """Return what nobody has used for some days.

    Args:
        workspace: of a site or server in FLARE; None for the features that this user's runs share.

    Raises:
        ConfigError: the folder is no workspace of a site or server, or the party's suture.toml is wrong.
    """
    before = time.time() - days * 24 * 3600
    if workspace is None:
        with suppress(RuntimeError):  # no home, and so no features
            found = (Leftover(f"features {one.name}", (one,)) for one in shared_features().glob("*.features"))
            return [one for one in found if _older(one.files, before)]
        return []
    return [one for one in (*_jobs(workspace), *_experiments(workspace)) if _older(one.files, before)]


def remove(leftover: Leftover) -> bool:
    """Delete it; False where a process works with it.

    Raises:
        OSError: a file cannot be deleted.
    """
    try:
        held = hold(leftover.lock, 0) if leftover.lock else None
    except SutureError:
        return False
    for path in leftover.files:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if held:
        held.close()
    return True


def _experiments(workspace: Path) -> Iterator[Leftover]:
    """Yield the states of the experiments that have finished at this party."""
    for folder in experiments(workspace):
        for states, lock, finished in (
            (folder / "state", SERVER_LOCK, _finished_at_server(folder)),
            (folder, SITE_LOCK, _finished_at_site(folder)),
        ):
            files = tuple(path for form in (*_STATES, *_KEPT) for path in sorted(states.glob(form)))
            if finished and files:
                yield Leftover(f"states of experiment {folder.name}", files, folder / lock)


def experiments(workspace: Path) -> list[Path]:
    """Return the folders of the experiments of a site or server.

    Raises:
        ConfigError: as `leftovers`.
    """
    kit = read_kit(workspace)
    if kit.role == "admin":
        raise ConfigError(f"{kit.folder} is an administrator's kit; name the workspace of a site or server")
    if kit.role == "server":
        storage = find_server_config(kit.folder).storage
    else:
        storage = load_site_config(find_site_config(kit.name, kit.folder)).storage
    return sorted(path for path in (storage.state / EXPERIMENTS).glob("*") if path.is_dir())


def _finished_at_server(folder: Path) -> bool:
    with suppress(SutureError):
        return read_json(folder / "run.json").get("status") == "finished"
    return False


def _finished_at_site(folder: Path) -> bool:
    """Whether the last thing that a server has asked for was the test of the model, which ends a run."""
    tested = [path.stat().st_mtime for path in folder.glob("answers/test/*.safetensors")]
    trained = [path.stat().st_mtime for path in folder.glob("round-*.safetensors")]
    return max(tested, default=0) > max(trained, default=0)


def _jobs(workspace: Path) -> Iterator[Leftover]:
    """Yield FLARE's folders of Suture's jobs that no process runs."""
    commands = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    for folder in sorted(read_kit(workspace).folder.glob("*-*-*-*-*")):
        with suppress(ValueError):
            UUID(folder.name)
            if any(folder.glob(f"app*/config/{PLAN}")) and not any(folder.name in one for one in commands):
                yield Leftover(f"job {folder.name}", (folder,))


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes of files and folders on the disk; a second link to a file has none."""
    return sum({(one.st_dev, one.st_ino): one.st_size for one in _facts(paths)}.values())


def _older(paths: Iterable[Path], than: float) -> bool:
    return all(one.st_mtime < than for one in _facts(paths))


def _facts(paths: Iterable[Path]) -> Iterator[stat_result]:
    """Yield the facts of the paths and of all below them; another process may delete some meanwhile."""
    for path in paths:
        with suppress(OSError):
            yield path.lstat()
            yield from _facts(path.iterdir() if path.is_dir() and not path.is_symlink() else ())
