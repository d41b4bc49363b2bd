"""An answer that FLARE cannot decode, over FLARE's own cells: it is refused, and the server's job lives."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import DownloadService
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.fuel.utils import fobs
from nvflare.private.defs import CellMessageHeaderKeys

from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat import job_guard
from suture.flare.compat import tensors as limits
from suture.flare.compat.job_guard import JobGuard
from suture.flare.compat.tensors import register
from suture.protocol.packing import Packed

TOKENS = {"token of a": "a"}
ROUTE = {"channel": CellChannel.SERVER_COMMAND, "target": "server.job"}


@dataclass
class Parcel:
    """A class that the server does not know."""

    content: str = "x"


@dataclass
class Federation:
    """The cells of a server's job and of a site, in this process.

    Attributes:
        taken: what reached FLARE's own handling of answers.
        refused: sites and reasons.
        ended: whether FLARE would have ended the job's process.
    """

    job: Cell
    site: Cell
    taken: list[Any] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    reply: object = "taken"

    def guard(self) -> JobGuard:
        agent = SimpleNamespace(execute_command=self.take, cell=self.job)
        engine = SimpleNamespace(
            server=SimpleNamespace(command_agent=agent),
            get_client_name_from_token=lambda token: TOKENS.get(token, ""),
        )
        return JobGuard(engine, lambda site, why: self.refused.append((site, why)))

    def take(self, request: Message) -> Message:
        self.taken.append(request.payload)
        return Message({}, self.reply)

    def send(self, payload: Any, *, encoded: bool = False, timeout: float = 10) -> Message:
        """Sends an answer as a site does."""
        message = Message({CellMessageHeaderKeys.TOKEN: "token of a"}, payload)
        if encoded:
            message.set_header(StreamHeaderKey.PAYLOAD_ENCODING, Encoding.FOBS)
        topic = ServerCommandNames.SUBMIT_UPDATE
        reply: Message = self.site.send_request(**ROUTE, topic=topic, request=message, timeout=timeout)
        return reply


@pytest.fixture(scope="module")
def cells() -> Iterator[tuple[Cell, Cell]]:
    """The cells of FLARE of a server, its job and a site."""
    register()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"tcp://localhost:{probe.getsockname()[1]}"
    root = Cell("server", url, False, {}, create_internal_listener=True)
    root.start()
    inner = root.core_cell.get_internal_listener_url()
    job = Cell("server.job", url, False, {}, create_internal_listener=False, parent_url=inner)
    site = Cell("site-1", url, False, {}, create_internal_listener=False)
    for cell in (job, site):
        cell.start()
    yield job, site
    for cell in (site, job, root):
        cell.stop()


@pytest.fixture
def federation(cells: tuple[Cell, Cell], monkeypatch: pytest.MonkeyPatch) -> Federation:
    """As FLARE makes it; a test puts the guard in."""
    made = Federation(*cells)

    def end(code: int) -> None:
        made.ended.append(code)
        raise RuntimeError("the job's process would have ended")

    monkeypatch.setattr(os, "_exit", end)
    # What a guard of an earlier test registered has precedence.
    streams = made.job.byte_streamer
    for topic, handler in (
        (STREAM_ERROR_TOPIC, streams._error_handler),
        (STREAM_ACK_TOPIC, streams._ack_handler),
    ):
        made.job.core_cell.register_request_cb(STREAM_CHANNEL, topic, handler)
    for topic in ("*", ServerCommandNames.SUBMIT_UPDATE):
        made.job.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic=topic, cb=made.take)
    return made


def answer(**content: Any) -> Shareable:
    """An answer that belongs to a job."""
    shareable = Shareable(content)
    shareable.set_peer_context(FLContext())
    return shareable


def unknown() -> bytes:
    """An answer with an object of a class that only the site knows."""
    return bytes(fobs.dumps(answer(x=Parcel()))).replace(b"Parcel", b"lecraP")


def spoiled() -> bytes:
    """An answer with a tensor whose bytes are no tensor."""
    whole = bytes(fobs.dumps(answer(x=torch.ones(1))))
    return whole.replace(b'"dtype":"F32"', b'"dtype":"X32"')


def coded(code: str) -> Shareable:
    shareable = make_reply(code)
    shareable.set_peer_context(FLContext())
    return shareable


def with_headers(headers: object) -> Shareable:
    shareable = Shareable()
    shareable[ReservedHeaderKey.HEADERS] = headers
    return shareable


UNDECODABLE: dict[str, Callable[[], bytes]] = {
    "a class": unknown,
    "a tensor": spoiled,
    "no FOBS": lambda: b"\x00" * 40,
    "cut off": lambda: bytes(fobs.dumps(answer(x="x" * 100)))[:-20],
}

UNUSABLE: dict[str, Callable[[], Any]] = {
    "int": lambda: 5,
    "dict": lambda: {"x": 1},
    "UNSAFE_JOB": lambda: coded(ReturnCode.UNSAFE_JOB),
    "RUN_MISMATCH": lambda: coded(ReturnCode.RUN_MISMATCH),
    "which job": Shareable,
    "ValueError": lambda: with_headers([1]),
}
"""By a word of the reason."""


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a message above `INLINE`: its tensors are fetched from the site."""
    monkeypatch.setattr(limits, "INLINE", 0)


def offered_by_a_dead_process(federation: Federation) -> bytes:
    """An answer whose tensors the site can no longer give: its next process has the same name."""
    written = fobs.dumps(answer(x=torch.ones(3)), fobs_ctx=federation.site.get_fobs_context())
    DownloadService.shutdown()
    return bytes(written)


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize("kind", ["undecodable", "dead"])
def test_flare_itself_would_end_the_job(kind: str, federation: Federation) -> None:
    sent = unknown() if kind == "undecodable" else offered_by_a_dead_process(federation)
    federation.send(sent, encoded=True, timeout=2)
    assert federation.ended == [1], "job_guard.py may go"


@pytest.mark.parametrize("kind", [*UNDECODABLE, *UNUSABLE])
def test_an_answer_that_flare_would_choke_on_is_refused_and_the_job_lives(
    kind: str, federation: Federation
) -> None:
    federation.guard()
    encoded = kind in UNDECODABLE
    reply = federation.send((UNDECODABLE | UNUSABLE)[kind](), encoded=encoded)
    # FLARE's site would wait five seconds after an error, and rounds would pass without it.
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == CellReturnCode.OK
    ((site, why),) = federation.refused
    assert site == "a"
    assert encoded or kind in why
    assert not federation.ended
    assert not federation.taken


@pytest.mark.parametrize(("inline", "downloaded"), [(0, [2]), (19, [1]), (20, [])])
def test_a_usable_answer_reaches_flare_as_it_was_sent(
    inline: int, downloaded: list[int], federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INLINE", inline)
    offered: list[int] = []
    add = TensorDownloadable.__init__

    def counting(self: TensorDownloadable, tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        offered.append(len(tensors))
        add(self, tensors, *rest)

    monkeypatch.setattr(TensorDownloadable, "__init__", counting)
    federation.guard()
    tensors = {"shared/w": torch.arange(3.0), "shared/n": torch.arange(1)}
    sent = to_shareable(Packed(tensors, {"type": "update"}))
    sent.set_peer_context(FLContext())
    assert federation.send(sent).payload == "taken"
    (taken,) = federation.taken
    packed = from_shareable_(taken)
    assert packed.tensors.keys() == tensors.keys()
    assert all(torch.equal(tensor, packed.tensors[name]) for name, tensor in tensors.items())
    assert offered == downloaded
    assert packed.header == {"type": "update"}
    assert not federation.refused


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(2, 3).t()])
def test_tensors_that_cannot_be_fetched_are_tried_again_and_then_refused(
    tensor: torch.Tensor, federation: Federation
) -> None:
    federation.guard()
    for attempt in range(job_guard.LOSSES):
        assert not federation.refused, attempt
        reply = federation.send(answer(x=tensor))
        last = attempt == job_guard.LOSSES - 1
        code = CellReturnCode.OK if last else CellReturnCode.COMM_ERROR
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == code
    assert [site for site, _ in federation.refused] == ["a"]
    assert not federation.ended
    assert not federation.taken


@pytest.mark.usefixtures("downloads")
def test_a_site_that_dies_while_it_sends_may_answer_again(federation: Federation) -> None:
    federation.guard()
    federation.send(offered_by_a_dead_process(federation), encoded=True)
    assert not federation.refused
    assert not federation.ended
    federation.send(answer(x=torch.ones(3)))
    assert torch.equal(federation.taken[0]["x"], torch.ones(3))


@pytest.mark.usefixtures("downloads")
def test_a_fetch_from_a_site_that_says_nothing_ends_with_the_job(federation: Federation) -> None:
    """FLARE would wait for ten minutes, four times."""
    guard = federation.guard()
    asked, over = threading.Event(), threading.Event()

    def silent(request: Message) -> Message:
        asked.set()
        over.wait()
        return Message({}, {})

    sent = fobs.dumps(answer(x=torch.ones(3)), fobs_ctx=federation.site.get_fobs_context())
    federation.site.register_request_cb(
        channel="download_service__", topic="download_service__download", cb=silent
    )
    sending = threading.Thread(
        target=federation.send, args=(sent,), kwargs={"encoded": True, "timeout": 3600}
    )
    sending.start()
    asked.wait()
    guard.close()
    sending.join()
    over.set()
    DownloadService.shutdown()  # it registers its own answers anew
    assert not federation.taken
    assert not federation.ended


@pytest.mark.parametrize("guarded", [False, True])
def test_a_site_that_calls_a_message_too_large_does_not_end_the_job(
    guarded: bool, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need only set the limit of its own messages low, or claim it."""
    handler = federation.site.byte_receiver.registry.find(CellChannel.RETURN_ONLY, "*").cb.__self__
    monkeypatch.setattr(handler, "max_blob_size", 1000)
    federation.reply = bytes(10_000)
    if guarded:
        federation.guard()
    federation.send(answer(x=1), timeout=3)
    time.sleep(0.5)
    assert bool(federation.ended) == (not guarded)


def test_a_sender_without_a_token_refuses_no_site(federation: Federation) -> None:
    federation.guard()
    TOKENS.clear()
    federation.send(5)
    TOKENS["token of a"] = "a"
    assert not federation.refused
    assert not federation.taken
