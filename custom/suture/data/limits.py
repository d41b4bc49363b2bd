"""What a file at a site may ask for: limits that are checked before its bytes are decoded.

A few kilobytes can unpack to gigabytes, so the size of a file says nothing about the memory that it takes.
"""

from __future__ import annotations

import os
from pathlib import Path

from suture.core.errors import DataError
from suture.core.plain import open_regular

MOST_PIXELS = 40_000_000
"""Pixels of an image; the largest films of public mammography have 38 million."""

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
        raise ValueError(f"its header says {width} x {height} pixels, and at most {MOST_PIXELS:,} are read")


def file_bytes(path: Path, most: int = MOST_ENCODED) -> bytes:
    """Read a regular file.

    Raises:
        DataError: it has more than `most` bytes.
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise DataError(f"{path} has {size:,} bytes, and at most {most:,} are read; remove it")
        return file.read()
