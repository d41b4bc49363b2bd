"""The server's part in secure aggregation: it passes on what sites say to one another, and unmasks the sum.

An attempt is five exchanges: the sites make keys, seal shares of their secrets for one another, answer the
task with masked updates, sign the list of sites whose updates have arrived, and reveal the shares that unmask
the sum of these. Where an attempt fails, the round is repeated with new keys. A site keeps its update, unless
it was of a class that too few sites of the new attempt train: nobody trains that one.

A site that can be shown to have lied (keys and signatures that are not its own, shares other than it has
committed to) is named, and left out while enough others are there. Where one site says that it holds no share
that another has sealed for it, one of the two lies: the one with several such disputes is left out. A site
whose masked update, or whose shares, have failed an attempt are left out of the next ones of the round. Of a
masked update nothing can be told but whether the sum can be one.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from suture.core.files import atomic_write, read_json, read_regular, write_json
from suture.federation.plan import Plan
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.norms import LARGEST_UPDATE, distance, norm_of
from suture.federation.server.registry import SiteRegistry
from suture.methods.base import GlobalModel, layout_of
from suture.models.classifier import Layout
from suture.privacy.masking import (
    Attempt,
    Identity,
    Masked,
    MaskingRefused,
    SiteLies,
    count,
    from_fixed_point,
    rows_of,
    sorted_out,
    too_few_left,
    unmask_sum,
)
from suture.privacy.robust import Counted, Merged
from suture.privacy.secure_aggregation import apart, fixed_of, received_of, ring_of
from suture.protocol.check import AllowedReply
from suture.protocol.messages import Masking, MaskKeys, MaskTask, TaskData, Update
from suture.protocol.packing import Packed
from suture.protocol.records import Note, SiteRound

log = logging.getLogger(__name__)

KEY = "mask.key"
"""File of the secret from which classes have their numbers, so that these tell sites no name."""

LISTS = "mask-lists.json"
"""File of the lists of sites among which updates of a round were masked, by the number of the round."""


class Masks:
    """One attempt after the other to add up masked updates.

    Args:
        rounds: of the run.
        folder: of the server's states.
        collector: of the updates, whose notes of attendance count for the other exchanges too.
        notify: is called with each answer that is not one, for the progress display.
        note: is called with what the reader of the report should know of sites that have lied.
        identity: checks the sites' signatures.

    Attributes:
        collector: of the exchanges besides the updates.
        stuck: why the attempt cannot be completed; empty while it can.
        lines: of each site that fell out in an exchange besides the updates.
        left_out: the classes that too few sites of the attempt train, so that none of them does.
    """

    def __init__(
        self,
        plan: Plan,
        rounds: int,
        folder: Path,
        collector: UpdateCollector,
        notify: Callable[..., None],
        note: Callable[[Iterable[Note]], None],
        identity: Identity,
    ) -> None:
        assert plan.secure_aggregation is not None
        self._plan, self._path, self._identity = plan, folder / KEY, identity
        self._notify, self._note = notify, note

        def failures(kind: str, **facts: object) -> None:
            if kind != "answer" or facts.get("status") != "accepted":
                notify(kind, **facts)

        self.collector = UpdateCollector(folder / "no-spool", failures)
        self.collector.attendance = collector.attendance
        self.stuck, self.lines = "", dict[str, SiteRound]()
        self._liars, self._disputes = dict[str, str](), set[frozenset[str]]()  # in this run
        self._lost = dict[str, str]()  # of the round: whose masked updates did not arrive
        self._times = Counter[str]()  # in this run, how often a site was among them
        self._kept = set[str]()  # the classes whose rows stayed as they were, for too few sites, in this run
        self.bytes: dict[str, tuple[int, int]] = {}
        self._attempt = Attempt(
            plan.experiment, 0, "", plan.secure_aggregation.colluders, plan.digest(rounds)
        )
        self._numbers, self._roster = dict[str, dict[str, int]](), dict[str, MaskKeys]()
        self.left_out = frozenset[str]()
        self._sealed, self._survivors = dict[str, dict[str, str]](), list[str]()
        self._unopened, self._revealed = dict[str, set[str]](), dict[str, Masking]()

    @cached_property
    def _key(self) -> bytes:
        """The secret of `KEY`, made at its first use."""
        if not self._path.exists():
            atomic_write(self._path, secrets.token_bytes(32), private=True)
        return read_regular(self._path)

    def _number(self, label: str) -> int:
        return int.from_bytes(hmac.digest(self._key, label.encode(), "sha256")[:7])

    def _numbers_of(self, registry: SiteRegistry, site: str) -> dict[str, int]:
        """Return the number of each class whose row a site sends, by its own names."""
        rows = registry.sent_by(site, self._plan.method)
        return dict(zip(registry.to_site(site, rows), map(self._number, rows), strict=True))

    def make_keys(
        self, round_: int, registry: SiteRegistry, ledgers: Mapping[str, str], quorum: int
    ) -> dict[str, Packed]:
        """Begin an attempt; return the task of each site to make its keys.

        Sites that were lost in attempts of the round are left out, but for none before others that were lost
        as often: where all are needed, all are asked again.

        Args:
            quorum: number of updates that the round needs: no site is left out where they would be fewer.
        """
        if round_ != self._attempt.round:
            self._lost = {}
        self._attempt = replace(self._attempt, round=round_, number=secrets.token_hex(32))
        self.stuck, self.lines, self.bytes = "", {}, {}
        self._roster, self._sealed, self._survivors, self._revealed = {}, {}, [], {}
        self._ledgers, self._quorum, asked = ledgers, quorum, set(registry.members)
        lists = self._lists()
        able = {site for site in asked if all(site in of for of in lists)}  # the others are too late
        # Who has masked an update of this round did so for a list of sites. Only these can add up with it, so
        # a repeated attempt may leave out no more of them than the threshold allows.
        least = max([quorum, *(self._attempt.threshold(len(of)) for of in lists)])
        out = [{site: of[site]} for of in (self._liars, self._find_disputes()) for site in sorted(of)]
        for times in sorted({self._times[site] for site in self._lost}):
            out.append({site: why for site, why in self._lost.items() if self._times[site] >= times})
        for some in out:
            if len(able - some.keys()) >= least:
                for site in sorted(asked & some.keys()):
                    self._leave_out(site, some[site])
                asked, able = asked - some.keys(), able - some.keys()
        self._numbers = {site: self._numbers_of(registry, site) for site in registry.members}
        self._labels = registry.labels
        number = self._attempt.number
        return self._open({s: MaskTask("keys", number, self._numbers[s]) for s in sorted(asked)})

    def _find_disputes(self) -> dict[str, str]:
        """Return the sites that are in dispute with several others."""
        several = Counter(site for pair in self._disputes for site in pair).items()
        most = max(1, self._attempt.colluders)  # each of so many liars can deny the share of an honest site
        return {s: f"is in dispute over shares with {n} others" for s, n in several if n > most}

    def _leave_out(self, site: str, why: str) -> None:
        """Note that a site has no further part in the attempt."""
        self.lines[site] = SiteRound("rejected", why)
        self._notify("answer", site=site, status="rejected", reason=why)
        log.warning("rejected: %s, round %d: %s", site, self._attempt.round, why)

    def _blame(self, lies: Mapping[str, str]) -> None:
        """Name sites that have lied, and leave them out from now on."""
        for site, why in sorted(lies.items()):
            self._leave_out(site, why)
            if self._liars.get(site) != why:
                self._note([Note("site_lied", {"round": self._attempt.round, "site": site, "why": why})])
            self._liars[site] = why

    def share_keys(self, missing: Mapping[str, str]) -> dict[str, Packed]:
        """Return the task of each site that has made keys to share its secrets with the others."""
        found = self._close(missing)
        roster = {site: step.keys for site, step in sorted(found.items()) if step.keys}
        self._blame(lies := self._attempt.unusable(roster, self._identity))
        lists, stated = self._lists(), Counter(keys.among for keys in roster.values())
        unknown = {of for of, n in stated.items() if of and of not in lists and 2 * n <= len(roster)}
        why = "names sites of an earlier attempt that no other site names"
        out = {site: why for site, keys in roster.items() if keys.among in unknown}
        roster = {site: keys for site, keys in roster.items() if site not in lies | out}
        before = [set(keys.among) for keys in roster.values() if keys.among]
        self._roster = {site: keys for site, keys in roster.items() if all(site in of for of in before)}
        late = "can take part from the next round on: others have masked their updates without it"
        for site, why in (dict.fromkeys(roster.keys() - self._roster, late) | out).items():
            self._leave_out(site, why)
        self._enough(len(self._roster), self._quorum)
        task = MaskTask("shares", self._attempt.number, roster=self._roster)
        return self._open({} if self.stuck else dict.fromkeys(self._roster, task))

    def _lists(self) -> set[tuple[str, ...]]:
        """Return the lists of sites among which updates of this round may have been masked."""
        path = self._path.with_name(LISTS)
        held = read_json(path) if path.exists() else {}
        return {tuple(sites) for sites in held.get(str(self._attempt.round), [])}

    def updates(self, missing: Mapping[str, str]) -> dict[str, MaskTask]:
        """Return what goes with the task to train, for each site whose shares have arrived."""
        sites = self._roster.keys()
        found = {site: step.sealed for site, step in sorted(self._close(missing).items())}
        self._sealed = {site: sealed for site, sealed in found.items() if sealed.keys() == sites}
        self._blame(dict.fromkeys(found.keys() - self._sealed, "has not sealed its shares for all sites"))
        fewest, senders = self._attempt.fewest, count(self._roster, self._sealed)
        for site, rows in rows_of(self._attempt, self._roster, self._sealed).items():
            if not rows:
                self._leave_out(site, f"of each of its classes fewer than {fewest} sites are there")
                del self._sealed[site]
        self.left_out = frozenset(n for n in self._labels if 0 < senders.get(self._number(n), 0) < fewest)
        if not self._enough(len(self._sealed), self._quorum):
            return {}
        lists = sorted(self._lists() | {tuple(sorted(sites))})
        write_json(self._path.with_name(LISTS), {str(self._attempt.round): lists}, private=True)
        sealed = {to: {by: of[to] for by, of in self._sealed.items() if by != to} for to in self._sealed}
        return {to: MaskTask("update", self._attempt.number, sealed=of) for to, of in sealed.items()}

    def agree(self, survivors: Collection[str]) -> dict[str, Packed]:
        """Return the task of each site whose masked update has arrived to sign the list of these sites."""
        self._survivors = sorted(survivors)
        present = self._sealed.keys()
        gone = [] if self.stuck else sorted(present - set(survivors))  # else they were not asked
        self._lost |= dict.fromkeys(gone, "its masked update did not arrive in an attempt of this round")
        self._times.update(gone)
        if self._enough(len(self._survivors), self._quorum) and (  # later a sum is revealed, once a round
            why := too_few_left(self._attempt, self._roster, present, self._survivors)
        ):
            self.stuck = f"{why}, without {', '.join(gone)}"
        task = MaskTask("survivors", self._attempt.number, survivors=tuple(self._survivors))
        return self._open({} if self.stuck else dict.fromkeys(self._survivors, task))

    def reveal(self, missing: Mapping[str, str]) -> dict[str, Packed]:
        """Return the task of each site that has signed the list to reveal its shares for it."""
        steps, attempt, lies = self._close(missing), self._attempt, dict[str, str]()
        agreed = attempt.agreement(attempt.digest(self._roster), sorted(self._sealed), self._survivors)
        for site, step in steps.items():
            try:
                certificate, signature = self._roster[site].certificate, bytes.fromhex(step.signature)
                self._identity.check(site, certificate, signature, agreed)
            except MaskingRefused:
                lies[site] = "has not signed the list of sites whose updates have arrived"
        self._blame(lies)
        signed = {site: step.signature for site, step in steps.items() if site not in lies}
        self._unopened = {site: set(steps[site].unopened) & self._sealed.keys() - {site} for site in signed}
        for by, sites in self._unopened.items():
            for site in sorted(sites):
                self._disputes.add(frozenset((by, site)))
                self._note([Note("share_disputed", {"round": attempt.round, "site": by, "other": site})])
        denied = Counter(site for sites in self._unopened.values() for site in sites)
        for site, number in denied.items() if self._enough(len(signed)) else ():
            if (left := len(signed) - number) < attempt.votes(self._roster):
                self._enough(left, what=f"left that hold shares of {site} in an attempt")
                self._lost[site] = "others held too few of its shares in an attempt of this round"
                self._times[site] += 1
        task = MaskTask("reveal", attempt.number, signatures=signed)
        return self._open({} if self.stuck else dict.fromkeys(signed, task))

    def close(self, missing: Mapping[str, str]) -> None:
        """Take the revealed shares."""
        self._revealed = dict(sorted(self._close(missing).items()))
        self._enough(len(self._revealed))

    def merge(
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
        numbers, rows = self._numbers, rows_of(self._attempt, self._roster, self._sealed)
        sent, weights = list[Update](), dict[int, float]()

        def each() -> Iterator[tuple[str, Masked]]:
            for site, update in updates:
                of_row = {n: number for n, number in numbers[site].items() if number in rows[site]}
                # Weights travel unmasked; that of a row counts where the row was masked at all.
                own = torch.tensor([name in of_row for name in update.labels]) * update.class_weights
                for name, weight in zip(update.labels, own.tolist(), strict=True):
                    if name in of_row:
                        weights[of_row[name]] = weights.get(of_row[name], 0.0) + weight
                sent.append(registry.from_site(site, replace(update, shared={}, head={}, class_weights=own)))
                yield site, ring_of(update, of_row)

        known: dict[int, bytes] = {}
        method, fixed = self._plan.method, fixed_of(previous.fixed)
        egress, every = method.egress(layout_of(previous, method)), method.labels.view == "all"
        received = {
            site: received_of(tasks[site], numbers[site], egress, fixed, known, every)
            for site in self._survivors
        }
        shares, lies = sorted_out(self._sealed, self._unopened, self._survivors, self._revealed)
        self._blame(lies)
        try:
            total = unmask_sum(self._attempt, self._roster, self._sealed, each(), shares, received)
        except MaskingRefused as error:
            self._blame(error.lies if isinstance(error, SiteLies) else {})
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
        norm = norm_of(*method.sharing.parts(previous.shared, previous.head))
        moved, furthest = distance(model, previous), LARGEST_UPDATE * norm * len(sent) ** 0.5
        if norm and moved > furthest:  # each row may be the longest of another site's: hence the root
            part, sites = self._suspects(model, previous, furthest)
            self.stuck = (
                f"the mean of the updates is {moved:.3g} from the model, and sites that check their own stay "
                f"within {furthest:.3g}: in {part} one of {', '.join(sites)} has sent something else, "
                "and the masks hide which. Begin an experiment with another seed, without the site that you "
                "suspect"
            )
            return None
        sent_rows = {number for of in numbers.values() for number in of.values()}
        kept = {n for n in previous.labels if self._number(n) in sent_rows - total.rows.keys()}
        if new := sorted(kept - self._kept):
            self._kept |= kept
            attempt = {"round": self._attempt.round, "fewest": self._attempt.fewest}
            self._note([Note("rows_kept", {**attempt, "labels": new})])
        return Merged(Counted(tuple(sent), model))

    def _suspects(self, model: GlobalModel, previous: GlobalModel, furthest: float) -> tuple[str, list[str]]:
        """Return what of a model is too far from the one before, and the sites that have sent it."""
        rows = rows_of(self._attempt, self._roster, self._sealed)
        for i, name in enumerate(previous.labels):
            moved = norm_of({key: t[i] - previous.head[key][i] for key, t in model.head.items()})
            if moved > furthest:
                return f"the row of {name}", [s for s in self._survivors if self._number(name) in rows[s]]
        return "the shared tensors", self._survivors

    def _enough(self, number: int, quorum: int = 0, what: str = "left of an attempt") -> bool:
        """Whether so many sites are enough to go on; if not, the attempt is stuck.

        Args:
            quorum: of those whose updates are added; the others only sign or reveal.
        """
        least = max(quorum, self._attempt.votes(self._roster))
        if number < least and not self.stuck:
            self.stuck = f"{number} sites are {what} of secure aggregation, which needs {least}"
        return not self.stuck

    def _open(self, tasks: Mapping[str, MaskTask]) -> dict[str, Packed]:
        """Begin an exchange besides the updates."""
        egress, round_, allowed = self._plan.egress(Layout({}, {})), self._attempt.round, {}
        for site, mask in tasks.items():
            task = TaskData("mask", round_, round_ - 1, ledger=self._ledgers.get(site), mask=mask)
            allowed[site] = AllowedReply(task, egress)
        return self.collector.open(allowed)

    def _close(self, missing: Mapping[str, str]) -> dict[str, Masking]:
        """End an exchange besides the updates; note its bytes, and the sites that fell out in it."""
        for site, line in self.collector.close(missing).items():
            up, down = self.bytes.get(site, (0, 0))
            self.bytes[site] = up + line.bytes_up, down + line.bytes_down
            if line.status != "accepted":
                self.lines.setdefault(site, replace(line, bytes_up=0, bytes_down=0))
        return self.collector.replies(Masking)

    def added_to(self, lines: dict[str, SiteRound]) -> None:
        """Add what the exchanges besides the updates say of each site to the lines of a round."""
        for site, line in self.lines.items():
            lines.setdefault(site, line)
        for site, (up, down) in self.bytes.items():
            line = lines.get(site, SiteRound("missing", self.stuck))
            lines[site] = replace(line, bytes_up=line.bytes_up + up, bytes_down=line.bytes_down + down)
