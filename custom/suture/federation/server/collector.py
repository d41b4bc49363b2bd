"""The update collector: takes the sites' answers to one exchange, checks each whole and keeps updates.

`Attendance` knows which sites fetch their tasks and are heard: a round does not wait for one that is gone.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from suture.core.errors import FederationError, RejectedUpdate
from suture.core.escaping import printable
from suture.federation.server.norms import Measure, NormBound, Norms, cosines
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import round_figure
from suture.protocol.messages import (
    RECORDED,
    Abstain,
    Evaluation,
    Masking,
    Metrics,
    Reply,
    Scores,
    SiteInfo,
    TaskData,
    Update,
)
from suture.protocol.packing import (
    Narrow,
    Packed,
    check_size,
    load,
    message_of,
    pack,
    restore_update,
    save,
    tensor_fields,
    tensors_of,
    without_tensors,
)
from suture.protocol.records import Number, Round, SiteRound, Validation

log = logging.getLogger(__name__)

FETCH_WITHIN = 25.0
"""Seconds in which a site fetches a task: it asks every two seconds; a restarted process needs 5 to 15."""

LATE = 4.0
"""Seconds after which a fetch is late."""

MOST_LATE = 3
"""Number of late fetches after which rounds with a grace period no longer wait for a site's fetch; a site's
launcher restarts a job process as often."""

SILENT_AFTER = 60.0
"""Seconds without a heartbeat after which a site is lost: its job process sends one every ten."""

GRACE = 120.0
"""Seconds in which a lost site may be heard again, before a round with enough updates ends without it."""

WAIT = 120.0
"""Seconds after which the run says whom it waits for; then after twice as long, up to `LONGEST_WAIT`."""

LONGEST_WAIT = 600.0


class Attendance:
    """Notes which sites leave their tasks unfetched, and when they fetch again.

    Args:
        notify: is called with the events of a site: ``fetched``, its first task, ``gone`` and ``back``; and
            with ``waiting``.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._offered: dict[str, float] = {}  # since when a site has left what it was offered
        self._seen: set[str] = set()
        self._fetched: dict[str, float] = {}  # when a site fetched its newest task
        self._late: Counter[str] = Counter()
        self._heard: dict[str, float] = {}  # when a site's newest heartbeat came
        self._waiting, self._since, self._told = frozenset[str](), 0.0, 0.0
        self.gone: set[str] = set()

    def offer(self, sites: Iterable[str]) -> None:
        """Note that each of these sites has a task to fetch."""
        self._waiting = frozenset()
        for site in sites:
            # Not renewed: a site that left an earlier task unfetched has been silent since that one.
            self._offered.setdefault(site, time.monotonic())

    def heard(self, site: str) -> None:
        """Note a heartbeat of a site's job process, which sends them while it trains, too."""
        self._heard[site] = time.monotonic()

    def silence(self, site: str) -> float:
        """Return for how many seconds a lost site has been silent; 0 for another one.

        One that was never heard is not lost: it may be starting, or its transport knows no heartbeats.
        """
        silent = time.monotonic() - self._heard[site] if site in self._heard else 0.0
        return silent if silent >= SILENT_AFTER else 0.0

    def absent(self, site: str) -> bool:
        """Whether a round with enough updates does not wait for a site: it is gone, or has long been lost."""
        return site in self.gone or self.silence(site) >= SILENT_AFTER + GRACE

    def waits(self, sites: Collection[str]) -> None:
        """Say which sites an exchange waits for, where it has waited long for the same ones."""
        now = time.monotonic()
        if self._waiting != set(sites):
            self._waiting, self._since, self._told = frozenset(sites), now, 0.0
        waited = now - self._since
        if sites and waited >= max(WAIT, self._told + min(self._told, LONGEST_WAIT)):
            self._told = waited
            lost = [site for site in sorted(sites) if self.silence(site)]
            self._notify("waiting", sites=sorted(sites), seconds=round(waited), lost=lost)

    def note_fetch(self, site: str) -> None:
        """Note that a site has fetched its task."""
        if (offered := self._offered.pop(site, None)) is not None:  # a repeated fetch gains no time
            self._fetched[site] = time.monotonic()
            self._late[site] += self._fetched[site] - offered >= LATE
        if site not in self._seen:
            self._seen.add(site)
            self._notify("fetched", site=site)
        if site in self.gone:
            self.gone.discard(site)
            self._notify("back", site=site)

    def is_awaited(self, site: str, grace: float) -> bool:
        """Whether a round with a grace period waits for a site.

        It waits until the site fetches its task, unless it is gone, and `grace` seconds from then on. A
        killed process that is being restarted would otherwise miss many short rounds.
        """
        if (offered := self._offered.get(site)) is None:
            return time.monotonic() - self._fetched.get(site, -grace) < grace
        expected = site not in self.gone and self._late[site] < MOST_LATE
        return expected and time.monotonic() - offered < FETCH_WITHIN

    def close(self, missing: Iterable[str]) -> None:
        """End an exchange.

        Args:
            missing: the sites that did not answer. Those that are lost, or have left their tasks unfetched
                for `FETCH_WITHIN` seconds, are gone.
        """
        now = time.monotonic()
        self._offered = {site: self._offered[site] for site in missing if site in self._offered}
        for site in missing:
            left = now - self._offered.get(site, math.inf) >= FETCH_WITHIN  # another thread may note a fetch
            if site not in self.gone and (left or self.silence(site)):
                self.gone.add(site)
                self._notify("gone", site=site)


IN_MEMORY = 128 * 2**20
"""Bytes of the updates of one exchange that wait in memory; the others wait on disk."""

Rows = dict[str, Number]

_R = TypeVar("_R", SiteInfo, Masking, Update, Scores, Evaluation, Abstain)


class UpdateCollector:
    """Takes the answers of one exchange after the other.

    The tensors of an update that would exceed `IN_MEMORY` are spooled to disk as it arrives and read back
    when the round closes, so that memory does not grow with the number of sites.

    Args:
        spool: folder for the updates of the open exchange.
        notify: is called with each answer, for the progress display.

    Attributes:
        bound: of the norms of updates.
    """

    def __init__(self, spool: Path, notify: Callable[..., None]) -> None:
        self._spool = spool
        self._notify = notify
        self.bound = NormBound()
        self._held: dict[str, Mapping[str, Tensor]] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._allowed: dict[str, AllowedReply] = {}
        self.answers: dict[str, Reply] = {}
        self._accepted_at: dict[str, float] = {}
        self.norms: dict[str, Norms] = {}
        self._measure = Measure()
        self.exchange, self._open = 0, False
        self._fault: OSError | None = None
        self.attendance = Attendance(notify)
        self.lines: dict[str, SiteRound] = {}
        self.since = time.monotonic()

    def open(self, allowed: Mapping[str, AllowedReply]) -> dict[str, Packed]:
        """Begin an exchange of the task of each site and what it may answer; return what to send."""
        self.empty()
        narrow, self._allowed, self._open = Narrow(), dict(allowed), True
        packed = {site: narrow(pack(own.task), own.transport) for site, own in allowed.items()}
        self.answers, self._fault, self.since = {}, None, time.monotonic()
        self._accepted_at, self.norms, self.exchange = {}, {}, self.exchange + 1
        self._measure = Measure()
        self.attendance.offer(packed)
        self.lines = {site: SiteRound("missing", bytes_down=p.nbytes) for site, p in packed.items()}
        return packed

    def receiver(self, quorum: int, grace: float | None) -> Receiver:
        """Return the receiver of the exchange that was opened last; see `Receiver`."""
        return Receiver(self, self.exchange, quorum, grace)

    def arrived(self) -> tuple[int, list[float]]:
        """Return the number of usable answers, and when each of the updates among them arrived."""
        with self._lock:
            usable = sum(not isinstance(reply, Abstain) for reply in self.answers.values())
            return usable, list(self._accepted_at.values())

    def receive(self, site: str, packed: Packed, exchange: int | None = None) -> None:
        """Take the answer of a site.

        Never raises, because a transport may swallow what its callbacks raise: a bad answer is rejected and
        logged, and `close` raises the error of a failed disk.

        Args:
            site: who answered, as the transport knows it; never taken from the message.
            exchange: number of the exchange that it answers; by default the one that was opened last.
        """
        with self._lock:
            # A transport may deliver what an earlier exchange has given up; it must not count for this one.
            if exchange not in (None, self.exchange) or not self._open:
                log.warning("a late answer of %s is ignored", site)
                return
            if site not in self._allowed or self.lines[site].status != "missing":
                log.warning("an unrequested or repeated answer of %s is ignored", site)
                return
            line = replace(self.lines[site], seconds=round(time.monotonic() - self.since, 3))
            try:
                # Before anything else: even to measure a header costs memory.
                check_size(packed)
                line = replace(line, bytes_up=packed.nbytes)
                reply = self._check(site, packed)
                if isinstance(reply, (Update, Scores, Evaluation)):
                    line = replace(line, spent=reply.spent)  # by what it sent, even if that is refused
                line = self._take(site, reply, line)
            except RejectedUpdate as error:
                line = replace(line, status="rejected", reason=str(error))
                log.warning("rejected: %s, round %d: %s", site, self._allowed[site].task.round, error)
            except OSError as error:
                self._fault = error
            self.lines[site] = line
            self._notify("answer", site=site, status=line.status, reason=line.reason)

    def _check(self, site: str, packed: Packed) -> Reply:
        """Unpack an answer whose size was checked, and check it; restore its precision."""
        reply = message_of(packed)
        if isinstance(reply, TaskData):
            raise RejectedUpdate("a task's payload is not an answer")
        allowed = self._allowed[site]
        check_reply(reply, allowed)
        if isinstance(reply, Update):
            return restore_update(reply, allowed.task, allowed.egress, allowed.transport)
        return reply

    def _take(self, site: str, reply: Reply, line: SiteRound) -> SiteRound:
        """Retain a checked answer, an update's tensors apart; return the line with what to record of it."""
        if isinstance(reply, Abstain):
            self.answers[site] = reply
            rows = f", {reply.rows} rows" if reply.rows is not None else ""
            return replace(line, status="abstained", reason=f"{reply.reason} ({reply.error}{rows})")
        line = replace(line, status="accepted")
        if isinstance(reply, Masking):
            self._accepted_at[site] = time.monotonic()
        if isinstance(reply, Update):
            norms, allowed = None, self._allowed[site]
            if not allowed.task.mask:  # else nothing can be told of it
                norms = self._measure(reply, allowed.task, allowed.egress)
                self.bound.check(site, norms)
            self._put(site, tensors_of(reply))
            # Whatever `SiteNumbers` declares: a new number needs no line here.
            numbers: dict[str, Any] = {name: getattr(reply, name) for name in RECORDED}
            if not bool((reply.class_weights == 1).all()):
                numbers["rows"] = dict(zip(reply.labels, reply.class_weights.tolist(), strict=True))
            if norms:
                numbers["norm"] = round_figure(norms.update)
                self.norms[site] = norms
            line = replace(line, **numbers)
            self._accepted_at[site] = time.monotonic()
            # What stays in memory does not grow with the model: `updates` puts the tensors back.
            reply = without_tensors(reply)
        self.answers[site] = reply
        return line

    def _put(self, site: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep an update's tensors in memory, or on disk where that would be too many.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        # By storage, because a tensor may be a small view of a large one.
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
        if self._held_bytes + size <= IN_MEMORY:
            self._held[site] = tensors
            self._held_bytes += size
            return
        # A spool does not outlive the process that reads it, so it need not reach the disk itself.
        save(self._path(site), Packed(tensors, {}), durable=False)

    def _path(self, site: str) -> Path:
        return self._spool / f"{site}.safetensors"

    def close(self, missing: Mapping[str, str]) -> dict[str, SiteRound]:
        """End the exchange.

        Args:
            missing: why a site did not answer, where the transport knows.

        Returns:
            a line for each site: status, reason, bytes, seconds.

        Raises:
            FederationError: an update could not be spooled, because the server's disk failed.
        """
        with self._lock:
            self._open = False
            self.attendance.close([s for s, line in self.lines.items() if line.status == "missing"])
            if self._fault:
                raise FederationError(f"the server could not keep an update: {self._fault}") from self._fault
            for site, line in list(self.lines.items()):
                if line.status == "missing":
                    line = self.lines[site] = replace(line, reason=printable(missing.get(site, "no answer")))
                    self._notify("answer", site=site, status="missing", reason=line.reason)
            return self.lines

    def summary(self, number: int, phase: str, named: Callable[[str, Rows], Rows]) -> Round:
        """Return the closed exchange as a round of history.jsonl.

        Args:
            named: translates values by a site's spelling of the classes; see `SiteRegistry.rename_keys`.
        """
        pointing, sites = cosines({site: norms.direction for site, norms in self.norms.items()}), {}
        for site, line in sorted(self.lines.items()):
            rows = line.rows and named(site, line.rows)
            sites[site] = replace(line, cosine=pointing.get(site), rows=rows)
        down, up = (sum(getattr(one, way) for one in sites.values()) for way in ("bytes_down", "bytes_up"))
        seconds = round(time.monotonic() - self.since, 3)
        return Round(number, phase, "committed", seconds, down, up, sites, Validation())

    def replies(self, kind: type[_R]) -> dict[str, _R]:
        """Return the accepted answers of one kind by site, in the order of their arrival.

        Updates are without tensors; see `updates`.
        """
        return {s: r for s, r in self.answers.items() if isinstance(r, kind)}

    def metrics(self) -> dict[str, Metrics]:
        """Return the sites' metrics of the global model on their own data."""
        found = {s: r.metrics for s, r in self.answers.items() if isinstance(r, (Update, Evaluation))}
        return {site: metrics for site, metrics in found.items() if metrics is not None}

    def abstained(self, reason: str) -> set[str]:
        """Return the sites that abstained for this reason."""
        return {s for s, r in self.answers.items() if isinstance(r, Abstain) and r.reason == reason}

    def accepted(self) -> list[str]:
        """Return the sites whose update was accepted, sorted."""
        return sorted(self.replies(Update))

    def updates(self) -> Iterator[tuple[str, Update]]:
        """Yield the accepted updates in the order of the sites' names, reading one at a time from disk.

        Their tensors are only to be read: those in memory are the same in each walk.
        """
        for site, update in sorted(self.replies(Update).items()):
            tensors = self._held[site] if site in self._held else load(self._path(site)).tensors
            yield site, replace(update, **tensor_fields(Update, tensors))

    @property
    def tasks(self) -> Mapping[str, TaskData]:
        """What each site was sent in the exchange that was opened last."""
        return {site: allowed.task for site, allowed in self._allowed.items()}

    def empty(self) -> None:
        """Drop the updates of a closed exchange, in memory and on disk."""
        self._held, self._held_bytes = {}, 0
        shutil.rmtree(self._spool, ignore_errors=True)


class Receiver:
    """Where a transport delivers the answers of one exchange, until it is closed.

    Args:
        number: of the exchange; later answers to it are dropped, even when another exchange is open.
        quorum: number of accepted updates that are enough.
        grace: seconds that the other sites still have from then on; None waits for all that are not absent.
    """

    def __init__(self, collector: UpdateCollector, number: int, quorum: int, grace: float | None) -> None:
        self._collector, self._number, self._quorum, self._grace = collector, number, quorum, grace

    def __call__(self, site: str, packed: Packed) -> None:
        """Take the answer of a site. Never raises; see `UpdateCollector.receive`."""
        self._collector.receive(site, packed, self._number)

    def note_fetch(self, site: str) -> None:
        """Note that a site has fetched its task; only a transport whose sites can be gone needs it."""
        if self._number == self._collector.exchange:
            self._collector.attendance.note_fetch(site)

    def enough(self, waiting: Collection[str]) -> bool:
        """Whether the exchange may end although some sites have not answered.

        The quorum is complete then, and the others are absent or their grace period is over.

        Only updates begin the grace period. A site that fetches its task later has as long from then on; see
        `Attendance.is_awaited`. Where all sites are needed, a site that is gone is waited for.
        """
        attendance, quorum, grace = self._collector.attendance, self._quorum, self._grace
        usable, accepted_at = self._collector.arrived()
        if usable >= quorum and all(map(attendance.absent, waiting)):
            return True
        if grace is None or not 0 < quorum <= len(accepted_at):
            return False
        over = time.monotonic() - accepted_at[quorum - 1] >= grace
        return over and not any(attendance.is_awaited(site, grace) for site in waiting)

    def waits(self, waiting: Collection[str]) -> None:
        """Say which sites the exchange waits for, where others have answered or these are lost."""
        attendance, answered = self._collector.attendance, len(self._collector.lines) - len(waiting)
        attendance.waits(waiting if answered else list(filter(attendance.silence, waiting)))

    def note_loss(self, site: str) -> str:
        """Return for how long a lost site has been silent, as the reason why it does not answer."""
        silent = self._collector.attendance.silence(site)
        return f"lost: not heard from for {silent / 60:.0f} min" if silent else ""


def list_reasons(reasons: Mapping[str, str | None]) -> str:
    """Say in one line why each site does not take part."""
    listed = "; ".join(f"{site}: {reason}" for site, reason in sorted(reasons.items()))
    return listed or "no site was requested"
