"""What a site learns by the list of its classes; the README and the threat model say so."""

from __future__ import annotations

from typing import Any

import torch

from rounds import reply_of
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import pack, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


def changed(tiny: Any, other: tuple[str, ...], out: str) -> dict[str, bool]:
    """Whether each row that beta lists comes back otherwise than beta sent it, after one round."""
    federation = tiny(METHOD, {f"alpha-{out}": other, "beta": ("Mass", "Nodule")}, view="own")
    server, sites = federation.server(out), federation.sites(out)
    sent: list[Update] = []

    def exchange(payloads: Any) -> None:
        for site, packed in payloads.items():
            payload = unpack(packed)
            assert isinstance(payload, TaskData)
            reply = reply_of(sites[site], payload)
            server.collector.receive(site, pack(reply))
            sent.extend([reply] if site == "beta" and isinstance(reply, Update) else [])

    exchange(server.handshake(sorted(sites)))
    server.begin({})
    exchange(server.assign())
    server.close_round({})
    back = unpack(server.assign()["beta"])
    assert isinstance(back, TaskData)
    assert back.labels == sent[0].labels == ("Mass", "Nodule"), "no other site's class is named"
    return {
        label: any(not torch.equal(back.head[key][i], rows[i]) for key, rows in sent[0].head.items())
        for i, label in enumerate(back.labels)
    }


def test_a_site_learns_whether_others_know_a_class_that_it_lists(tiny: Any) -> None:
    assert changed(tiny, ("Nodule", "Hernia"), "without") == {"Mass": False, "Nodule": True}
    assert changed(tiny, ("Mass", "Hernia"), "with") == {"Mass": True, "Nodule": False}
