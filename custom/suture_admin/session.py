"""An administrator's connection to a running FLARE system: jobs and their results."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.common.excepts import ConfigError as FlareConfigError
from nvflare.fuel.flare_api.api_spec import (
    AuthenticationError,
    AuthorizationError,
    InternalError,
    InvalidJobDefinition,
    InvalidTarget,
    JobNotDone,
    JobNotFound,
    JobNotRunning,
    NoClientsAvailable,
    NoConnection,
    NoReply,
    SessionClosed,
)
from nvflare.fuel.flare_api.flare_api import Session

from suture.core.errors import ConfigError, FederationError
from suture.core.files import read_regular
from suture.flare import STATS_GROUP
from suture.flare.compat.cells import stop
from suture.flare.kit import Kit
from suture_admin.kits import check_valid_now

_LOGIN = 30.0
"""Seconds for a login; FLARE's own 5 s are not enough where the machine is busy."""

_REFUSALS = (InternalError, InvalidJobDefinition, InvalidTarget, JobNotDone, NoReply, RuntimeError)


class NoAnswer(FederationError):
    """The server does not answer; it may answer later."""


class Connection:
    """The session of one administrator; every method raises `FederationError` with FLARE's reason."""

    def __init__(self, session: Any, kit: Kit) -> None:
        self._session = session
        self._kit = kit

    def contacts(self) -> dict[str, float]:
        """Return when the server last heard from each connected site, in seconds of its clock."""
        with suppress(NoClientsAvailable):
            clients = self._ask("get_connected_client_list")
            return dict(sorted((client.name, client.last_connect_time) for client in clients))
        return {}

    def sites(self) -> list[str]:
        """Return the names of the connected sites."""
        return list(self.contacts())

    def submit(self, folder: Path) -> str:
        """Submit an exported job; return its id."""
        return str(self._ask("submit_job", str(folder)))

    def metas(self) -> list[dict[str, Any]]:
        """Return the complete metadata of each job, oldest first."""
        return list(self._ask("list_jobs", detailed=True))

    def meta(self, job_id: str) -> dict[str, Any]:
        """Return the metadata of a job: status, submitter, the answers of the parties to its deployment."""
        return dict(self._ask("get_job_meta", job_id))

    def abort(self, job_id: str) -> None:
        """Abort a job; one that has ended stays as it is."""
        self._ask("abort_job", job_id)

    def clone(self, job_id: str) -> str:
        """Submit a copy of a job from the server's job store; return the id of the copy."""
        return str(self._ask("clone_job", job_id))

    def recent(self, job_id: str) -> dict[str, Any]:
        """Return the newest events of a running job, as `EventFeed.recent`; empty while there are none."""
        try:
            return dict(self._ask("show_stats", job_id, "server")["server"][STATS_GROUP])
        except NoAnswer:
            raise
        except (FederationError, JobNotRunning, KeyError, TypeError):
            return {}  # a job that is starting or ending is unknown to this command for a while

    def download(self, job_id: str, folder: Path) -> Path:
        """Download the server's workspace of a job that has ended; return its folder."""
        return Path(self._ask("download_job_result", job_id, str(folder))) / "workspace"

    def error_logs(self, job_id: str) -> dict[str, str]:
        """Return the error logs that sites sent to the server, as far as this administrator may read them."""
        with suppress(FederationError):
            folder = Path(self._ask("download_job_components", job_id))
            return {
                path.name.removeprefix("ERRORLOG_"): read_regular(path).decode(errors="replace")
                for path in folder.rglob("ERRORLOG_*")
            }
        return {}

    def _ask(self, command: str, *arguments: str, **options: bool) -> Any:
        """Return FLARE's answer to a command; raise its errors as one line with a remedy."""
        try:
            return getattr(self._session, command)(*arguments, **options)
        except (NoConnection, SessionClosed) as error:
            raise NoAnswer(f"the server at {self._kit.server} does not answer: {error}") from error
        except AuthorizationError as error:
            raise FederationError(
                f"{self._kit.name} may not do this: {error}; the server's authorization.json gives the right"
            ) from error
        except JobNotFound as error:
            raise FederationError(f"the server knows no such job ({error}); see `suture status`") from error
        except _REFUSALS as error:
            raise FederationError(f"the server at {self._kit.server} refused: {error}") from error


def sites_of(job: Mapping[str, Any]) -> set[str]:
    """Return the sites that a job names."""
    names = {str(name) for targets in dict(job.get("deploy_map", {})).values() for name in targets}
    return {name for name in names if name != "server" and not name.startswith("@")}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence FLARE, which prints and logs while it connects; errors still arrive as exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _log_in(kit: Kit) -> Session:
    """Log in. FLARE's `new_secure_session` leaves its threads running where Ctrl-C interrupts it."""
    session = Session(kit.name, str(kit.folder), study=kit.study)
    try:
        session.try_connect(_LOGIN)
    except BaseException:
        session.api.close()
        if session.api.cell:
            stop(session.api.cell)
        raise
    return session


@contextmanager
def connect(kit: Kit) -> Iterator[Connection]:
    """Log an administrator in, with mutual TLS, and out again at the end.

    Raises:
        NoAnswer: the server does not answer.
        ConfigError: the certificate has expired, or it or the study is refused.
    """
    check_valid_now(kit)
    try:
        with _quiet():
            session = _log_in(kit)
    except (NoConnection, FLCommunicationError, TypeError) as error:
        # A server that is only starting has no certificate to show yet, or no callback for a login.
        raise NoAnswer(
            f"the server at {kit.server} does not answer ({error}); is it running? On this machine "
            "`suture poc up JOB` starts one"
        ) from error
    except (AuthenticationError, AuthorizationError, FlareConfigError, ValueError) as error:
        raise ConfigError(
            f"the server at {kit.server} does not accept the kit {kit.folder}: {error}; see `suture doctor`"
        ) from error
    try:
        yield Connection(session, kit)
    finally:
        with suppress(Exception), _quiet():
            session.close()


def wait_for_sites(kit: Kit, sites: set[str], seconds: float, alive: Callable[[], None]) -> set[str]:
    """Wait until sites are connected; return those that are not when the time is over.

    Args:
        seconds: how long to wait.
        alive: called before each attempt; it raises where waiting is pointless.
    """
    end, missing = time.monotonic() + seconds, set(sites)
    while missing and time.monotonic() < end:
        alive()
        with suppress(NoAnswer), connect(kit) as federation:
            while missing and time.monotonic() < end:
                alive()
                missing = sites - set(federation.sites())
                time.sleep(0.5)
    return missing
