"""Clipping and noise on what a site sends, where it asks for them: local differential privacy of an update.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557.

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

with delta what a site changed of all that it was sent, taken as one vector, or the gradient that it sends.

The noise is a function of a secret of the site and of the clipped update. So a round that is repeated after
a crash has the same answer and spends nothing more, while any other update, be it of one patient more or of
another payload, has noise of its own. It is made of 256 bits by SHAKE: torch's generator has 2^32 seeds, and
who knows one number that the training did not change could try them all.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.files import atomic_write
from suture.protocol.messages import Payload, Update, rounded
from suture.protocol.privacy import PrivacyConfig


@dataclass(frozen=True)
class Noise:
    """What is done to an update.

    Attributes:
        clip: C, the largest L2 norm of what is sent.
        multiplier: z, the noise's standard deviation in units of C; 0 adds none.
    """

    clip: float
    multiplier: float = 0.0

    @classmethod
    def of(cls, config: PrivacyConfig) -> Noise | None:
        """What a site's configuration asks for, None for nothing."""
        return None if config.clip is None else cls(config.clip, config.noise)

    def apply(self, update: Update, received: Payload, secret: bytes) -> Update:
        """The update with its shared tensors and rows clipped together, and noise on each.

        Weights, scalars and measurements are not touched. A variance of batch norm that the noise made
        negative becomes 0.

        Args:
            received: what the site was sent, from which the change of weights is taken.
            secret: of the site and the experiment.

        Raises:
            ConfigError: the update has tensors that the noise does not cover.
        """
        _refuse_uncovered(update)
        gradient = update.kind == "gradient"
        sent = {**_named("shared", update.shared), **_named("head", update.head)}
        base = {} if gradient else {**_named("shared", received.shared), **_named("head", received.head)}
        deltas = {n: t.double() - base[n].double() if base else t.double() for n, t in sorted(sent.items())}
        norm = math.sqrt(sum(float(d.square().sum()) for d in deltas.values()))
        factor = min(1.0, self.clip / max(norm, 1e-300))
        clipped = {name: delta * factor for name, delta in deltas.items()}
        seed = _seed(secret, clipped)
        done = {}
        for name, delta in clipped.items():
            noise = gaussian(tuple(delta.shape), seed + name.encode()) if self.multiplier else 0.0
            changed = delta + noise * self.multiplier * self.clip
            told = (changed + base[name].double() if base else changed).to(sent[name].dtype)
            done[name] = told.clamp_min(0) if name.endswith(_VARIANCE) and not gradient else told
        return replace(update, shared=_group("shared", done), head=_group("head", done))


_VARIANCE = ".running_var"


def _refuse_uncovered(update: Update) -> None:
    tensors = [*update.shared.items(), *update.head.items()]
    stray = [*update.class_tensors, *(name for name, t in tensors if not t.is_floating_point())]
    if stray:
        raise ConfigError(
            f"[privacy] clip does not cover {min(stray)}, which this method sends besides weights; remove "
            "clip and noise, or take part in jobs of another method"
        )


def _named(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for name, tensor in tensors.items()}


def _group(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = ((name.partition("/"), tensor) for name, tensor in tensors.items())
    return {name: tensor for (of, _, name), tensor in found if of == group}


def _seed(secret: bytes, tensors: Mapping[str, Tensor]) -> bytes:
    """256 bits that nobody knows who lacks the secret, other ones for other tensors."""
    digest = hashlib.sha3_256(secret)
    for name, tensor in tensors.items():
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.digest()


def gaussian(shape: tuple[int, ...], seed: bytes) -> Tensor:
    """Standard normal numbers, float64, of a stream of bits that a seed determines.

    SHAKE256 (FIPS 202) makes 52 bits for each, the inverse of the normal distribution function the number.
    """
    count = math.prod(shape)
    bits = np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8") >> np.uint64(12)
    return torch.from_numpy(ndtri((bits + 0.5) * 2.0**-52)).reshape(shape)


def secret_of(folder: Path) -> bytes:
    """The secret of a site in one experiment: made once, kept in its folder, and never sent."""
    path = folder / "noise.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, secrets.token_bytes(32))
        path.chmod(0o600)
    return path.read_bytes()


def protected(
    update: Update,
    received: Payload,
    privacy: PrivacyConfig,
    losses: Collection[str],
    samples: int,
    folder: Path,
) -> Update:
    """The update as far as a site's [privacy] lets it leave.

    Args:
        losses: of its scalars, those that are losses.
        samples: that its losses rest on; with too few they are withheld.
        folder: of the experiment at the site.
    """
    noise, few = Noise.of(privacy), samples < privacy.min_loss
    told = {name: value for name, value in update.scalars.items() if not (few and name in losses)}
    shown = replace(
        update,
        train_loss=None if few else rounded(update.train_loss),
        scalars={name: rounded(value) for name, value in told.items()},
    )
    return noise.apply(shown, received, secret_of(folder)) if noise else shown


def epsilon(multiplier: float, rounds: int, delta: float) -> float:
    """What `rounds` updates under noise spend of local differential privacy, by opacus' accountant.

    Mironov. Rényi Differential Privacy. 2017. Local: whatever two data sets a site may have, its updates are
    so hard to tell apart. Two clipped updates differ by up to 2 C, so the noise counts half; every round
    counts (sampling rate 1).

    Raises:
        ImportError: opacus is not installed (``suture[dp]``).
    """
    from opacus.accountants import RDPAccountant  # importing it costs seconds, which only noise is worth

    accountant = RDPAccountant()
    accountant.history = [(multiplier / 2, 1.0, rounds)]
    return float(accountant.get_epsilon(delta))
