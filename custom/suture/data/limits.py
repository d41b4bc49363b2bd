"""What a file at a site may ask for: limits that are checked before its bytes are decoded.

A few kilobytes can unpack to gigabytes, so the size of a file says nothing about the memory that it takes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from suture.core.errors import DataError
from suture.core.files import open_regular

MOST_PIXELS = 40_000_000
"""Pixels of an image; the largest films of public mammography have 38 million."""

_MOST_SCANS = 100
"""Scans of a JPEG. Encoders write about ten; each of 40 million pixels takes 30 ms, however few its bytes."""

MOST_ENCODED = 2**28
"""Bytes of the file of an image: more than `MOST_PIXELS` of three 16-bit channels take."""

MOST_DOCUMENT = 2**20
"""Bytes of one report of an archive."""

MOST_MEMBERS = 2**19
"""Members of an archive, whatever they are; MIMIC-CXR has 377,110 images."""

MOST_LISTED = 2**25
"""Bytes of the list of the members of a .zip, which Python unpacks to some twenty times as many."""

MOST_UNPACKED = 2**30
"""Bytes that a gzipped archive may unpack to, or `MOST_TIMES` its own size where that is more."""

MOST_TIMES = 100

MOST_TEXT = 2**29
"""Bytes of a table, or of a list, once it is decompressed."""

MOST_CELLS = 2**25
"""Cells of a table, of which a row takes `ROW` more than it has: MIMIC-CXR with 40 classes has 20 million."""

ROW = 7

LONGEST_LINE = 2**19
"""Bytes of one line of a table."""

FOLLOW = "set [data] follow_links = true if you trust them"
"""What a person can do about links that lead out of a folder of data."""


def check_pixels(width: int, height: int) -> None:
    """Check the size that the header of an image announces.

    Raises:
        ValueError: it has no pixel, or more than `MOST_PIXELS`.
    """
    if not (width > 0 and height > 0 and width * height <= MOST_PIXELS):
        raise ValueError(f"its header says {width} x {height} pixels; the limit is {MOST_PIXELS:,}")


_SCAN = b"\xff\xda"

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
"""A marker of a JPEG (ITU-T T.81, B.1.1.2), but for those of restarts, which stand within a scan."""


def check_scans(data: bytes) -> None:
    """Check how many scans a JPEG has; other files pass.

    Raises:
        ValueError: they are more than `_MOST_SCANS`.
    """
    # The two bytes may also occur in what a camera adds, so only many are looked at one by one.
    if not data.startswith(b"\xff\xd8") or data.count(_SCAN) <= _MOST_SCANS:
        return
    scans, position = 0, 2
    while (found := _MARKER.search(data, position)) and found[1] != b"\xd9":
        scans += found[1] == _SCAN[1:]
        if scans > _MOST_SCANS:
            raise ValueError(f"it has more than {_MOST_SCANS} scans; save it as a baseline JPEG or PNG")
        length = 0 if found[1] in (b"\xd8", b"\x01") else int.from_bytes(data[found.end() : found.end() + 2])
        position = found.end() + length


def file_bytes(path: Path, most: int = MOST_ENCODED) -> bytes:
    """Read a regular file.

    Raises:
        DataError: it has more than `most` bytes.
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise DataError(f"{path} has {size:,} bytes; the limit is {most:,}; remove it")
        return file.read()
