"""A site's part in secure aggregation: it masks its update, and checks first what the server cannot any more.

Keys live in memory: a process that is killed takes part again from the next attempt on. What was revealed is
written down before it leaves, because the sums of one round over two lists of survivors differ by an update.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import RejectedUpdate
from suture.core.files import append_line, hold, read_json, read_records, write_json
from suture.core.labels import LabelSet
from suture.core.validation import OPEN, parse
from suture.federation.plan import Plan
from suture.federation.server.norms import LARGEST_UPDATE, Measure
from suture.federation.site.releases import SiteAnswer
from suture.models.classifier import HEADS
from suture.privacy.masking import (
    Attempt,
    Identity,
    MaskingRefused,
    Participant,
    UpdateTooLarge,
    count,
    rows_of,
)
from suture.privacy.secure_aggregation import fixed_of, in_ring, received_of, with_ring
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.messages import Labels, Masking, MaskTask, TaskData, Update
from suture.protocol.packing import pack, unpack

MASKS_FILE = "masks.json"
"""File of what the site has revealed in an experiment."""

MASKED = "masked.jsonl"
"""File of the digests of all updates that the site has masked, in all experiments; beside its ledger."""

_REQUEST = "request"
"""What the header of a state calls the request by which it was trained."""

_WAIT = 60.0
"""Seconds to wait for another experiment of the site that writes into `MASKED`."""


class ReusedSeed(MaskingRefused):
    """The site has masked the same update before; another seed makes another. The server sees this name."""


@validated(frozen=True, config=OPEN)
class _Said:
    """The content of `MASKS_FILE`.

    Attributes:
        numbers: of its classes, which the server may not change: a row would be added to other rows.
        among: for each round, the sites among which the site has first masked its update.
        fixed: the digest of what it was sent once, such as a frozen encoder; another one would make another
            update of it than of the other sites.
        revealed: for each round, the digest of the sums to which the site has revealed its shares, and of
            what it has received.
        states: for each round, the history of each class that its state has learned, and the request by which
            that was trained.
        colluders: the most that a job of the experiment has had.
        folder: random digits; a folder that was deleted and made again has lost the rest of this file.
    """

    numbers: dict[str, int] = Field(default_factory=dict)
    among: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    fixed: str = ""
    revealed: dict[str, str] = Field(default_factory=dict)
    states: dict[str, tuple[dict[int, str], str]] = Field(default_factory=dict)
    colluders: int = 0
    folder: str = Field(default_factory=lambda: secrets.token_hex(16))


class SiteMasks:
    """The masks of a site in one experiment.

    Args:
        rounds: of the run.
        folder: of the experiment at the site.
        identity: signs the site's keys.

    Attributes:
        request: by which the site is asked for an update; see `Releases.digest_request`.
    """

    request = ""
    _hidden = ""  # the request of the update that was masked

    def __init__(self, site: str, plan: Plan, rounds: int, folder: Path, identity: Identity) -> None:
        self._site, self._plan, self._folder, self._identity = site, plan, folder, identity
        self._rounds = rounds
        self._numbers: dict[str, int] = {}
        self._part: Participant | None = None
        self._base: tuple[int, int] = 0, 0  # the committed round of the attempt, that of the site's state

    def check_kept(self) -> None:
        """Refuse a plan without secure aggregation for an experiment that had it: updates would leave again.

        And one with it for an experiment that had none: nobody has compared the states and the encoder.

        Raises:
            MaskingRefused: it is one.
        """
        secure, had = self._plan.secure_aggregation is not None, (self._folder / MASKS_FILE).exists()
        if had > secure or (secure > had and any(self._folder.glob("*.safetensors"))):
            one, other = ("secure aggregation", "none")[:: 1 if had else -1]
            raise MaskingRefused(
                f"the experiment had {one}, and this job has {other}; begin a new experiment"
            )

    def check_fixed(self, task: TaskData) -> None:
        """Take what the site is sent once, or refuse another one.

        Raises:
            MaskingRefused: it is another one.
        """
        alike = {name: tensor for name, tensor in task.fixed.items() if not name.startswith(HEADS)}
        if not (digest := fixed_of(alike)):
            return
        if (record := self._said()).fixed not in ("", digest):
            raise MaskingRefused("the server has sent other fixed tensors, such as an encoder, than before")
        if not record.fixed:
            self._write(replace(record, fixed=digest))

    def step(self, task: TaskData, sent: Labels, state: Callable[[], Mapping[str, Any]]) -> Masking:
        """Take one step of an attempt.

        Args:
            sent: those of the site's classes whose rows it sends.
            state: reads the header of the state from which the site would go on.

        Raises:
            MaskingRefused: the server asks for what would reveal an update, or the attempt began elsewhere.
        """
        secure, mask = self._plan.secure_aggregation, task.mask
        if secure is None or mask is None:
            raise MaskingRefused("the job has no secure aggregation")
        if mask.step == "keys":
            numbers = {name: mask.numbers[name] for name in sent if name in mask.numbers}
            record = self._said()
            before = {name: number for name, number in record.numbers.items() if name in numbers}
            if len(set(numbers.values())) < len(numbers) or before != {
                name: numbers[name] for name in before
            }:
                raise MaskingRefused("the server has given the site's classes other numbers than before")
            if secure.colluders < record.colluders:
                raise MaskingRefused(
                    f"the experiment had secure_aggregation.colluders={record.colluders}, and this job has "
                    f"{secure.colluders}; set it as before, or begin a new experiment"
                )
            self._write(replace(record, numbers=record.numbers | numbers, colluders=secure.colluders))
            digest, name = self._plan.digest(self._rounds), self._plan.experiment
            attempt = Attempt(name, task.round, mask.attempt, secure.colluders, digest)
            header, among = state(), record.among.get(str(task.round), ())
            self._numbers, self._base = numbers, (task.committed, header.get("round", 0))
            learned, request = record.states.get(str(self._base[1]), ({}, ""))
            if request != header.get(_REQUEST, ""):  # it was trained again, for no sum
                learned = {}
            rows = list(numbers.values())
            self._part = Participant(self._site, attempt, rows, self._identity, among, learned)
            return Masking("keys", keys=self._part.keys)
        part = self._current(task, mask)
        if mask.step == "shares":
            return Masking("shares", sealed=part.shares(mask.roster))
        if mask.step == "survivors":
            return Masking("survivors", signature=part.sign(mask.survivors), unopened=part.unopened)
        revealed = part.reveal(mask.signatures)
        # On disk before the shares leave: the site, restarted, refuses another sum of this round.
        self._reveal_once(task.round, part)
        return revealed

    def _current(self, task: TaskData, mask: MaskTask | None) -> Participant:
        part = self._part
        if not (part and mask and (part.attempt.number, part.attempt.round) == (mask.attempt, task.round)):
            raise MaskingRefused("this process has no keys of this attempt, as after a restart")
        return part

    def _reveal_once(self, round_: int, part: Participant) -> None:
        """Note the sums to which the site is about to reveal its shares, and so what its state is made of.

        Raises:
            MaskingRefused: it has revealed them to other sums of this round, or of another model's updates.
        """
        rows, got = rows_of(part.attempt, part.roster, part.present), part.received
        sums = {site: rows[site] for site in part.survivors}
        model = [got.shared.hex(), *(got.rows[row].hex() for row in part.rows)]
        digest = _digest([sums, model])
        record = self._said()
        if record.revealed.get(str(round_), digest) != digest:
            raise MaskingRefused(
                f"round {round_} was added up over other sites before, or from another model; the difference "
                "could be an update. Repeat it as it was, or begin a new experiment with another seed"
            )
        before = part.learned if part.continues else {}
        learned = {
            row: _digest([before.get(row), sums, got.shared.hex(), got.rows[row].hex()]) for row in part.rows
        }
        states = record.states | {str(round_): (learned, self._hidden)}
        self._write(replace(record, revealed=record.revealed | {str(round_): digest}, states=states))

    def _said(self) -> _Said:
        path = self._folder / MASKS_FILE
        return parse(_Said, read_json(path), str(path)) if path.exists() else _Said()

    def _write(self, said: _Said) -> None:
        write_json(self._folder / MASKS_FILE, asdict(said), private=True)

    def begin(self, task: TaskData, sent: Labels, own: LabelSet) -> None:
        """Take the shares of the other sites, before anything is trained.

        The site trains those of its classes that enough sites of this very attempt train, and no other:
        where the server zeroes the other rows, the sum of the shared tensors is the update of the sites that
        have this class. A site that trained none of its classes would hide nobody's update. Where one of
        several classes is right, rows that are equal move nothing: there all sites need the same classes.

        Args:
            sent: see `step`.
            own: the site's classes.

        Raises:
            MaskingRefused: the shares are not those of this attempt, or a class has too few sites, or is
                missing.
        """
        part, use = self._current(task, task.mask), self._plan.method.labels
        if task.mask is None or task.mask.step != "update" or task.committed != self._base[0]:
            raise MaskingRefused("the server asks for an update outside of secure aggregation")
        part.receive(task.mask.sealed)
        asked, senders = set(task.labels), count(part.roster, part.present)
        enough = {name for name, number in self._numbers.items() if number in part.rows}
        if few := sorted(asked & self._numbers.keys() - enough):
            raise MaskingRefused(
                f"{senders[self._numbers[few[0]]]} sites that are present train the class {few[0]!r}, and a "
                f"sum needs {part.attempt.fewest}"
            )
        strange = (set(sent) if use.view == "all" else asked) - self._numbers.keys()
        unnamed = set(own.names) - set(own.one_sided) - self._numbers.keys()
        if wrong := strange | (enough | unnamed) - asked:
            raise MaskingRefused(
                f"the server asks to train {'with' if strange else 'without'} the class {min(wrong)!r}. To "
                "hide each site's update, a site trains all its classes that enough sites have, and no other"
            )
        lists = {part.roster[site].rows for site in part.present}
        if own.label_type == "multiclass" and use.unknown == "masked" and len(lists) > 1:
            raise MaskingRefused(
                "the sites have different classes, of which one is right: rows could be equal"
            )

    @property
    def continues(self) -> bool:
        """Whether the site trains on from what it has of the rounds before; see `continuing`."""
        return self._part is not None and self._part.continues

    def goes_on(self, state: Mapping[str, Any]) -> bool:
        """Return `continues`, for the header of the state.

        Raises:
            MaskingRefused: the others have been told of another state.
        """
        if state.get("round", 0) != self._base[1]:
            raise MaskingRefused("the site's state is another one than its keys were made for")
        return self.continues

    def mark(self) -> dict[str, str]:
        """Return what the state of a round says of how it was trained."""
        return {_REQUEST: self.request}

    def _mask_once(self, update: Update, task: TaskData) -> None:
        """Note an update, tensors and rows by their digests, before it is masked.

        Raises:
            ReusedSeed: one of them was masked in another experiment or round: added up with those of other
                sites, the difference of the two sums would be an update.
        """
        at = [i for i, name in enumerate(update.labels) if name in self._numbers]
        rows = [tuple({n: t[i] for n, t in head.items()} for i in at) for head in (update.head, task.head)]
        sent, base = (update.shared, *rows[0]), (task.shared, *rows[1])
        moved = [
            fixed_of(part)
            for part, before in zip(sent, base, strict=True)
            if any(not torch.equal(tensor, before[name]) for name, tensor in part.items())
        ]
        path, said = self._folder.parents[1] / MASKED, self._said()
        origin = {"experiment": self._plan.experiment, "folder": said.folder, "round": task.round}
        with hold(path.with_name(f".{MASKED}.lock"), _WAIT, f".{MASKED}.*.tmp"):
            lines = read_records(path)
            for line in lines:
                if set(line["parts"]) & set(moved) and line != {**origin, "parts": line["parts"]}:
                    raise ReusedSeed(
                        f"the site has masked the same update in round {line['round']} of the experiment "
                        f"{line['experiment']}; set another seed in the job"
                    )
            if (now := {**origin, "parts": moved}) not in lines:
                append_line(path, now, durable=True, private=True)

    def mask(self, answer: SiteAnswer, task: TaskData, allowed: AllowedReply) -> SiteAnswer:
        """Return the answer with a masked update, once it has passed what the server checks of a plain one.

        Raises:
            MaskingRefused: it has not, or a number is out of range; names it.
        """
        part, update = self._current(task, task.mask), unpack(answer.packed)
        assert isinstance(update, Update)
        try:
            check_reply(update, replace(answer.allowed or allowed, task=replace(allowed.task, mask=None)))
        except RejectedUpdate as error:
            raise MaskingRefused(f"{self._site}: {error}") from error
        norms = Measure()(update, task, allowed.egress)
        if norms.update > LARGEST_UPDATE * norms.model > 0:
            raise UpdateTooLarge(
                f"{self._site}: an update of norm {norms.update:.3g}, more than {LARGEST_UPDATE:g} times the "
                f"model's, {norms.model:.3g}, the bound of secure aggregation"
            )
        self._mask_once(update, task)
        plain = in_ring(update, {n: k for n, k in self._numbers.items() if k in part.rows}, len(part.present))
        said = self._said()
        every = self._plan.method.labels.view == "all"
        got = received_of(task, self._numbers, allowed.egress, said.fixed, every=every)
        hidden, self._hidden = part.mask(plain, got), self.request
        self._write(replace(said, among={str(task.round): tuple(sorted(part.roster))} | said.among))
        return replace(answer, packed=pack(with_ring(update, hidden, self._numbers)))


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
