"""A site whose job is aborted stops within one step, whatever it computes, and keeps nothing of the task."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import METHOD
from torch.nn.modules.module import register_module_forward_hook

from rounds import conformant, context_of
from suture.core.errors import Aborted
from suture.data.batch import abortable
from suture.federation.loop import Loop, federate
from suture.learning.training import predict
from suture.methods import METHODS
from suture.models import ModelSpec
from suture.models import priors as feature_cache
from suture.models.classifier import Classifier
from suture_synthetic.trial import Trial

SMALL = ModelSpec("cnn", size=16, weights="random")
TRAINING = sorted(name for name, kind in METHODS.items() if not kind.about.local_only)
STEP = 4
"""Passes of a step at most: a method may compare the model with a teacher, on several views of a batch."""


class Abort:
    """A signal that triggers when it is looked at for the nth time; 0 for never.

    Attributes:
        looks: how often it was looked at.
        passes: of whole models since the last look, and the largest number of them so far.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.looks, self.passes, self.most = at, 0, 0, 0

    def __call__(self) -> bool:
        self.looks += 1
        self.passes = 0
        return self.looks == self.at

    def count(self, module: Any, *_: object) -> None:
        if isinstance(module, Classifier):
            self.passes += 1
            self.most = max(self.most, self.passes)

    @contextmanager
    def over(self) -> Iterator[None]:
        hook = register_module_forward_hook(self.count)
        try:
            with abortable(self):
                yield
        finally:
            hook.remove()


def trial_of(name: str) -> Trial:
    method = conformant(name)
    label_type = "multilabel" if method.labels.view == "target" else method.labels.types[0]
    return Trial(method, SMALL, label_type)


@pytest.mark.parametrize("name", TRAINING)
def test_every_method_looks_at_the_signal_in_each_step_and_stops(name: str) -> None:
    with trial_of(name) as trial:
        trial.payload("alpha")
        whole = Abort()
        with whole.over():
            expected = trial.answer("alpha").packed
    assert whole.looks > 1
    assert 1 <= whole.most <= STEP, whole.most
    middle = (whole.looks + 1) // 2
    for at in (1, middle, whole.looks) if name == "fedlsm" else (middle,):
        with trial_of(name) as trial:
            trial.payload("alpha")
            before = files(trial)
            abort = Abort(at)
            with abort.over(), pytest.raises(Aborted):
                trial.answer("alpha")
            assert abort.looks == at
            assert files(trial) == before, "no state, no kept answer, no line of the ledger, no error"
            again = trial.answer("alpha").packed
            assert all(torch.equal(t, again.tensors[k]) for k, t in expected.tensors.items())


def files(trial: Trial) -> dict[str, int]:
    """The files of all sites with their sizes; not locks, caches, or what a site fixes or receives once."""
    return {
        str(path.relative_to(trial.folder)): path.stat().st_size
        for path in trial.folder.rglob("*")
        if path.is_file() and not re.search("lock|counts.json|encoder|/cache/", str(path))
    }


def test_evaluation_stops_at_each_batch() -> None:
    with trial_of("surgical") as trial:
        site = trial.sites["alpha"]
        context = replace(context_of(site, trial.payload("alpha")), batch_size=2)
        for batch in (1, 2, 5):
            abort = Abort(3 * (batch - 1) + 1)  # images, labels and the mask of each batch are moved
            with abort.over(), pytest.raises(Aborted):
                predict(context, context.samples["train"])
            assert abort.most == min(batch - 1, 1)


@pytest.mark.parametrize("stored", [False, True])
def test_features_of_a_prior_stop_at_each_batch(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prior:
        width, digest, passes = 2, "0", 0

        def features(self, images: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return torch.zeros(len(images), 2)

    monkeypatch.setattr(feature_cache, "BATCH", 4)
    prior: Any = Prior()
    images = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
    with abortable(Abort(3)), pytest.raises(Aborted):
        feature_cache.cached_features(prior, images, tmp_path if stored else None, "cpu", "alpha")
    assert prior.passes == 2
    assert not list(tmp_path.iterdir())


def test_images_stop_being_decoded(tmp_path: Path, tiny: Any) -> None:
    site = tiny(METHOD).sites()["alpha"]
    with Abort(2).over(), pytest.raises(Aborted):
        _ = site.trainer.data
    assert not list(tmp_path.rglob("*.npy"))
    assert len(site.trainer.data[1]["train"])


def test_a_run_whose_server_is_aborted_commits_nothing_more() -> None:
    with trial_of("surgical") as trial:
        with abortable(Abort(5)), pytest.raises(Aborted):
            federate(trial.server, Loop(trial.sites))
        assert trial.history() == []
