"""Methods for tests: settings that suit tiny networks, and one round outside of a federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from suture.learning.training import LocalTraining, SiteContext
from suture.methods import METHODS
from suture.methods.base import Method, RoundContext, local_round
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed
from suture_papers.metafl.inner_loop import INNER, ServerStep
from suture_papers.rare_classes.creff import ClassGradients
from suture_papers.rare_classes.federated_features import FederatedFeatures

_QUICK: dict[str, dict[str, Any]] = {
    "creff": {
        "class_gradients": ClassGradients(draws=2, images=2),
        "federated_features": FederatedFeatures(per_class=20),
    }
}
"""Hyperparameters that do fewer steps than by default, or that 18 images are enough for."""

NEW = Packed({}, {})


def train_round(
    method: Method, site: SiteContext, received: TaskData, ctx: RoundContext, state: Packed = NEW
) -> tuple[Update, dict[str, Tensor]]:
    """What the site sends and stores after a round from `state`."""
    return method.train(site, received, local_round(method, site, state, ctx))


def conformant(name: str) -> Method:
    """The method with a learning rate and batches at which a tiny network moves."""
    kind: Any = METHODS[name]
    if kind().labels.view != "target":
        return kind(local=LocalTraining(lr=1e-2, batch_size=8), **_QUICK.get(name, {}))  # type: ignore[no-any-return]
    method = kind(local=replace(INNER, lr=0.1, iterations=3), batches=1)
    return method if name == "fl" else replace(method, server=ServerStep(lr=1e-2))
