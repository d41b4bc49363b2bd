"""One round of a method at a site, outside of a federation."""

from __future__ import annotations

from torch import Tensor

from suture.learning.training import SiteContext
from suture.methods.base import Method, RoundContext, local_round
from suture.protocol.messages import Payload, Update
from suture.protocol.packing import Packed

NEW = Packed({}, {})


def train_round(
    method: Method, site: SiteContext, received: Payload, ctx: RoundContext, state: Packed = NEW
) -> tuple[Update, dict[str, Tensor]]:
    """What the site sends and stores after a round from `state`."""
    return method.train(site, received, local_round(method, site, state, ctx))
