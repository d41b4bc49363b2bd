"""suture.data.images and .archives: folders and archives of images, whose members take the row of no file."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from little_memory import little_memory
from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data import archives
from suture.data.archives import reports, tar_members, unpacking
from suture.data.decoding import decode_image
from suture.data.images import ImageSource, images_of, present, read_all
from suture.data.limits import MOST_LISTED
from suture.data.table import Table
from suture_results.inputs import find_inputs
from world import refused

Change = Callable[[tarfile.TarInfo], None]


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "PNG")
    return file.getvalue()


def tar(path: Path, *members: tuple[str, bytes], change: Change = lambda _: None) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
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
        for i, member in enumerate(IMAGES.items()):
            tar(tmp_path / f"images_{i:03d}.tar.gz", member)
        return tmp_path
    return tar(tmp_path / f"all.{layout}", *((f"./{name}", data) for name, data in IMAGES.items()))


@pytest.mark.parametrize("layout", ["folder", "tar", "tar.gz", "tgz", "archives"])
def test_an_image_is_found_by_path_and_by_base_name(tmp_path: Path, layout: str) -> None:
    root = laid_out(tmp_path, layout)
    with ImageSource(root) as source:
        for i, name in enumerate(("images/a.png", "b.png", "./images/sub/c.png"), 1):
            assert name in source
            assert source.read(name, color=False).tolist() == [[i, i], [i, i]]
        assert "d.png" not in source
        with refused("'d.png'", "[data] root", by=DataError):
            source.read("d.png", color=False)
        results = dict(read_all(source, ["c.png", "gone.png", "a.png"], partial(decode_image, color=True)))
    np.testing.assert_array_equal(results[0], np.full((2, 2, 3), 3))
    assert isinstance(results[1], DataError)
    np.testing.assert_array_equal(results[2], np.full((2, 2, 3), 1))


def test_an_archive_is_read_forwards(tmp_path: Path) -> None:
    with ImageSource(laid_out(tmp_path, "archives")) as source:
        assert sorted(["c.png", "a.png", "b.png"], key=source.position) == ["a.png", "b.png", "c.png"]


def test_of_members_of_one_name_the_path_goes_first_and_the_last_one_counts(tmp_path: Path) -> None:
    members = ("x/a.png", png(1)), ("y/a.png", png(2))
    with ImageSource(tar(tmp_path / "t.tar", *members)) as source:
        assert source.read("y/a.png", color=False)[0, 0] == 2
        assert "a.png" not in source
        with refused("2 images 'a.png'", by=DataError):
            source.raw("a.png")
    for more in (("a.png", png(5)),), (("a.png", png(4)), ("a.png", png(5))):
        with ImageSource(tar(tmp_path / "t.tar", *members, *more)) as source:
            assert source.read("a.png", color=False)[0, 0] == 5


@pytest.mark.parametrize(("name", "keep"), [("t.tar", 700), ("t.tar.gz", 60), ("t.tar", 0), ("t.tgz", 0)])
def test_a_broken_archive_is_named_and_ends_no_prediction(tmp_path: Path, name: str, keep: int) -> None:
    rng = np.random.default_rng(0)
    root = tar(tmp_path / name, ("a.png", rng.bytes(2000)), ("b.png", rng.bytes(2000)))
    root.write_bytes(root.read_bytes()[:keep])
    with ImageSource(root) as source, refused(root, by=DataError):
        source.raw("a.png")
    (tmp_path / "own.png").write_bytes(png(1))
    with find_inputs([tmp_path], "image") as inputs:
        assert inputs.found[str(tmp_path / "own.png")].read() == png(1)


def test_a_root_that_is_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for root in (tmp_path / "none", tmp_path / "notes.txt"):
        with refused("[data] root", by=DataError):
            ImageSource(root)


@pytest.mark.parametrize("layout", ["folder", "tar"])
def test_the_stamp_changes_with_the_files(tmp_path: Path, layout: str) -> None:
    root = laid_out(tmp_path, layout)
    names = ("a.png", "b.png")
    with ImageSource(root) as source:
        before = source.stamp(names)
        assert ImageSource(root).stamp(names) == before
    os.utime(root / "images/b.png" if layout == "folder" else root, ns=(1, 1))
    assert ImageSource(root).stamp(names) != before


def test_a_partial_download_is_cut_to_what_is_there(tmp_path: Path) -> None:
    root = laid_out(tmp_path, "tar")
    y = np.array([[0], [1], [0]], dtype=np.float32)
    table = Table(LabelSet(("Mass",)), ("a.png", "z.png", "c.png"), ("1", "2", "3"), y, ("train",) * 3, root)
    with ImageSource(root) as source:
        kept, dropped = present(table, source)
    assert (kept.images, dropped) == (("a.png", "c.png"), 1)


@pytest.mark.complete
@pytest.mark.data
def test_the_real_archive_is_read(data_root: Path) -> None:
    with ImageSource(data_root / "nih_cxr14_64px/images.tar") as source:
        image = source.read("00000001_000.png", color=False)
    assert image.shape == (64, 64)
    assert 50 < image.mean() < 200


# A name within an archive never leaves it


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, whose row no member of an archive may take."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.png").write_bytes(png(1))
    return tmp_path / "own"


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
@pytest.mark.parametrize(
    "name",
    ["{folder}/a.png", "/{folder}/a.png", "../a.png", "x/../../a.png", "./../a.png", "0.tar/../../a.png"],
)
def test_a_member_takes_the_row_of_no_file(folder: Path, name: str, suffix: str) -> None:
    # "0" is read before "a.png": what comes first keeps the row.
    archive = tar(folder / f"0{suffix}", (name.format(folder=folder), png(2)), ("b.png", png(3)))
    for sources in ([folder], [archive, folder]):
        with find_inputs(sources, "image") as inputs:
            read = {path: one.read() for path, one in inputs.found.items()}
        assert read.pop(str(folder / "a.png")) == png(1)
        assert read.pop(str(archive / "b.png")) == png(3)
        assert all(Path(path).is_relative_to(archive) and ".." not in path for path in read)
        assert len(read) + sum(".." in path for path in inputs.others) == 1


def test_the_path_of_a_member_lies_below_its_archive(folder: Path, tmp_path: Path) -> None:
    archive = tar(tmp_path / "t.tar", (str(folder / "b.png"), png(2)))
    listed = tmp_path / "list.csv"
    listed.write_text("image\nb.png\n")
    with find_inputs([listed], "image", root=archive) as inputs:
        [(name, one)] = inputs.found.items()
        assert name.startswith(f"{archive}/")
        assert one.read() == png(2)


def test_members_that_unpack_to_one_path_are_ambiguous(tmp_path: Path) -> None:
    for other in ("/a.png", "x//a.png", "./x/./a.png", "/x/a.png"):
        name = "x/a.png" if "x" in other else "a.png"
        root = tar(tmp_path / "t.tar", (name, png(1)), (other, png(2)), ("b.png", png(3)))
        with ImageSource(root) as source, refused(f"2 images '{name}'", by=DataError):
            source.raw(name)
        with find_inputs([root], "image") as inputs:
            with refused("2 images", by=DataError):
                inputs.found[str(root / name)].read()
            assert inputs.found[str(root / "b.png")].read() == png(3)


@pytest.mark.parametrize(
    ("name", "other"), [("a.png", "A.png"), ("\u00e1.png", "a\N{COMBINING ACUTE ACCENT}.png")]
)
def test_names_that_only_look_alike_are_two(tmp_path: Path, name: str, other: str) -> None:
    with find_inputs([tar(tmp_path / "t.tar", (name, png(1)), (other, png(2)))], "image") as inputs:
        assert sorted(one.read() for one in inputs.found.values()) == sorted([png(1), png(2)])


def test_a_file_beside_an_archive_keeps_its_name(folder: Path) -> None:
    (folder / "ward").mkdir()
    (folder / "ward" / "c.png").write_bytes(png(5))
    tar(folder / "0.tar", ("a.png", png(2)), ("ward/c.png", png(2)), ("b.png", png(3)))
    with ImageSource(folder) as source:
        for name in ("a.png", "ward/c.png"):
            with refused(f"2 images '{name}'", by=DataError):
                source.raw(name)
        assert source.raw("b.png") == png(3)
        before = source.stamp(("a.png",))
    (folder / "a.png").write_bytes(png(1) + b"\0")
    with ImageSource(folder) as source:
        assert source.stamp(("a.png",)) != before
    found = images_of(folder)
    assert (found.root, found.paths) == (folder, {"a.png", "ward/c.png"})


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_of_an_archive_is_left_out(folder: Path, kind: bytes) -> None:
    def link(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, str(folder / "a.png")

    archive = tar(folder / "0.tar", ("b.png", b""), change=link)
    with find_inputs([folder], "image") as inputs:
        assert list(inputs.found) == [str(folder / "a.png")]
        assert inputs.others.keys() == {f"{archive}/b.png"}
    with ImageSource(archive) as source, refused("link", by=DataError):
        source.raw("b.png")


def test_a_sparse_member_does_not_read_on_into_others(tmp_path: Path) -> None:
    """Its size is that of the whole file, and fewer bytes are stored."""
    archive = tmp_path / "t.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as packed:
        for name, byte, headers in (
            ("a.png", b"s", {"GNU.sparse.map": "0,512", "GNU.sparse.size": "2048"}),
            ("b.png", b"b", {}),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 512, headers
            packed.addfile(info, io.BytesIO(byte * 512))
    with find_inputs([archive], "image") as inputs:
        assert list(inputs.found) == [str(archive / "b.png")]
        assert inputs.others.keys() == {f"{archive}/a.png"}


def test_two_reports_of_one_name_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "r.zip"
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("files/s1.txt", "first")
        file.writestr("/x/../files/s1.txt", "second")
    assert [name for name, _ in reports(packed, lambda _: True)] == ["files/s1.txt"]
    packed = tar(tmp_path / "r.tar", ("files/s1.txt", b"first"), ("/files/s1.txt", b"second"))
    with refused("'files/s1.txt'", by=DataError):
        list(reports(packed, lambda _: True))


@pytest.mark.parametrize("first", ["table", "file"])
def test_a_text_of_a_table_takes_the_row_of_no_file(tmp_path: Path, first: str) -> None:
    file, listed = tmp_path / "note.txt", tmp_path / "list.csv"
    file.write_text("own")
    listed.write_text(f"document,text\n{file},other\nb,third\n")
    with find_inputs([listed, file] if first == "table" else [file, listed], "text") as inputs:
        read = {name: one.read() for name, one in inputs.found.items()}
        assert all(name == one.name for name, one in inputs.found.items())
    assert read == {str(file): b"own", f"{file} (text 1 of {listed})": b"other", "b": b"third"}


# What an archive may ask for


def packed(path: Path, **members: bytes) -> Path:
    """A .zip or .tar.gz of texts."""
    texts = [(f"{name}.txt", data) for name, data in members.items()]
    if path.suffix != ".zip":
        return tar(path, *texts)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in texts:
            file.writestr(name, data)
    return path


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_reports_of_an_archive_are_bounded(suffix: str, tmp_path: Path) -> None:
    path = packed(tmp_path / f"reports.{suffix}", large=bytes(2 << 20), small=b"clear")
    assert list(reports(path, lambda name: name == "small.txt")) == [("small.txt", b"clear")]
    with refused("'large.txt'", "2,097,152", by=DataError):
        list(reports(path, lambda name: name == "large.txt"))


def test_the_members_of_an_archive_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        packed(tmp_path / name, **{f"{i:050}": b"a" for i in range(100)}) for name in ("a.zip", "a.tar.gz")
    ]
    for path in paths:
        monkeypatch.setattr(archives, "MOST_MEMBERS", 100)
        assert len(list(reports(path, lambda _: True))) == 100
        monkeypatch.setattr(archives, "MOST_MEMBERS", 99)
        with refused(path.name, "99", by=DataError):
            list(reports(path, lambda _: True))
    monkeypatch.setattr(archives, "MOST_MEMBERS", 100)
    monkeypatch.setattr(archives, "MOST_DOCUMENT", 1)
    monkeypatch.setattr(archives, "MOST_TEXT", 100)
    assert len(list(reports(paths[0], lambda _: True))) == 100
    for limit, most in (("MOST_TEXT", 99), ("MOST_DOCUMENT", 0)):
        monkeypatch.setattr(archives, limit, most)
        with refused("a.zip", f" {most} ", by=DataError):
            list(reports(paths[0], lambda _: True))
    monkeypatch.setattr(archives, "MOST_LISTED", 9_000)
    with pytest.raises(OSError, match="10,000 bytes"):
        list(reports(paths[0], lambda _: True))


def test_an_archive_unpacks_to_a_hundred_times_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = packed(tmp_path / "t.tar.gz", a=bytes(1 << 20), b=b"b")
    assert ImageSource(root).raw("b.txt") == b"b"
    monkeypatch.setattr(archives, "MOST_UNPACKED", 1 << 19)
    with refused("t.tar.gz", "100 times", by=DataError):
        ImageSource(root).raw("b.txt")


def header(kind: bytes, content: bytes = b"", sparse: bool = False) -> bytes:
    info = tarfile.TarInfo("a.png")
    info.type, info.size = kind, len(content)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[482] = sparse  # more blocks follow
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * 32)
    return bytes(block) + content + bytes(-len(content) % 512)


RECORDS = b"".join(b"10 %05d=\n" % i for i in range(65))

LONG_HEADERS = {
    "chain": header(tarfile.GNUTYPE_LONGNAME) * 5_000,
    "global": header(tarfile.XGLTYPE, RECORDS) + header(tarfile.REGTYPE),
    "long names": (header(tarfile.GNUTYPE_LONGNAME, b"n" * 3_000) + header(tarfile.REGTYPE)) * 1_000,
    "sparse": header(tarfile.GNUTYPE_SPARSE, sparse=True) + (bytes(504) + b"\1" + bytes(7)) * 5_000,
}


@pytest.mark.parametrize("kind", LONG_HEADERS)
def test_the_headers_of_an_archive_are_bounded(kind: str, tmp_path: Path) -> None:
    """tarfile keeps them all, and copies global ones into each member: minutes and gigabytes."""
    root = tmp_path / "t.tar"
    root.write_bytes(LONG_HEADERS[kind] + bytes(1024))
    with refused("t.tar", by=DataError):
        ImageSource(root).files()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_a_tar_header_cannot_ask_for_gigabytes(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.type, info.size = kind, 1 << 33
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)))
    with ImageSource(tmp_path / "a.tar.gz") as source, refused("a.tar.gz", by=DataError), little_memory():
        source.raw("a.png")


def understated(method: int, size: int) -> bytes:
    """A .zip of one report whose list says that it unpacks to ten bytes."""
    to = io.BytesIO()
    with zipfile.ZipFile(to, "w", method) as packed:
        packed.writestr("a.xml", b"x" * size)
    data = bytearray(to.getvalue())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<L", 10)
    return bytes(data)


@pytest.mark.complete
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_that_understates_the_size_of_a_report_is_unpacked_no_further(
    method: int, tmp_path: Path
) -> None:
    path = tmp_path / "reports.zip"
    path.write_bytes(understated(method, 64 * 2**20))
    with (
        little_memory(MOST_LISTED + 8 * 2**20),
        refused("reports.zip", by=DataError),
        unpacking(path, "fetch it again"),
    ):
        list(reports(path, lambda _: True))


def backward(size: int, pax: bool) -> bytes:
    """A .tar of two members, the second of which ends before it begins."""
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
        member = tarfile.TarInfo("b.png")
        if pax:
            member.pax_headers = {"size": str(size)}
        tar.addfile(member)
    data = bytearray(to.getvalue())
    if not pax:
        header = data[512:1024]
        header[124:136] = bytes([255]) + size.to_bytes(11, "big", signed=True)
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
        data[512:1024] = header
    return bytes(data)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("size", "pax"), [(-1536, True), (-512, False), (-1, False)])
def test_a_member_of_a_negative_size_ends_an_archive(
    size: int, pax: bool, zipped: bool, tmp_path: Path
) -> None:
    data = backward(size, pax)
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(data) if zipped else data)
    with refused("'b.png'", by=DataError):
        list(islice(tar_members(path), 100))
