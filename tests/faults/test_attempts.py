"""Kills at every step of secure aggregation: the run goes on with new keys, and no file has a secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ledger import Found

from suture.federation.loop import Loop, federate
from suture.federation.server.collector import Receiver
from suture.federation.site.site import Site
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.secure_aggregation import SecureAggregation
from suture.protocol.messages import Masking, TaskData, TaskName
from suture.protocol.packing import Packed, load, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
SITES = dict.fromkeys(("alpha", "beta", "delta", "gamma"), ("Mass", "Nodule"))
VICTIM = "beta"
"""Neither the first site that answers nor the last."""

KILLS = list(
    product(
        ("site", "server", "both"),
        ("keys", "shares", "update", "survivors", "reveal"),
        ("before", "after"),
    )
)
QUICK = [("site", "update", "after"), ("both", "reveal", "after")]
PLAIN: dict[str, torch.Tensor] = {}
"""The model without secure aggregation."""


class Killed(Exception):
    """The server's process ends."""


class Killing(Loop):
    """A loop in which a process ends at a step of the second round, once.

    Attributes:
        keys: all public keys that sites have made.
        secrets: the private ones, and the seeds and shares.
    """

    def __init__(self, federation: Any, out: str, kill: tuple[str, str, str]) -> None:
        super().__init__(federation.sites(out))
        self._federation, self._out, self._kill, self._done = federation, out, kill, False
        self.keys: list[str] = []
        self.secrets: set[bytes] = set()

    def restart(self) -> None:
        """Put new processes in the place of all sites."""
        self.close()
        self._sites = dict(sorted(self._federation.sites(self._out).items()))

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name, packed in payloads.items():
            payload = unpack(packed)
            assert isinstance(payload, TaskData)
            self._end_at(name, payload, "before")
            answer = self._sites[name].answer(payload).packed
            self._look(self._sites[name], answer)
            receive(name, answer)
            self._end_at(name, payload, "after")
        return {}

    def _end_at(self, name: str, task: TaskData, moment: str) -> None:
        who, step, when = self._kill
        here = task.mask is not None and (name, task.round, task.mask.step, moment) == (VICTIM, 2, step, when)
        if not here or self._done:
            return
        self._done = True
        if who != "server":
            self._sites[name].close()
            self._sites[name] = self._federation.sites(self._out)[name]
        if who != "site":
            raise Killed

    def _look(self, site: Site, answer: Packed) -> None:
        message = unpack(answer)
        if isinstance(message, Masking) and message.keys:
            self.keys += [message.keys.cipher, message.keys.mask, message.keys.seed]
        if part := site.masks._part:
            own = (part._key.private_bytes_raw(), part._cipher.private_bytes_raw(), part._seed)
            self.secrets |= {*own, *(share for pair in part._shares.values() for share in pair)}


def files_with(folder: Path, secrets: set[bytes]) -> Iterator[Path]:
    """The files that have a secret, as bytes or as hexadecimal digits."""
    forms = [form for secret in secrets for form in (secret[:32], secret[:32].hex().encode())]
    starts = np.array([int.from_bytes(form[:8], "little") for form in forms], np.uint64)
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        eights = (
            np.frombuffer(content[at : len(content) - (len(content) - at) % 8], "<u8") for at in range(8)
        )
        if any(np.isin(starts, some).any() for some in eights) and any(form in content for form in forms):
            yield path


@pytest.mark.complete
@pytest.mark.case("secure aggregation")
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(kill, id="-".join(kill), marks=[] if kill in QUICK else pytest.mark.faults)
        for kill in KILLS
    ],
)
def test_a_kill_costs_an_attempt_and_no_secret(kill: tuple[str, str, str], tiny: Any, note: Any) -> None:
    federation = tiny(METHOD, SITES, n=10, rounds=2, selection="last")
    if not PLAIN:
        model = federation.run("plain").model
        PLAIN.update({**model.shared, **model.head})
    plan = replace(federation.plan, secure_aggregation=SecureAggregation())
    federation = replace(federation, plan=plan)
    transport = Killing(federation, "cut", kill)
    server = federation.server("cut")
    try:
        federate(server, transport)
    except Killed:
        if kill[0] == "both":
            transport.restart()
        server = federation.server("cut")
        federate(server, transport)
    model = server.model
    assert server.round == 2
    for name, tensor in PLAIN.items():
        assert ({**model.shared, **model.head}[name] - tensor).abs().max() < 1e-6
    assert len(set(transport.keys)) == len(transport.keys) >= 2 * 3 * len(SITES)
    folder = federation.folder / "cut"
    assert transport.secrets
    assert not list(files_with(folder, transport.secrets))
    (folder / "planted").write_text(f"x{min(transport.secrets).hex()}")
    assert list(files_with(folder, transport.secrets)) == [folder / "planted"]
    updates = {
        bytes(tensor.numpy())
        for path in folder.glob("sites/*/answers/train/*.safetensors")
        for name, tensor in load(path).tensors.items()
        if name.startswith("shared/") and tensor.numel() > 8
    }
    assert updates
    kept = {path for path in files_with(folder, updates) if "sites" not in path.relative_to(folder).parts}
    assert not kept
    note(Found(rounds_lost=None))
