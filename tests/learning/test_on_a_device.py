"""What computes beside the steps of a method runs on a device, too; and predicting waits for it once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_site import LABELS, images_of, samples_of, small_site

from simulated_device import NAME, WAITS, Simulated, live_bytes
from suture.data.batch import Samples
from suture.learning import training
from suture.learning.losses import masked_bce
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    SiteContext,
    fit,
    on_known,
    predict,
)
from suture.models import ModelSpec
from suture.models.encoders import TextLSTM
from suture_papers.fedmas.pretraining import Pretraining, Trainer
from suture_results.finetuning import FineTuning, finetune
from suture_results.model_export.explanation import explain
from suture_results.prediction import Model

SPEC = ModelSpec("cnn", size=32)
LOSS = on_known(masked_bce)


def site(device: str, spec: ModelSpec = SPEC) -> SiteContext:
    made = small_site(20, spec, batch_size=8)
    made.model.to(device)
    return replace(made, device=torch.device(device))


def saved(device: str) -> Model:
    return Model(site(device).model.eval(), SPEC, SPEC.preprocessing, device)


@pytest.mark.parametrize(("kept", "waits"), [(2**20, 1), (1, 3), (16, 3), (17, 2), (33, 1)])
def test_predicting_waits_once_for_all_logits_that_its_memory_bears(
    kept: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 images of two classes in batches of 8: 16, 16 and 8 logits."""
    monkeypatch.setattr(training, "_LOGITS", kept)
    with Simulated():
        there = site(NAME)
        predict(there, samples_of(1, 32))  # copies the constants of the normalisation
        WAITS.clear()
        found = predict(there, samples_of(20, 32))
        assert WAITS.total() == waits
        assert torch.equal(found, predict(site("cpu"), samples_of(20, 32)))


@pytest.mark.complete
def test_a_saved_model_predicts_and_says_where_it_looks() -> None:
    images = images_of(3, 32)
    with Simulated():
        there, here = saved(NAME), saved("cpu")
        assert torch.equal(there(images), here(images))
        one, two = (explain(model, images[0, 0].numpy()) for model in (there, here))
    assert one.probabilities == two.probabilities
    for name in LABELS:
        assert (one.maps[name] == two.maps[name]).all()


@pytest.mark.parametrize(("width", "waits"), [(None, 1), (6, 0)])
def test_a_model_of_text_waits_only_for_the_longest_of_a_batch(
    width: int | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but its LSTM, for which torch takes a kernel that GPUs alone have."""
    monkeypatch.setattr(TextLSTM, "_read", lambda *given: given[1])
    network, tokens, length = TextLSTM(9, width=width), torch.arange(8).view(2, 4), torch.tensor([4, 2])
    here = network(tokens, length)
    with Simulated():
        network.to(NAME)
        inputs = tokens.to(NAME), length.to(NAME)
        WAITS.clear()
        there = network(*inputs)
        assert WAITS.total() == waits
        assert torch.equal(there.cpu(), here)


def test_fine_tuning_runs_there() -> None:
    how = FineTuning(runs=1, epochs=1, batch_size=4, test=0.3, start="fresh")
    data = samples_of(30, 32)
    one = Samples(data.inputs, data.y[:, :1], data.patients)
    with Simulated():
        there, here = (next(finetune("Mass", SPEC, {}, one, how, 1, device))[1] for device in (NAME, "cpu"))
    assert (there.train, there.test, len(there.auroc)) == (here.train, here.test, 1)


@pytest.mark.parametrize("color", [False, True])
def test_a_step_of_pretraining_waits_for_nothing(color: bool) -> None:
    spec = Pretraining(size=32, color=color, batch_size=8, queue=16)
    with Simulated():
        trainer = Trainer(images_of(16, 32, 3 if color else 1), spec, 1, NAME)
        WAITS.clear()
        loss = trainer.step(torch.arange(8))
        assert not WAITS
        assert loss.device.type == NAME


@pytest.mark.complete
def test_between_rounds_a_site_holds_its_model_alone() -> None:
    """With the gradients of its last step it would hold twice as much."""
    with Simulated():
        before = live_bytes()
        there = site(NAME)
        model = live_bytes() - before
        local = LocalTraining(batch_size=8, epochs=1)
        fit(there, LOSS, LocalRound(local, "average", 1, 1))
        assert model <= live_bytes() - before <= 1.01 * model
