"""What a site stores between rounds: the part of the model that is its own, and what the method keeps.

A state has the site's local parameters under ``fixed/``, the rest of the model that the site trained under
``local/`` (where the method keeps local models), the optimiser state under ``optimiser/``, and what else the
method keeps under ``kept/``. A frozen encoder, which no round changes, is a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError, SutureError
from suture.core.seeds import seed_for
from suture.core.validation import OPEN, parse
from suture.data.config import TrainingConfig
from suture.federation.plan import Plan
from suture.federation.site.abstention import ComputationChanged, MissingState
from suture.federation.store import Rounds
from suture.learning.optimisers import LOSS_SCALE
from suture.models import build
from suture.models.classifier import HEADS, Classifier, check_tensors, load_tensors, relabelled
from suture.protocol.egress import Shapes, shape_mismatch, strip_prefix
from suture.protocol.messages import Count, Labels, TaskData
from suture.protocol.packing import Packed, load, save


@validated(frozen=True, config=OPEN)
class _Header:
    """The facts of a site's state; a site that has none yet has an empty one."""

    threads: int | None = None
    device: str | None = None
    precision: str | None = None
    compile: str | None = None
    labels: Labels = ()
    phase: str = ""
    round: Count = 0


def own_part_of(state: Packed) -> Packed:
    """Return a state without the optimiser's, and what else the method keeps."""
    own = {name: tensor for name, tensor in state.tensors.items() if name.startswith("fixed/")}
    return Packed(own, state.header)


class States:
    """The states of a site in one experiment.

    Args:
        site: its name.
        folder: of the experiment at the site.
    """

    def __init__(self, site: str, plan: Plan, training: TrainingConfig, folder: Path) -> None:
        self._site, self._plan, self._method, self._training = site, plan, plan.method, training
        self.files = Rounds(folder)
        self._encoder = folder / "encoder.safetensors"
        self._encoder_of: Classifier | None = None  # the model that holds it

    def before(self, task: TaskData) -> Packed:
        """Return the newest state of a committed round, or the state of the round whose model is evaluated.

        Raises:
            ComputationChanged: the state was made on another kind of device, in another precision, by a
                compiled backbone or not, or with another number of torch threads.
            ConfigError: another version of Suture wrote the state, or it is not one of a site.
        """
        # A later state is of a round that the server has not committed: it counts as if it were not there.
        found = self.files.newest(not_later_than=task.committed if task.task == "train" else task.round)
        if not found:
            return Packed({}, {})
        number, state = found
        parse(_Header, state.header, f"the state of round {number} in {self.files.folder}")
        for key, now in self._training.computation.items():
            if (before := state.header.get(key, now)) != now:
                raise ComputationChanged(
                    f"{self._site}: {key} was {before} in earlier rounds and is {now} now, which changes the "
                    "results; set it back under [training] in suture.toml, or begin a new experiment"
                )
        return state

    def own_part(self, task: TaskData, state: Packed, model: Classifier) -> dict[str, Tensor]:
        """Return the site's local parameters, with a row of the head for each class of the task.

        Those that the site does not hold yet are taken from the task, or from the site's own random
        initialisation where `Share` says so.

        Raises:
            MissingState: the site no longer holds some of them.
        """
        self._fill_encoder(task, model)
        first = {name: tensor for name, tensor in task.fixed.items() if name not in model.frozen_names}
        share = self._method.sharing.share
        if first and share is not None and share.init == "own":
            seed = seed_for(self._plan.seed, self._site, "own")
            drawn = build(self._plan.model, model.labels, seed, pretrained=False).state_dict()
            first = {name: drawn[name] for name in first}
        # What the site has goes before what it is sent, which is only for a site that has nothing.
        held = {**first, **strip_prefix("fixed", state.tensors)}
        names = [name for name in self._method.sharing.local(model) if name not in model.frozen_names]
        missing = [name for name in names if name not in held]
        if missing:
            raise MissingState(f"the site no longer holds {missing[0]} and {len(missing) - 1} more tensors")
        return self._with_rows({name: held[name] for name in names}, task, state, model)

    def _fill_encoder(self, task: TaskData, model: Classifier) -> None:
        """Put the frozen encoder, if there is one, into the model: as received now, or once before.

        Raises:
            MissingState: the site no longer holds it.
            ConfigError: it is not of this model.
        """
        names = model.frozen_names - model.counters
        sent = {name: tensor for name, tensor in task.fixed.items() if name in names}
        if not names or (model is self._encoder_of and not sent):
            return
        if sent:
            save(self._encoder, Packed(sent, {}))
        else:
            try:
                sent = dict(load(self._encoder).tensors)
            except (SutureError, OSError) as error:
                raise MissingState(f"the site no longer holds the frozen encoder ({error})") from error
        check_tensors(sent, {n: t for n, t in model.state_dict().items() if n in names}, str(self._encoder))
        load_tensors(model, sent)
        self._encoder_of = model

    def local_model(self, task: TaskData, state: Packed, model: Classifier) -> dict[str, Tensor]:
        """Return the model that the site trained in the evaluated round; {} without one."""
        trained = strip_prefix("local", state.tensors)
        if not (self._method.sharing.keep_local and trained) or state.header.get("round") != task.round:
            return {}
        return self._with_rows(trained, task, state, model)

    def _with_rows(
        self, tensors: Mapping[str, Tensor], task: TaskData, state: Packed, model: Classifier
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
        if not head:
            return dict(tensors)
        plan = self._plan
        return {**tensors, **relabelled(head, before, task.labels, plan.seed, plan.model.row_init)}

    def kept_by_method(self, state: Packed) -> dict[str, Tensor]:
        """Return what the method has kept, as it returned it: the optimiser state and its channels."""
        return strip_prefix("optimiser", state.tensors) | strip_prefix("kept", state.tensors)

    def save(self, task: TaskData, model: Classifier, keep: Mapping[str, Tensor], **facts: Any) -> None:
        """Store the state of a trained round.

        Args:
            keep: what the method keeps.
            facts: for the header: the name of the phase, `Releases.mark` and `SiteMasks.mark`.

        Raises:
            ConfigError: the method keeps what it does not declare.
            OSError: the disk is full or cannot be written.
        """
        channels, moments = self._channels(model), {*model.names, LOSS_SCALE}
        title, kept = self._method.about.title, {}
        for name, tensor in keep.items():
            if name not in channels and name.rpartition("/")[0] not in moments:
                raise ConfigError(
                    f"{title} keeps {name!r} at a site and does not declare it; add a "
                    'Channel(..., way="site") to its egress'
                )
            if name in channels and (wrong := shape_mismatch(channels[name], tensor, len(model.labels))):
                raise ConfigError(
                    f"{title} keeps {name!r} at a site, which is {wrong}; change the tensor, or the "
                    "channel that its egress declares"
                )
            kept[f"{'kept' if name in channels else 'optimiser'}/{name}"] = tensor.detach().cpu()
        header = {**self._training.computation, "labels": list(task.labels), "round": task.round, **facts}
        state = Packed(self._method.sharing.stored(model) | kept, header)
        self.files.save(task.round, state, task.committed)

    def _channels(self, model: Classifier) -> Shapes:
        """Return the form of each tensor that the method declares to keep at a site."""
        return self._method.egress(self._method.sharing.layout(model)).forms("site")

    def retain(self, best: int) -> None:
        """Retain the state of the best round so far, where it holds a part of the selected model."""
        sharing = self._method.sharing
        if sharing.part_at_site or sharing.keep_local:
            earlier = self.files.latest(best)
            if earlier is not None:
                self.files.keep(earlier)
