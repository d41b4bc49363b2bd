"""Frozen priors: their digest, what they do to images, published checkpoints, and the cache of features."""

from __future__ import annotations

import errno
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import suture.models.priors as cache
from suture.core.errors import ConfigError, DataError
from suture.core.runtime import seed_torch
from suture.data.batch import Preprocessing
from suture.models import MODELS, ModelSpec
from suture.models.priors import PRIORS, Prior, PriorSpec, cached_features, digest_of, freeze, load_prior
from suture_papers.fedmas.priors import VisionTower, moco_resnet50, rename_tensors
from world import refused

GRAY = ModelSpec("cnn", 16).preprocessing
TENSORS = {"a": torch.arange(4.0), "b": torch.tensor(3), "c": torch.ones(2, 3, dtype=torch.bfloat16)}


def cnn(color: bool = False) -> Prior:
    spec = ModelSpec("cnn", 16, color)
    with seed_torch(1):
        network, width = MODELS["cnn"].build(spec, None)
    return freeze("cnn", network, width, spec.preprocessing, "a test's")


def pixels(n: int = 3, channels: int = 1, side: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), generator=generator).to(torch.uint8)


def test_the_digest_is_of_tensors_and_preprocessing_not_of_their_order() -> None:
    digest = digest_of("cnn", TENSORS, GRAY)
    assert len(digest) == 64
    assert digest_of("cnn", dict(reversed(TENSORS.items())), GRAY) == digest
    others = [
        *(TENSORS | {name: t + 1} for name, t in TENSORS.items()),
        TENSORS | {"a": TENSORS["a"].view(2, 2)},
        TENSORS | {"a": TENSORS["a"].to(torch.float64)},
        {("d" if k == "a" else k): t for k, t in TENSORS.items()},
    ]
    found = {digest_of("cnn", tensors, GRAY) for tensors in others}
    found |= {digest_of("cnn", TENSORS, replace(GRAY, **c)) for c in ({"size": 17}, {"mean": (0.4,)})}
    found |= {digest_of("resnet18", TENSORS, GRAY)}
    assert len(found | {digest}) == len(others) + 4


def test_it_rests_whatever_is_said_to_its_network() -> None:
    prior = cnn()
    before = {name: t.clone() for name, t in prior.network.state_dict().items()}
    expected = prior.features(pixels())
    prior.network.train()
    out = prior.features(pixels())
    assert not out.requires_grad
    assert not any(p.requires_grad for p in prior.network.parameters())
    assert torch.equal(out, expected)
    assert all(torch.equal(t, before[name]) for name, t in prior.network.state_dict().items())
    weight = torch.ones(prior.width, requires_grad=True)  # a loss may be taken against its features
    (out * weight).sum().backward()
    assert torch.equal(weight.grad, out.sum(0))
    model = nn.Linear(2, 2)
    model.prior = prior
    assert set(model.state_dict()) == {"weight", "bias"}  # a model that holds it does not share its tensors


def test_images_of_any_size_and_kind() -> None:
    prior = cnn()
    gray, large = pixels(), pixels(channels=3, side=40)
    whole, kept = gray.float() / 255, gray.float() / 255
    torch.testing.assert_close(prior.features(whole), prior.features(gray), rtol=0, atol=1e-6)
    assert torch.equal(whole, kept)
    colourless = prior.features(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(colourless, prior.features(gray), rtol=0, atol=1e-5)
    reduced = F.interpolate(large.float(), (16, 16), mode="bilinear", antialias=True)
    luma = (reduced * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(prior.features(large), prior.features(luma / 255), rtol=0, atol=1e-5)
    colour = cnn(color=True)
    assert torch.equal(colour.features(gray), colour.features(gray.expand(-1, 3, -1, -1)))


def test_the_prior_of_the_package() -> None:
    state = torch.get_rng_state()
    prior = load_prior(PriorSpec("phantoms"))
    assert torch.equal(torch.get_rng_state(), state)
    assert prior.width == 128
    assert prior.preprocessing == ModelSpec("cnn", 64).preprocessing
    assert prior.digest == digest_of("cnn", prior.network.state_dict(), prior.preprocessing)
    assert prior.features(pixels(2, 1, 64)).std() > 0


@pytest.mark.complete
@pytest.mark.parametrize("name", ["phantoms", "efficientnet_lite0"])
def test_a_prior_at_another_size_is_another_prior(name: str) -> None:
    own, small = load_prior(PriorSpec(name)), load_prior(PriorSpec(name, size=48))
    assert small.preprocessing == replace(own.preprocessing, size=48)
    assert small.digest != own.digest
    assert load_prior(PriorSpec(name, size=own.preprocessing.size)).digest == own.digest
    images = pixels(2, 3, 96)
    reduced = F.interpolate(images.float(), (48, 48), mode="bilinear", antialias=True)
    torch.testing.assert_close(small.features(images), small.features(reduced / 255), rtol=0, atol=1e-4)
    assert (small.features(images) - own.features(images)).abs().max() > 1e-3
    assert (PRIORS[name].width, PRIORS[name].size) == (own.width, own.preprocessing.size)


def test_specifications_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("'moco_resnet50'", by=ConfigError):
        PriorSpec("moco_resnet")
    with refused("224 px", "prior.size", by=ConfigError):
        load_prior(PriorSpec("clip_vitb32", "a", size=96))
    for name, entry in PRIORS.items():
        for path in (None, str(tmp_path / "nowhere")):
            if entry.needs or path:
                with refused("nowhere" if entry.needs and path else "path", by=ConfigError):
                    load_prior(PriorSpec(name, path))
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with refused("suture[lite]", by=ConfigError):
        load_prior(PriorSpec("efficientnet_lite0"))


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)


@pytest.mark.complete
def test_moco_gives_torchvisions_features(tmp_path: Path) -> None:
    """The file of the authors: the query encoder with its projection, and what else was being trained."""
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(weights=None).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):  # else mean 0 and variance 1 would hide a mix-up
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    state = {f"module.encoder_q.{k}": t for k, t in theirs.state_dict().items() if not k.startswith("fc.")}
    state |= {f"module.encoder_q.fc.{i}.weight": torch.zeros(2, 2) for i in (0, 2)}
    state |= {"module.queue": torch.zeros(2, 2), "module.encoder_k.conv1.weight": torch.zeros(64, 3, 7, 7)}
    path = tmp_path / "moco_v2_800ep_pretrain.pth.tar"
    torch.save({"epoch": 800, "arch": "resnet50", "state_dict": state}, path)
    prior = load_prior(PriorSpec("moco_resnet50", str(path)))
    assert (prior.width, prior.preprocessing.size) == (2048, 224)
    theirs.fc = nn.Identity()
    x = pixels(2, 3, 224)
    with torch.no_grad():
        torch.testing.assert_close(prior.features(x), theirs((x / 255 - MEAN) / STD), rtol=0, atol=1e-5)
    assert moco_resnet50(path, 64).preprocessing.size == 64


def block(x: Tensor, t: dict[str, Tensor], name: str, heads: int = 12) -> Tensor:
    """A transformer block from its definition, with the checkpoint's words."""
    t = {key.removeprefix(name): value for key, value in t.items()}
    width = x.shape[-1]
    y = F.layer_norm(x, (width,), t["ln_1.weight"], t["ln_1.bias"])
    qkv = y @ t["attn.in_proj_weight"].T + t["attn.in_proj_bias"]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    seen = (q @ k.transpose(-1, -2) / math.sqrt(width // heads)).softmax(-1) @ v
    x = x + seen.transpose(1, 2).flatten(2) @ t["attn.out_proj.weight"].T + t["attn.out_proj.bias"]
    y = F.layer_norm(x, (width,), t["ln_2.weight"], t["ln_2.bias"])
    y = y @ t["mlp.c_fc.weight"].T + t["mlp.c_fc.bias"]
    return x + (y * torch.sigmoid(1.702 * y)) @ t["mlp.c_proj.weight"].T + t["mlp.c_proj.bias"]


def test_clips_encoder_is_its_definition() -> None:
    torch.manual_seed(0)
    width, at = 768, "transformer.resblocks.0."
    shapes = {"class_embedding": (width,), "positional_embedding": (5, width), "proj": (width, 512)}
    shapes |= {"conv1.weight": (width, 3, 32, 32)}
    for layer, (rows, columns) in {
        "attn.in_proj_": (3 * width, width),
        "attn.out_proj.": (width, width),
        "mlp.c_fc.": (4 * width, width),
        "mlp.c_proj.": (width, 4 * width),
    }.items():
        shapes |= {f"{at}{layer}weight": (rows, columns), f"{at}{layer}bias": (rows,)}
    norms = ("ln_pre", "ln_post", f"{at}ln_1", f"{at}ln_2")
    shapes |= {f"{norm}.{k}": (width,) for norm in norms for k in ("weight", "bias")}
    t = {name: torch.randn(shape) * 0.03 + ("ln_" in name) for name, shape in shapes.items()}
    x = torch.randn(2, 3, 64, 64)
    patches = F.conv2d(x, t["conv1.weight"], stride=32).flatten(2).transpose(1, 2)
    tokens = torch.cat([t["class_embedding"].expand(2, 1, -1), patches], 1) + t["positional_embedding"]
    tokens = block(F.layer_norm(tokens, (width,), t["ln_pre.weight"], t["ln_pre.bias"]), t, at)
    expected = F.layer_norm(tokens[:, 0], (width,), t["ln_post.weight"], t["ln_post.bias"]) @ t["proj"]
    tower = VisionTower(layers=1, size=64).eval()
    tower.load_state_dict(rename_tensors(t))
    with torch.no_grad():
        torch.testing.assert_close(tower(x), expected, rtol=0, atol=1e-4)


@pytest.mark.complete
def test_files_that_are_not_the_published_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    for content, named in (
        ({"state_dict": {"conv1.weight": torch.ones(1)}}, "module.encoder_q.*"),
        ({"state_dict": {"module.encoder_q.conv1.weight": torch.ones(1)}}, "conv1.weight"),
        ([torch.ones(1)], "list"),
    ):
        torch.save(content, path)
        with refused("x.pth", named, by=ConfigError):
            moco_resnet50(path)
    clip = tmp_path / "x.safetensors"
    for name, named in (("vision_model.x", "visual.*"), ("visual.conv1.weight", "CLIP")):
        save_file({name: torch.ones(1)}, clip)
        with refused("x.safetensors", named, by=ConfigError):
            load_prior(PriorSpec("clip_vitb32", str(clip)))
    for junk, name in ((path, "moco_resnet50"), (clip, "clip_vitb32")):
        junk.write_bytes(b"junk")
        with refused(junk.name, by=ConfigError):
            load_prior(PriorSpec(name, str(junk)))


N = 192
"""Three batches."""


class Counting(nn.Module):
    """The mean and the largest pixel of each image; notes how many it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, image: Tensor) -> Tensor:
        self.seen += len(image)
        return torch.stack([image.mean((1, 2, 3)), image.amax((1, 2, 3))], dim=1)


@pytest.fixture
def prior() -> Prior:
    return freeze("counting", Counting(), 2, Preprocessing(8, False, 1, (0.0,), (1.0,)), "a test's")


def many(n: int = N) -> Tensor:
    return pixels(n, side=8)


def features(prior: Prior, images: Tensor, folder: Path | None) -> Tensor:
    return cached_features(prior, images, folder, "cpu", "alpha")


def seen(prior: Prior) -> int:
    assert isinstance(prior.network, Counting)
    return prior.network.seen


def test_an_image_is_read_once_in_an_entry_of_its_own_user(
    prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    found = features(prior, many(), folder)
    torch.testing.assert_close(found, prior.features(many()))
    before = seen(prior)
    again = features(prior, many().clone(), folder)
    assert torch.equal(again, found)
    assert again.dtype == torch.float32
    assert seen(prior) == before
    for _ in range(2):
        features(prior, many(), None)  # without a folder nothing is kept
    assert seen(prior) == before + 2 * N
    assert features(prior, many(0), None).shape == (0, 2)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    for images in (many(), many(N + 1)):  # of its own entry, and of one that would take from it
        with refused("cache", by=DataError):
            features(prior, images, folder)


def test_other_pixels_another_prior_and_other_threads_are_others(prior: Prior, tmp_path: Path) -> None:
    features(prior, many(), tmp_path)
    other = many()
    other[-1, 0, 7, 7] ^= 1
    features(prior, other, tmp_path)
    assert seen(prior) == N + cache.BATCH  # one of them is new
    features(replace(prior, digest="f" * 64), many(), tmp_path)
    torch.set_num_threads(2)
    features(prior, many(), tmp_path)
    torch.set_num_threads(1)
    assert seen(prior) == 3 * N + cache.BATCH
    assert len(list(tmp_path.iterdir())) == 4


def test_an_entry_takes_from_others_what_they_have(prior: Prior, tmp_path: Path) -> None:
    """Splits of other seeds, a table that has grown: the same bytes as computed alone, in any order."""
    first, second = many()[:128], many()[64:].flip(0)
    features(prior, first, tmp_path / "shared")
    features(prior, many()[100:170], tmp_path / "shared")
    before = seen(prior)
    found = features(prior, second, tmp_path / "shared")
    assert seen(prior) == before + cache.BATCH  # 22 images, in one batch
    features(prior, second, tmp_path / "alone")
    alone, shared = ({p.name: p for p in (tmp_path / kind).iterdir()} for kind in ("alone", "shared"))
    assert [path.read_bytes() for path in alone.values()] == [shared[name].read_bytes() for name in alone]
    torch.testing.assert_close(found, prior.features(second))
    before = seen(prior)
    features(prior, many().flip(0), tmp_path / "shared")
    assert seen(prior) == before
    # A few inputs share nothing: sums of a batch of another size may differ in their last digit.
    for n in (9, 10):
        features(prior, many()[:n], tmp_path / "few")
    assert seen(prior) == before + 9 + 10


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "strange"])
def test_a_damaged_entry_is_made_again(
    harm: str, prior: Prior, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = features(prior, many(), tmp_path).clone()  # which is not mapped
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    if harm == "strange":
        other = tmp_path / "other"
        features(prior, many()[1:], other)
        next(other.iterdir()).rename(path)
        other.rmdir()
    else:
        path.write_bytes({"cut": data[:-9], "flip": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[harm])
    assert torch.equal(features(prior, many(), tmp_path), whole)
    assert str(path) in caplog.text
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_taken_from_a_damaged_entry(
    prior: Prior, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features(prior, many(), tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    before = seen(prior)
    torch.testing.assert_close(features(prior, many()[1:], tmp_path), prior.features(many()[1:]))
    assert seen(prior) == before + 2 * N - 1
    assert str(path) in caplog.text
    assert path.exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with refused("'alpha'", " 0 MB", "[storage] cache", by=DataError):
        features(prior, many(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.complete
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    """400 MB, and as many taken from them, take less than 100 MB of a process's own: mapped pages can go."""
    code = """
import re, sys, torch
from pathlib import Path
from suture.models.priors import cache
import numpy as np
shape, most = (100_000, 1024), []
of = np.arange(200_000).view(np.uint8).reshape(-1, 16)
def used():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
def features(rows):
    most.append(used())
    return torch.full((len(rows), shape[1]), float(rows[0]))
before, folder = used(), Path(sys.argv[1])
found = cache(folder, "a", of, shape, features, "alpha", "it")
assert found[99_999, 0] == 99_968
grown = cache(folder, "a", of[1:], (99_999, 1024), features, "alpha", "it")
assert grown[99_998, 0] == 99_968
print(max(*most, used()) - before)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert all(path.stat().st_size > 400e6 for path in tmp_path.iterdir())
    assert int(done.stdout) < 100


def test_the_entries_that_were_not_used_for_longest_are_deleted(
    prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry has 192 rows of 2 numbers, a header of 128 bytes and 193 digests: 4,768 bytes."""
    monkeypatch.setattr(cache, "MOST_BYTES", 10_000)
    made = []
    for age, step in ((300, 1), (200, 2)):
        features(prior, many() // step, tmp_path)
        (new,) = set(tmp_path.iterdir()) - set(made)
        os.utime(new, (new.stat().st_atime - age, new.stat().st_mtime - age))
        made.append(new)
    features(prior, many(), tmp_path)  # used again: now the younger
    features(prior, many() // 4, tmp_path)
    assert [path.exists() for path in made] == [True, False]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_long_pass_says_how_far_it_is(
    prior: Prior, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "MESSAGE_PAUSE", -1.0)
    with caplog.at_level(logging.WARNING):
        features(prior, many(), None)
    assert ["64 of 192" in caplog.messages[0], "192 of 192" in caplog.messages[-1]] == [True, True]
    assert "'alpha'" in caplog.text
