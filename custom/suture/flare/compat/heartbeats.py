"""The heartbeats of the sites' job processes, of which FLARE tells the communicator and no controller.

FLARE 2.9.0: a whole site that was killed and registers again has another token. The server then looks for its
job under the old one, reports nothing, and does not start it there again: its tasks stay open until their
timeout. The heartbeats of its job process, one every ten seconds, end with the process.
Where: nvflare/private/fed/server/server_runner.py: _handle_job_heartbeat
Where: nvflare/private/fed/server/fed_server.py: _sync_client_jobs
Expires with: test_flare_does_not_report_a_site_that_registers_again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext


def on_heartbeat(communicator: Any, heard: Callable[[str], None]) -> None:
    """Call a function with the name of the site at each heartbeat; the simulator's sites send none.

    The name is the one that the site states: with that of a lost site it can make the server wait as long as
    by not answering itself.
    """
    theirs = communicator.client_is_active

    def active(client_name: str, reason: str, fl_ctx: FLContext) -> None:
        # FLARE calls this of every request: heard of one, a site of the simulator would later count as lost.
        if reason == "jobHeartbeat":
            heard(client_name)
        theirs(client_name, reason, fl_ctx)

    communicator.client_is_active = active
