"""The batches of an evaluation: large where images are small, and half as large where memory is full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from suture.core.labels import LabelSet
from suture.data.batch import Augmentation, Samples
from suture.learning.training import SiteContext, evaluation_batch, predict, retry_in_smaller_batches
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_results.prediction import open_model

LABELS = LabelSet(("Edema", "Mass"))


@pytest.mark.parametrize(
    ("side", "device", "size"),
    [
        (16, "cpu", 256),
        (64, "cpu", 256),  # 2^20 pixels
        (96, "cpu", 113),  # 2^20 / 9,216
        (224, "cpu", 20),  # 2^20 / 50,176
        (4096, "cpu", 1),
        (224, "cuda:1", 256),
    ],
)
def test_a_batch_on_the_cpu_has_a_mebipixel_at_most(side: int, device: str, size: int) -> None:
    assert evaluation_batch({"image": torch.empty(0, 3, side, side)}, device) == size


def test_documents_have_no_pixels() -> None:
    assert evaluation_batch({"tokens": torch.empty(0, 900)}, "cpu") == 256
    assert evaluation_batch({"tokens": torch.empty(0, 900)}, "cpu", most=64) == 64


def test_a_batch_that_does_not_fit_is_halved_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def compute(size: int, fits: int) -> int:
        tried.append(size)
        if size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return -size

    assert retry_in_smaller_batches(lambda size: compute(size, 50), 256) == -32
    assert tried == [256, 128, 64, 32]
    assert "batches of 32" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        retry_in_smaller_batches(lambda size: compute(size, 0), 3)
    assert tried[4:] == [3, 1]


def site_of(name: str, side: int, batch_size: int | None = None) -> SiteContext:
    spec = ModelSpec(name, size=side)
    model = build(spec, LABELS, 1, pretrained=False)
    device = torch.device("cpu")
    return SiteContext("site", model, {}, spec.preprocessing, Augmentation(), device, batch_size=batch_size)


def samples_of(n: int, side: int) -> Samples:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (n, 1, side, side), dtype=torch.uint8)
    return Samples({"image": image}, torch.zeros(n, 2), tuple(map(str, range(n))))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "side"), [("cnn", 64), ("resnet_small", 64), ("resnet18", 64), ("densenet121", 64)]
)
def test_predictions_do_not_depend_on_the_batch(name: str, side: int) -> None:
    samples = samples_of(11, side)
    whole = predict(site_of(name, side), samples)
    for size in (1, 3, 8):
        torch.testing.assert_close(predict(site_of(name, side, size), samples), whole, atol=1e-5, rtol=0)


def test_an_evaluation_goes_on_with_half_the_batch_where_memory_is_full() -> None:
    site, samples = site_of("cnn", 16, batch_size=8), samples_of(11, 16)
    expected = predict(site, samples)
    seen: list[int] = []

    def full(_: torch.nn.Module, given: tuple[dict[str, torch.Tensor]]) -> None:
        seen.append(len(given[0]["image"]))
        if seen[-1] > 3:  # a last batch of one row joins the batch before it
            raise torch.OutOfMemoryError("CUDA out of memory")

    site.model.register_forward_pre_hook(full)
    torch.testing.assert_close(predict(site, samples), expected, atol=1e-5, rtol=0)
    assert seen[:4] == [8, 4, 2, 2]


@pytest.mark.parametrize(("side", "images", "sizes"), [(16, 70, [64, 6]), (224, 41, [20, 20, 1])])
def test_files_are_predicted_in_batches_by_the_same_rule(
    side: int, images: int, sizes: list[int], tmp_path: Path
) -> None:
    spec = ModelSpec("cnn", size=side)
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "model", {})
    (tmp_path / "in").mkdir()
    for number in range(images):
        Image.new("L", (8, 8), number).save(tmp_path / "in" / f"{number}.png")
    model, seen = open_model(tmp_path / "model"), list[int]()
    expected = model.predict(tmp_path / "in", batch=7)

    def full(_: torch.nn.Module, given: tuple[dict[str, torch.Tensor]]) -> None:
        seen.append(len(given[0]["image"]))
        if seen[-1] > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")

    plain = model.network.register_forward_pre_hook(lambda _, given: seen.append(len(given[0]["image"])))
    model.predict(tmp_path / "in")
    assert seen == sizes
    plain.remove()
    model.network.register_forward_pre_hook(full)
    halved = model.predict(tmp_path / "in", batch=40)  # twice 20 in place of 40
    assert seen[len(sizes) :][:3] == [40, 20, 20]
    np.testing.assert_allclose(halved, expected, atol=1e-5)
