"""Methods give the same bytes through FLARE's messages and the site's filter as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.utils import fobs

from rounds import conformant
from suture.federation.loop import Loop, federate
from suture.federation.site.site import Site
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.flare.executor import ALLOWED, EgressFilter
from suture.methods.base import Method
from suture.models import ModelSpec
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed, Transport, unpack
from suture_synthetic.trial import Trial

pytestmark = pytest.mark.complete


SMALL = ModelSpec("cnn", size=16, weights="random")


class _ThroughFlare(Loop):
    """The loop, with each message written and read by FLARE, and each answer passed by the site's filter."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        super().__init__(sites)
        self.filter, self.abstained = EgressFilter(), 0

    def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
        for name, packed in payloads.items():
            payload = unpack(_sent(packed))
            assert isinstance(payload, TaskData)
            site, context = self._sites[name], FLContext()
            answer = site.answer(payload)
            self.abstained += answer.allowed is None
            context.set_prop(ALLOWED, answer.allowed, private=True, sticky=False)
            passed = self.filter.process(to_shareable(answer.packed), context)
            receive(name, _sent(from_shareable_(passed)))
        return {}


def _sent(packed: Packed) -> Packed:
    """As it arrives: FLARE refers to large tensors and fetches them later, so small ones stand for them."""
    return from_shareable_(fobs.loads(fobs.dumps(to_shareable(packed))))


def _trial(method: Method, transport: Transport) -> Trial:
    label_type = "multilabel" if method.labels.view == "target" else method.labels.types[0]
    return Trial(method, SMALL, label_type, rounds=2, transport=transport)


UNLIKE = ("afl", "creff", "fedmlp", "pmfl")
"""Methods that send unlike things: sums in double precision, tensors of classes both ways, rows of classes of
others, gradients beside a head of their own. What the others send is among that.
"""

PLAIN, *OTHERS = get_args(Transport)


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("transport", [PLAIN, *(pytest.param(t, marks=pytest.mark.complete) for t in OTHERS)])
def test_flares_messages_change_no_byte(name: str, transport: Transport) -> None:
    register()
    method = conformant(name)
    with _trial(method, transport) as loop, _trial(method, transport) as flare:
        federate(loop.server, Loop(loop.sites))
        through = _ThroughFlare(flare.sites)
        federate(flare.server, through)
        assert not through.abstained
        assert loop.metrics() == flare.metrics()
        one, two = loop.server.model, flare.server.model
        for group in ("shared", "head", "fixed", "channels"):
            a, b = getattr(one, group), getattr(two, group)
            assert a.keys() == b.keys()
            for key, tensor in a.items():
                assert torch.equal(tensor, b[key]), f"{group}/{key}"
