"""What decoders warn of: one printable line for each image, with its name.

Pillow and pydicom quote the file in their warnings, so that a file could give commands to the terminal.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from suture.core.printable import printable

LOG = logging.getLogger(__name__)


class _Decoded(threading.local):
    """The image that this thread decodes, if any, and what it was warned of."""

    warned: list[str] | None = None


_decoded = _Decoded()


@contextmanager
def warned_of(name: str) -> Iterator[None]:
    """Log the first warning of a block, and how many follow, as one line with the name of the image."""
    outer, _decoded.warned = _decoded.warned, []
    try:
        yield
    finally:
        found, _decoded.warned = _decoded.warned, outer
        if found:
            more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
            LOG.warning("image %s: %s%s", printable(name), printable(found[0]), more)


def _show(message: Any, *place: Any, **keys: Any) -> None:
    if _decoded.warned is None:
        _elsewhere(message, *place, **keys)
    else:
        _decoded.warned.append(str(message))


# Not `warnings.catch_warnings`, which changes the filters of all threads: images are decoded on several.
_elsewhere = warnings.showwarning
warnings.showwarning = _show


class _Cleaner(logging.Handler):
    """Cleans the records of a library before the handlers of its parents write them."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = printable(record.getMessage()), ()


for _library in ("pydicom", "PIL", "nibabel"):
    logging.getLogger(_library).addHandler(_Cleaner())
