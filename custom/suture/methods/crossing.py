"""Which tensors of a model cross in each round, and which are sent once and then stay at the site."""

from __future__ import annotations

from suture.methods.contract import Method
from suture.models.classifier import HEADS, Classifier
from suture.models.norm import counters, shared_names


def crossing(model: Classifier, method: Method) -> tuple[str, ...]:
    """Names of the tensors outside the head that cross each round, sorted."""
    return () if method.personal == "model" else shared_names(model, method.batch_norm)


def staying(model: Classifier, method: Method) -> tuple[str, ...]:
    """Names of the tensors that a site receives once and then keeps, sorted.

    They are batch norm where it is not averaged, and what is personal.
    """
    head = {name for name in model.state_dict() if name.startswith(HEADS)}
    away = set(crossing(model, method)) | counters(model) | (head if method.personal == "nothing" else set())
    return tuple(sorted(set(model.state_dict()) - away))
