"""Features of a frozen encoder in place of its inputs: computed once for all runs that share a cache.

They depend on encoder, input, view, kind of device, precision and threads, and on nothing else: an image has
the same views in every split and at every site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from suture.core.runtime import device_name, generator_for
from suture.data.batch import FEATURES, ROW, Augmentation, Samples, Source, augment, moved
from suture.data.table import Split
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from suture.models.priors import cache, digests, key
from suture.protocol.packing import Packed, digest

_FORMAT = 3
"""The format of an entry; a new number invalidates every older entry."""

_AFTER = {"hidden", "dropout", "projection", "second_head", "neck", "head", "row_init", "name_vectors"}
_ELSEWHERE = {"weights", "norm_momentum", "train", "views", "adapters"}
"""Settings of a model on which the encoder's features do not depend: of what comes after it; and where its
tensors came from, which are hashed themselves, or what becomes of the features."""


class FeatureStore:
    """The features of a party's samples.

    Args:
        model: holds the encoder, on the device that computes.
        samples: with the encoder's inputs.
        folder: of the features; see `StorageConfig`.
        party: for messages.

    Attributes:
        samples: with `FEATURES` and `ROW` in place of their inputs.

    Raises:
        DataError: the features cannot be written (a full or read-only disk); nothing is then left of them.
    """

    def __init__(
        self, model: Classifier, spec: ModelSpec, samples: Mapping[Split, Samples], folder: Path, party: str
    ) -> None:
        self._spec, self._prepare, self._party = spec, spec.preprocessing, party
        self._folder, self._train = folder, samples.get("train")
        self._views: dict[Augmentation, Tensor] = {}
        state = model.state_dict()
        encoder = {name: state[name].cpu() for name in model.frozen_names - model.counters}
        settings = dataclasses.asdict(spec) | {"preprocessing": dataclasses.asdict(self._prepare)}
        facts = {name: value for name, value in settings.items() if name not in _AFTER | _ELSEWHERE}
        self._encoder = digest(Packed(encoder, facts))
        self._of = {split: digests(part.inputs) for split, part in samples.items()}
        self.samples = {split: self._read(model, split, part) for split, part in samples.items()}

    def view(
        self, model: Classifier, augmentation: Augmentation, rows: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return one of the kept views of each of some training images.

        Args:
            augmentation: of the views, which are computed when they are first asked for.
            rows: numbers of the images ``[n]``.
            noise: draws the view.

        Returns:
            features ``[n, d]``, on the device of `rows`.
        """
        here, count = rows.cpu(), self._spec.views
        if self._train is None or "image" not in self._train.inputs:
            return self.samples["train"].inputs[FEATURES][here].to(rows.device)
        if augmentation not in self._views:
            self._views[augmentation] = self._view(model, self._train, augmentation)
        drawn = torch.randint(count, (len(here),), generator=noise)
        return self._views[augmentation][here, drawn].to(rows.device)

    def _read(self, model: Classifier, split: Split, part: Samples) -> Samples:
        """Return samples as they are read without augmentation."""

        def features(rows: Tensor) -> Tensor:
            return self._encode(model, part, rows)

        found = self._entry(model, split, (len(part), model.encoding), features, "as it is")
        return dataclasses.replace(part, inputs={FEATURES: found, ROW: torch.arange(len(part))})

    def _view(self, model: Classifier, train: Samples, augmentation: Augmentation) -> Tensor:
        """Return the features of all views of the training images, ``[n, views, d]``."""
        count, names = self._spec.views, [digest.tobytes().hex() for digest in self._of["train"]]

        def features(rows: Tensor) -> Tensor:
            views = []
            for number in range(count):
                noise = [generator_for(0, "view", number, names[row]) for row in rows]
                views.append(self._encode(model, train, rows, augmentation, noise).cpu())
            return torch.stack(views, dim=1)

        how = {**dataclasses.asdict(augmentation), "views": count}
        return self._entry(model, "train", (len(train), count, model.encoding), features, how)

    @torch.no_grad()
    def _encode(
        self,
        model: Classifier,
        part: Samples,
        rows: Tensor,
        augmentation: Augmentation | None = None,
        noise: Source = (),
    ) -> Tensor:
        model.backbone.eval()
        device = model.head.weight.device
        inputs = {name: moved(tensor[rows], device) for name, tensor in part.inputs.items()}
        if "image" in inputs:
            inputs["image"] = self._prepare(inputs["image"])
            if augmentation:
                inputs["image"] = augment(inputs["image"], noise, augmentation, std=self._prepare.std)
        return model.encode(inputs)

    def _entry(
        self,
        model: Classifier,
        split: Split,
        shape: tuple[int, ...],
        features: Callable[[Tensor], Tensor],
        view: object,
    ) -> Tensor:
        device, precision = device_name(model.head.weight.device), str(model.amp_dtype)
        how = key("encoder", _FORMAT, self._encoder, view, device, precision, torch.get_num_threads())
        return cache(self._folder, how, self._of[split], shape, features, self._party, "the encoder")
