"""The page of a run, served while the run works: on this machine alone, and nothing else of its folder."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from suture.core.errors import ConfigError, SutureError
from suture.core.escaping import printable
from suture.core.files import read_json, whole_lines
from suture.execution.progress import Progress
from suture_results.report import Live, render_report, render_waiting

log = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 6016
"""Where the page is; another free port where this one is in use."""

_FILES = ("run.json", "history.jsonl", "events.jsonl", "metrics.json", "tuned.json", "diagnostics.jsonl")
"""The files that the page is made of."""

_PATIENCE = 60.0
"""Seconds in which the folder of a run that is about to begin has to come."""

_LAST = 12
"""Lines of the newest events on the page."""

_LINGER = 3.0
"""Seconds: an open page asks every two for a change, and then loads the finished report."""

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LivePage(ThreadingTCPServer):
    """Serves the page of a run folder at ``http://127.0.0.1:PORT/``, and nothing else.

    The page is rendered when it is requested and a file of the run has changed. A request that names another
    host, as a page of another site would make it (DNS rebinding), is refused.

    Args:
        folder: of the run; it need not be there yet.
        port: 0 for a free one.

    Raises:
        OSError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.folder = folder
        self.port = int(self.server_address[1])
        self.hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        self._lock = threading.Lock()
        self._rendered: tuple[str, bytes] = ("", b"")
        self.asked = -math.inf

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.port}/"

    def version(self) -> str:
        """Return a text that changes when a file of the run does."""
        found = []
        for name in _FILES:
            with suppress(OSError):
                status = (self.folder / name).stat()
                found.append(f"{name[0]}{status.st_ino:x}.{status.st_mtime_ns:x}.{status.st_size:x}")
        return "-".join(found)

    def page(self) -> tuple[str, bytes]:
        """Return the page and the version of the files that it shows."""
        with self._lock:
            version = self.version()
            if version != self._rendered[0] or not self._rendered[1]:
                self._rendered = version, self._render(version).encode()
            return self._rendered

    def _render(self, version: str) -> str:
        try:
            if not (self.folder / "run.json").is_file():
                return render_waiting(Live(version, state(self.folder)))
            return render_report(self.folder, live(self.folder, version))
        except Exception as error:  # a damaged file; the next version may be whole
            log.debug("the page of %s", self.folder, exc_info=True)
            return render_waiting(Live(version, str(error)))

    def handle_error(self, *_: Any) -> None:
        """Log what went wrong with a request: a browser that has gone away is no error of the run."""
        log.debug("the page of %s", self.folder, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    timeout = 10
    server_version, sys_version = "suture", ""

    def do_GET(self) -> None:
        if self._is_allowed():
            version, page = self.server.page()
            self._head(version, len(page))
            self.wfile.write(page)

    def do_HEAD(self) -> None:
        if self._is_allowed():
            self._head(self.server.version())

    def _is_allowed(self) -> bool:
        self.server.asked = time.monotonic()
        if not set(self.headers.get_all("Host", [""])) <= self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def _head(self, version: str, length: int | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{version}"')
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


@contextmanager
def serve(folder: Path, port: int | None = None) -> Iterator[LivePage]:
    """Serve the page of a run, in a thread of this process, while the block runs.

    If a browser shows it when the block ends, it is served for `_LINGER` more, with the finished report.

    Args:
        port: by default `PORT`, or a free one where that is in use.

    Raises:
        ConfigError: the port that was asked for cannot be used, or FOLDER is a file.
        OSError: no port can be used.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give the folder of a run")
    with _bound(folder, port) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield page
        finally:
            interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            if not interrupted and time.monotonic() < page.asked + _LINGER:
                time.sleep(_LINGER)
            page.shutdown()
            thread.join()


def _bound(folder: Path, port: int | None) -> LivePage:
    try:
        return LivePage(folder, PORT if port is None else port)
    except OSError as error:
        if port is None:
            return LivePage(folder, 0)
        raise ConfigError(
            f"port {port} of this machine cannot be used ({error.strerror}); choose another --port, or leave "
            "it out"
        ) from error


def states(folder: Path) -> Iterator[str]:
    """Yield the state of a run whenever it has changed, without an end.

    Raises:
        ConfigError: there is no such folder, and none has come after a minute.
    """
    last, patience = "", time.monotonic() + _PATIENCE
    while True:
        if time.monotonic() > patience and not folder.exists():
            raise ConfigError(f"{folder} has not come after a minute; name the folder of a run")
        if (now := state(folder)) != last:
            yield now
        last = now
        time.sleep(0.5)


def state(folder: Path) -> str:
    """Return in a sentence whether a run has begun, works or has ended."""
    if not (folder / "run.json").is_file():
        return f"waiting for a run: {folder} has no run.json yet"
    try:
        status = printable(read_json(folder / "run.json", "status")["status"], 40)
    except SutureError as error:
        return str(error)
    if status == "running":
        return "the run is running"
    return f"the run has ended: {status}"


def live(folder: Path, version: str) -> Live:
    """Return what the events of a run say of it; nothing where it has ended."""
    if read_json(folder / "run.json", "status")["status"] != "running":
        return Live(version, "")
    progress, lines, at = Progress("", ""), [], None
    for text in whole_lines(folder / "events.jsonl"):
        with suppress(ValueError, RecursionError):
            event = json.loads(text)
            lines += [line] if (line := progress.take(event)) else []
            at = _time(event)
    sites = {printable(site, 80): how or progress.doing for site, how in progress.sites.items()}
    return Live(version, _now(progress), lines[-_LAST:], at, sites)


def _time(event: object) -> datetime | None:
    with suppress(ValueError):
        return datetime.fromisoformat(str(event.get("time"))) if isinstance(event, dict) else None
    return None


def _now(progress: Progress) -> str:
    """Say in a sentence what a run does."""
    if not progress.rounds:
        return "The sites have not started."
    left = f", about {progress.left.strip()}" if progress.left else ""
    return f"Round {progress.round} of {progress.rounds}: {progress.doing}{left}."
