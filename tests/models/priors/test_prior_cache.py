"""suture.models.priors: a prior reads each image once."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import suture.models.priors as cache
from suture.core.errors import DataError
from suture.models.classifier import Preprocessing
from suture.models.priors import Prior, cached_features, freeze

N = 192
"""Three batches."""


class Counting(nn.Module):
    """The mean and the largest pixel of each image; notes how many it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(len(image))
        return torch.stack([image.mean((1, 2, 3)), image.amax((1, 2, 3))], dim=1)


@pytest.fixture
def prior() -> Prior:
    return freeze("counting", Counting(), 2, Preprocessing(8, False, 1, (0.0,), (1.0,)), "a test's")


def pixels(n: int = N) -> Tensor:
    return torch.randint(0, 256, (n, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def features(prior: Prior, images: Tensor, folder: Path | None) -> Tensor:
    return cached_features(prior, images, folder, "cpu", "alpha")


def seen(prior: Prior) -> int:
    assert isinstance(prior.network, Counting)
    return sum(prior.network.seen)


def test_features_of_another_user_are_refused(
    prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features(prior, pixels(), tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    for images in (pixels(), pixels(N + 1)):  # of its own entry, and of one that would take from it
        with pytest.raises(DataError, match=r"belongs to another user.*cache"):
            features(prior, images, tmp_path / "cache")


def test_an_image_is_read_once(prior: Prior, tmp_path: Path) -> None:
    found = features(prior, pixels(), tmp_path / "cache")
    torch.testing.assert_close(found, prior.features(pixels()))
    before = seen(prior)
    again = features(prior, pixels().clone(), tmp_path / "cache")
    assert torch.equal(again, found)
    assert again.dtype == torch.float32
    assert seen(prior) == before


def test_other_pixels_another_prior_and_other_threads_are_others(prior: Prior, tmp_path: Path) -> None:
    features(prior, pixels(), tmp_path)
    other = pixels()
    other[-1, 0, 7, 7] ^= 1
    features(prior, other, tmp_path)
    assert seen(prior) == N + cache.BATCH  # one of them is new
    features(replace(prior, digest="f" * 64), pixels(), tmp_path)
    torch.set_num_threads(2)
    features(prior, pixels(), tmp_path)
    torch.set_num_threads(1)
    assert seen(prior) == 3 * N + cache.BATCH
    assert len(list(tmp_path.iterdir())) == 4


def test_an_entry_takes_from_others_what_they_have(prior: Prior, tmp_path: Path) -> None:
    """Splits of other seeds, a table that has grown: the same bytes as computed alone, in any order."""
    first, second = pixels()[:128], pixels()[64:].flip(0)
    features(prior, first, tmp_path / "shared")
    features(prior, pixels()[100:170], tmp_path / "shared")
    before = seen(prior)
    found = features(prior, second, tmp_path / "shared")
    assert seen(prior) == before + cache.BATCH  # 22 images, in one batch
    features(prior, second, tmp_path / "alone")
    alone, shared = ({p.name: p for p in (tmp_path / kind).iterdir()} for kind in ("alone", "shared"))
    assert [path.read_bytes() for path in alone.values()] == [shared[name].read_bytes() for name in alone]
    torch.testing.assert_close(found, prior.features(second))
    before = seen(prior)
    features(prior, pixels().flip(0), tmp_path / "shared")
    assert seen(prior) == before


def test_nothing_is_taken_from_a_damaged_entry(
    prior: Prior, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features(prior, pixels(), tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    before = seen(prior)
    torch.testing.assert_close(features(prior, pixels()[1:], tmp_path), prior.features(pixels()[1:]))
    assert seen(prior) == before + 2 * N - 1
    assert f"{path} is damaged" in caplog.text
    assert path.exists()


def test_a_few_inputs_share_nothing(prior: Prior, tmp_path: Path) -> None:
    """The sums of a batch of another size may differ in their last digit."""
    features(prior, pixels()[:9], tmp_path)
    features(prior, pixels()[:10], tmp_path)
    assert seen(prior) == 9 + 10


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "strange"])
def test_a_damaged_entry_is_made_again(
    prior: Prior, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = features(prior, pixels(), tmp_path).clone()  # which is not mapped
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    if harm == "strange":
        other = tmp_path / "other"
        features(prior, pixels()[1:], other)
        next(other.iterdir()).rename(path)
        other.rmdir()
    else:
        path.write_bytes({"cut": data[:-9], "flip": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[harm])
    assert torch.equal(features(prior, pixels(), tmp_path), whole)
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_and_leaves_nothing(
    prior: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"'alpha'.*No space left.*set \[storage\] cache"):
        features(prior, pixels(), tmp_path)
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
        features(prior, pixels() // step, tmp_path)
        (new,) = set(tmp_path.iterdir()) - set(made)
        os.utime(new, (new.stat().st_atime - age, new.stat().st_mtime - age))
        made.append(new)
    features(prior, pixels(), tmp_path)  # used again: now the younger
    features(prior, pixels() // 4, tmp_path)
    assert made[0].exists()
    assert not made[1].exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_folder_nothing_is_kept(prior: Prior) -> None:
    for _ in range(2):
        features(prior, pixels(), None)
    assert seen(prior) == 2 * N
    assert features(prior, pixels(0), None).shape == (0, 2)


def test_a_long_pass_says_how_far_it_is(
    prior: Prior, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "PATIENCE", -1.0)
    with caplog.at_level(logging.WARNING):
        features(prior, pixels(), None)
    assert "site 'alpha': the prior has read 64 of 192 images" in caplog.messages
    assert "site 'alpha': the prior has read 192 of 192 images" in caplog.messages
