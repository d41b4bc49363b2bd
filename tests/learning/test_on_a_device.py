"""What computes beside the steps of a method runs on a device, too; and predicting waits for it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from simulated_device import NAME, OPERATIONS, WAITS, Simulated, live_bytes
from suture.core.labels import LabelSet
from suture.data.batch import STRONG, Augmentation, Samples, augment
from suture.federation.site.diagnostics import OPTIONS, compile_backbone
from suture.learning import training
from suture.learning.losses import masked_bce
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    SiteContext,
    activation_bytes,
    fit,
    on_known,
    predict,
    training_batches,
)
from suture.models import ModelSpec, build
from suture.models.encoders import TextLSTM
from suture_papers.fedmas.pretraining import Pretraining, Trainer
from suture_results.finetuning import FineTuning, finetune
from suture_results.model_export.explanation import explain
from suture_results.prediction import Model

SPEC = ModelSpec("cnn", size=32)
LABELS = LabelSet(("Edema", "Mass"))
LOSS = on_known(masked_bce)


def images(n: int, channels: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, channels, 32, 32), dtype=torch.uint8, generator=generator)


def samples(n: int) -> Samples:
    y = torch.arange(2 * n).view(n, 2).remainder(3).clamp(max=1).float()
    return Samples({"image": images(n)}, y, tuple(str(i) for i in range(n)))


def site(device: str) -> SiteContext:
    model = build(SPEC, LABELS, 1, pretrained=False).to(device)
    split = {"train": samples(20)}
    return SiteContext(
        "alpha", model, split, SPEC.preprocessing, Augmentation(), torch.device(device), batch_size=8
    )


def saved(device: str) -> Model:
    network = build(SPEC, LABELS, 1, pretrained=False).eval().to(device)
    return Model(network, SPEC, SPEC.preprocessing, device)


def test_predicting_waits_once_for_all_batches() -> None:
    with Simulated():
        there = site(NAME)
        predict(there, samples(1))  # copies the constants of the normalisation
        WAITS.clear()
        found = predict(there, samples(20))
        assert WAITS.total() == 1
        assert torch.equal(found, predict(site("cpu"), samples(20)))


@pytest.mark.parametrize(("kept", "waits"), [(1, 3), (16, 3), (17, 2), (32, 2), (33, 1), (40, 1)])
def test_no_more_logits_are_kept_there_than_its_memory_bears(
    kept: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 images of two classes in batches of 8: 16, 16 and 8 logits."""
    monkeypatch.setattr(training, "_LOGITS", kept)
    with Simulated():
        there = site(NAME)
        predict(there, samples(1))
        WAITS.clear()
        found = predict(there, samples(20))
        assert WAITS.total() == waits
        assert torch.equal(found, predict(site("cpu"), samples(20)))


@pytest.mark.complete
def test_a_saved_model_predicts_and_says_where_it_looks() -> None:
    with Simulated():
        there, here = saved(NAME), saved("cpu")
        assert torch.equal(there(images(3)), here(images(3)))
        pixels = images(1)[0, 0].numpy()
        one, two = (explain(model, pixels) for model in (there, here))
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
    data = samples(30)
    one = Samples(data.inputs, data.y[:, :1], data.patients)
    with Simulated():
        (_, there), (_, here) = (
            next(finetune("Mass", SPEC, {}, one, how, 1, device)) for device in (NAME, "cpu")
        )
    assert (there.train, there.test, len(there.auroc)) == (here.train, here.test, 1)


@pytest.mark.parametrize("color", [False, True])
def test_a_step_of_pretraining_waits_for_nothing(color: bool) -> None:
    spec = Pretraining(size=32, color=color, batch_size=8, queue=16)
    with Simulated():
        trainer = Trainer(images(16, 3 if color else 1), spec, 1, NAME)
        WAITS.clear()
        loss = trainer.step(torch.arange(8))
        assert not WAITS
        assert loss.device.type == NAME


@pytest.mark.complete
def test_memory_and_compiling_are_checked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "kernels", {"backend": "eager"})  # type: ignore[arg-type]
    with Simulated():
        assert activation_bytes(site(NAME), LOSS) == activation_bytes(site("cpu"), LOSS)
        compile_backbone(site(NAME), LOSS, "kernels")


def test_strong_views_of_large_images_take_no_more_operations() -> None:
    """The median filter works block by block for a CPU's cache; to a GPU each block is more operations."""
    found = []
    with Simulated():
        for side in (32, 300):
            pixels = torch.rand(16, 1, side, side, generator=torch.Generator().manual_seed(1))
            there = pixels.to(NAME)
            OPERATIONS.clear()
            seen = augment(there, torch.Generator().manual_seed(1), STRONG)
            found.append(OPERATIONS.total())
            assert torch.equal(seen.cpu(), augment(pixels, torch.Generator().manual_seed(1), STRONG))
    assert found[0] == found[1] < 500


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


@pytest.mark.parametrize("work", ["training", "predicting", "pretraining"])
def test_copies_of_large_images_are_not_waited_for(work: str) -> None:
    """A batch of 16 images of 96 px is 144 KiB, and the noise of a strong view more."""
    spec, g = replace(SPEC, size=96), torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (48, 1, 96, 96), dtype=torch.uint8, generator=g)
    data = Samples({"image": pixels}, torch.ones(48, 2), tuple(map(str, range(48))))
    with Simulated():
        model = build(spec, LABELS, 1, pretrained=False).to(NAME)
        where = torch.device(NAME)
        there = SiteContext("a", model, {"train": data}, spec.preprocessing, STRONG, where, batch_size=16)
        trainer = Trainer(pixels, Pretraining(size=96, batch_size=16, queue=16), 1, NAME)
        works: dict[str, Callable[[], object]] = {
            "training": lambda: list(training_batches(there, LocalTraining(batch_size=16), g, noise)),
            "predicting": lambda: predict(there, data),
            "pretraining": lambda: trainer.step(torch.arange(16)),
        }
        noise = torch.Generator().manual_seed(1)
        works[work]()  # copies the constants of the normalisation
        WAITS.clear()
        works[work]()
        assert WAITS.total() == (work == "predicting")
