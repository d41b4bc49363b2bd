"""A site's half of a method in a job of FLARE's own workflow: the method trains what the script has received.

    site = LocalSite(name, "fedmas", SETTINGS, MODEL, labels, {"image": images}, y)
    while (received := receive(labels, images=len(y))) is not None:
        update = site.train(received)
        send(FLModel(params={**update.shared, **update.head}), update.labels, weight=update.weight)

A script may train in any other way: see `suture.flare.client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet, LabelType
from suture.core.runtime import repeatable
from suture.core.validation import parse
from suture.data.batch import Augmentation, Samples, columns
from suture.federation.plan import round_context
from suture.flare.components import contract
from suture.learning.training import SiteContext, predict
from suture.methods import method_class
from suture.methods.base import Method, local_round
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, load_tensors, split_state
from suture.models.priors import load_prior
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed


def network(
    labels: Sequence[str],
    spec: Mapping[str, Any],
    label_type: LabelType = "multilabel",
    seed: int = 1,
) -> Classifier:
    """Return the network of a job, as FLARE's recipe names it: ``{"class_path": "suture.sdk.network", ...}``.

    Args:
        labels: the classes of the rows of its layer ``head``, in their order.
        spec: as a job's ``[model]``, with `encoder` for its `name`, which FLARE would take for a component's.
        seed: of the initial values.

    Raises:
        ConfigError: there is no such encoder, or a setting does not fit.
    """
    return build(_spec_of(spec), LabelSet(tuple(labels), label_type), seed, pretrained=True)


def _spec_of(spec: Mapping[str, Any]) -> ModelSpec:
    values = {"name" if key == "encoder" else key: value for key, value in spec.items()}
    return parse(ModelSpec, values, "model")


class LocalSite:
    """The method's half at a site, with the site's own part of the model and of the optimiser.

    Both live as long as the script. There is no validation part: a phase that keeps its best epoch needs one.

    Args:
        name: of the site; with `seed` it seeds the order of the data and their augmentation.
        method: its name, as the job's `MethodAggregator` has it.
        settings: of the method, the same.
        spec: of the model, as `network` has it.
        labels: the classes that the site annotates, the columns of `y`.
        inputs: what the model reads: under ``image`` uint8 ``[n, channels, size, size]``; or under ``tokens``
            int32 ``[n, l]``, with ``length`` int64 ``[n]``.
        y: labels ``[n, c]``, NaN where unknown.
        label_type: as the aggregator has it.
        augmentation: of the images; by default none.
        device: of torch.
        seed: of the job.

    Attributes:
        accuracy: of the model as received, on these data: the share of known labels that it predicts.

    Raises:
        ConfigError: there is no such method or model, or a setting does not fit.
    """

    def __init__(
        self,
        name: str,
        method: str,
        settings: Mapping[str, Any],
        spec: Mapping[str, Any],
        labels: Sequence[str],
        inputs: Mapping[str, Any],
        y: Any,
        *,
        label_type: LabelType = "multilabel",
        augmentation: Augmentation | None = None,
        device: str = "cpu",
        seed: int = 1,
    ) -> None:
        self.accuracy = 0.0
        self._method: Method = parse(method_class(method), settings, f"settings of {method}")
        self._name, self._spec, self._seed, self._device = name, _spec_of(spec), seed, device
        if (needed := self._method.adapted(self._spec)) != self._spec:
            raise ConfigError(f"{self._method.about.title} trains another model than the job's: {needed}")
        self._own = LabelSet(tuple(labels), label_type)
        tensors = {key: torch.as_tensor(value) for key, value in inputs.items()}
        self._samples = Samples(tensors, torch.as_tensor(y), tuple(map(str, range(len(y)))))
        self._augmentation = augmentation or Augmentation()
        prior = self._method.sharing.prior
        self._prior = load_prior(prior).to(device) if prior else None
        self._cache: dict[str, Tensor] = {}
        self._model: Classifier | None = None
        self._state = Packed({}, {})

    def train(self, received: FLModel) -> Update:
        """Train a round on what was received, and return what the site sends.

        Raises:
            SutureError: the method does not run on these data, or the loss is not finite.
        """
        context = self._context(received)
        model, labels = context.model, context.model.labels
        shared, head = split_state({n: contract.as_tensor(n, t) for n, t in received.params.items()})
        channels = {n: contract.as_tensor(n, t) for n, t in received.meta.get(contract.CHANNELS, {}).items()}
        load_tensors(model, self._method.sharing.put(model.state_dict(), {**shared, **head}))
        # FLARE's round 0 asks for the classes.
        number = received.current_round
        where = round_context(self._method, self._seed, received.total_rounds - 1, number)
        round_ = local_round(self._method, context, self._state, where)
        task = TaskData("train", number, labels=labels.names, shared=shared, head=head, channels=channels)
        with repeatable(self._device):
            self.accuracy = self._share_predicted(context)
            update, keep = self._method.train(context, task, round_)
        self._state = Packed(keep, {"labels": labels.names, "phase": where.phase.name, "round": number})
        return update

    def _context(self, received: FLModel) -> SiteContext:
        labels = LabelSet(tuple(received.meta[contract.LABELS]), self._own.label_type)
        if self._model is None:
            self._model = build(self._spec, labels, self._seed, pretrained=False).to(self._device)
        absent = self._method.labels.unknown == "negative"
        return SiteContext(
            self._name,
            self._model,
            {"train": columns(self._samples, self._own, labels, absent=absent)},
            self._spec.preprocessing,
            self._augmentation,
            torch.device(self._device),
            prior=self._prior,
            cache=self._cache,
            identified=torch.tensor([name in self._own for name in labels]),
        )

    def _share_predicted(self, context: SiteContext) -> float:
        """Return the share of known labels that the model predicts: a probability above a half is a yes."""
        logits, (y, known) = predict(context, context.samples["train"]), context.samples["train"].targets()
        if self._own.label_type == "multiclass":
            return (logits.argmax(1) == y.argmax(1)).float().mean().item()
        return ((logits > 0) == (y > 0))[known].float().mean().item()
