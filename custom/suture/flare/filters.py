"""The site's filter: nothing leaves that the method did not declare.

It guards against mistakes of a method, and against a job whose code was changed, only where the package is
installed at the site and jobs may not bring code of their own; see docs/architecture.md.
"""

from __future__ import annotations

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from suture.check import Expectation, check_reply
from suture.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.executor import EXPECTATION
from suture.messages import Abstain, Payload
from suture.packing import pack, unpack


class EgressFilter(Filter):
    """Checks a site's answer against what was asked of it, and passes on only what it has checked."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The answer, made anew from its checked parts.

        Raises:
            RejectedUpdate: a tensor, field or size that was not declared. FLARE then sends an error code in
                the answer's place.
        """
        if shareable.get_return_code() != ReturnCode.OK:
            return make_reply(shareable.get_return_code())
        reply = unpack(from_shareable_(shareable))
        if isinstance(reply, Payload):
            raise RejectedUpdate("a payload does not leave a site")
        expected = fl_ctx.get_prop(EXPECTATION)
        if not isinstance(reply, Abstain):
            if not isinstance(expected, Expectation):
                raise RejectedUpdate("nothing was asked of this site")
            check_reply(reply, expected)
        return to_shareable(pack(reply))
