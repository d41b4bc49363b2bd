"""What a site may answer to a task: the server and the site's filter check against one expectation."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from suture.methods.base import Method
from suture.models.classifier import Layout
from suture.protocol.check import Expectation
from suture.protocol.messages import Labels, Payload
from suture.protocol.privacy import PrivacyConfig


def expected_answer(
    method: Method,
    task: Payload,
    shared: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    own: Labels = (),
    images: int = 0,
    limits: PrivacyConfig | None = None,
    *,
    half: bool = False,
) -> Expectation:
    """Return what one site may answer to a task.

    Each side passes the tensors of its own model and never those of a message, so that neither side can
    widen what the other side lets through.

    Args:
        shared, head: what is exchanged in each round of the model of this party; see `parts`. Empty before
            there is a model.
        own: the classes that the site annotates, in its own spelling.
        images: number of training images that the site has announced.
        half: whether the model's tensors travel in half precision; only those of a round of training do.
        limits: of the site; None at the server, which does not know them.
    """
    return Expectation(
        task.task,
        task.round,
        task.committed,
        task.split,
        task.labels,
        own,
        method.egress(Layout.of(shared, head)),
        images,
        method.keep_local,
        half and task.task == "train",
        limits,
        tuple(task.decisions),
    )
