"""A name within an archive never leaves it: it takes the row of no file."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from suture.core.errors import DataError
from suture.data import archives
from suture.data.images import ImageSource, images_of
from suture_results.inputs import find_inputs

Change = Callable[[tarfile.TarInfo], None]


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def tar(path: Path, *members: tuple[str, bytes], change: Change = lambda _: None) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            archive.addfile(info, io.BytesIO(data))
    return path


REAL = "a.png"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / REAL).write_bytes(png(1))
    return tmp_path / "own"


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
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
        assert read[str(folder / REAL)] == png(1)
        assert read[str(archive / "b.png")] == png(3)
        others = [path for path in read if path not in (str(folder / REAL), str(archive / "b.png"))]
        assert all(Path(path).is_relative_to(archive) and ".." not in path for path in others)
        assert len(others) + sum(".." in path for path in inputs.others) == 1


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
        with ImageSource(root) as source, pytest.raises(DataError, match=f"has 2 images '{name}'"):
            source.raw(name)
        with find_inputs([root], "image") as inputs:
            with pytest.raises(DataError, match="has 2 images"):
                inputs.found[str(root / name)].read()
            assert inputs.found[str(root / "b.png")].read() == png(3)


@pytest.mark.parametrize("other", ["A.png", "a\N{COMBINING ACUTE ACCENT}.png"])
def test_names_that_only_look_alike_are_two(tmp_path: Path, other: str) -> None:
    name = "a.png" if other == "A.png" else "\N{LATIN SMALL LETTER A WITH ACUTE}.png"
    with find_inputs([tar(tmp_path / "t.tar", (name, png(1)), (other, png(2)))], "image") as inputs:
        assert [one.read() for one in inputs.found.values()] in ([png(1), png(2)], [png(2), png(1)])


def test_a_file_beside_an_archive_keeps_its_name(folder: Path) -> None:
    (folder / "ward").mkdir()
    (folder / "ward" / "c.png").write_bytes(png(5))
    tar(folder / "0.tar", (REAL, png(2)), ("ward/c.png", png(2)), ("b.png", png(3)))
    with ImageSource(folder) as source:
        for name in (REAL, "ward/c.png"):
            with pytest.raises(DataError, match=f"has 2 images '{name}'"):
                source.raw(name)
        assert source.raw("b.png") == png(3)
        before = source.stamp((REAL,))
    (folder / REAL).write_bytes(png(1) + b"\0")
    with ImageSource(folder) as source:
        assert source.stamp((REAL,)) != before
    found = images_of(folder)
    assert (found.root, found.paths) == (folder, {REAL, "ward/c.png"})


def link(kind: bytes, to: str) -> Change:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, to

    return change


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_of_an_archive_is_left_out_with_the_reason(folder: Path, kind: bytes) -> None:
    archive = tar(folder / "0.tar", ("b.png", b""), change=link(kind, str(folder / REAL)))
    with find_inputs([folder], "image") as inputs:
        assert list(inputs.found) == [str(folder / REAL)]
        assert inputs.others == {f"{archive}/b.png": "a link or device within an archive"}
    with ImageSource(archive) as source, pytest.raises(DataError, match="is left out: a link or device"):
        source.raw("b.png")


def test_a_sparse_member_does_not_read_on_into_others(tmp_path: Path) -> None:
    """Its size is that of the whole file, and fewer bytes are stored."""

    archive = tmp_path / "t.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as packed:
        info = tarfile.TarInfo("a.png")
        info.pax_headers = {"GNU.sparse.map": "0,512", "GNU.sparse.size": "2048"}
        info.size = 512
        packed.addfile(info, io.BytesIO(b"s" * 512))
        secret = tarfile.TarInfo("b.png")
        secret.size = 512
        packed.addfile(secret, io.BytesIO(b"b" * 512))
    with find_inputs([archive], "image") as inputs:
        assert list(inputs.found) == [str(archive / "b.png")]
        assert inputs.others.keys() == {f"{archive}/a.png"}
        assert "sparse file" in inputs.others[f"{archive}/a.png"]


def test_an_archive_that_cannot_be_read_does_not_end_a_prediction(folder: Path) -> None:
    (folder / "0.tar").write_bytes(b"no archive" * 100)
    with find_inputs([folder], "image") as inputs:
        assert inputs.found[str(folder / REAL)].read() == png(1)
        with pytest.raises(DataError, match=r"0\.tar cannot be read"):
            inputs.found[str(folder / "0.tar")].read()
    with pytest.raises(DataError, match="cannot be read"), find_inputs([folder / "0.tar"], "image"):
        pass


def test_two_reports_of_one_name_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "r.zip"
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("files/s1.txt", "first")
        file.writestr("/x/../files/s1.txt", "second")
    assert [name for name, _ in archives.reports(packed, lambda _: True)] == ["files/s1.txt"]
    packed = tar(tmp_path / "r.tar", ("files/s1.txt", b"first"), ("/files/s1.txt", b"second"))
    with pytest.raises(DataError, match=r"two members are 'files/s1\.txt'"):
        list(archives.reports(packed, lambda _: True))


def test_the_members_of_an_archive_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tar(tmp_path / "t.tar", *((f"{i}.png", b"") for i in range(5)))
    monkeypatch.setattr(archives, "MOST_MEMBERS", 5)
    assert len(ImageSource(root).files()) == 5
    monkeypatch.setattr(archives, "MOST_MEMBERS", 4)
    with pytest.raises(DataError, match="has more than 4 members"):
        ImageSource(root).files()
    packed = tmp_path / "r.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for i in range(100):
            file.writestr(f"{i:050}.txt", "a")
    with pytest.raises(DataError, match="has more than 4 members"):
        list(archives.reports(packed, lambda _: True))
    monkeypatch.setattr(archives, "MOST_MEMBERS", 100)
    assert len(list(archives.reports(packed, lambda _: True))) == 100
    monkeypatch.setattr(archives, "MOST_LISTED", 9_000)
    with pytest.raises(OSError, match="10,000 bytes in one member"):
        list(archives.reports(packed, lambda _: True))


def test_an_archive_unpacks_to_a_hundred_times_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tar(tmp_path / "t.tar.gz", ("a.png", bytes(1 << 20)), ("b.png", png(1)))
    assert ImageSource(root).raw("b.png") == png(1)
    monkeypatch.setattr(archives, "MOST_UNPACKED", 1 << 19)
    with pytest.raises(DataError, match="unpacks to more than 100 times its size"):
        ImageSource(root).raw("b.png")


def header(kind: bytes, content: bytes = b"", sparse: bool = False) -> bytes:
    info = tarfile.TarInfo("a.png")
    info.type, info.size = kind, len(content)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[482] = sparse  # more blocks follow
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * 32)
    return bytes(block) + content + bytes(-len(content) % 512)


def records(*keys: str) -> bytes:
    return b"".join(b"%d %s=\n" % (len(key) + 5, key.encode()) for key in keys)


LONG_HEADERS = {
    "chain": header(tarfile.GNUTYPE_LONGNAME) * 5_000,
    "global": header(tarfile.XGLTYPE, records(*(f"{i:05}" for i in range(65)))) + header(tarfile.REGTYPE),
    "long names": (header(tarfile.GNUTYPE_LONGNAME, b"n" * 3_000) + header(tarfile.REGTYPE)) * 1_000,
    "sparse": header(tarfile.GNUTYPE_SPARSE, sparse=True) + (bytes(504) + b"\1" + bytes(7)) * 5_000,
}


@pytest.mark.parametrize("kind", LONG_HEADERS)
def test_the_headers_of_an_archive_are_bounded(kind: str, tmp_path: Path) -> None:
    """tarfile keeps them all, and copies global ones into each member: minutes and gigabytes."""
    root = tmp_path / "t.tar"
    root.write_bytes(LONG_HEADERS[kind] + bytes(1024))
    with pytest.raises(DataError, match=r"t\.tar"):
        ImageSource(root).files()


@pytest.mark.parametrize("first", ["table", "file"])
def test_a_text_of_a_table_takes_the_row_of_no_file(tmp_path: Path, first: str) -> None:
    file, listed = tmp_path / "note.txt", tmp_path / "list.csv"
    file.write_text("own")
    listed.write_text(f"document,text\n{file},other\nb,third\n")
    sources = [listed, file] if first == "table" else [file, listed]
    with find_inputs(sources, "text") as inputs:
        read = {name: one.read() for name, one in inputs.found.items()}
        assert all(name == one.name for name, one in inputs.found.items())
    assert read == {str(file): b"own", f"{file} (text 1 of {listed})": b"other", "b": b"third"}
