"""The site's filter: nothing leaves a site that the method did not declare.

It guards against mistakes of a method, and against a job with changed code only where the package is
installed at the site and jobs may not bring code of their own; see docs/architecture.md.
"""

from __future__ import annotations

import logging

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from suture.core.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.executor import ALLOWED
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.messages import Abstain, Reply, TaskData
from suture.protocol.packing import pack, unpack

log = logging.getLogger(f"custom.{__name__}")

RETURN_CODES = frozenset(value for name, value in vars(ReturnCode).items() if name.isupper())
"""FLARE's return codes: a return code is text, so any other text could leave in its place."""


class EgressFilter(Filter):
    """Checks a site's answer against what is allowed, and passes on only what it has checked."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the answer, rebuilt from its checked parts.

        The result passes the filter again: a site's policy and a job may both install it.

        Raises:
            RejectedUpdate: a tensor, field or size was not declared. FLARE then sends an error code in place
                of the answer, and writes this error into its log: so it names nothing of the answer.
        """
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in RETURN_CODES else ReturnCode.EXECUTION_EXCEPTION)
        try:
            # The executor has packed this answer already, and it is unpacked and packed a second time on
            # purpose. What leaves is the Shareable, into which other components of the job may have written,
            # so it is the Shareable that must be checked. And validation accepts more than one form of a
            # value (a number as text of any length, say), so the form itself could carry information: only a
            # message packed from the validated values carries nothing else. Tensors are not copied.
            return to_shareable(pack(_checked(shareable, fl_ctx.get_prop(ALLOWED))))
        except Exception as error:  # noqa: BLE001 - FLARE would write its text into the log of errors
            log.warning("held back: %s", error)
        raise RejectedUpdate("an answer that was not declared is held back; log.txt of this site says why")


def _checked(shareable: Shareable, allowed: object) -> Reply:
    reply = unpack(from_shareable_(shareable))
    if isinstance(reply, TaskData):
        raise RejectedUpdate("a payload does not leave a site")
    if not isinstance(reply, Abstain):
        if not isinstance(allowed, AllowedReply):
            raise RejectedUpdate("nothing was requested of this site")
        check_reply(reply, allowed)
    return reply
