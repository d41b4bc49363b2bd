"""One exchange with the sites: who was asked what, and what came back, checked whole and spooled to disk."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from suture.core.errors import FederationError, RejectedUpdate
from suture.protocol.check import Expectation, check_reply
from suture.protocol.messages import Abstain, Evaluation, Metrics, Payload, Reply, SiteInfo, Update
from suture.protocol.packing import Packed, check_size, load, pack, save, unpack

log = logging.getLogger(__name__)

Line = dict[str, Any]


class Receiver(Protocol):
    """What a transport hands answers to."""

    def __call__(self, site: str, packed: Packed) -> None:
        """Takes a site's answer; never raises."""

    def enough(self) -> bool:
        """Whether the exchange may end before all have answered."""


class UpdateCollector:
    """Takes the answers of one exchange after the other.

    An update is spooled as it comes and read back when the round closes, so that memory does not grow with
    the number of sites.

    Args:
        spool: folder for the updates of the open exchange.
        notify: told of each answer, for the progress display.
    """

    def __init__(self, spool: Path, notify: Callable[..., None]) -> None:
        self._spool = spool
        self._notify = notify
        self._lock = threading.Lock()
        self._asked: dict[str, Expectation] = {}
        self._answers: dict[str, Reply] = {}
        self._accepted_at: list[float] = []
        self._exchange = 0
        self._fault: OSError | None = None
        self.lines: dict[str, Line] = {}
        self.since = time.monotonic()

    def open(self, asked: Mapping[str, tuple[Payload, Expectation]]) -> dict[str, Packed]:
        """Begins an exchange; returns what to send to each site."""
        shutil.rmtree(self._spool, ignore_errors=True)
        packed = {site: pack(payload) for site, (payload, _) in asked.items()}
        self._asked = {site: expected for site, (_, expected) in asked.items()}
        self._answers, self._fault, self.since = {}, None, time.monotonic()
        self._accepted_at, self._exchange = [], self._exchange + 1
        self.lines = {
            site: {"status": "missing", "reason": None, "bytes_down": p.nbytes, "bytes_up": 0}
            for site, p in packed.items()
        }
        return packed

    def intake(self, quorum: int, grace: float | None) -> OpenExchange:
        """The door of the exchange that was opened last; as in `OpenExchange`."""
        return OpenExchange(self, self._exchange, quorum, grace)

    def waited(self, quorum: int) -> float | None:
        """Seconds since the quorum-th update was accepted; None where it has not been."""
        with self._lock:
            times = self._accepted_at
            return time.monotonic() - times[quorum - 1] if 0 < quorum <= len(times) else None

    def receive(self, site: str, packed: Packed, exchange: int | None = None) -> None:
        """Takes a site's answer.

        Never raises, since a transport may swallow what its callbacks raise: a bad answer is rejected and
        logged, and a failing disk is raised by `close`.

        Args:
            site: who answered, as the transport knows it; never taken from the message.
            exchange: that it answers to; by default the one that was opened last.
        """
        with self._lock:
            if exchange not in (None, self._exchange) or not self._asked:
                log.warning("an answer of %s came too late and is dropped", site)
                return
            if site not in self._asked or site in self._answers:
                log.warning("an answer of %s that was not asked for, or came twice, is dropped", site)
                return
            line = self.lines[site]
            line["seconds"] = round(time.monotonic() - self.since, 3)
            try:
                check_size(packed)
                line["bytes_up"] = packed.nbytes
                reply = unpack(packed)
                if isinstance(reply, Payload):
                    raise RejectedUpdate("a payload is no answer")
                check_reply(reply, self._asked[site])
                line |= self._keep(site, reply)
            except RejectedUpdate as error:
                line |= {"status": "rejected", "reason": str(error)}
                log.warning("rejected: %s, round %d: %s", site, self._asked[site].round, error)
            except OSError as error:
                self._fault = error
            self._notify("answer", site=site, status=line["status"], reason=line["reason"])

    def _keep(self, site: str, reply: Reply) -> Line:
        if isinstance(reply, Abstain):
            self._answers[site] = reply
            rows = f", {reply.rows} rows" if reply.rows is not None else ""
            return {"status": "abstained", "reason": f"{reply.reason} ({reply.error}{rows})"}
        line: Line = {"status": "accepted"}
        if isinstance(reply, Update):
            self._spool.mkdir(parents=True, exist_ok=True)
            # A spool does not outlive the process that reads it, so it need not reach the disk itself.
            save(self._spool / f"{site}.safetensors", pack(reply), durable=False)
            line |= {"weight": reply.weight, "train_loss": reply.train_loss, "scalars": dict(reply.scalars)}
            if not bool((reply.class_weights == 1).all()):
                line["rows"] = dict(zip(reply.labels, reply.class_weights.tolist(), strict=True))
            self._accepted_at.append(time.monotonic())
            # The tensors are on disk now; what stays in memory does not grow with the model.
            reply = Update(reply.round, (), {}, {}, reply.class_weights[:0], metrics=reply.metrics)
        self._answers[site] = reply
        return line

    def close(self, missing: Mapping[str, str]) -> dict[str, Line]:
        """Ends the exchange.

        Args:
            missing: why a site did not answer, where the transport knows.

        Returns:
            a line for each site: status, reason, bytes, seconds.

        Raises:
            FederationError: an update could not be kept, because the server's disk failed.
        """
        with self._lock:
            self._asked = {}
            if self._fault:
                raise FederationError(f"the server could not keep an update: {self._fault}") from self._fault
            for site, line in self.lines.items():
                if line["status"] == "missing":
                    line["reason"] = missing.get(site, "no answer")
                    self._notify("answer", site=site, status="missing", reason=line["reason"])
            return self.lines

    def summary(self, number: int, phase: str, named: Callable[[str, Line], Line]) -> Line:
        """The closed exchange as a round of history.jsonl.

        Args:
            named: values by a site's spelling of the classes, by the federation's.
        """
        sites = {site: dict(line) for site, line in sorted(self.lines.items())}
        for site, line in sites.items():
            if "rows" in line:
                line["rows"] = named(site, line["rows"])
        return {
            "round": number,
            "phase": phase,
            "status": "committed",
            "seconds": round(time.monotonic() - self.since, 3),
            "bytes_down": sum(line["bytes_down"] for line in self.lines.values()),
            "bytes_up": sum(line["bytes_up"] for line in self.lines.values()),
            "sites": sites,
            "validation": {"loss": None, "auroc": None},
        }

    def infos(self) -> dict[str, SiteInfo]:
        """The sites that introduced themselves."""
        return {s: r for s, r in self._answers.items() if isinstance(r, SiteInfo)}

    def metrics(self) -> dict[str, Metrics]:
        """What the sites measured on their own data."""
        found = {s: r.metrics for s, r in self._answers.items() if isinstance(r, (Update, Evaluation))}
        return {site: metrics for site, metrics in found.items() if metrics is not None}

    def local_metrics(self) -> dict[str, Metrics]:
        """What they measured of the models that they had trained themselves."""
        found = {s: r.local for s, r in self._answers.items() if isinstance(r, Evaluation)}
        return {site: metrics for site, metrics in found.items() if metrics is not None}

    def abstained(self, reason: str) -> set[str]:
        """The sites that abstained for this reason."""
        return {s for s, r in self._answers.items() if isinstance(r, Abstain) and r.reason == reason}

    def accepted(self) -> list[str]:
        """The sites whose update counts, sorted."""
        return sorted(s for s, r in self._answers.items() if isinstance(r, Update))

    def updates(self) -> Iterator[tuple[str, Update]]:
        """The accepted updates, read one at a time, in the order of the sites' names."""
        for site in self.accepted():
            update = unpack(load(self._spool / f"{site}.safetensors"))
            if isinstance(update, Update):
                yield site, update

    def empty(self) -> None:
        """Drops the spooled updates of a closed exchange."""
        shutil.rmtree(self._spool, ignore_errors=True)


class OpenExchange:
    """The door of one exchange: it takes answers until the exchange is closed, and says when they are enough.

    Args:
        exchange: its number; what comes after it is dropped, whatever was opened since.
        quorum: accepted updates that are enough.
        grace: seconds that the others still have from then on; None waits for all.
    """

    def __init__(self, collector: UpdateCollector, exchange: int, quorum: int, grace: float | None) -> None:
        self._inbox, self._exchange, self._quorum, self._grace = collector, exchange, quorum, grace

    def __call__(self, site: str, packed: Packed) -> None:
        """Takes a site's answer, as `UpdateCollector.receive`."""
        self._inbox.receive(site, packed, self._exchange)

    def enough(self) -> bool:
        """Whether the quorum is there and the grace is over; only updates count."""
        waited = self._inbox.waited(self._quorum)
        return self._grace is not None and waited is not None and waited >= self._grace


def told(reasons: Mapping[str, str]) -> str:
    """Why each site did not take part, in a line."""
    return "; ".join(f"{site}: {reason}" for site, reason in sorted(reasons.items())) or "no site was asked"
