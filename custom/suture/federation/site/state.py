"""The state of a site between rounds: how it is restored, and which of the model's tensors it provides.

A state has the site's local parameters under ``fixed/``, the rest of the model that the site trained under
``local/`` (where the method keeps local models), the optimiser state under ``optimiser/``, and what else the
method keeps under ``kept/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.seeds import seed_for
from suture.core.validation import OPEN, parse
from suture.data.config import TrainingConfig
from suture.federation.plan import Plan
from suture.federation.site.abstention import ComputationChanged, MissingState
from suture.federation.store import Rounds
from suture.learning.loss_scale import LOSS_SCALE
from suture.methods.base import Method
from suture.models import build
from suture.models.classifier import HEADS, Classifier, check_tensors, load_tensors, relabelled
from suture.models.heads import RowInit
from suture.protocol.egress import misfit
from suture.protocol.messages import Count, Labels, TaskData
from suture.protocol.packing import Packed

CLIENT_STATE, _FORMER = "kept/", "rows/"
"""What the names of a site's channels begin with in its state; and, in one of a former version, those with a
row for each class after that."""


@dataclass(frozen=True, config=OPEN)
class _Header:
    """The facts of a site's state; a site that has none yet has an empty one."""

    threads: int | None = None
    device: str | None = None
    precision: str | None = None
    compile: str | None = None
    labels: Labels = ()
    phase: str = ""
    round: Count = 0


def restored(states: Rounds, task: TaskData, training: TrainingConfig, site: str) -> Packed:
    """Read the newest state of a committed round, or the state of the round whose model is evaluated.

    Local parameters that the site does not hold yet are taken from the task.

    Raises:
        ComputationChanged: the state was made on another kind of device, in another precision, by a compiled
            backbone or not, or with another number of torch threads.
        ConfigError: another version of Suture wrote the state, or it is not one of a site.
    """
    found = states.newest(not_later_than=task.committed if task.task == "train" else task.round)
    state = found[1] if found else Packed({}, {})
    if found:
        parse(_Header, state.header, f"the state of round {found[0]} in {states.folder}")
    for key, now in training.computation.items():
        if (before := state.header.get(key, now)) != now:
            raise ComputationChanged(
                f"{site}: {key} was {before} in earlier rounds and is {now} now, which changes the "
                "results; set it back under [training] in suture.toml, or begin a new experiment"
            )
    sent = {f"fixed/{name}": tensor for name, tensor in task.fixed.items()}
    return replace(state, tensors=sent | dict(state.tensors))


def with_own_initialisation(task: TaskData, plan: Plan, site: str, labels: LabelSet) -> TaskData:
    """Return the task with the site's own random initialisation as local parameters, where `Share` says so.

    Args:
        labels: of the site's model.
    """
    share = plan.method.exchange.share
    if not task.fixed or share is None or share.init == "server":
        return task
    state = build(plan.model, labels, seed_for(plan.seed, site, "own"), pretrained=False).state_dict()
    return replace(task, fixed={name: state[name] for name in task.fixed})


def group(state: Packed, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a state whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): t for k, t in state.tensors.items() if k.startswith(prefix)}


def kept_by_method(state: Packed, method: Method, model: Classifier) -> dict[str, Tensor]:
    """Return what the method has kept, as it returned it: the optimiser state and its channels."""
    declared = method.egress(method.exchange.layout(model)).forms("site")
    kept = {k if k in declared else k.removeprefix(_FORMER): t for k, t in group(state, CLIENT_STATE).items()}
    return group(state, "optimiser/") | kept


def as_kept(keep: Mapping[str, Tensor], method: Method, model: Classifier) -> dict[str, Tensor]:
    """Return what a method keeps, as a state has it; see `kept_by_method`.

    Raises:
        ConfigError: the method keeps what it does not declare.
    """
    declared = method.egress(method.exchange.layout(model)).forms("site")
    moments = {*model.names, LOSS_SCALE}
    for name, tensor in keep.items():
        if name not in declared and name.rpartition("/")[0] not in moments:
            raise ConfigError(
                f"{method.about.title} keeps {name!r} at a site and does not declare it; add a "
                'Channel(..., way="site") to its egress'
            )
        if name in declared and (wrong := misfit(declared[name], tensor, len(model.labels))):
            raise ConfigError(
                f"{method.about.title} keeps {name!r} at a site, which is {wrong}; change the tensor, or the "
                "channel that its egress declares"
            )
    return {
        f"{CLIENT_STATE if k in declared else 'optimiser/'}{k}": t.detach().cpu() for k, t in keep.items()
    }


def fixed_tensors(
    task: TaskData, state: Packed, model: Classifier, method: Method, seed: int, start: RowInit = "random"
) -> dict[str, Tensor]:
    """Return the site's local parameters, with a row of the head for each class of the task.

    Args:
        start: of the row of a class that is new.

    Raises:
        MissingState: the site no longer holds some of them.
    """
    held, names = group(state, "fixed/"), method.exchange.local(model)
    missing = [name for name in names if name not in held]
    if missing:
        raise MissingState(f"the site no longer holds {missing[0]} and {len(missing) - 1} more tensors")
    return _with_rows({name: held[name] for name in names}, task, state, model, seed, start)


def check_channels(task: TaskData, model: Classifier, method: Method) -> None:
    """Check that the server sent the channels that the method declares.

    Raises:
        ConfigError: names the first tensor that is missing or has another form.
    """
    classes = len(task.labels)
    for name, form in method.egress(method.exchange.layout(model)).forms("down").items():
        if wrong := misfit(form, task.channels.get(name), classes):
            raise ConfigError(
                f"the server's {name} of round {task.round} is {wrong}; run the same version of suture on "
                "both sides"
            )


@contextmanager
def predicting(model: Classifier, method: Method, task: TaskData) -> Iterator[None]:
    """Make the received model the one that predicts, while it is measured; see `Method.predictor`."""
    others = method.predictor({**task.shared, **task.head}, task.channels)
    if not others:
        yield
        return
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in others}
    load_tensors(model, others)
    try:
        yield
    finally:
        load_tensors(model, before)


def local_model(
    task: TaskData, state: Packed, model: Classifier, method: Method, seed: int, start: RowInit = "random"
) -> dict[str, Tensor]:
    """Return the model that the site trained in the evaluated round; {} if it keeps none, or was absent."""
    trained = group(state, "local/")
    if not (method.exchange.keep_local and trained) or state.header.get("round") != task.round:
        return {}
    return _with_rows(trained, task, state, model, seed, start)


def _with_rows(
    tensors: Mapping[str, Tensor],
    task: TaskData,
    state: Packed,
    model: Classifier,
    seed: int,
    start: RowInit,
) -> dict[str, Tensor]:
    """Return the tensors with a row of the head, if it is among them, for each class of the task.

    Raises:
        ConfigError: they are not of this model.
    """
    head = {name: rows for name, rows in tensors.items() if name.startswith(HEADS)}
    before = tuple(state.header.get("labels", task.labels))
    expected = {}
    for name, tensor in model.state_dict().items():
        if head and name.startswith(HEADS):
            expected[name] = tensor.new_empty((len(before), *tensor.shape[1:]))
        elif name in tensors:
            expected[name] = tensor
    check_tensors(tensors, expected, f"the site's state of round {state.header.get('round')}")
    return {**tensors, **(relabelled(head, before, task.labels, seed, start) if head else {})}
