"""The job guard: what one site sends may cost that site its round, and not the others the job.

FLARE 2.9.0: it decodes an answer before any code of a job sees it, and fetches its tensors from the site
meanwhile. Where that fails, it ends the server's job process (fuel/f3/cellnet/cell.py:122): one unregistered
class is enough, or a site that dies while it sends. NVIDIA/NVFlare#4496 says why: on a server's full disk,
clients sent their answers again and again, and the job never failed. It also ends the job where an answer has
certain return codes (private/fed/server/server_runner.py:502), or a site says that a message was too large
for it (cell.py:153 and 653: such a task never arrives). There is no setting for any of it, so the guard puts
itself in front, with the calls by which FLARE registers its own callbacks: it decodes an answer itself, and
passes on what it has decoded.
Where: nvflare/fuel/f3/cellnet/cell.py: call
Where: nvflare/private/fed/server/server_engine.py: ask_to_stop
Expires with: test_flare_itself_would_end_the_job
Expires with: test_flare_sets_a_flag_and_no_signal_when_it_ends_a_job
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Adapter
from nvflare.fuel.f3.cellnet.defs import CellChannel, ReturnCode
from nvflare.fuel.f3.cellnet.utils import decode_payload, make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, StreamError, StreamFuture
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.fuel.utils.fobs.decomposers.via_downloader import materialize_lazy_download_refs
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.server_runner import ServerRunner

from suture.flare.compat import check_flare

log = logging.getLogger(__name__)

LOSSES = 3
"""Number of vain attempts in a row to fetch the tensors of a site's answers, after which it is refused."""

_ROUTE = (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE)


@dataclass(frozen=True)
class _Decoded:
    """An answer after the attempt to decode it, in the place of its bytes.

    Attributes:
        answer: what the site sent; anything.
        why: why it could not be decoded.
    """

    answer: object = field(default=None, repr=False)  # FLARE formats what it passes on, tensors and all
    why: str | None = None

    def __len__(self) -> int:
        return 0  # FLARE measures what it passes on, and would end the job where it cannot


class JobGuard:
    """Decodes the answers to a server's job, and refuses those for which FLARE would end it.

    Args:
        engine: FLARE's engine of the server's job.
        refuse: is called with the name of a site and why its answer cannot be used, from another thread. The
            name is the one that FLARE knows by the sender's token.

    Raises:
        FederationError: see `check_flare`.
    """

    def __init__(self, engine: Any, refuse: Callable[[str, str], None]) -> None:
        check_flare()
        self._engine, self._refuse = engine, refuse
        self._losses: dict[str, int] = {}
        self._closed = Signal()
        agent = engine.server.command_agent
        self._execute = agent.execute_command
        self._cell = cell = agent.cell  # in the simulator, the engine's own cell is another one
        self._pass_on = Adapter(self._take, cell.core_cell.my_info, cell).call
        # The exact topic has precedence over the "*" of FLARE's own callback; the second call replaces the
        # part of the first that decodes.
        cell.register_request_cb(channel=_ROUTE[0], topic=_ROUTE[1], cb=self._take)
        cell.register_blob_cb(*_ROUTE, self._receive)
        for topic in (STREAM_ERROR_TOPIC, STREAM_ACK_TOPIC):
            theirs = cell.core_cell.req_reg.find(STREAM_CHANNEL, topic).cb
            cell.core_cell.register_request_cb(STREAM_CHANNEL, topic, _as_any_error(theirs))

    def close(self) -> None:
        """Fetch no more: a request to a site that has died would hold the end of the job up for minutes."""
        self._closed.trigger(True)

    def _receive(self, future: StreamFuture) -> None:
        """Decode an answer, as FLARE's callback; its tensors stay references for now."""
        message = Message(future.headers, future.result())
        context = self._cell.get_fobs_context(props={FOBSContextKey.PASS_THROUGH: True})
        try:
            decode_payload(message, StreamHeaderKey.PAYLOAD_ENCODING, fobs_ctx=context)
            decoded = _Decoded(message.payload)
        except Exception as error:  # noqa: BLE001 - whatever a site can cause here must not end the job
            decoded = _Decoded(why=f"the answer could not be decoded ({type(error).__name__})")
        message.remove_header(StreamHeaderKey.PAYLOAD_ENCODING)
        passed = StreamFuture(future.get_stream_id(), message.headers)
        passed.set_result(decoded)
        self._pass_on(passed)

    def _take(self, request: Message) -> Message:
        """Fetch an answer's tensors and pass it on to FLARE; or refuse it."""
        site = self._engine.get_client_name_from_token(request.get_header(CellMessageHeaderKeys.TOKEN))
        if not site:
            return make_reply(ReturnCode.AUTHENTICATION_ERROR, "an answer of an unknown sender")
        why = None
        if isinstance(request.payload, _Decoded):
            why, request.payload = request.payload.why, request.payload.answer
        if why := why or _flaw(request.payload):
            return self._reply_refused(site, why)
        try:
            request.payload = materialize_lazy_download_refs(request.payload, self._cell, self._closed)
        except Exception as error:  # noqa: BLE001 - as above
            return self._reply_lost(site, error)
        self._losses.pop(site, None)
        reply: Message = self._execute(request)
        return reply

    def _reply_lost(self, site: str, error: Exception) -> Message:
        """Note that the tensors of an answer could not be fetched.

        A site whose process has died gets its task again when the process is restarted, and one whose line
        broke sends its answer again: so the task stays open, until it has happened `LOSSES` times.
        """
        self._losses[site] = self._losses.get(site, 0) + 1
        log.warning("the tensors of an answer of %s could not be fetched: %s", site, error)
        if self._losses[site] >= LOSSES:
            del self._losses[site]
            return self._reply_refused(site, f"its tensors could not be fetched, {LOSSES} times in a row")
        return make_reply(ReturnCode.COMM_ERROR, "the tensors could not be fetched")

    def _reply_refused(self, site: str, why: str) -> Message:
        """Refuse an answer as if it was taken: after an error, the site would wait and send it again."""
        self._refuse(site, why)
        return make_reply(ReturnCode.OK)


def asked_to_stop(engine: Any) -> bool:
    """Whether FLARE ends the process of a server's job, as when the server has died."""
    return getattr(engine, "asked_to_stop", False) is True


def _as_any_error(handler: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    """Let FLARE take "too large" as any other error of a stream, which fails that one message."""

    def handle(message: Message) -> Message | None:
        if message.get_header(StreamHeaderKey.ERROR_TYPE) == BlobSizeError.__name__:
            message.set_header(StreamHeaderKey.ERROR_TYPE, StreamError.__name__)
        return handler(message)

    return handle


def _flaw(answer: object) -> str | None:
    """Return why an answer must not reach FLARE; None where it may."""
    if not isinstance(answer, Shareable):
        return f"the answer is a {type(answer).__name__}, and no Shareable"
    try:
        code = answer.get_return_code()
        if code in ServerRunner.ABORT_RETURN_CODES:
            return f"FLARE answered {code}"
        if not isinstance(answer.get_peer_context(), FLContext):
            return "the answer does not say which job it belongs to"
    except Exception as error:  # noqa: BLE001 - the fields of an answer may be anything
        return f"the answer could not be read ({type(error).__name__})"
    return None
