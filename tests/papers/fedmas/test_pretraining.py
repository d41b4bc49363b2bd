"""MoCo v2: its loss, its queue, its views, a short training, and the command."""

from __future__ import annotations

import colorsys
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from small_hospitals import write_hospital
from suture.core.errors import ConfigError, DataError
from suture.data.batch import resample
from suture.learning.steps import NonFiniteLoss
from suture.models.priors import PriorSpec, load_prior, read_prior
from suture_papers.fedmas import pretraining as moco
from suture_papers.fedmas.pretraining import Pretraining, Queue, Trainer, Views, pretrain
from world import exit_of, refused, suture

SHORT = Pretraining(
    size=16,
    epochs=2,
    batch_size=8,
    lr=1.0,
    momentum=0.99,
    queue=64,
    views=Views(crop=0.6, flip=0.0, tone=0.1),  # sixteen steps are few
)


def scenes(n: int = 64, side: int = 16) -> torch.Tensor:
    """Images that differ in more than noise: uint8 ``[n, 1, side, side]``."""
    coarse = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 255
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear").to(torch.uint8)


def test_info_nce_by_hand() -> None:
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    queue = Queue(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), torch.tensor([7, 1, 8]))
    # Image 0 has three negative keys; image 1 has two, because the key of row 1 is its own.
    first = -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(2.0) + math.exp(0.0) + math.exp(1.6)))
    second = -math.log(math.exp(2.0) / (math.exp(2.0) + math.exp(0.0) + math.exp(1.2)))
    loss = moco.info_nce(queries, keys, queue, torch.tensor([0, 1]), temperature=0.5)
    assert loss.item() == pytest.approx((first + second) / 2, abs=1e-6)


def test_the_queue_keeps_the_newest() -> None:
    queue = Queue(torch.arange(5.0).view(5, 1), torch.arange(5))
    queue.push(torch.tensor([[10.0], [11.0]]), torch.tensor([10, 11]))
    assert queue.keys.flatten().tolist() == [10, 11, 0, 1, 2]
    queue.push(torch.arange(20.0, 27.0).view(7, 1), torch.arange(20, 27))
    assert queue.rows.tolist() == [20, 21, 22, 23, 24]


def test_the_key_encoder_follows() -> None:
    key, query = (moco.Encoder(torch.nn.Identity(), 2, 3) for _ in range(2))
    before = [p.detach().clone() for p in key.parameters()]
    moco.follow(key, query, 0.75)
    for was, now, other in zip(before, key.parameters(), query.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * was + 0.25 * other)


def test_a_key_comes_back_to_its_image_from_another_group() -> None:
    trainer = Trainer(scenes(), SHORT, 1, "cpu")
    trainer.key.eval()  # groups do not matter then
    rows = torch.arange(64)
    trainer.views = lambda rows: trainer.prepare(trainer.images[rows])  # type: ignore[method-assign]
    expected = trainer.key(trainer.prepare(trainer.images))
    torch.testing.assert_close(trainer.keys(rows), expected, rtol=0, atol=1e-5)


@pytest.mark.complete
def test_it_learns_and_the_same_seed_gives_the_same_tensors() -> None:
    state = torch.get_rng_state()
    one, again = (pretrain(scenes(), SHORT, 1) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.losses[-1] < one.losses[0] - 0.1
    assert one.losses == again.losses
    for name, tensor in one.network.state_dict().items():
        assert torch.equal(tensor, again.network.state_dict()[name])
    other = pretrain(scenes(), SHORT, 2)
    assert other.losses != one.losses


def test_a_batch_of_a_single_image_joins_the_one_before() -> None:
    trainer = Trainer(scenes(33), SHORT, 1, "cpu")
    assert [len(rows) for rows in trainer.batches()] == [8, 8, 8, 9]
    assert len(trainer.queue.keys) == 33  # as many as there are images


def test_what_cannot_be_trained() -> None:
    with refused("resnet8", "resnet18", by=ConfigError):
        Pretraining(backbone="resnet8")
    with refused("resnet18", "33", by=ConfigError):
        Pretraining(backbone="resnet18", size=32)
    with refused(by=DataError):
        pretrain(scenes(1), SHORT, 1)
    with refused("epoch 1, step 2", by=NonFiniteLoss):
        pretrain(scenes(), Pretraining(size=16, epochs=1, batch_size=16, lr=1e38), 1)


WORDS = ["--size", "16", "--epochs", "2"]
WORDS += ["--set", "batch_size=16", "--set", "lr=0.3", "--set", "momentum=0.9"]


@pytest.mark.complete
def test_the_command_writes_a_prior(tmp_path: Path) -> None:
    sites = [write_hospital(tmp_path / name, ("Mass",), 30, i) for i, name in enumerate(("a", "b"))]
    out = tmp_path / "made" / "prior"
    command = ["pretrain", *sites, *WORDS, "--out", out, "--licence", "CC0"]
    assert "36 images of 2 data sets" in suture(*command)
    assert sorted(p.name for p in out.iterdir()) == ["prior.json", "prior.safetensors"]
    facts = json.loads((out / "prior.json").read_text())
    assert facts["data"] == [{"dataset": "hospital", "images": 18}] * 2
    assert (facts["backbone"], facts["width"], facts["licence"]) == ("cnn", 128, "CC0")
    assert facts["final_loss"] == facts["losses"][-1]
    assert load_prior(PriorSpec("checkpoint", str(out))).digest == facts["digest"]
    with refused(out, "--overwrite", by=ConfigError):
        suture(*command)
    changed = ["--set", "views.crop=0.5", "--set", "views.flip=0"]
    suture(*command, "--overwrite", *changed)
    facts = json.loads((out / "prior.json").read_text())
    assert (facts["training"]["views"]["crop"], facts["training"]["views"]["flip"]) == (0.5, 0.0)
    weights = out / "prior.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), b"cut off"):
        weights.write_bytes(damaged)
        with refused("prior.json", by=ConfigError):
            read_prior(out)
    (out / "prior.json").unlink()
    with refused("prior.json", by=ConfigError):
        read_prior(out)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["views.crp=1"], "'crop'"),
        (["views.crop"], "views.crop"),
        (["views.crop=2"], "crop"),
        (["views=2", "views.crop=1"], "views.crop=1"),
        (["rate=2"], "rate"),
        (["a.b.c=1"], "a.b"),
    ],
)
def test_settings_that_do_not_exist_are_refused(words: list[str], named: str, tmp_path: Path) -> None:
    sets = [part for word in words for part in ("--set", word)]
    with refused(named, by=ConfigError):
        suture("pretrain", tmp_path / "suture.toml", *WORDS, "--out", tmp_path / "out", *sets)


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "epoch", Mock(side_effect=KeyboardInterrupt))
    config, out = write_hospital(tmp_path / "a", ("Mass",), 30, 0), tmp_path / "out"
    assert exit_of(monkeypatch, "pretrain", config, *WORDS, "--out", out) == 130
    assert not list(out.iterdir())


# Its views

OFF = Views(crop=1.0, flip=0.0)


def chances(monkeypatch: pytest.MonkeyPatch, tone: float = 0.0, gray: float = 0.0) -> None:
    """How likely an image has its colours jittered, and is made gray; constants of MoCo v2."""
    monkeypatch.setattr(moco, "TONE_CHANCE", tone)
    monkeypatch.setattr(moco, "GRAY_CHANCE", gray)


def images(channels: int = 1, n: int = 6) -> torch.Tensor:
    return torch.rand(n, channels, 16, 16, generator=torch.Generator().manual_seed(0)) * 255


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_is_the_only_source_of_randomness(channels: int) -> None:
    torch.manual_seed(0)
    one = moco.view(images(channels), seeded(), Views())
    torch.manual_seed(9)
    assert torch.equal(one, moco.view(images(channels), seeded(), Views()))
    assert not torch.equal(one, moco.view(images(channels), seeded(2), Views()))
    assert one.shape == (6, channels, 16, 16)
    assert 0 <= one.min() < one.max() <= 255


def test_a_crop_is_inside_the_image_and_of_the_area_that_is_asked() -> None:
    maps = moco.crops(500, seeded(), Views())
    sides, centre = maps[:, [0, 1], [0, 1]], maps[:, :, 2]
    assert (sides.abs() + centre.abs() <= 1 + 1e-6).all()
    area, ratio = sides.prod(1).abs(), (sides[:, 0] / sides[:, 1]).abs()
    assert 0.2 - 1e-6 <= area.min() < 0.25
    assert area.max() <= 1
    assert 3 / 4 - 1e-6 <= ratio.min() < ratio.max() <= 4 / 3 + 1e-6
    assert 0.4 < (sides[:, 0] < 0).float().mean() < 0.6
    torch.testing.assert_close(resample(images(), moco.crops(6, seeded(), OFF)), images(), rtol=0, atol=1e-3)


def test_brightness_and_contrast_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    chances(monkeypatch, tone=0.5)
    x = images(n=40) * 0.2 + 100  # far from both ends, where values are cut
    out = moco.color_jitter(x, seeded(), replace(OFF, tone=0.2))
    same = (out - x).abs().amax((1, 2, 3)) < 1e-3
    assert 0 < same.sum() < len(x)
    assert (out.mean((1, 2, 3)) / x.mean((1, 2, 3))).min() >= 0.8
    spread = (out.std((1, 2, 3)) / x.std((1, 2, 3)))[~same]
    assert spread.min() < 0.9 < 1.1 < spread.max()


def test_gray_has_no_colour_and_off_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(3)
    chances(monkeypatch)
    torch.testing.assert_close(moco.mixed(x, moco.colours(6, seeded(), OFF)), x, rtol=0, atol=0.1)
    chances(monkeypatch, gray=1.0)
    gray = moco.mixed(x, moco.colours(6, seeded(), OFF))
    torch.testing.assert_close(gray[:, 0], gray[:, 2], rtol=0, atol=0.1)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    torch.testing.assert_close(gray[:, :1], (x * weights).sum(1, keepdim=True), rtol=0, atol=0.1)


def test_hue_turns_red_towards_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    chances(monkeypatch, tone=1.0)
    red = torch.tensor([200.0, 60.0, 60.0]).view(1, 3, 1, 1).expand(50, 3, 2, 2)
    spec = replace(OFF, tone=0.0)
    out = moco.mixed(red, moco.colours(50, seeded(), spec))[:, :, 0, 0] / 255
    hues = torch.tensor([(colorsys.rgb_to_hsv(*pixel)[0] + 0.5) % 1 - 0.5 for pixel in out.tolist()])
    assert -0.16 < hues.min() < -0.05
    assert 0.05 < hues.max() < 0.16


def test_blur_is_torchvisions() -> None:
    from torchvision.transforms.functional import gaussian_blur

    x, sigma = images(3), torch.linspace(0.3, 1.0, 6)
    weights = moco.gaussian_kernels(sigma, 1.0)
    assert weights.shape == (6, 7)
    out = moco.blur(x, weights)
    inner = (slice(None), slice(3, -3), slice(3, -3))  # borders are continued in another way
    for i in range(6):
        expected = gaussian_blur(x[i], [7, 7], [float(sigma[i])] * 2)
        torch.testing.assert_close(out[i][inner], expected[inner], rtol=0, atol=1e-2)
