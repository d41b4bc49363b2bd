"""suture.learning.samples: images decoded once."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import suture.learning.samples as cache
from killing import forked
from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.images import ImageSource
from suture.data.table import Table
from suture.learning.samples import decode
from world import refused

N = 40


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Forty images of 4x4; image i is all i."""
    root = tmp_path / "images"
    root.mkdir()
    for i in range(N):
        Image.new("RGB", (4, 4), (i, i, i)).save(root / f"{i}.png")
    y = np.arange(N, dtype=np.float32)[:, None]
    names = tuple(f"{i}.png" for i in range(N))
    return Table(LabelSet(("Mass",)), names, tuple(f"p{i}" for i in range(N)), y, ("train",) * N, root)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def damage(table: Table, *images: int) -> None:
    for i in images:
        (table.root / f"{i}.png").write_bytes(b"damaged")


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("decoded again")


def test_images_come_in_the_order_of_the_table_as_the_caller_wants_them(table: Table, folder: Path) -> None:
    images, kept = decode(table.rows(np.array([3, 1, 39])), 4, False, folder)
    assert tuple(images.shape) == (3, 1, 4, 4)
    assert images.float().mean(dim=(1, 2, 3)).tolist() == [3, 1, 39]
    assert kept.images == ("3.png", "1.png", "39.png")
    images, _ = decode(table, 2, True, folder)
    assert tuple(images.shape) == (N, 3, 2, 2)
    assert images[7].unique().tolist() == [7]


@pytest.mark.parametrize("packed", [False, True])
def test_the_second_time_nothing_is_decoded_unless_an_image_has_changed(
    packed: bool, table: Table, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
            archive.add(table.root, arcname="images")
        table = replace(table, root=tmp_path / "all.tar.gz")
    first, _ = decode(table, 4, False, folder)
    images = first.clone()
    first.zero_()  # does not reach the disk
    with monkeypatch.context() as patch:
        patch.setattr(cache, "read_all", refuse)
        if packed:
            patch.setattr(ImageSource, "_index", property(refuse))
        assert decode(table, 4, False, folder)[0].equal(images)
        for size, color in ((2, False), (4, True)):
            with pytest.raises(AssertionError):
                decode(table, size, color, folder)
    if not packed:
        (path,) = folder.glob("*.npy")
        np.testing.assert_array_equal(np.load(path), images.numpy())
        Image.new("L", (4, 4), 200).save(table.root / "5.png")
        assert decode(table, 4, False, folder)[0][5].unique().tolist() == [200]


def test_unreadable_images_are_left_out_and_told(
    table: Table, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(table, 0, 17)
    for _ in range(2):  # decoded, then from the cache
        with caplog.at_level(logging.WARNING):
            images, kept = decode(table, 4, False, folder, max_faults=0.05, site="alpha")
        assert len(images) == len(kept) == 38
        assert images.float().mean(dim=(1, 2, 3)).tolist() == kept.y[:, 0].tolist()
        assert "site 'alpha': 2 images left out: 0.png, 17.png" in caplog.text
        caplog.clear()


def test_too_many_unreadable_images_are_an_error_and_leave_nothing(table: Table, folder: Path) -> None:
    damage(table, 3, 4)
    (table.root / "9.png").unlink()
    for faults in (0.05, 0.5, 0.05):  # a cache of a more tolerant day is not trusted blindly
        if faults == 0.5:
            assert list(folder.iterdir()) == []
            assert len(decode(table, 4, False, folder, max_faults=faults)[1]) == N - 3
            continue
        with refused("'alpha'", "3 of 40", "5%", "'3.png'", "partial = true", by=DataError):
            decode(table, 4, False, folder, max_faults=faults, site="alpha")
    damage(table, *range(N))
    with refused("40 of 40", by=DataError):
        decode(table, 4, False, folder, max_faults=1.0)
    with pytest.raises(DataError):
        decode(table.rows(np.array([], dtype=np.intp)), 4, False, folder)


@pytest.mark.parametrize(
    ("module", "function"), [(os, "replace"), (os, "fsync"), (cache, "write_json"), (cache, "_header")]
)
def test_a_full_disk_is_told_and_leaves_nothing(
    table: Table, folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, function, full)
        with refused("'alpha'", "[storage] cache", by=DataError):
            decode(table, 4, False, folder, site="alpha")
    assert list(folder.iterdir()) == []
    images, _ = decode(table, 4, False, folder, site="alpha")
    assert len(images) == N


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("*.npy", lambda data: data[:-100]),
        ("*.npy", lambda data: data[:-1] + b"\xff"),
        ("*.npy", lambda _: b""),
        ("*.json", lambda _: None),
        ("*.json", lambda _: b"{"),
        ("*.json", lambda _: b'["sha256"]'),
    ],
    ids=["cut", "flipped", "empty", "no seal", "bad seal", "strange seal"],
)
def test_a_damaged_entry_is_made_again(
    table: Table, folder: Path, file: str, content: Callable[[bytes], bytes | None]
) -> None:
    whole = decode(table, 4, False, folder)[0].clone()
    (images,), (path,) = folder.glob("*.npy"), folder.glob(file)
    data, changed = images.read_bytes(), content(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    again, _ = decode(table, 4, False, folder)
    assert again.equal(whole)
    assert images.read_bytes() == data


def test_an_entry_of_another_user_is_refused_and_a_link_replaced(
    table: Table, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that all may write, it could have any pixels, with a seal that fits."""
    decode(table, 4, False, folder)
    [path] = folder.glob("*.npy")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        with refused("user", by=DataError):
            decode(table, 4, False, folder)
    path.symlink_to(path.rename(path.with_name("other")))
    decode(table, 4, False, folder)
    assert not path.is_symlink()
    (folder.parent / "file").touch()
    with refused(folder.parent / "file", by=DataError):
        decode(table, 4, False, folder.parent / "file")


TRIES = int(os.environ.get("SUTURE_CACHE_TRIES", "15"))


@pytest.mark.complete
def test_makers_of_one_entry_never_take_it_from_one_another(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two make it, and a third fails: it tolerates no damaged image, or is killed."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed: no power fails here
    damage(table, 3)
    table, draw, lost = table.rows(np.arange(8)), random.Random(0), []
    for attempt in range(TRIES):
        folder, (ready, go) = tmp_path / str(attempt), os.pipe()

        def make(max_faults: float, go: int = go, ready: int = ready, folder: Path = folder) -> None:
            os.close(go)
            os.read(ready, 1)  # until every copy of the other end is closed: all begin at once
            _make(table, folder, max_faults)

        makers = [forked(partial(make, faults)) for faults in (0.5, 0.5, 0.0)]
        os.close(go)
        if attempt % 2:
            time.sleep(draw.uniform(0, 0.02))
            os.kill(makers[-1], signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) for maker in makers]
        os.close(ready)
        with monkeypatch.context() as patched:
            patched.setattr(cache, "read_all", refuse)
            try:
                _make(table, folder)
            except AssertionError as error:
                lost.append((attempt, str(error)))
        if any(ends[:2]):
            lost.append((attempt, str(ends)))
    assert not lost, f"{len({attempt for attempt, _ in lost})} of {TRIES}: {lost[:3]}"


def _make(table: Table, folder: Path, max_faults: float = 0.5) -> None:
    images, _ = decode(table, 4, False, folder, max_faults)
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.complete
def test_what_a_killed_maker_left_goes_with_the_next_and_a_live_ones_stays(
    table: Table, folder: Path
) -> None:
    decode(table, 4, False, folder)
    (name,) = (path.name for path in folder.glob("*.npy"))
    for path in folder.iterdir():
        path.unlink()
    ended = forked(lambda: None)
    os.waitpid(ended, 0)
    dead, live = (folder / f".{name}.{pid}.0123abcd.tmp" for pid in (ended, os.getpid()))
    other = folder / f".of-another-entry.npy.{ended}.0123abcd.tmp"
    for path in (dead, live, other):
        path.mkdir()
    decode(table, 4, False, folder)
    assert [path.exists() for path in (dead, live, other)] == [False, True, True]


def test_another_depth_is_another_entry(tmp_path: Path, folder: Path) -> None:
    pixels = np.full((4, 4), 2048, dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    labels = LabelSet(("Mass",))
    table = Table(labels, ("deep.png",), ("p",), np.ones((1, 1), np.float32), ("train",), tmp_path)
    read = {bits: decode(replace(table, bits=bits), 4, False, folder)[0] for bits in (None, 12)}
    assert {bits: int(image[0, 0, 0, 0]) for bits, image in read.items()} == {None: 8, 12: 128}
    assert replace(table, bits=12).of("train").bits == 12, "the rows of a table keep it"
