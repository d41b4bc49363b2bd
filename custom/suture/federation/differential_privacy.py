"""Local differential privacy of updates: clipping and noise at the sites that request them.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557.

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

where delta is the change of all parameters that the site has received, as one vector, or its gradient.

The noise is a function of a secret of the site and of the clipped update. So a round that is repeated after
a crash has the same answer and spends nothing more, while any other update, of one more patient or of
another payload, has different noise. SHAKE derives it from 256 bits: torch's generator has 2^32 seeds, which
anyone who knows one unchanged parameter could try one after the other.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.files import atomic_write, make_folder
from suture.protocol.messages import Payload, Update, rounded
from suture.protocol.privacy import PrivacyConfig
from suture.protocol.records import Round


@dataclass(frozen=True)
class Noise:
    """Clipping and noise of an update.

    Attributes:
        clip: C, the largest L2 norm of what a site sends.
        multiplier: z, the noise's standard deviation in units of C; 0 adds none.
    """

    clip: float
    multiplier: float = 0.0

    @classmethod
    def of(cls, config: PrivacyConfig) -> Noise | None:
        """Return what a site's configuration requests; None where it requests nothing."""
        return None if config.clip is None else cls(config.clip, config.noise)

    def apply(self, update: Update, received: Payload, secret: bytes) -> Update:
        """Return the update with its shared tensors and rows clipped together, and noise on each.

        Weights, scalars and metrics are unchanged. A batch norm variance that the noise has made negative
        becomes 0.

        Args:
            received: the payload relative to which the change of the parameters is computed.
            secret: of the site in this experiment.

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
            value = (changed + base[name].double() if base else changed).to(sent[name].dtype)
            done[name] = value.clamp_min(0) if name.endswith(_VARIANCE) and not gradient else value
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
    """Return 256 bits that only the secret and these tensors determine."""
    digest = hashlib.sha3_256(secret)
    for name, tensor in tensors.items():
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.digest()


def gaussian(shape: tuple[int, ...], seed: bytes) -> Tensor:
    """Return standard normal numbers, float64, that the seed determines.

    SHAKE256 (FIPS 202) gives 52 bits for each; the inverse normal distribution function maps them.
    """
    count = math.prod(shape)
    bits = np.frombuffer(hashlib.shake_256(seed).digest(8 * count), dtype="<u8") >> np.uint64(12)
    return torch.from_numpy(ndtri((bits + 0.5) * 2.0**-52)).reshape(shape)


def secret_of(folder: Path) -> bytes:
    """Return the secret of a site in one experiment: created once, stored in its folder, never sent."""
    path = folder / "noise.key"
    if not path.exists():
        make_folder(folder)
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
    """Return the update that may leave a site under its [privacy]: clipped, with noise, figures rounded.

    Args:
        received: the payload that the update answers.
        losses: names of the update's scalars that are losses.
        samples: number of samples behind the losses; below `min_loss` the losses are withheld.
        folder: of the experiment at the site.
    """
    noise, few = Noise.of(privacy), samples < privacy.min_loss
    scalars = {name: value for name, value in update.scalars.items() if not (few and name in losses)}
    shown = replace(
        update,
        train_loss=None if few else rounded(update.train_loss),
        scalars={name: rounded(value) for name, value in scalars.items()},
    )
    return noise.apply(shown, received, secret_of(folder)) if noise else shown


def epsilon(multiplier: float, rounds: int, delta: float) -> float:
    """Return the ε of local differential privacy after `rounds` updates under noise, by opacus' accountant.

    Mironov. Rényi Differential Privacy. 2017. The ε bounds how well updates tell any two data sets of a site
    apart. Two clipped updates differ by up to 2 C, so the noise counts half; every round counts (sampling
    rate 1).

    Raises:
        ImportError: opacus is not installed (``suture[dp]``).
    """
    from opacus.accountants import RDPAccountant  # importing it costs seconds, which only noise is worth

    accountant = RDPAccountant()
    accountant.history = [(multiplier / 2, 1.0, rounds)]
    return float(accountant.get_epsilon(delta))


def spent(protection: Mapping[str, Mapping[str, float]], history: Sequence[Round]) -> list[str]:
    """Say for each site that clips its updates or adds noise what its updates have spent of its privacy.

    Args:
        protection: clip, noise and delta of each protected site.
        history: the rounds of the run.
    """
    return [_spent(site, own, _updates(site, history)) for site, own in sorted(protection.items())]


def _updates(site: str, history: Sequence[Round]) -> int:
    """Count the updates that may have left a site, accepted or not: in every round without abstention."""
    return sum(line.sites[site].status != "abstained" for line in history if site in line.sites)


def _spent(site: str, own: Mapping[str, float], updates: int) -> str:
    clips = f"{site} clips its updates to a norm of {own['clip']:g}"
    if not own["noise"]:
        return f"{clips} and adds no noise."
    clips += f" and adds noise of {own['noise']:g} times that"
    try:
        value = epsilon(own["noise"], updates, own["delta"])
    except ImportError:
        return f"{clips}; install suture[dp] at the server to see what {updates} updates spend."
    return (
        f"{clips}: ε = {value:.3g} at δ = {own['delta']:g} over {updates} updates (local differential "
        "privacy per site update, sampling rate 1; not per patient; of tensors alone, not of counts and "
        "figures)."
    )
