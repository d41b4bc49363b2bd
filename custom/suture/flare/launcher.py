"""A site's launcher of job processes that outlives the death of one.

FLARE ends a whole job when the process of one site is killed (by the kernel, for want of memory, or by a
person): any signal counts as an error of the job. This launcher starts the process again. It asks the server
for its task, gets the same one once more, and has the state of the last committed round on its disk. The site
installs it in place of FLARE's own in local/resources.json; see docs/deployment.md.

A connection that is cut takes the request with it that was on the way; nobody is told, and FLARE asks again
only when the answer is overdue. For pieces of tensors that is ten minutes, and an environment variable.
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
    """Starts a site's job process, and starts it again where a signal has ended it.

    Args:
        restarts: how often, for one job; after that the job goes on without this site.
        overdue: seconds after which a piece of the tensors is asked for again; a variable of the
            environment goes before it.
    """

    def __init__(self, restarts: int = 3, overdue: float = 60) -> None:
        super().__init__()
        self.restarts, self.overdue = restarts, overdue

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Starts the process of a job, with the variables of this one; see `TolerantHandle`."""
        os.environ.setdefault(_PIECE, str(self.overdue))
        launch = super().launch_job
        return TolerantHandle(lambda: launch(job_meta, fl_ctx), self.restarts)


class TolerantHandle(JobHandleSpec):
    """The process of a job, or the one that took its place.

    Args:
        launch: starts the process.
        restarts: how often it is started again.
    """

    def __init__(self, launch: Callable[[], ProcessHandle], restarts: int) -> None:
        super().__init__()
        self._launch = launch
        self._left = restarts
        self._stopped = False
        self._lock = threading.Lock()
        self._process = launch()

    def terminate(self) -> None:
        """Ends the process for good."""
        with self._lock:
            self._stopped = True
            self._process.terminate()

    def poll(self) -> Any:
        """FLARE's code of the process's end; that of a killed process says nothing about the job."""
        return JobReturnCode.UNKNOWN if self._killed() else self._process.poll()

    def wait(self) -> None:
        """Waits until the process has ended and no other takes its place."""
        self._process.wait()
        while self._again():
            self._process.wait()

    def _killed(self) -> bool:
        code = self._process.adapter.poll()
        return code is not None and code < 0

    def _again(self) -> bool:
        """Starts the process again, if it was killed and may be."""
        with self._lock:
            if self._stopped or not self._killed():
                return False
            code = self._process.adapter.poll()
            if not self._left:
                log.error(
                    "the job process was ended by signal %d once too often; the job goes on without", -code
                )
                return False
            self._left -= 1
            log.warning("the job process was ended by signal %d; starting it again", -code)
            self._process = self._launch()
            return True
