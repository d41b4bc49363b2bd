"""FLARE's heartbeats of a site's job process reach the server, and FLARE itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.private.fed.server.server_runner import ServerRunner

from flare_job import context
from suture.flare.compat.heartbeats import on_heartbeat


def test_a_heartbeat_alone_is_heard_and_flare_still_hears_everything() -> None:
    heard: list[str] = []
    communicator = WFCommServer()
    on_heartbeat(communicator, heard.append)
    runner: Any = object.__new__(ServerRunner)
    controller = SimpleNamespace(communicator=communicator)
    runner.current_wf, runner.wf_lock = SimpleNamespace(controller=controller), threading.RLock()
    for site in ("alpha", "beta"):
        communicator.process_dead_client_report(site, context(site))
    runner._handle_job_heartbeat("topic", Shareable(), context("alpha"))
    runner._report_client_active("getTask", context("beta"))  # all that the simulator's sites send
    assert heard == ["alpha"]
    assert not communicator._dead_clients
