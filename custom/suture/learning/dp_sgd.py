"""DP-SGD of a site: differential privacy of each of its training patients.

    Abadi et al. Deep Learning with Differential Privacy. CCS 2016, Algorithm 1.

Each step draws every patient independently with probability q (Poisson sampling), and one image of each
drawn patient; with the gradients g_i of these images

    g = ( sum_i g_i min(1, C / |g_i|) + N(0, (sigma C)^2) ) / B,    q = B / patients

goes to the job's optimiser. So a patient moves the sum by at most C, and what follows from it costs no
more.

An example is a batch of one image: a mean over the known labels of a batch would mix patients. A gradient
that is not finite counts as 0, since a failed round would tell of the patient. What an image undergoes at
random (views, dropout) is drawn from secret seeds: from the job's seed, the numbers of all others would
depend on whether a patient was drawn before them.

Noise and draws are computed in double precision, and updates are sent in single precision: attacks on the
lowest bits of floating-point numbers (Mironov 2012) are not covered. They come from the system's random
bytes, and never from a seed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.errors import ConfigError
from suture.data.batch import Batch
from suture.models.classifier import Classifier

if TYPE_CHECKING:
    from suture.learning.steps import Objective

Draw = Callable[[int], bytes]
"""Gives a number of random bytes; only tests use another one than the system's."""


def gaussian(shape: tuple[int, ...], draw: Draw = os.urandom) -> torch.Tensor:
    """Return standard normal numbers, float64: the inverse normal distribution function of 52 bits each."""
    from scipy.special import ndtri

    bits = np.frombuffer(draw(8 * math.prod(shape)), dtype="<u8") >> np.uint64(12)
    return torch.from_numpy(ndtri((bits + 0.5) * 2.0**-52)).reshape(shape)


def uniform(count: int, draw: Draw = os.urandom) -> torch.Tensor:
    """Return numbers that are uniform in [0, 1), of 53 bits each, ``[count]``, float64."""
    bits = np.frombuffer(draw(8 * count), dtype="<u8") >> np.uint64(11)
    return torch.from_numpy(bits * 2.0**-53)


_TOGETHER, _NUMBERS = 256, 2**26
"""Images whose gradients are in memory together at most, and numbers of these: 256 MiB."""


@dataclass(frozen=True)
class PatientPrivacy:
    """How a site trains with differential privacy of its patients.

    Attributes:
        clip: C, the largest norm of a patient's gradient, over all trained parameters.
        multiplier: sigma, the noise's standard deviation in units of C.
        patients: number of training patients as the site announces it, with noise; q follows from it, so that
            neither q nor the number of steps tells more.
        draw: the source of samples and noise.
    """

    clip: float
    multiplier: float
    patients: int
    draw: Draw = os.urandom

    def draws(self, patients: Sequence[str], rate: float, steps: int) -> Iterator[Tensor]:
        """Yield the rows of each step; a step may have none.

        Args:
            patients: of each row.
            rate: q, the probability that a step draws a patient.
        """
        rows: dict[str, list[int]] = {}
        for row, patient in enumerate(patients):
            rows.setdefault(patient, []).append(row)
        own = [rows[patient] for patient in sorted(rows)]
        for _ in range(steps):
            drawn = (uniform(len(own), self.draw) < rate).nonzero().squeeze(1).tolist()
            which = uniform(len(drawn), self.draw).tolist()
            picked = [own[i][int(u * len(own[i]))] for i, u in zip(drawn, which, strict=True)]
            yield torch.tensor(picked, dtype=torch.long)

    def step(
        self,
        model: Classifier,
        objective: Objective,
        optimiser: torch.optim.Optimizer,
        batch: Batch,
        expected: int,
    ) -> None:
        """Take a step of the optimiser by the noisy mean of the clipped gradients of a batch's images.

        Args:
            expected: B, the expected number of images of a batch.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trained.items()}
        numbers = sum(p.numel() for p in trained.values())
        size = min(_TOGETHER, max(1, _NUMBERS // max(numbers, 1)))
        for start in range(0, len(batch), size):
            gradients = example_gradients(model, objective, batch, slice(start, start + size))
            parts = [g.flatten(1).double().square().sum(1) for g in gradients.values()]
            norms = torch.stack(parts).sum(0).sqrt()
            factors = torch.where(norms.isfinite(), (self.clip / norms.clamp_min(1e-300)).clamp_max(1), 0.0)
            for name, gradient in gradients.items():
                safe = gradient.double().flatten(1).nan_to_num(0.0, 0.0, 0.0)
                total[name] += (factors @ safe).view_as(total[name])
        for name, parameter in trained.items():
            noise = self.multiplier * self.clip * gaussian(tuple(parameter.shape), self.draw)
            parameter.grad = ((total[name] + noise.to(parameter.device)) / expected).to(parameter.dtype)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def example_gradients(
    model: Classifier, objective: Objective, batch: Batch, rows: slice = slice(None)
) -> dict[str, Tensor]:
    """Return the gradients of the objective on each image alone.

    Returns:
        by trained parameter ``[n, ...]``.
    """
    from torch.func import functional_call, grad, vmap

    module = _Objective(model, objective)
    trained = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(values: dict[str, Tensor], inputs: Mapping[str, Tensor], y: Tensor, known: Tensor) -> Tensor:
        example = Batch({name: value[None] for name, value in inputs.items()}, y[None], known[None])
        objective_value: Tensor = functional_call(module, values, (example,))
        return objective_value

    examples = {name: value[rows] for name, value in batch.inputs.items()}, batch.y[rows], batch.known[rows]
    try:
        gradients = vmap(grad(loss), (None, 0, 0, 0), randomness="different")(trained, *examples)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        # A model may look at the numbers of an input, as a recurrent one at the length of a document.
        inputs, y, known = examples
        by_example = [
            grad(loss)(trained, {name: value[i] for name, value in inputs.items()}, y[i], known[i])
            for i in range(len(y))
        ]
        gradients = {name: torch.stack([one[name] for one in by_example]) for name in trained}
    return {name.removeprefix("model."): gradient for name, gradient in gradients.items()}


class _Objective(nn.Module):
    """An objective as a module, whose parameters can be replaced."""

    def __init__(self, model: Classifier, objective: Objective) -> None:
        super().__init__()
        self.model, self._of = model, objective

    def forward(self, batch: Batch) -> Tensor:
        """Return the objective on a batch, a scalar."""
        return self._of(self.model, batch)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse a model whose batch norm takes statistics of the batch, and so mixes patients.

    Raises:
        ConfigError: names the first such layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ConfigError(
                f"[privacy] epsilon: the batch norm {name} mixes the images of a batch, so no patient is "
                'protected. Set method.batch_norm = "frozen", model.train = "head", or choose a model '
                "without batch norm"
            )
