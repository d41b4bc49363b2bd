"""What a site keeps between rounds: how it is restored, and what of it the model is made of.

A state holds under ``fixed/`` the tensors that stay at the site, under ``local/`` the model that it trained
(where the method keeps local models) and under ``kept/`` what the method keeps, its optimiser's moments say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from suture.core.labels import LabelSet
from suture.core.seeds import seed_for
from suture.federation.plan import Plan
from suture.federation.site.abstain import MissingState, ThreadsChanged
from suture.federation.store import Rounds
from suture.methods.base import Method
from suture.methods.parameters import local_parameters
from suture.models import build
from suture.models.classifier import HEADS, Classifier, relabelled
from suture.protocol.messages import Payload
from suture.protocol.packing import Packed


def restored(states: Rounds, task: Payload, threads: int, site: str) -> Packed:
    """The newest state of a committed round, or that of the model to be measured.

    What was sent for good in this task fills up what the site does not hold.

    Raises:
        ThreadsChanged: the state was made with another number of torch threads.
    """
    found = states.newest(not_later_than=task.round if task.task == "evaluate" else task.committed)
    state = found[1] if found else Packed({}, {})
    if state.header.get("threads", threads) != threads:
        raise ThreadsChanged(
            f"{site} ran with {state.header['threads']} threads and now has {threads}; other thread counts "
            "give other sums: set it back, or begin a new experiment"
        )
    sent = {f"fixed/{name}": tensor for name, tensor in task.fixed.items()}
    return replace(state, tensors=sent | dict(state.tensors))


def own_beginning(task: Payload, plan: Plan, site: str, labels: LabelSet) -> Payload:
    """The payload; what is sent for good is the site's own initialisation, where the method shares so.

    Args:
        labels: of the model that the site is to hold.
    """
    share = plan.method.share
    if not task.fixed or share is None or share.init == "server":
        return task
    state = build(plan.model, labels, seed_for(plan.seed, site, "own"), pretrained=False).state_dict()
    return replace(task, fixed={name: state[name] for name in task.fixed})


def under(prefix: str, state: Packed) -> dict[str, Tensor]:
    """The tensors of one kind, by their names."""
    return {k.removeprefix(prefix): t for k, t in state.tensors.items() if k.startswith(prefix)}


def fixed(task: Payload, state: Packed, model: Classifier, method: Method, seed: int) -> dict[str, Tensor]:
    """What stays at the site: batch norm unless it is averaged, and what is personal.

    Raises:
        MissingState: the site no longer holds some of it.
    """
    held, names = under("fixed/", state), local_parameters(model, method)
    missing = [name for name in names if name not in held]
    if missing:
        raise MissingState(f"the site no longer holds {missing[0]} and {len(missing) - 1} more tensors")
    return _with_rows({name: held[name] for name in names}, task, state, seed)


def local(task: Payload, state: Packed, method: Method, seed: int) -> dict[str, Tensor]:
    """The model as the site had trained it in the measured round; {} if it keeps none, or was absent."""
    trained = under("local/", state)
    if not (method.keep_local and trained) or state.header.get("round") != task.round:
        return {}
    return _with_rows(trained, task, state, seed)


def _with_rows(tensors: Mapping[str, Tensor], task: Payload, state: Packed, seed: int) -> dict[str, Tensor]:
    """The tensors with a row of the head, if it is among them, for each class that is asked for."""
    head = {name: rows for name, rows in tensors.items() if name.startswith(HEADS)}
    before = tuple(state.header.get("labels", task.labels))
    return {**tensors, **(relabelled(head, before, task.labels, seed) if head else {})}
