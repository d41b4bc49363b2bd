"""What a file at a site may ask for: limits that are checked before its bytes are decoded.

A few kilobytes can unpack to gigabytes, so the size of a file says nothing about the memory that it takes.
"""

from __future__ import annotations

import stat
from pathlib import Path

from suture.core.errors import DataError

MOST_PIXELS = 40_000_000
"""Pixels of an image; the largest films of public mammography have 38 million."""

MOST_ENCODED = 2**28
"""Bytes of the file of an image: more than `MOST_PIXELS` of three 16-bit channels take."""

MOST_DOCUMENT = 2**20
"""Bytes of one report of an archive."""

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
    """Read a regular file; a pipe or device, which may never end, is not opened.

    Raises:
        DataError: it is no regular file, or has more than `most` bytes.
        OSError: it cannot be read.
    """
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise DataError(f"{path} is no regular file; remove it")
    if facts.st_size > most:
        raise DataError(f"{path} has {facts.st_size:,} bytes, and at most {most:,} are read; remove it")
    return path.read_bytes()
