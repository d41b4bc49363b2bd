"""What decoders warn of is one printable line for each image."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image

from suture.data import decoding as decoder_warnings
from suture.data.decoding import warned_of

PREDICTED = """
import sys
from pathlib import Path
from suture.data.decoding import open_image
from suture.data.images import ImageSource, read_all
with ImageSource(Path(sys.argv[1])) as source:
    names = source.paths()
    for row, found in read_all(source, names, open_image):
        print(names[row], type(found).__name__)
"""


def dicom(path: Path, text: str) -> None:
    """An image whose date pydicom does not believe, and quotes."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPInstanceUID = ExplicitVRLittleEndian, generate_uid()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    one = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    one.SamplesPerPixel, one.PhotometricInterpretation, one.PixelRepresentation = 1, "MONOCHROME2", 0
    one.Rows = one.Columns = one.BitsAllocated = one.BitsStored = 8
    one.HighBit, one.PixelData = 7, bytes(range(64))
    one["PixelData"].VR = "OB"
    one.RescaleIntercept, one.RescaleSlope = 0, 1
    one.Modality = "QQQQ"
    one.SpecificCharacterSet = "ISO_IR 99"
    one.save_as(path, enforce_file_format=True)
    content = path.read_bytes().replace(b"ISO_IR 99 ", text.encode()).replace(b"QQQQ", b"\x1b[2J")
    path.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    dicom(tmp_path / "in" / "a\x1b]0;x\n.dcm", "\x1b[31mred\n\r")
    image = io.BytesIO()
    Image.new("L", (8, 8)).save(image, "PNG", exif=b"XX*\0\x1b[2J")
    (tmp_path / "in" / "b.png").write_bytes(image.getvalue())
    return tmp_path / "in"


@pytest.mark.complete
def test_no_warning_gives_commands_to_a_terminal(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PREDICTED, folder], capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert all(line.isprintable() for line in lines), done.stderr
    told = [line.partition(":")[0] for line in lines]
    assert sorted(told) == ["image a\\x1b]0;x\\n.dcm", "image b.png"], done.stderr
    assert "orientation" in done.stderr


def test_the_warnings_of_an_image_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with warned_of("outer"):
        decoder_warnings._show("before", UserWarning, "file", 1)
        with warned_of("a\n.png"):
            for i in range(1000):
                decoder_warnings._show(f"\x1b[{i}m", UserWarning, "file", i)
    assert caplog.messages == ["image a\\n.png: \\x1b[0m (and 999 more)", "image outer: before"]


def test_a_warning_of_no_image_is_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(decoder_warnings, "_elsewhere", lambda *place, **_: shown.append(place[0]))
    monkeypatch.setattr(warnings, "showwarning", decoder_warnings._show)
    warnings.showwarning("text", UserWarning, "file", 1)
    assert shown == ["text"]


@pytest.mark.parametrize("library", ["pydicom", "PIL.TiffImagePlugin", "pydicom.pixels.decoders"])
def test_a_log_of_a_library_is_printable(library: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger(library).warning("odd %s", "\x1b[2J\nfinished")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "odd \\x1b[2J\\nfinished\n"
