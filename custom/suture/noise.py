"""Clipping and noise on what a site sends, where it asks for them: local differential privacy of an update.

    Dwork & Roth. The Algorithmic Foundations of Differential Privacy. 2014, App. A (the Gaussian mechanism);
    Geyer, Klein, Nabi. Differentially Private Federated Learning. arXiv:1712.07557.

    sent:  clip(delta) + N(0, (z C)^2),   clip(delta) = delta min(1, C / |delta|)

with delta what a site changed of all that it was sent, taken as one vector, or the gradient that it sends.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suture.measuring import rounded
from suture.messages import Payload, Update
from suture.privacy import PrivacyConfig


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

    def apply(self, update: Update, received: Payload, generator: torch.Generator | None = None) -> Update:
        """The update with its shared tensors and rows clipped together, and noise on each.

        Weight, scalars and measurements are not touched. What is no floating-point number passes as it is.

        Args:
            received: what the site was sent, from which the change of weights is taken.
            generator: by default one of a secret seed: noise that others can draw again protects nothing, so
                a run with noise cannot be repeated.
        """
        gradient = update.kind == "gradient"
        deltas = [
            {
                name: t.double() if gradient else t.double() - base[name].double()
                for name, t in sent.items()
                if t.is_floating_point()
            }
            for sent, base in ((update.shared, received.shared), (update.head, received.head))
        ]
        norm = torch.sqrt(
            sum((d.square().sum() for group in deltas for d in group.values()), torch.zeros(()))
        )
        factor = float(min(1.0, self.clip / max(float(norm), 1e-300)))
        source = generator or torch.Generator().manual_seed(secrets.randbits(63))
        shared, head = (
            self._sent(group, {} if gradient else base, sent, factor, source)
            for group, base, sent in zip(
                deltas, (received.shared, received.head), (update.shared, update.head), strict=True
            )
        )
        return replace(update, shared=shared, head=head)

    def _sent(
        self,
        deltas: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        sent: Mapping[str, Tensor],
        factor: float,
        source: torch.Generator,
    ) -> dict[str, Tensor]:
        done = dict(sent)
        for name, delta in deltas.items():
            noise = torch.randn(delta.shape, generator=source, dtype=torch.float64)
            changed = delta * factor + noise * self.multiplier * self.clip
            done[name] = (changed + base[name].double() if name in base else changed).to(sent[name].dtype)
        return done


def protected(update: Update, received: Payload, privacy: PrivacyConfig, images: int) -> Update:
    """The update as far as a site's [privacy] lets it leave.

    Args:
        images: that the site trains on; a loss over too few is withheld.
    """
    noise, told = Noise.of(privacy), update.train_loss
    shown = replace(
        update,
        train_loss=None if told is None or images < privacy.min_loss else rounded(told),
        scalars={name: rounded(value) for name, value in update.scalars.items()},
    )
    return noise.apply(shown, received) if noise else shown


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
