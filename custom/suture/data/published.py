"""Tables as public data sets publish them, which `suture init` recognises by their columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suture.data.reading import Sheet


@dataclass(frozen=True)
class PublishedTable:
    """A published table.

    Attributes:
        title: of the data set.
        columns: that the table has, all of them.
        data: keys of ``[data]``. Those of the hospital's own table are filled in where they are not given.
        beside: further keys where a file of that name, gzipped or not, is in the table's folder.
        names: a pattern of the file names of its images, where the columns alone are too common.
    """

    title: str
    columns: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: str = ""

    def recognises(self, sheet: Sheet, images: Collection[str]) -> bool:
        """Whether a table is this one, beside images of these paths."""
        return {*self.columns} <= {*sheet.header} and (
            not self.names or all(re.search(self.names, name) for name in images)
        )

    def keys(self, folder: Path) -> dict[str, Any]:
        """The keys of ``[data]`` for a table in a folder."""
        found = dict(self.data)
        for name, keys in self.beside.items():
            if any(map(Path.is_file, (folder / name, folder / f"{name}.gz"))):
                found |= keys
        return found
