"""The transport to sites in several processes of this machine, which train at the same time.

Each process answers for the same sites throughout, so that their images and caches stay in its memory. A
packed message lies in a file while it is under way, which needs no copy of it in memory.

They are forked from a process that is spawned and has imported torch (`ForkServer`): a program that runs jobs
with them needs `if __name__ == "__main__":`, as with multiprocessing.
"""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue

from suture.core.errors import FederationError
from suture.core.files import make_folder
from suture.core.processes import ForkServer, keep_memory
from suture.federation.loop import answer_task
from suture.federation.server.collector import Receiver
from suture.federation.site.abstention import kind
from suture.federation.site.site import Site
from suture.protocol.messages import TaskName
from suture.protocol.packing import Packed, load, save

Openers = Mapping[str, Callable[[], Site]]
"""What opens each site, by its name, in the process that answers for it. It is pickled: no lambda."""


class Workers:
    """The transport to sites in processes. These start now, load torch meanwhile and live until `close`."""

    def __init__(self, processes: int) -> None:
        self._server = ForkServer(_work, processes)
        self._workers = [_Worker(self._server, index) for index in range(processes)]
        self._folder: Path | None = None

    def open(
        self, sites: Openers, images: Mapping[str, int], devices: Mapping[str, str], folder: Path
    ) -> None:
        """Deal the sites to the processes; those that get none are ended.

        Args:
            sites: by name.
            images: of each site, which are shared out evenly.
            devices: of each site. Where processes suffice, each has sites of one device.
            folder: for the messages under way.
        """
        self._server.wait()  # one that was not forked yet would begin after `close`
        make_folder(folder)
        self._folder = folder
        shares = balanced_shares(images, len(self._workers), devices)
        for surplus in self._workers[len(shares) :]:
            surplus.kill()
        self._workers = self._workers[: len(shares)]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.open({name: sites[name] for name in share}, folder)

    @property
    def sites(self) -> list[str]:
        return sorted(name for worker in self._workers for name in worker.sites)

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        """Give each process one task after the other, and wait for all answers.

        Raises:
            FederationError: a process was killed, or a site failed without abstaining.
        """
        # A site stays in one process, which has its data and model; the answers come as the processes are
        # done.
        waiting = {worker: [name for name in payloads if name in worker.sites] for worker in self._workers}
        while True:
            for worker, names in waiting.items():
                if names and not worker.site:
                    worker.give(task, names[0], payloads[names.pop(0)])
            busy = [worker for worker in waiting if worker.site]
            if not busy:
                return {}
            ready = wait([worker.line for worker in busy])
            for worker in busy:
                if worker.line in ready:
                    receive(*worker.answer())

    def close(self) -> None:
        """Kill the processes. A site loses nothing: a task that it has not answered is given again."""
        self._server.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def balanced_shares(images: Mapping[str, int], processes: int, devices: Mapping[str, str]) -> list[list[str]]:
    """Deal sites to processes, the one of most images first, each to the process that has fewest so far.

    The processes are those of the devices in turn, so that all devices compute at a time.
    """
    kinds = sorted(set(devices.values()))
    shares: list[list[str]] = [[] for _ in range(min(processes, len(images)))]
    for name in sorted(images, key=lambda name: (-images[name], name)):
        of_device = shares[kinds.index(devices[name]) :: len(kinds)] if kinds else shares
        min(of_device or shares, key=lambda share: sum(images[one] for one in share)).append(name)
    return [share for share in shares if share]


class _Worker:
    """One process, from the side of the server.

    Attributes:
        sites: that it answers for.
        site: that has a task now; empty while it waits.
        line: can be read when an answer is there, or the process has ended.
    """

    def __init__(self, server: ForkServer, index: int) -> None:
        self.sites: list[str] = []
        self.site = ""
        self.line = server.lines[index]
        self._server, self._index = server, index

    def open(self, sites: Openers, folder: Path) -> None:
        self.sites, self._folder = list(sites), folder
        self._send(sites, folder)

    def give(self, task: TaskName, site: str, payload: Packed) -> None:
        save(_task(self._folder, site), payload, durable=False)
        self.site = site
        self._send(task, site)

    def _send(self, *message: object) -> None:
        with suppress(BrokenPipeError):  # `answer` says how the process has ended
            self.line.send(message)

    def answer(self) -> tuple[str, Packed]:
        """Return the site that had a task, and its answer; what it has logged appears here."""
        site, self.site = self.site, ""
        try:
            logged, failure = self.line.recv()
        except (EOFError, ConnectionResetError):
            raise FederationError(f"{site}: {self._end()}") from None
        for record in logged:
            logging.getLogger(record.name).handle(record)
        if failure:
            raise FederationError(f"{site}: {failure}")
        return site, _take(_answer(self._folder, site))

    def _end(self) -> str:
        code = self._server.exit_code(self._index)
        if code == -signal.SIGKILL:
            return "its process was killed, probably because memory was full; try fewer --workers"
        return f"its process ended with code {code}; see its output above"

    def kill(self) -> None:
        self._server.kill(self._index)


# In the process of the sites


def _work(line: Connection) -> None:
    """Answer for the sites until the server's process has ended."""
    keep_memory()
    logged: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logging.getLogger().addHandler(QueueHandler(logged))
    with suppress(EOFError, BrokenPipeError):
        openers, folder = line.recv()
        sites = {name: opener() for name, opener in openers.items()}
        while True:
            task, name = line.recv()
            failure = _perform(sites[name], task, folder)
            line.send(([logged.get() for _ in range(logged.qsize())], failure))


def _perform(site: Site, task: TaskName, folder: Path) -> str:
    """Perform a task; return what went wrong, or an empty text."""
    try:
        answer = answer_task(site, task, _take(_task(folder, site.name)))
        save(_answer(folder, site.name), answer, durable=False)
    except Exception as error:  # noqa: BLE001 - the server raises it
        return f"{kind(error)}: {error}"
    return ""


def _task(folder: Path, site: str) -> Path:
    return folder / f"{site}-task.safetensors"


def _answer(folder: Path, site: str) -> Path:
    return folder / f"{site}-answer.safetensors"


def _take(path: Path) -> Packed:
    """Read a message and delete its file."""
    packed = load(path)
    path.unlink()
    return packed
