"""A launcher of a site's job processes that restarts a killed process.

FLARE 2.9.0: it ends a whole job when the process of one site is killed, by the kernel for lack of memory or
by a person: any signal counts as an error of the job (NVIDIA/NVFlare#5194). This launcher starts the
process again. The new process receives the same task from the server, and reads the state of the last
committed round from its disk. The site installs the launcher in place of FLARE's own in
local/resources.json; see docs/deployment.md.

A broken connection also loses the pending request. FLARE reports no error and repeats the request only when
its answer is overdue: for pieces of tensors after ten minutes, which an environment variable can shorten.
Where: nvflare/app_common/job_launcher/process_launcher.py: poll
Where: nvflare/private/fed/client/client_executor.py: _wait_child_process_finish
Expires with: test_flare_reports_a_killed_process_as_a_failure_of_the_job
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

log = logging.getLogger(__name__)

_PIECE = "NVFLARE_TENSOR_STREAMING_PER_REQUEST_TIMEOUT"


class TolerantLauncher(ClientProcessJobLauncher):
    """Starts a site's job process, and restarts it where a signal has ended it.

    Args:
        restarts: maximum number of restarts for one job; after that the job continues without this site.
        overdue: seconds after which the request for a piece of the tensors is repeated; the environment
            variable of FLARE takes precedence.
    """

    def __init__(self, restarts: int = 3, overdue: float = 60) -> None:
        super().__init__()
        self.restarts, self.overdue = restarts, overdue

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Start the process of a job, with the environment of this one; see `TolerantHandle`."""
        os.environ.setdefault(_PIECE, str(self.overdue))
        launch = super().launch_job
        return TolerantHandle(lambda: launch(job_meta, fl_ctx), self.restarts)


class TolerantHandle(JobHandleSpec):
    """The process of a job, or the one that replaced it.

    Args:
        launch: starts the process.
        restarts: maximum number of restarts.
    """

    def __init__(self, launch: Callable[[], ProcessHandle], restarts: int) -> None:
        super().__init__()
        self._launch = launch
        self._left = restarts
        self._stopped = False
        self._lock = threading.Lock()
        self._process = launch()

    def terminate(self) -> None:
        """End the process without a restart."""
        with self._lock:
            self._stopped = True
            self._process.terminate()

    def poll(self) -> Any:
        """Return FLARE's exit code of the process; UNKNOWN for a killed one, which does not fail the job."""
        return JobReturnCode.UNKNOWN if self._was_killed() else self._process.poll()

    def wait(self) -> None:
        """Wait until the process has ended and no other replaces it."""
        self._process.wait()
        while self._was_restarted():
            self._process.wait()

    def _was_killed(self) -> bool:
        code = self._process.adapter.poll()
        return code is not None and code < 0

    def _was_restarted(self) -> bool:
        """Restart the process if it was killed and restarts are left; return whether it was restarted."""
        with self._lock:
            if self._stopped or not self._was_killed():
                return False
            code = self._process.adapter.poll()
            if not self._left:
                log.error(
                    "the job process was ended by signal %d once too often; the job continues without it",
                    -code,
                )
                return False
            self._left -= 1
            log.warning("the job process was ended by signal %d; restarting it", -code)
            self._process = self._launch()
            return True
