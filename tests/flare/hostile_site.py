"""A job in FLARE's simulator, of which one site sends what FLARE cannot decode, or ends jobs for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply

from suture.flare import recipe, simulate
from suture.flare.codec import from_shareable_
from suture.flare.compat.allow_list import allowing
from suture.flare.executor import EgressFilter
from suture.protocol.messages import Update
from suture.protocol.packing import unpack

HOSTILE = "harbor"


@dataclass
class Parcel:
    """A class that the server does not know."""

    content: str = "x"


class Spoiler(EgressFilter):
    """Spoils the updates of one site: in round 1 with an unknown class, in round 2 with a return code."""

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        answer = super().process(shareable, fl_ctx)
        reply = unpack(from_shareable_(answer))
        if fl_ctx.get_identity_name() != HOSTILE or not isinstance(reply, Update):
            return answer
        if reply.round == 2:
            return make_reply(ReturnCode.UNSAFE_JOB)
        answer["parcel"] = Parcel()
        return answer


if __name__ == "__main__":
    from hostile_site import Spoiler as Imported  # by the name that the sites find it under

    recipe.EgressFilter = Imported  # type: ignore[misc]
    simulate.allowing = lambda entries: allowing([*entries, "hostile_site."])
    simulate.main(Path(sys.argv[1]), int(sys.stdin.readline()))
