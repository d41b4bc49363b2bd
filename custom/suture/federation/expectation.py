"""What a site may answer to a task: the server and the site's filter check against one expectation."""

from __future__ import annotations

from suture.core.privacy import PrivacyConfig
from suture.methods.base import Method
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import Labels, TaskData
from suture.protocol.precision import Transport


def expected_answer(
    method: Method,
    task: TaskData,
    egress: Egress,
    own: Labels = (),
    images: int = 0,
    limits: PrivacyConfig | None = None,
    *,
    transport: Transport = "float32",
) -> AllowedReply:
    """Return what one site may answer to a task.

    Args:
        egress: what the method declares of the tensors that are exchanged in each round; see `parts`. Each
            side passes that of its own model and never of a message's tensors, so that neither side can
            widen what the other side lets through. Before there is a model, of an empty layout.
        own: the classes that the site annotates, in its own spelling.
        images: number of training images that the site has announced.
        transport: the type in which the model's tensors travel in a round of training.
        limits: of the site; None at the server, which does not know them.
    """
    return AllowedReply(
        task.task,
        task.round,
        task.committed,
        task.split,
        task.labels,
        own,
        egress,
        images,
        method.sharing.keep_local,
        transport if task.task == "train" else "float32",
        limits,
        tuple(task.decisions),
        prior=method.sharing.prior is not None,
        mask=task.mask,
    )
