"""The stored runs of a study: one JSON Lines file for each setting, one run a line, sorted by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from suture.core.errors import DataError
from suture.core.files import atomic_write, hold, read_regular

_LOCK_SECONDS = 60.0

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """The records in a file, by name. Several processes may add to it.

    Attributes:
        path: of the file; without one there is no record.
    """

    path: Path

    @cached_property
    def _known(self) -> dict[str, Record]:
        return _read(self.path)

    def find(self, name: str) -> Record | None:
        """Return the record of that name; None if there is none.

        Raises:
            DataError: the file is damaged; names the line.
        """
        return self._known.get(name)

    def put(self, name: str, record: Record) -> None:
        """Add a record, or replace the one of that name.

        Raises:
            DataError: the file is damaged.
            SutureError: another process holds the folder's lock for longer than a minute.
        """
        with hold(self.path.parent / ".lock", _LOCK_SECONDS):
            lines = {**_read(self.path), name: record}
            texts = [
                json.dumps({"name": key, **lines[key]}, separators=(",", ":"), allow_nan=False)
                for key in sorted(lines)
            ]
            atomic_write(self.path, "".join(f"{text}\n" for text in texts).encode())
            self._known.update(lines)

    def runs(self) -> int:
        """Return the number of runs."""
        return sum("seconds" in record for record in self._known.values())

    def seconds(self) -> float:
        """Return what all runs have taken."""
        return sum(float(record.get("seconds", 0.0)) for record in self._known.values())


def _read(path: Path) -> dict[str, Record]:
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        try:
            record = json.loads(line)
            found[record.pop("name")] = record
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number} cannot be read: {error!r:.200}; delete it, and its run is done again"
            ) from None
    return found
