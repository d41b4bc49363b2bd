"""Small files that ask for gigabytes, run other programs, or lead out of the folder of the data."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pytest
from PIL import EpsImagePlugin, Image
from PIL.JpegImagePlugin import JpegImageFile
from pyarrow import parquet
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)

import suture.data.decoding as decoding
from suture.core.errors import DataError
from suture.data import decoding as dicom_module
from suture.data import images
from suture.data.archives import reports, tar_members, unpacking
from suture.data.decoding import decode_image
from suture.data.images import ImageSource, read_all
from suture.data.limits import MOST_LISTED, MOST_PIXELS, file_bytes
from suture.data.reading import read_columns, read_sheet, read_text
from suture.learning.samples import decode
from suture_results.inputs import find_inputs

PEAK = 600
"""Megabytes that no hostile file may take, this package's own imports included."""

PEAK_OF_TABLES = 900
"""The same of a process that reads a .xlsx or .parquet: 768, and its imports."""


def png(width: int, height: int, bits: int) -> bytes:
    """A gray PNG of zeros, by hand: a thousandth of the size that it unpacks to."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    packer = zlib.compressobj(1)
    row = bytes(1 + width * bits // 8)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def dicom(content: bytes, syntax: Any, rows: int = 8, columns: int = 8, **tags: Any) -> bytes:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PixelRepresentation = (
        1,
        "MONOCHROME2",
        0,
    )
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 8, 8, 7
    dataset.Rows, dataset.Columns = rows, columns
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.PixelData = content
    dataset["PixelData"].VR = "OB"
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()


def run_length(segment: bytes, **size: int) -> bytes:
    frame = struct.pack("<16L", 1, 64, *[0] * 14) + segment
    return dicom(encapsulate([frame]), RLELossless, **size)


def jpeg_of_another_size() -> bytes:
    """A JPEG of 8 x 8 pixels whose header says 13000 x 13000, within a data set of 8 x 8."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 13000, 13000)
    return dicom(encapsulate([bytes(data)]), JPEGBaseline8Bit)


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
    "rle-header.dcm": lambda: run_length(b"\x81\0" * 1900, rows=65535, columns=65535),
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


def test_the_scans_of_a_jpeg_are_counted() -> None:
    for data in (scanned(100), scanned(100, extra=b"\xff\xda" * 1000), scanned(100) + b"\xff\xda" * 1000):
        assert decode_image(data, "a.jpg", color=False).shape == (64, 64)
    for data in (scanned(101), scanned(101, extra=b"\xff\xd9\xff\xd8"), scanned(1000, extra=b"\xff\xd9")):
        with pytest.raises(DataError, match=r"'a\.jpg' cannot be read: it has more than 100 scans"):
            decode_image(data, "a.jpg", color=False)
        frame = dicom(encapsulate([data]), JPEGBaseline8Bit, rows=64, columns=64)
        with pytest.raises(DataError, match=r"'a\.dcm' cannot be read: it has more than 100 scans"):
            decode_image(frame, "a.dcm", color=False)


def test_a_jpeg_of_a_thousand_scans_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data, decoded = scanned(1000), []
    monkeypatch.setattr(JpegImageFile, "load", decoded.append)
    with pytest.raises(DataError, match="more than 100 scans"):
        decode_image(data, "a.jpg", color=False)
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
    data = png(8, 8, 8)
    crc = struct.pack(">I", zlib.crc32(kind + content))
    data = data[:33] + struct.pack(">I", len(content)) + kind + content + crc + data[33:]
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):
            decode_image(data, "a.png", color=False)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["TIFF", "PNG"])
def test_tags_that_share_their_bytes_do_not_multiply_them(kind: str) -> None:
    """5,000 tags of 200,000 bytes, which are the same: a gigabyte, if each were copied."""
    shared = bytes(200_000)
    tags = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tags += [
        (277, 3, 1, 1),
        (278, 4, 1, 8),
        (279, 4, 1, 64),
        *((n, 1, len(shared), 8) for n in range(5000, 10_000)),
    ]
    entries = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    data = b"II*\0" + struct.pack("<I", 8 + len(shared)) + shared + entries
    if kind == "PNG":
        data = (
            png(8, 8, 8)[:33]
            + struct.pack(">I", len(data))
            + b"eXIf"
            + data
            + struct.pack(">I", zlib.crc32(b"eXIf" + data))
            + png(8, 8, 8)[33:]
        )
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):
            decode_image(data, "a.tif", color=False)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


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
    for data in (HOSTILE["rle-header.dcm"](), HOSTILE["jpeg.dcm"]()):
        with pytest.raises(DataError, match=r"its header says|its compressed frame is of"):
            decode_image(data, "a.dcm", color=False)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoder)
    with pytest.raises(DataError, match=r"its header says 13000 x 13000 pixels; .*40,000,000"):
        decode_image(png(13000, 13000, 1), "a.png", color=False)


def test_a_deflated_dicom_is_not_inflated() -> None:
    data = dicom(bytes(64), DeflatedExplicitVRLittleEndian)
    with pytest.raises(DataError, match=r"'a\.dcm' cannot be read: .*deflated"):
        decode_image(data, "a.dcm", color=False)


def test_a_run_length_encoded_image_is_read_as_before() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    data = run_length(b"".join(b"\x07" + row.tobytes() for row in pixels))
    assert decode_image(data, "a.dcm", color=False)[:, 0].tolist() == [0, 32, 65, 97, 130, 162, 194, 227]


def test_the_length_of_runs_is_counted_as_the_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # PS3.5 G.3.2: 2 literal bytes, 3 times the byte 9, nothing, 128 times the byte 1.
    segment = bytes([1, 5, 6, 254, 9, 128, 129, 1])
    monkeypatch.setattr(dicom_module, "MOST_OF_SEGMENT", 133)
    data = run_length(segment, rows=7, columns=19)
    assert decode_image(data, "a.dcm", color=False).shape == (7, 19)
    monkeypatch.setattr(dicom_module, "MOST_OF_SEGMENT", 132)
    with pytest.raises(DataError, match="a segment of it unpacks to more than 132 bytes"):
        decode_image(data, "a.dcm", color=False)


def test_a_page_of_postscript_never_reaches_ghostscript(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **_: started.append(a))
    path = tmp_path / "page.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match=r"page\.png' cannot be read"):
        decode_image(path.read_bytes(), path.name, color=False)
    assert not started


@pytest.mark.parametrize("form", ["GIF", "ICO", "PCX", "PPM", "SGI", "TGA", "WEBP", "JPEG2000"])
def test_other_formats_are_refused_whatever_the_suffix(form: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, form)
    with pytest.raises(DataError, match=r"'a\.png' cannot be read"):
        decode_image(file.getvalue(), "a.png", color=False)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({"RescaleSlope": "NaN", "RescaleIntercept": 0}, "RescaleSlope is NaN"),
        ({"RescaleSlope": "inf", "RescaleIntercept": 0}, "RescaleSlope is inf"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "RescaleSlope is 0"),
        ({"RescaleSlope": 1, "RescaleIntercept": "NaN"}, "RescaleIntercept is NaN"),
        ({"RescaleSlope": "1e308", "RescaleIntercept": "1e308"}, "not finite"),
        ({"WindowCenter": "NaN", "WindowWidth": 10}, "WindowCenter is NaN"),
        ({"WindowCenter": ["NaN", 5], "WindowWidth": [10, 10]}, "WindowCenter is NaN"),
        ({"WindowCenter": 5, "WindowWidth": "inf"}, "WindowWidth is inf"),
        ({"WindowCenter": 5, "WindowWidth": 0}, "Window Width must be"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_rescaling_that_shows_nothing_is_a_fault(tags: dict[str, Any], said: str) -> None:
    pixels = np.arange(64, dtype=np.uint8).tobytes()
    with pytest.raises(DataError, match=f"image 'ward/7.dcm' cannot be read: .*{said}"):
        decode_image(dicom(pixels, ExplicitVRLittleEndian, **tags), "ward/7.dcm", color=False)


def test_full_memory_is_a_fault_of_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decoding, "_pillow", full)
    with pytest.raises(DataError, match=r"'a\.png' cannot be read: MemoryError"):
        decode_image(b"x", "a.png", color=False)
    monkeypatch.undo()
    (tmp_path / "a.png").write_bytes(png(4, 4, 8))
    with ImageSource(tmp_path) as source:
        [(_, result)] = read_all(source, ["a.png"], full)
    assert isinstance(result, DataError)


def test_images_that_cannot_be_read_leave_their_reason_alone(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with ImageSource(tmp_path) as source:
        results = [one for _, one in read_all(source, ["a.png", "b.png"], partial(decode_image, color=False))]
    for one in results:  # and not the frames of decoders: of 100,000 images they take a gigabyte
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


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with ImageSource(tmp_path, follow_links=True) as source:
        for name in ("pipe.png", "zero.png"):
            with pytest.raises(DataError, match=f"'{name}' of .* cannot be read: not a regular file"):
                source.raw(name)
            with pytest.raises(OSError, match="not a regular file"):
                file_bytes(tmp_path / name)


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(1 << 40)
    with ImageSource(tmp_path) as source, pytest.raises(DataError, match="has 1,099,511,627,776 bytes"):
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


def test_a_link_out_of_the_root_is_not_read(linked: Path) -> None:
    with ImageSource(linked) as source:
        assert source.read("own.png", False).shape == (4, 4)
        assert source.read("within.png", False).shape == (4, 4)
        for name in ("out.png", "secret.png", "ward/secret.png", "../private/secret.png"):
            with pytest.raises(DataError, match=r"3 links lead out of it: set \[data\] follow_links = true"):
                source.raw(name)


def test_a_site_may_say_that_links_are_followed(linked: Path) -> None:
    with ImageSource(linked, follow_links=True) as source:
        for name in ("own.png", "out.png", "ward/secret.png"):
            assert source.read(name, False).shape == (4, 4)


def test_links_count_as_unreadable_images_of_a_table(linked: Path, tmp_path: Path) -> None:
    from suture.data.config import load_site_config
    from suture.data.readers import load_table

    (tmp_path / "labels.csv").write_text("image,patient,split,Mass\nown.png,1,train,1\nout.png,2,train,0\n")
    toml = '[data]\ndataset = "hospital"\nroot = "root"\ntable = "labels.csv"\n'
    (tmp_path / "suture.toml").write_text(toml)
    table = load_table(load_site_config(tmp_path / "suture.toml").data)
    with pytest.raises(DataError, match=r"1 of 2 images cannot be used.*'out\.png'"):
        decode(table, 16, False, tmp_path / "cache")
    (tmp_path / "suture.toml").write_text(toml + "follow_links = true\n")
    table = load_table(load_site_config(tmp_path / "suture.toml").data)
    assert len(decode(table, 16, False, tmp_path / "cache")[1]) == 2


def test_an_archive_that_is_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.tar").symlink_to(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.png"), io.BytesIO())
    with pytest.raises(DataError, match=r"a\.tar leads out of .*follow_links"):
        ImageSource(tmp_path / "root")
    assert "a.png" in ImageSource(tmp_path / "root", follow_links=True)


def test_a_folder_to_predict_is_not_left_by_a_link(linked: Path) -> None:
    with find_inputs([linked], "image") as inputs:
        for name in ("out.png", "up", "ward"):
            with pytest.raises(DataError, match="leads out of"):
                inputs.found[str(linked / name)].read()
        assert sorted(inputs.found) == [
            str(linked / name) for name in ("out.png", "own.png", "up", "ward", "within.png")
        ]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
def test_a_tar_header_cannot_ask_for_gigabytes(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.type, info.size = kind, 1 << 33
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)))
    with (
        ImageSource(tmp_path / "a.tar.gz") as source,
        pytest.raises(DataError, match=r"8,589,93|100 times its size"),
    ):
        source.raw("a.png")


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_reports_of_an_archive_are_bounded(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"reports.{suffix}"
    large = bytes(2 << 20)
    if suffix == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("large.txt", large)
            packed.writestr("small.txt", b"clear")
    else:
        with tarfile.open(path, "w:gz") as tar:
            for name, data in (("large.txt", large), ("small.txt", b"clear")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    assert list(reports(path, lambda name: name == "small.txt")) == [("small.txt", b"clear")]
    with pytest.raises(DataError, match=r"'large\.txt' has 2,097,152 bytes"):
        list(reports(path, lambda name: name == "large.txt"))


def test_tables_within_the_limits_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    rows = "".join(f"{i},x\n\n" for i in range(1000))
    path.write_bytes(gzip.compress(f"a,b\n{rows}".encode()))
    sheet = read_sheet(path)
    assert [row[0] for row in sheet.rows] == [str(i) for i in range(1000)]
    assert sheet.numbers == tuple(range(2, 2002, 2))
    assert list(read_columns(path, ["b"], "key")) == [("x",)] * 1000
    assert read_text(path) == f"a,b\n{rows}"


def test_the_columns_that_are_kept_of_a_large_table_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,x\n" * 10)
    monkeypatch.setattr("suture.data.reading.MOST_CELLS", 9)
    with pytest.raises(DataError, match=r"t\.csv: its b exceed"):
        list(read_columns(path, ["b"], "key"))
    with pytest.raises(DataError, match=r"t\.csv has more than 10 rows"):
        read_sheet(path)


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
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"reports\.zip"), unpacking(path, "fetch it again"):
            list(reports(path, lambda _: True))
        assert tracemalloc.get_traced_memory()[1] < MOST_LISTED + 8 * 2**20
    finally:
        tracemalloc.stop()


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
    with pytest.raises(DataError, match=r"'b\.png' .*size; pack it again"):
        list(islice(tar_members(path), 100))
