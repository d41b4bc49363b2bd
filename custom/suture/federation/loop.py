"""A whole federation, start to end, over any transport; and the transport that is no transport.

`federate` is the order of things: hello, rounds, validation of the last model, test of the selected one. The
loop in one process and the FLARE controller both run it; they differ only in how a packed message gets to a
site and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from suture.core.errors import RejectedUpdate
from suture.federation.server.collector import Receiver
from suture.federation.server.finish import finish
from suture.federation.server.server import Server
from suture.federation.site.site import Site
from suture.protocol.messages import Payload, TaskName
from suture.protocol.packing import Packed, pack, unpack


class Transport(Protocol):
    """Carries tasks to sites and answers back."""

    @property
    def sites(self) -> list[str]:
        """The sites that can be asked."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        """Sends each site its payload and hands every answer to `receive`, until it says that it has enough.

        Returns:
            why a site did not answer, for those that did not.
        """


def federate(server: Server, transport: Transport) -> None:
    """Runs a federation from where it stands to its end.

    Raises:
        FederationError: it cannot go on; what was committed stays.
    """

    def ask(task: TaskName, payloads: Mapping[str, Packed]) -> dict[str, str]:
        return transport.exchange(task, payloads, server.intake())

    server.begin(ask("handshake", server.handshake(transport.sites)))
    while not server.done:
        server.close_round(ask("train", server.assign()))
    server.close_validation(ask("evaluate", server.assign_validation()))
    finish(server, server.close_test(ask("evaluate", server.assign_test())))


class Loop:
    """Sites in this process, asked one after the other: it waits for all, since no site is late."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self._sites = dict(sorted(sites.items()))

    @property
    def sites(self) -> list[str]:
        return list(self._sites)

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name, packed in payloads.items():
            payload = unpack(packed)
            if not isinstance(payload, Payload) or payload.task != task:
                raise RejectedUpdate(f"{name} was sent something else than a {task} task")
            receive(name, pack(self._sites[name].answer(payload)))
        return {}
