"""Secure aggregation as a setting of a job: which methods it fits, and with what else it goes.

It has an update as numbers of the ring of `suture.privacy.masking`, and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.methods import METHODS
from suture.methods.base import Method
from suture.privacy.masking import Masked, MaskingRefused, Received, Ring, in_fixed_point
from suture.privacy.robust import RobustMerge
from suture.protocol.egress import CLASSES, OWNED_CLASSES, Egress, Layout
from suture.protocol.messages import MOST_SITES, TaskData, Update
from suture.protocol.packing import Packed, Transport, digest

Numbers = Mapping[str, int]
"""The number of each class whose row is sent, by the name that a message has for it."""


def in_ring(update: Update, numbers: Numbers, sites: int) -> Masked:
    """Return a site's update times its weights, in fixed point.

    Args:
        sites: of the attempt.

    Raises:
        MaskingRefused: a number is out of range, or a row has no weight; names the tensor or the class.
    """
    shared = [
        in_fixed_point(t, update.weight, sites, f"shared/{n}") for n, t in sorted(update.shared.items())
    ]
    rows, weights = {}, dict(zip(update.labels, update.class_weights.tolist(), strict=True))
    for label, number in numbers.items():
        if not weights[label] > 0:
            raise MaskingRefused(
                f"the row of {label!r} has weight {weights[label]:g}, so that it would be no sum"
            )
        at = update.labels.index(label)
        parts = [
            in_fixed_point(t[at], weights[label], sites, f"head/{n} of {label!r}")
            for n, t in sorted(update.head.items())
        ]
        rows[number] = _join(parts)
    return Masked(_join(shared), rows)


def with_ring(update: Update, masked: Masked, numbers: Numbers) -> Update:
    """Return the update with numbers of the ring as int64 in place of its tensors; other rows are zeros."""
    head = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in update.head.items()}
    for label, number in numbers.items():
        if number in masked.rows:
            at = update.labels.index(label)
            for name, values in apart(
                _to_signed(masked.rows[number]), {n: t[at] for n, t in head.items()}
            ).items():
                head[name][at] = values
    return replace(update, shared=apart(_to_signed(masked.shared), update.shared), head=head)


def ring_of(update: Update, numbers: Numbers) -> Masked:
    """Return the numbers of a masked update."""
    shared = [_numbers(tensor) for _, tensor in sorted(update.shared.items())]
    at = {label: i for i, label in enumerate(update.labels)}
    rows = {
        number: _join([_numbers(t[at[label]]) for _, t in sorted(update.head.items())])
        for label, number in numbers.items()
    }
    return Masked(_join(shared), rows)


def apart(numbers: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return joined numbers as tensors of the shapes and names of others."""
    names = sorted(like)
    pieces = torch.split(numbers, [like[name].numel() for name in names])
    return {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}


def fixed_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of what all sites are sent once; empty where that is nothing."""
    return _tensor_digest(tensors).hex() if tensors else ""


def received_of(
    task: TaskData,
    numbers: Numbers,
    egress: Egress,
    fixed: str,
    known: dict[int, bytes] | None = None,
    every: bool = False,
) -> Received:
    """Return the digests of all by which a task and the ones before decide the update.

    Args:
        egress: of the method, which says what of the channels has rows of classes.
        fixed: see `fixed_of`; of the first that the site was sent.
        known: digests of shared tensors that other tasks have brought too, by the identity of the first.
        every: whether all sites receive the rows of all classes, and train on those that they do not send.
    """
    known, key = {} if known is None else known, id(next(iter(task.shared.values()), None))
    if key not in known:
        known[key] = _tensor_digest(task.shared)
    at = {label: i for i, label in enumerate(task.labels)}
    forms = egress.forms("down", "facts")
    by_row = {n: t for n, t in task.channels.items() if n in forms and forms[n][0][:1] == (CLASSES,)}
    whole = {n: t for n, t in task.channels.items() if n not in by_row}
    rows = {
        number: _tensor_digest({n: t[at[label]] for n, t in {**task.head, **by_row}.items()})
        for label, number in numbers.items()
        if label in at
    }
    parts = known[key] + _tensor_digest(whole) + f"{task.phase} {task.committed} {fixed}".encode()
    parts += _tensor_digest({**task.head, **by_row}) if every else b""
    return Received(hashlib.sha256(parts).digest(), rows)


def _tensor_digest(tensors: Mapping[str, Tensor]) -> bytes:
    return bytes.fromhex(digest(Packed(tensors, {})))


def _to_signed(numbers: Ring) -> Tensor:
    return torch.from_numpy(numbers.view(np.int64))


def _numbers(tensor: Tensor) -> Ring:
    numbers: Ring = tensor.reshape(-1).numpy().view(np.uint64)
    return numbers


def _join(parts: list[Ring]) -> Ring:
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


@validated(frozen=True, config=STRICT)
class SecureAggregation:
    """The server learns sums of the sites' updates and no update.

    Attributes:
        colluders: number of sites that may tell the server all that they know. Each class, and each round,
            needs three sites more than this.
    """

    colluders: Annotated[int, Field(ge=0, le=MOST_SITES)] = 0

    @property
    def fewest(self) -> int:
        """Number of sites that a sum needs."""
        return 3 + self.colluders


def check_secure(
    secure: SecureAggregation | None,
    method: Method,
    robust: RobustMerge | None = None,
    transport: Transport = "float32",
) -> None:
    """Check that a method's updates can be added up without the server seeing them.

    Raises:
        ConfigError: they cannot; says why, and the remedy.
    """
    if secure is None:
        return
    if robust:
        raise ConfigError(
            f"secure_aggregation and robust.kind={robust.kind!r} exclude each other. Robust aggregation "
            "compares the sites' updates, which the server does not see; remove one of the two sections"
        )
    if transport != "float32":
        raise ConfigError(
            f"secure_aggregation and transport={transport!r} exclude each other: masked numbers "
            "have 64 bits; set transport='float32'"
        )
    if why := unfit(method):
        others = ", ".join(name for name, kind in METHODS.items() if not unfit(kind()))
        raise ConfigError(
            f"secure_aggregation: {method.about.title} {why}; remove [secure_aggregation], or choose one of "
            f"the methods that fit: {others}"
        )


def unfit(method: Method) -> str | None:
    """Why the server of a method needs more than the weighted sum of updates; None where it does not."""
    egress = method.egress(Layout({}, {}))
    if method.about.local_only:
        return method.about.local_only
    if not method.merges_by_mean:
        return "makes more of the updates than their weighted sum"
    if method.sharing.head_at_site:
        return "keeps heads at the sites, which a server could begin so that all sites but one learn nothing"
    if up := egress.going("up"):
        return f"also sends {', '.join(channel.name for channel in up)}, which would not be masked"
    if any(isinstance(w, tuple) and w[0] <= 0 for w in (egress.weight, egress.class_weight)):
        return "may give a site or a row the weight 0, so that a sum would be of fewer sites than it seems"
    masked = method.labels.view == "all" and method.labels.unknown == "masked"
    if masked and egress.class_weight != OWNED_CLASSES:
        return "sends rows of classes that a site has not trained, so that a sum would be of fewer sites"
    return None
