"""The parties of a federation, step by step: what one says in another's place, and what each has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from between import Between
from rounds import reply_of
from suture.core.files import read_records
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import Packed, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
Change = Callable[[str, TaskData, Packed], Packed | None]


def honest(site: str, task: TaskData, answer: Packed) -> Packed:
    return answer


def says(who: str, kind: Any, change: Callable[[Any], Packed] | None) -> Change:
    """One site changes its replies of a kind, or loses them."""

    def said(site: str, task: TaskData, answer: Packed) -> Packed | None:
        reply = unpack(answer)
        if site != who or not isinstance(reply, kind):
            return answer
        return change(reply) if change else None

    return said


def run(federation: Any, out: str = "run", change: Change = honest) -> Server:
    """A whole run in which a test stands between sites and server."""
    server: Server = federation.server(out)
    federate(server, Between(federation.sites(out), change))
    return server


def limited(federation: Any, *who: str, **privacy: Any) -> Any:
    """The federation, some of whose sites, or all, have other keys under [privacy]."""
    for name in who or tuple(federation.configs):
        config = federation.configs[name]
        own = config.privacy.model_copy(update=privacy)
        federation.configs[name] = config.model_copy(update={"privacy": own})
    return federation


def begun(federation: Any, out: str = "run") -> tuple[Server, dict[str, Site], dict[str, TaskData]]:
    """A server that has sent round 1, its sites, and what they were sent."""
    server, sites = federation.server(out), federation.sites(out)
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    return server, sites, {name: task_in(packed) for name, packed in server.assign().items()}


def first_task(federation: Any, site: str = "alpha") -> TaskData:
    """The task of round 1 for a site that has answered nothing yet: other folders took the handshake."""
    task = begun(federation, "asked")[2][site]
    return replace(task, ledger=None)


def task_in(packed: Packed) -> TaskData:
    message = unpack(packed)
    assert isinstance(message, TaskData)
    return message


def abstains(site: Site, task: TaskData, reason: str, *named: str) -> Abstain:
    """The site's abstention; its own record of it names these, and no message does."""
    reply = reply_of(site, task)
    assert isinstance(reply, Abstain), reply
    assert reply.reason == reason
    message = complaint(site)
    assert [name for name in named if name not in message] == [], message
    return reply


def complaint(site: Site) -> str:
    """What a site has last written down of what failed."""
    return str(read_records(site.folder / "errors.jsonl")[-1]["message"])


def history(server: Server) -> list[dict[str, Any]]:
    return lines(server.record.folder / "history.jsonl")


def events(server: Server, kind: str = "") -> list[dict[str, Any]]:
    found = lines(server.record.folder / "events.jsonl")
    return [event for event in found if kind in ("", event["event"])]


def record(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.record.folder / name).read_text())
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def exported(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()
