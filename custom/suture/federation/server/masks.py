"""The server's part in secure aggregation: it passes on what sites say to one another, and unmasks the sum.

An attempt is five exchanges: the sites make keys, seal shares of their secrets for one another, answer the
task with masked updates, sign the list of sites whose updates have arrived, and reveal the shares that unmask
the sum of these. Where an attempt fails, the round is repeated with new keys; a site keeps its update.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from suture.core.files import atomic_write, make_folder
from suture.core.plain import read_regular
from suture.federation.expectation import expected_answer
from suture.federation.plan import Plan
from suture.federation.server.collector import Line, UpdateCollector
from suture.federation.server.registry import SiteRegistry
from suture.methods.base import GlobalModel
from suture.methods.exchange import layout_of
from suture.methods.robust import Counted, Merged
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply
from suture.protocol.masked_updates import apart, fixed_of, received_of, ring_of
from suture.protocol.masking import (
    Attempt,
    Masked,
    MaskingRefused,
    from_fixed_point,
    rows_of,
    short_row,
    unmasked,
)
from suture.protocol.messages import Masking, MaskTask, Roster, TaskData, Update
from suture.protocol.packing import Packed

KEY = "mask.key"
"""File of the secret from which classes have their numbers, so that these tell sites no name."""


class Masks:
    """One attempt after the other to add up masked updates.

    Args:
        folder: of the server's states.
        collector: of the updates, whose notes of attendance count for the other exchanges too.
        notify: is called with each answer that is not one, for the progress display.

    Attributes:
        collector: of the exchanges besides the updates.
        stuck: why the attempt cannot be completed; empty while it can.
        lines: of each site that fell out in an exchange besides the updates.
    """

    def __init__(
        self, plan: Plan, folder: Path, collector: UpdateCollector, notify: Callable[..., None]
    ) -> None:
        assert plan.secure_aggregation is not None
        self._plan, self._path = plan, folder / KEY

        def failures(kind: str, **facts: object) -> None:
            if kind != "answer" or facts.get("status") != "accepted":
                notify(kind, **facts)

        self.collector = UpdateCollector(folder / "no-spool", failures)
        self.collector.attendance = collector.attendance
        self.stuck, self.lines = "", dict[str, Line]()
        self.bytes: dict[str, tuple[int, int]] = {}
        self._attempt = Attempt(plan.experiment, 0, "", plan.secure_aggregation.colluders)
        self._roster: Roster = {}
        self._sealed: dict[str, dict[str, str]] = {}
        self._survivors: list[str] = []
        self._revealed: dict[str, Masking] = {}

    @cached_property
    def _key(self) -> bytes:
        """The secret of `KEY`, made at its first use."""
        if not self._path.exists():
            make_folder(self._path.parent)
            atomic_write(self._path, secrets.token_bytes(32))
        return read_regular(self._path)

    def _number(self, label: str) -> int:
        return int.from_bytes(hmac.digest(self._key, label.encode(), "sha256")[:7])

    def _numbers(self, registry: SiteRegistry, site: str) -> dict[str, int]:
        """Return the number of each class whose row a site may send, by its own names."""
        rows = registry.rows_for(site, self._plan.method.labels.view)
        return dict(zip(registry.to_site(site, rows), map(self._number, rows), strict=True))

    def make_keys(self, round_: int, registry: SiteRegistry, ledgers: Mapping[str, str]) -> dict[str, Packed]:
        """Begin an attempt; return the task of each site to make its keys."""
        self._attempt = replace(self._attempt, round=round_, number=secrets.token_hex(32))
        self.stuck, self.lines, self.bytes = "", {}, {}
        self._roster, self._sealed, self._survivors, self._revealed = {}, {}, [], {}
        self._ledgers = ledgers
        number = self._attempt.number
        return self._open(
            {site: MaskTask("keys", number, self._numbers(registry, site)) for site in registry.members}
        )

    def share_keys(self, missing: Mapping[str, str]) -> dict[str, Packed]:
        """Return the task of each site that has made keys to share its secrets with the others."""
        found = self._close(missing)
        roster = {site: step.keys for site, step in sorted(found.items()) if step.keys}
        before = [set(keys.among) for keys in roster.values() if keys.among]
        self._roster = {site: keys for site, keys in roster.items() if all(site in of for of in before)}
        task = MaskTask("shares", self._attempt.number, roster=self._roster)
        return self._open(dict.fromkeys(self._roster, task) if self._enough(len(self._roster)) else {})

    def updates(self, missing: Mapping[str, str]) -> dict[str, MaskTask]:
        """Return what goes with the task to train, for each site whose shares have arrived."""
        sites = self._roster.keys()  # who has not sealed a share for each other one is left out
        found = sorted(self._close(missing).items())
        self._sealed = {s: step.sealed for s, step in found if step.sealed.keys() == sites - {s}}
        if not self._enough(len(self._sealed)):
            return {}
        sealed = {to: {by: of[to] for by, of in self._sealed.items() if by != to} for to in self._sealed}
        return {to: MaskTask("update", self._attempt.number, sealed=of) for to, of in sealed.items()}

    def agree(self, survivors: Collection[str]) -> dict[str, Packed]:
        """Return the task of each site whose masked update has arrived to sign the list of these sites."""
        self._survivors = sorted(survivors)
        present = self._sealed.keys()
        if self._enough(len(self._survivors)) and (
            row := short_row(self._attempt, self._roster, present, self._survivors)
        ):
            self.stuck = f"a class has {row[1]} of the {self._attempt.fewest} sites left that its sum needs"
        task = MaskTask("survivors", self._attempt.number, survivors=tuple(self._survivors))
        return self._open({} if self.stuck else dict.fromkeys(self._survivors, task))

    def reveal(self, missing: Mapping[str, str]) -> dict[str, Packed]:
        """Return the task of each site that has signed the list to reveal its shares for it."""
        signed = {site: step.signature for site, step in self._close(missing).items()}
        task = MaskTask("reveal", self._attempt.number, signatures=signed)
        return self._open(dict.fromkeys(signed, task) if self._enough(len(signed)) else {})

    def close(self, missing: Mapping[str, str]) -> None:
        """Take the revealed shares."""
        self._revealed = dict(sorted(self._close(missing).items()))
        self._enough(len(self._revealed))

    def merged(
        self,
        previous: GlobalModel,
        updates: Iterable[tuple[str, Update]],
        tasks: Mapping[str, TaskData],
        registry: SiteRegistry,
    ) -> Merged | None:
        """Return the updates of the survivors, each with the mean of their tensors and rows in its place.

        None where the attempt is stuck.

        Args:
            updates: masked, under the sites' own names of classes; they are read one at a time.
            tasks: that the sites have answered.
        """
        if self.stuck:
            return None
        numbers = {site: self._numbers(registry, site) for site in self._survivors}
        rows = rows_of(self._attempt, self._roster, self._sealed)
        sent, weights = list[Update](), dict[int, float]()

        def each() -> Iterator[tuple[str, Masked]]:
            for site, update in updates:
                of_row = {n: numbers[site][n] for n in update.labels if numbers[site][n] in rows[site]}
                own = torch.tensor([name in of_row for name in update.labels]) * update.class_weights
                for name, weight in zip(update.labels, own.tolist(), strict=True):
                    if name in of_row:
                        weights[of_row[name]] = weights.get(of_row[name], 0.0) + weight
                sent.append(registry.from_site(site, replace(update, shared={}, head={}, class_weights=own)))
                yield site, ring_of(update, of_row)

        known: dict[int, bytes] = {}
        method, fixed = self._plan.method, fixed_of(previous.fixed)
        egress = method.egress(layout_of(previous, method))
        received = {
            site: received_of(tasks[site], numbers[site], egress, fixed, known) for site in self._survivors
        }
        try:
            total = unmasked(self._attempt, self._roster, self._sealed, each(), self._revealed, received)
        except MaskingRefused as error:
            self.stuck = str(error)
            return None
        shared = {name: previous.shared[name] for name in tasks[self._survivors[0]].shared}
        mean = apart(from_fixed_point(total.shared) / sum(update.weight for update in sent), shared)
        head = {name: tensor.clone() for name, tensor in previous.head.items()}
        for i, number in enumerate(map(self._number, previous.labels)):
            if number in total.rows:
                row = from_fixed_point(total.rows[number]) / weights[number]
                for name, values in apart(row, {n: t[i] for n, t in head.items()}).items():
                    head[name][i] = values.to(head[name].dtype)
        model = previous.moved_to({n: t.to(previous.shared[n].dtype) for n, t in mean.items()} | head)
        return Merged(Counted(tuple(sent), model))

    def _enough(self, number: int) -> bool:
        """Whether so many sites are enough to go on; if not, the attempt is stuck."""
        least = self._attempt.fewest
        if self._roster:
            least = max(least, self._attempt.votes(self._roster))
        if number < least and not self.stuck:
            self.stuck = f"{number} sites are left of an attempt of secure aggregation, which needs {least}"
        return not self.stuck

    def _open(self, tasks: Mapping[str, MaskTask]) -> dict[str, Packed]:
        """Begin an exchange besides the updates."""
        method, round_ = self._plan.method, self._attempt.round
        egress, payloads = method.egress(Layout({}, {})), dict[str, tuple[TaskData, AllowedReply]]()
        for site, mask in tasks.items():
            task = TaskData("mask", round_, ledger=self._ledgers.get(site), mask=mask)
            payloads[site] = task, expected_answer(method, task, egress)
        return self.collector.open(payloads)

    def _close(self, missing: Mapping[str, str]) -> dict[str, Masking]:
        """End an exchange besides the updates; note its bytes, and the sites that fell out in it."""
        for site, line in self.collector.close(missing).items():
            up, down = self.bytes.get(site, (0, 0))
            self.bytes[site] = up + line["bytes_up"], down + line["bytes_down"]
            if line["status"] != "accepted":
                self.lines.setdefault(site, line | {"bytes_up": 0, "bytes_down": 0})
        return self.collector.replies(Masking)

    def added_to(self, lines: dict[str, Line]) -> None:
        """Add what the exchanges besides the updates say of each site to the lines of a round."""
        for site, line in self.lines.items():
            lines.setdefault(site, line)
        for site, (up, down) in self.bytes.items():
            lines[site]["bytes_up"] += up
            lines[site]["bytes_down"] += down
