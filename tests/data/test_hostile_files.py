"""Small files that ask for gigabytes, run other programs, or lead out of the folder of the data."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pytest
from PIL import EpsImagePlugin, Image
from PIL.JpegImagePlugin import JpegImageFile
from pyarrow import parquet
from pydicom.encaps import encapsulate
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless

from dicom_files import dicom, stored
from little_memory import little_memory
from suture.core.errors import DataError
from suture.data import decoding, images
from suture.data.decoding import decode_image
from suture.data.images import ImageSource, read_all
from suture.data.limits import MOST_PIXELS, file_bytes
from suture.data.readers import load_table
from suture.data.reading import read_columns, read_sheet, read_text
from suture.learning.samples import decode
from suture_results.inputs import find_inputs
from world import refused, site_config

PEAK = 600
"""Megabytes that no hostile file may take, this package's own imports included."""

PEAK_OF_TABLES = 900
"""The same of a process that reads a .xlsx or .parquet: 768, and its imports."""


def chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, bits: int, beside: bytes = b"") -> bytes:
    """A gray PNG of zeros, by hand: a thousandth of the size that it unpacks to."""
    packer = zlib.compressobj(1)
    row = bytes(1 + width * bits // 8)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + beside
    return start + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def run_length(segment: bytes, shape: tuple[int, int] = (8, 8)) -> bytes:
    frame = struct.pack("<16L", 1, 64, *[0] * 14) + segment
    return stored(encapsulate([frame]), RLELossless, shape)


def jpeg_of_another_size() -> bytes:
    """A JPEG of 8 x 8 pixels whose header says 13000 x 13000, within a data set of 8 x 8."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 13000, 13000)
    return stored(encapsulate([bytes(data)]), JPEGBaseline8Bit)


def tiled_tiff(side: int) -> bytes:
    """A TIFF of 8 x 8 pixels in one deflated tile of `side` x `side`."""
    packer = zlib.compressobj(1)
    tile = b"".join(packer.compress(bytes(side)) for _ in range(side)) + packer.flush()
    tags = [(256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    count, end = len(tags) + 2, 8 + 2 + 12 * (len(tags) + 2) + 4
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in [*tags, (324, end), (325, len(tile))]]
    return b"II*\0" + struct.pack("<IH", 8, count) + b"".join(entries) + struct.pack("<I", 0) + tile


def xlsx(part: str, start: str, unit: str, times: int, end: str) -> bytes:
    """A workbook of which one part is a unit that is repeated."""
    file = io.BytesIO()
    book = openpyxl.Workbook()
    book.active.append(["image"])
    book.save(file)
    content = "".join([start, unit * times, end]).replace(
        "MAIN", "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    )
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(file) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            new.writestr(name, content if name == part else old.read(name))
    return packed.getvalue()


def scanned(scans: int, side: int = 64, extra: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan is repeated, with `extra` as what a camera adds."""
    file = io.BytesIO()
    Image.fromarray(np.indices((side, side)).sum(0).astype(np.uint8)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    own = data.count(b"\xff\xda")
    added = b"\xff\xed" + struct.pack(">H", len(extra) + 2) + extra if extra else b""
    return data[:2] + added + data[2:-2] + data[data.rindex(b"\xff\xda") : -2] * (scans - own) + b"\xff\xd9"


def repeated(text: str, times: int) -> bytes:
    """A gzipped file of a repeated text: members of a gzip file may follow one another."""
    return gzip.compress(text.encode()) * times


def columns(number: int, text: str, rows: int) -> bytes:
    """A .parquet of one text in every cell, which is stored once for each column."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))
    file = io.BytesIO()
    table = pa.table({f"c{i}": column for i in range(number)})
    parquet.write_table(table, file, compression="zstd", write_statistics=False, store_schema=False)
    return file.getvalue()


def lying(size: int) -> bytes:
    """A .parquet of one cell, of `size` bytes, whose footer says that they are five."""
    file = io.BytesIO()
    table = pa.table({"a": ["a" * size]})
    parquet.write_table(table, file, compression="zstd", use_dictionary=False, write_statistics=False)
    data = file.getvalue()
    start = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    left, said = (
        2 * parquet.read_metadata(io.BytesIO(data)).row_group(0).column(0).total_uncompressed_size,
        b"",
    )
    while left:
        left, said = left >> 7, said + bytes([left & 127 | (128 if left > 127 else 0)])
    return data[:start] + data[start:].replace(said, b"\x8a" + b"\x80" * (len(said) - 2) + b"\0")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "rle-header.dcm": lambda: run_length(b"\x81\0" * 1900, (65535, 65535)),
    "rle-runs.dcm": lambda: run_length(b"\x81\0" * (5 << 20)),
    "jpeg.dcm": jpeg_of_another_size,
    "sixteen-bit.png": lambda: png(13000, 13000, 16),
    "tile.tif": lambda: tiled_tiff(16000),
    "cells.csv.gz": lambda: b"".join([repeated("a,b\n", 1), repeated(",x\n" * 300_000, 1100)]),
    "blank.csv.gz": lambda: b"".join([repeated("a,b\n", 1), repeated("\n" * 1_000_000, 1000)]),
    "line.csv.gz": lambda: repeated("a" * 100_000 + ",", 10_000),
    "wide.csv.gz": lambda: b"".join([repeated("a,b\n", 1), repeated("," * 200_000 + "\n", 500)]),
    "row.xlsx": lambda: xlsx(
        "xl/worksheets/sheet1.xml",
        '<worksheet xmlns="MAIN"><sheetData><row>',
        "<c/>",
        20_000_000,
        "</row></sheetData></worksheet>",
    ),
    "strings.xlsx": lambda: xlsx("xl/sharedStrings.xml", '<sst xmlns="MAIN">', "<si/>", 20_000_000, "</sst>"),
    "styles.xlsx": lambda: xlsx(
        "xl/styles.xml",
        '<styleSheet xmlns="MAIN"><cellXfs>',
        '<xf a=""/>',
        4_000_000,
        "</cellXfs></styleSheet>",
    ),
    "names.xlsx": lambda: xlsx(
        "xl/workbook.xml",
        '<workbook xmlns="MAIN"><sheets>',
        '<sheet name="a"/>',
        2_000_000,
        "</sheets></workbook>",
    ),
    "columns.parquet": lambda: columns(17_000, "a", 1),
    "dictionary.parquet": lambda: columns(200, "a" * 500_000, 20_000),
    "footer.parquet": lambda: lying(250_000_000),
    "list.txt.gz": lambda: repeated("0001.png " * 100_000, 1000),
}

MEASURED = """
import json, resource, sys
from pathlib import Path
from suture.core.errors import DataError
from suture.data.decoding import decode_image
from suture.data.limits import file_bytes
from suture.data.reading import read_sheet, read_text
path = Path(sys.argv[1])
tables = {".csv.gz": read_sheet, ".xlsx": read_sheet, ".parquet": read_sheet, ".txt.gz": read_text}
read = tables.get("".join(path.suffixes), lambda path: decode_image(file_bytes(path), str(path), False))
try:
    read(path)
    said = ""
except DataError as error:
    said = str(error)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([said, max(int(peak.split()[1]), child) / 1024]))
"""


def measured(path: Path) -> tuple[str, float]:
    """What reading a file says in a process of its own, and the peak of its memory, or its child's [MB]."""
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, check=True)
    said, peak = json.loads(done.stdout)
    return said, peak


def test_the_scans_of_a_jpeg_are_counted_and_more_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (scanned(100), scanned(100, extra=b"\xff\xda" * 1000), scanned(100) + b"\xff\xda" * 1000):
        assert decode_image(data, "a.jpg", color=False).shape == (64, 64)
    decoded: list[object] = []
    monkeypatch.setattr(JpegImageFile, "load", decoded.append)
    for data in (scanned(101), scanned(101, extra=b"\xff\xd9\xff\xd8"), scanned(1000, extra=b"\xff\xd9")):
        frame = stored(encapsulate([data]), JPEGBaseline8Bit, (64, 64))
        for name, content in (("a.jpg", data), ("a.dcm", frame)):
            with refused(name, "100 scans", by=DataError):
                decode_image(content, name, color=False)
    assert not decoded


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 << 20))),
        (b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(bytes(64 << 20))),
        (b"iCCP", b"sRGB\0\0" + zlib.compress(bytes(64 << 20))),
        (b"acTL", struct.pack(">II", 2**31 - 1, 0)),
    ],
)
def test_what_stands_beside_the_pixels_of_a_png_is_bounded(kind: bytes, content: bytes) -> None:
    """Pillow unpacks at most 1 MiB of it."""
    data = png(8, 8, 8, chunk(kind, content))
    with little_memory(), suppress(DataError):
        decode_image(data, "a.png", color=False)


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["TIFF", "PNG"])
def test_tags_that_share_their_bytes_do_not_multiply_them(kind: str) -> None:
    """5,000 tags of 200,000 bytes, which are the same: a gigabyte, if each were copied."""
    shared = bytes(200_000)
    tags = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tags += [(277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]
    tags += [(n, 1, len(shared), 8) for n in range(5000, 10_000)]
    entries = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    data = b"II*\0" + struct.pack("<I", 8 + len(shared)) + shared + entries
    if kind == "PNG":
        data = png(8, 8, 8, chunk(b"eXIf", data))
    with little_memory(), suppress(DataError):
        decode_image(data, "a.tif", color=False)


@pytest.mark.complete
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_does_not_fill_the_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(HOSTILE[name]())
    assert (tmp_path / name).stat().st_size < 11 << 20
    said, peak = measured(tmp_path / name)
    assert name in said
    assert peak < (PEAK_OF_TABLES if name.endswith((".xlsx", ".parquet")) else PEAK)


@pytest.mark.complete
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_the_largest_image_that_is_read_does_not_fill_it_either(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png(6400, 6250, 16))
    assert MOST_PIXELS == 6400 * 6250
    said, peak = measured(tmp_path / "large.png")
    assert said == ""
    assert peak < PEAK


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_no_decoder_is_called_for_an_image_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder(*_: object, **__: object) -> None:
        raise AssertionError("a decoder was called")

    monkeypatch.setattr("pydicom.dataset.Dataset.convert_pixel_data", decoder)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoder)
    for data, named in (
        (HOSTILE["rle-header.dcm"](), "65535 x 65535"),
        (HOSTILE["jpeg.dcm"](), "13000"),
        (png(13000, 13000, 1), "13000 x 13000"),
    ):
        with refused("'a'", named, by=DataError):
            decode_image(data, "a", color=False)


def test_a_run_length_encoded_image_is_read_and_the_length_of_its_runs_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    data = run_length(b"".join(b"\x07" + row.tobytes() for row in pixels))
    assert decode_image(data, "a.dcm", color=False)[:, 0].tolist() == [0, 32, 65, 97, 130, 162, 194, 227]
    # PS3.5 G.3.2: 2 literal bytes, 3 times the byte 9, nothing, 128 times the byte 1.
    data = run_length(bytes([1, 5, 6, 254, 9, 128, 129, 1]), (7, 19))
    monkeypatch.setattr(decoding, "MOST_OF_SEGMENT", 133)
    assert decode_image(data, "a.dcm", color=False).shape == (7, 19)
    monkeypatch.setattr(decoding, "MOST_OF_SEGMENT", 132)
    with refused("132 bytes", by=DataError):
        decode_image(data, "a.dcm", color=False)


def test_a_page_of_postscript_never_reaches_ghostscript(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **_: started.append(a))
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    with refused("'page.png'", by=DataError):
        decode_image(page, "page.png", color=False)
    assert not started


@pytest.mark.parametrize("form", ["GIF", "PPM", "TGA", "WEBP", "JPEG2000"])
def test_other_formats_are_refused_whatever_the_suffix(form: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, form)
    with refused("'a.png'", by=DataError):
        decode_image(file.getvalue(), "a.png", color=False)


@pytest.mark.parametrize(
    ("tags", "named"),
    [
        ({"RescaleSlope": "NaN", "RescaleIntercept": 0}, "RescaleSlope is NaN"),
        ({"RescaleSlope": "inf", "RescaleIntercept": 0}, "RescaleSlope is inf"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "RescaleSlope is 0"),
        ({"RescaleSlope": 1, "RescaleIntercept": "NaN"}, "RescaleIntercept is NaN"),
        ({"RescaleSlope": "1e308", "RescaleIntercept": "1e308"}, "rescaling"),
        ({"WindowCenter": ["NaN", 5], "WindowWidth": [10, 10]}, "WindowCenter is NaN"),
        ({"WindowCenter": 5, "WindowWidth": "inf"}, "WindowWidth is inf"),
        ({"WindowCenter": 5, "WindowWidth": 0}, "Window Width"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_rescaling_that_shows_nothing_is_a_fault(tags: dict[str, Any], named: str) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    with refused("'ward/7.dcm'", named, by=DataError):
        decode_image(dicom(pixels, **tags), "ward/7.dcm", color=False)
    with refused("'ward/7.dcm'", "deflated", by=DataError):  # which pydicom would inflate without a limit
        decode_image(stored(bytes(64), DeflatedExplicitVRLittleEndian), "ward/7.dcm", color=False)


def test_full_memory_is_a_fault_of_the_image_and_leaves_its_reason_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, refused("'a.png'", "MemoryError", by=DataError):
        patch.setattr(decoding, "_pillow", full)
        decode_image(b"x", "a.png", color=False)
    (tmp_path / "a.png").write_bytes(b"x")
    with ImageSource(tmp_path) as source:
        results = [*read_all(source, ["a.png"], full)]
        results += read_all(source, ["a.png", "b.png"], partial(decode_image, color=False))
    for _, one in results:  # and not the frames of decoders: of 100,000 images they take a gigabyte
        assert isinstance(one, DataError)
        assert (one.__traceback__, one.__cause__, one.__context__) == (None, None, None)


def test_few_large_images_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}.png" for i in range(9)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr(images, "MOST_ENCODED", 300)
    with ImageSource(tmp_path) as source:
        raw, taken = source.raw, list[str]()
        monkeypatch.setattr(source, "raw", lambda name: (taken.append(name), raw(name))[1])
        read = read_all(source, names, lambda data, _: len(data))
        next(read)
        assert len(taken) == 3
        assert dict([*read]).keys() | {0} == {*range(9)}


def test_pipes_devices_and_sparse_files_of_a_terabyte_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(1 << 40)
    with ImageSource(tmp_path, follow_links=True) as source:
        for name in ("pipe.png", "zero.png"):
            with refused(name, by=DataError):
                source.raw(name)
            with pytest.raises(OSError, match="not a regular file"):
                file_bytes(tmp_path / name)
        with refused("a.png", "1,099,511,627,776", by=DataError):
            source.raw("a.png")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A root, itself a link, with a link out of it, a folder linked from elsewhere, and a link within."""
    (tmp_path / "private").mkdir()
    (tmp_path / "data").mkdir()
    for name in ("private/secret.png", "data/own.png"):
        (tmp_path / name).write_bytes(png(4, 4, 8))
    (tmp_path / "data/out.png").symlink_to(tmp_path / "private/secret.png")
    (tmp_path / "data/ward").symlink_to(tmp_path / "private")
    (tmp_path / "data/within.png").symlink_to("own.png")
    (tmp_path / "data/up").symlink_to(tmp_path)
    (tmp_path / "root").symlink_to("data")
    return tmp_path / "root"


def test_a_link_out_of_the_root_is_not_read_unless_the_site_says_so(linked: Path) -> None:
    with ImageSource(linked) as source:
        for name in ("own.png", "within.png"):
            assert source.read(name, False).shape == (4, 4)
        for name in ("out.png", "secret.png", "ward/secret.png", "../private/secret.png"):
            with refused(name, "3 links", "follow_links = true", by=DataError):
                source.raw(name)
    with ImageSource(linked, follow_links=True) as source:
        for name in ("own.png", "out.png", "ward/secret.png"):
            assert source.read(name, False).shape == (4, 4)


def test_links_count_as_unreadable_images_of_a_table(linked: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,patient,split,Mass\nown.png,1,train,1\nout.png,2,train,0\n")
    data = {"dataset": "hospital", "root": "root", "table": "labels.csv"}
    table = load_table(site_config(tmp_path, data=data).data)
    with refused("1 of 2", "'out.png'", by=DataError):
        decode(table, 16, False, tmp_path / "cache")
    table = load_table(site_config(tmp_path, data=data | {"follow_links": True}).data)
    assert len(decode(table, 16, False, tmp_path / "cache")[1]) == 2


def test_an_archive_that_is_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.tar").symlink_to(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.png"), io.BytesIO())
    with refused("a.tar", "follow_links", by=DataError):
        ImageSource(tmp_path / "root")
    assert "a.png" in ImageSource(tmp_path / "root", follow_links=True)


def test_a_folder_to_predict_is_not_left_by_a_link(linked: Path) -> None:
    with find_inputs([linked], "image") as inputs:
        names = ("out.png", "own.png", "up", "ward", "within.png")
        assert sorted(inputs.found) == [str(linked / name) for name in names]
        for name in ("out.png", "up", "ward"):
            with refused(linked, by=DataError):
                inputs.found[str(linked / name)].read()


def test_tables_within_the_limits_are_read_whole_and_larger_ones_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv.gz"
    rows = "".join(f"{i},x\n\n" for i in range(1000))
    path.write_bytes(gzip.compress(f"a,b\n{rows}".encode()))
    sheet = read_sheet(path)
    assert [row[0] for row in sheet.rows] == [str(i) for i in range(1000)]
    assert sheet.numbers == tuple(range(2, 2002, 2))
    assert list(read_columns(path, ["b"], "key")) == [("x",)] * 1000
    assert read_text(path) == f"a,b\n{rows}"
    monkeypatch.setattr("suture.data.reading.MOST_CELLS", 999)
    with refused("t.csv.gz", " b ", by=DataError):
        list(read_columns(path, ["b"], "key"))
    with refused("t.csv.gz", "rows", by=DataError):
        read_sheet(path)
