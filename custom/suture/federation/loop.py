"""A whole federation from start to end, over any transport; and the loop, which needs no network.

`federate` determines the order of the steps: handshake, rounds, validation of the last model, counts of
scores where the job decides by them, test of the selected model. The loop in one process,
`suture.federation.workers` and the FLARE controller all run it; they differ only in how a packed message
reaches a site and how the answer returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from suture.core.errors import Aborted, RejectedUpdate
from suture.federation.server.collector import Receiver
from suture.federation.server.results import finish
from suture.federation.server.server import Server
from suture.federation.site.site import Site
from suture.protocol.messages import Metrics, TaskData, TaskName
from suture.protocol.packing import Packed, unpack


class Transport(Protocol):
    """Carries tasks to the sites and their answers back."""

    @property
    def sites(self) -> list[str]:
        """The sites that can receive tasks."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        """Send each site its payload, and pass every answer to `receive` until all, or enough, are there.

        Returns:
            why a site did not answer, for those that did not.
        """


def federate(server: Server, transport: Transport) -> None:
    """Run a federation from its present state to its end.

    What fails after the last round does not cost its result: the model, the metrics that there are and the
    error are recorded first, and then the error is raised.

    Raises:
        FederationError: it cannot continue; committed rounds stay.
    """

    def exchange(task: TaskName, payloads: Mapping[str, Packed]) -> dict[str, str]:
        return transport.exchange(task, payloads, server.receiver(task))

    server.begin(exchange("handshake", server.handshake(transport.sites)))
    while not server.done:
        if (masks := server.masks) is None:
            server.close_round(exchange("train", server.assign()))
            continue
        held = server.exchanges.ledgers.read()
        # Keys, sealed shares, masked updates, the signed list of those that have arrived, shares for the sum.
        # An attempt that is stuck goes through the other exchanges with no task, and the round is repeated.
        keys = masks.make_keys(server.round + 1, server.registry, held, server.quorum)
        shares = masks.share_keys(exchange("mask", keys))
        trained = exchange("train", server.assign(masks.updates(exchange("mask", shares))))
        signed = exchange("mask", masks.agree(server.close_updates(trained)))
        server.close_round(exchange("mask", masks.reveal(signed)))
    tested: Mapping[str, Metrics] = {}
    fault: Exception | None = None
    try:
        server.close_validation(exchange("evaluate", server.assign_validation()))
        if server.decides:
            server.close_scores(exchange("calibrate", server.assign_scores()))
        tested = server.close_test(exchange("evaluate", server.assign_test()))
    except Aborted:
        raise
    except Exception as error:  # noqa: BLE001 - `finish` raises it
        fault = error
    finish(server, tested, fault)


class Loop:
    """The transport to sites in this process. They answer one after the other, so none is late."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self._sites = dict(sorted(sites.items()))

    @property
    def sites(self) -> list[str]:
        return list(self._sites)

    def close(self) -> None:
        """Leave the sites' folders to other processes."""
        for site in self._sites.values():
            site.close()

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name, packed in payloads.items():
            receive(name, answer_task(self._sites[name], task, packed))
        return {}


def answer_task(site: Site, task: TaskName, packed: Packed) -> Packed:
    """Return a site's packed answer to a packed task.

    Raises:
        RejectedUpdate: the message is something else than such a task.
    """
    payload = unpack(packed)
    if not isinstance(payload, TaskData) or payload.task != task:
        raise RejectedUpdate(f"{site.name} received a task other than {task}")
    return site.answer(payload).packed
