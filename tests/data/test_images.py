"""suture.data.images: folders and archives of images."""

from __future__ import annotations

import io
import os
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.decoding import decode_image
from suture.data.images import ImageSource, present, read_all
from suture.data.table import Table


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "PNG")
    return file.getvalue()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


IMAGES = {"images/a.png": png(1), "images/b.png": png(2), "images/sub/c.png": png(3)}


def laid_out(tmp_path: Path, layout: str) -> Path:
    if layout == "folder":
        for name, data in IMAGES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return tmp_path
    if layout == "archives":
        for i, (name, data) in enumerate(IMAGES.items()):
            tar(tmp_path / f"images_{i:03d}.tar.gz", {name: data})
        return tmp_path
    return tar(tmp_path / f"all.{layout}", {f"./{name}": data for name, data in IMAGES.items()})


@pytest.mark.parametrize("layout", ["folder", "tar", "tar.gz", "tgz", "archives"])
def test_an_image_is_found_by_path_and_by_base_name(tmp_path: Path, layout: str) -> None:
    with ImageSource(laid_out(tmp_path, layout)) as source:
        for i, name in enumerate(("images/a.png", "b.png", "./images/sub/c.png"), 1):
            assert name in source
            assert source.read(name, color=False).tolist() == [[i, i], [i, i]]
        assert "d.png" not in source
        with pytest.raises(DataError, match=r"'d\.png' is not in .*correct the table or \[data\] root"):
            source.read("d.png", color=False)


@pytest.mark.parametrize("layout", ["folder", "tar", "archives"])
def test_many_are_read_at_once_and_each_fault_is_kept(tmp_path: Path, layout: str) -> None:
    root = laid_out(tmp_path, layout)
    with ImageSource(root) as source:
        results = dict(read_all(source, ["c.png", "gone.png", "a.png"], partial(decode_image, color=True)))
    np.testing.assert_array_equal(results[0], np.full((2, 2, 3), 3))
    assert isinstance(results[1], DataError)
    np.testing.assert_array_equal(results[2], np.full((2, 2, 3), 1))


def test_an_archive_is_read_forwards(tmp_path: Path) -> None:
    with ImageSource(laid_out(tmp_path, "archives")) as source:
        names = ["c.png", "a.png", "b.png"]
        assert sorted(names, key=source.position) == ["a.png", "b.png", "c.png"]


def test_a_base_name_of_two_images_is_not_guessed(tmp_path: Path) -> None:
    root = tar(tmp_path / "t.tar", {"x/a.png": png(1), "y/a.png": png(2)})
    with ImageSource(root) as source:
        assert source.read("y/a.png", color=False)[0, 0] == 2
        assert "a.png" not in source
        with pytest.raises(DataError, match=r"has 2 images 'a\.png'; write the path"):
            source.raw("a.png")


def test_a_path_goes_before_a_base_name(tmp_path: Path) -> None:
    root = tar(tmp_path / "t.tar", {"x/a.png": png(1), "a.png": png(2)})
    with ImageSource(root) as source:
        assert source.read("a.png", color=False)[0, 0] == 2


def test_a_member_added_twice_counts_once_and_last(tmp_path: Path) -> None:
    root = tar(tmp_path / "t.tar", {"a.png": png(1)})
    with tarfile.open(root, "a") as archive:
        info = tarfile.TarInfo("a.png")
        info.size = len(png(2))
        archive.addfile(info, io.BytesIO(png(2)))
    with ImageSource(root) as source:
        assert source.read("a.png", color=False)[0, 0] == 2


@pytest.mark.parametrize(("name", "keep"), [("t.tar", 700), ("t.tar.gz", 60), ("t.tar", 0), ("t.tgz", 0)])
def test_a_broken_archive_is_named(tmp_path: Path, name: str, keep: int) -> None:
    rng = np.random.default_rng(0)
    root = tar(tmp_path / name, {"a.png": rng.bytes(2000), "b.png": rng.bytes(2000)})
    root.write_bytes(root.read_bytes()[:keep])
    with (
        ImageSource(root) as source,
        pytest.raises(DataError, match=f"{root} cannot be read: .*fetch it again"),
    ):
        source.raw("a.png")


def test_a_root_that_is_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for root in (tmp_path / "none", tmp_path / "notes.txt"):
        with pytest.raises(DataError, match=r"correct \[data\] root"):
            ImageSource(root)


@pytest.mark.parametrize("layout", ["folder", "tar"])
def test_the_stamp_changes_with_the_files(tmp_path: Path, layout: str) -> None:
    root = laid_out(tmp_path, layout)
    names = ("a.png", "b.png")
    with ImageSource(root) as source:
        before = source.stamp(names)
        assert ImageSource(root).stamp(names) == before
    file = root / "images/b.png" if layout == "folder" else root
    os.utime(file, ns=(1, 1))
    assert ImageSource(root).stamp(names) != before


def test_a_partial_download_is_cut_to_what_is_there(tmp_path: Path) -> None:
    root = laid_out(tmp_path, "tar")
    y = np.array([[0], [1], [0]], dtype=np.float32)
    table = Table(LabelSet(("Mass",)), ("a.png", "z.png", "c.png"), ("1", "2", "3"), y, ("train",) * 3, root)
    with ImageSource(root) as source:
        kept, dropped = present(table, source)
    assert kept.images == ("a.png", "c.png")
    assert dropped == 1


@pytest.mark.complete
@pytest.mark.data
def test_the_real_archive_is_read(data_root: Path) -> None:
    with ImageSource(data_root / "nih_cxr14_64px/images.tar") as source:
        image = source.read("00000001_000.png", color=False)
    assert image.shape == (64, 64)
    assert 50 < image.mean() < 200
