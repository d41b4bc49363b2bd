"""Federated features: vectors on which the head has the gradients that sites measure on their images.

    Shang et al. Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
    Federated Features. IJCAI 2022.

    G_c      = mean over h of  (softmax(W h + b) - e_c) (h, 1)^T         [M, d+1], of features h of class c
    D(A, B)  = sum over the rows m of W of  1 - cos(A_m, B_m),  plus  1 - cos(A_b, B_b)
    V_c     <- V_c - eta grad D(G_c(V_c), mean over sites of G_c)        some steps from where V_c stands
    psi~     = a new head, trained on all V by cross-entropy

Rows of a head are ``[M, d + 1]`` here: the weights of each class and its bias. The server computes in double
precision, in which no finite gradient that a site sends overflows.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import LIMIT, STRICT

BATCH = 32
"""Features a step of SGD on the new head."""

TINY = 1e-6
"""In the divisor of a cosine."""

STEPS, RATE = 100, 0.1
"""Of SGD on the features, in each round."""

HEAD_EPOCHS, HEAD_RATE = 300, 0.01
"""Of SGD on the new head, in each round."""


@validated(frozen=True, config=STRICT)
class FederatedFeatures:
    """How the server makes features of the gradients, and a head of these.

    Attributes:
        per_class: number of features of each class.
    """

    per_class: Annotated[int, Field(ge=1, le=LIMIT)] = 100

    def matched(self, features: Tensor, classes: Tensor, rows: Tensor, target: Tensor) -> Tensor:
        """The features after the steps toward the gradients of the sites.

        Args:
            features: V_c ``[s, n, d]`` of the classes ``[s]``.
            rows: the head that the sites used, ``[M, d + 1]``.
            target: the mean of their gradients, ``[s, M, d + 1]``.
        """
        y = F.one_hot(classes, len(rows)).to(rows).unsqueeze(1)
        for _ in range(STEPS):
            features = features.detach().requires_grad_()
            away = distance(head_gradient(features, y, rows), target).sum()
            (slope,) = torch.autograd.grad(away, features)
            features = features - RATE * slope
        return features.detach()

    def retrained(self, features: Tensor, rows: Tensor, order: torch.Generator) -> Tensor:
        """A head of the classes that have features, trained from `rows`.

        Args:
            features: ``[s, n, d]``, of each of its classes.
            rows: where it begins, ``[s, d + 1]``.
            order: draws the batches.
        """
        s, n, d = features.shape
        x, y = features.reshape(s * n, d), torch.eye(s).to(features).repeat_interleave(n, dim=0)
        for _ in range(HEAD_EPOCHS):
            for batch in torch.split(torch.randperm(s * n, generator=order), BATCH):
                rows = rows - HEAD_RATE * head_gradient(x[batch], y[batch], rows)
        return rows


def head_gradient(features: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy by the rows of a head.

    Args:
        features: ``[..., n, d]``.
        y: one-hot labels ``[..., n, M]``, or one for all features of a class, ``[..., 1, M]``.
        rows: ``[M, d + 1]``.

    Returns:
        ``[..., M, d + 1]``.
    """
    h = F.pad(features, (0, 1), value=1.0)
    error = torch.softmax(h @ rows.T, dim=-1) - y
    return error.transpose(-2, -1) @ h / features.shape[-2]


def distance(one: Tensor, other: Tensor) -> Tensor:
    """D of gradients ``[..., M, d + 1]``: one minus the cosine, for each row of W and for b; ``[...]``."""
    of_rows = (1 - _cos(one[..., :-1], other[..., :-1])).sum(dim=-1)
    return of_rows + 1 - _cos(one[..., -1], other[..., -1])


def _cos(a: Tensor, b: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(dim=-1) / (norms + TINY)
