"""Features of a frozen encoder in place of its inputs: computed once for all runs that share a cache.

An entry is one file, named by a hash of everything that its numbers depend on: encoder, inputs, views, kind
of device, precision and threads. Features tell of patients: only the owner of the files may read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from suture.core.devices import device_name, moved
from suture.core.files import make_folder, writing
from suture.core.seeds import generator_for
from suture.data.augmentation import Augmentation, augment
from suture.data.batch import FEATURES, ROW, Samples
from suture.data.table import Split
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from suture.models.priors.feature_cache import SUFFIX, cached
from suture.protocol.packing import Packed, digest

FORMAT = 2
"""The format of an entry; a new number invalidates every older entry."""

FOLDER = "features"
"""Of the entries, in a party's cache."""

_AFTER = {"hidden", "dropout", "projection", "second_head", "neck", "head", "row_init", "name_vectors"}
_ELSEWHERE = {"weights", "norm_momentum", "train", "views", "adapters"}
"""Settings of a model on which the encoder's features do not depend: of what comes after it; and where its
tensors came from, which are hashed themselves, or what becomes of the features."""


class FeatureStore:
    """The features of a party's samples.

    Args:
        model: holds the encoder, on the device that computes.
        samples: with the encoder's inputs.
        cache: folder of `[storage] cache`.
        party: for messages.

    Attributes:
        samples: with `FEATURES` and `ROW` in place of their inputs.

    Raises:
        DataError: the features cannot be written (a full or read-only disk); nothing is then left of them.
    """

    def __init__(
        self, model: Classifier, spec: ModelSpec, samples: Mapping[Split, Samples], cache: Path, party: str
    ) -> None:
        self._spec, self._prepare, self._party = spec, spec.preprocessing, party
        self._folder, self._train = cache / FOLDER, samples.get("train")
        self._views: dict[Augmentation, Tensor] = {}
        state = model.state_dict()
        encoder = {name: state[name].cpu() for name in model.frozen_names - model.counters}
        settings = dataclasses.asdict(spec) | {"preprocessing": dataclasses.asdict(self._prepare)}
        facts = {name: value for name, value in settings.items() if name not in _AFTER | _ELSEWHERE}
        self._encoder = digest(Packed(encoder, facts))
        make_folder(cache)
        with writing(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
        self.samples = {split: self._read(model, part) for split, part in samples.items()}

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
            self._views[augmentation] = self._viewed(model, self._train, augmentation)
        drawn = torch.randint(count, (len(here),), generator=noise)
        return self._views[augmentation][here, drawn].to(rows.device)

    def _read(self, model: Classifier, part: Samples) -> Samples:
        """Return samples as they are read without augmentation."""

        def features(rows: slice) -> Tensor:
            return self._encoded(model, part, rows)

        found = self._entry(model, part, (len(part), model.encoding), features, "as it is")
        return dataclasses.replace(part, inputs={FEATURES: found, ROW: torch.arange(len(part))})

    def _viewed(self, model: Classifier, train: Samples, augmentation: Augmentation) -> Tensor:
        """Return the features of all views of the training images, ``[n, views, d]``."""
        count = self._spec.views

        def features(rows: slice) -> Tensor:
            noises = [generator_for(0, "view", number, rows.start) for number in range(count)]
            views = [self._encoded(model, train, rows, augmentation, noise).cpu() for noise in noises]
            return torch.stack(views, dim=1)

        how = {**dataclasses.asdict(augmentation), "views": count}
        return self._entry(model, train, (len(train), count, model.encoding), features, how)

    @torch.no_grad()
    def _encoded(
        self,
        model: Classifier,
        part: Samples,
        rows: slice,
        augmentation: Augmentation | None = None,
        noise: torch.Generator | None = None,
    ) -> Tensor:
        model.backbone.eval()
        device = model.head.weight.device
        inputs = {name: moved(tensor[rows], device) for name, tensor in part.inputs.items()}
        if "image" in inputs:
            inputs["image"] = self._prepare(inputs["image"])
            if augmentation and noise:
                inputs["image"] = augment(inputs["image"], noise, augmentation, std=self._prepare.std)
        return model.encode(inputs)

    def _entry(
        self,
        model: Classifier,
        part: Samples,
        shape: tuple[int, ...],
        features: Callable[[slice], Tensor],
        how: object,
    ) -> Tensor:
        device, precision = device_name(model.head.weight.device), str(model.amp_dtype)
        facts = [FORMAT, self._encoder, how, device, precision, torch.get_num_threads()]
        key = digest(Packed(dict(part.inputs), {"of": facts}))[:32]

        return cached(self._folder / f"{key}{SUFFIX}", shape, features, self._party, "the encoder")
