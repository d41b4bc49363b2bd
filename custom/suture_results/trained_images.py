"""Whether labelled data hold images that a run was trained on, which its model knows already."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from suture.core.errors import SutureError
from suture.core.escaping import number_of
from suture.data.config import CONFIG, SiteConfig, load_site_config
from suture.data.images import ImageSource
from suture.data.readers import read_table
from suture.data.table import Table
from suture.execution.study import SERVER
from suture_results.finetuning_results import read_finetuning_results

_NOT_HERE = (
    "the table has no splits, so all its rows are used. Whether the model was trained on some of them "
    "cannot be told here: if so, add a column of splits to the table and choose with --split"
)


class _Image(NamedTuple):
    """An image, or a document, whose `place` is its name and text."""

    place: str
    split: str
    name: str
    source: ImageSource | None

    def digest(self) -> bytes:
        return hashlib.sha256(self.source.raw(self.name) if self.source else b"").digest()


def remark(model: Path, config: SiteConfig, which: str, *, divided: bool) -> str:
    """Return how many of the images that are used the run has trained on; empty where there is none.

    Images of the run's sites are recognised by their paths, and copies elsewhere by file name and bytes.

    Args:
        model: its folder; see `_tables`.
        which: the split that is used, or "all".
        divided: whether the data, or a person, say which images are for test.
    """
    tables = _tables(model)
    if not tables:
        return "" if divided else _NOT_HERE
    with ExitStack() as stack:
        known = [(image, site) for site, table in tables.items() for image in _images(table, stack)]
        places = dict.fromkeys((image.place for image, _ in known), None)
        trained = {image: site for image, site in known if image.split == "train"}
        places |= {image.place: site for image, site in trained.items()}
        used = [i for i in _images(read_table(config.data).table, stack) if which in ("all", i.split)]
        others = [image for image in used if image.source and image.place not in places]
        names = {os.path.basename(image.place) for image in others}
        copies = {i.digest(): site for i, site in trained.items() if os.path.basename(i.place) in names}
        found = [places.get(i.place) for i in used] + [copies.get(i.digest()) for i in others if copies]
    if not (sites := Counter(filter(None, found))):
        return ""
    row = "document" if config.data.holds_text else "image"
    new = shlex.join(["suture", "evaluate", str(model), str(sites.most_common(1)[0][0]), "--split", "test"])
    return (
        f"the model was trained on {sites.total():,} of these {number_of(len(used), row)}, so the figures "
        f"are too good; for {row}s that it has not seen: {new}"
    )


def _tables(model: Path) -> dict[Path, Table]:
    """Return the tables whose split `train` a model was trained on, by where their suture.toml is.

    The run around a model has that of each site, if these are on this machine. Beside a fine-tuned model
    tuned.json names the one before and the data, which have trained it but for their test split and the cases
    that its run was tested on.
    """
    tables: dict[Path, Table] = {}
    seen: set[Path] = set()
    while model not in seen:
        seen.add(model)
        run = next((folder for folder in model.absolute().parents if (folder / "run.json").is_file()), model)
        try:
            tuned = read_finetuning_results(model.parent)
            if tuned is None or not tuned.data:
                files = [path for path in sorted(run.glob(f"sites/*/{CONFIG}")) if path.parent.name != SERVER]
                return tables | {path.parent: read_table(load_site_config(path).data).table for path in files}
            table = read_table(load_site_config(Path(tuned.data)).data).table
            tested = {*next(iter(tuned.targets.values())).runs[0].cases}
            rows = zip(table.images, table.split, strict=True)
            split = tuple(
                "test" if name in tested else of.replace("validation", "train") for name, of in rows
            )
            tables[Path(tuned.data)] = replace(table, split=split)
            model = Path(tuned.begun)
        except SutureError:  # the data were moved since
            break
    return tables


def _images(table: Table, stack: ExitStack) -> Iterator[_Image]:
    """The images, or documents, of a table that are in a split and exist."""
    rows = zip(table.images, table.texts or table.images, table.split, strict=True)
    source = None if table.texts else stack.enter_context(ImageSource(table.root, table.follow_links))
    for name, text, split in rows:
        if split and (source is None or name in source):
            place = os.path.realpath(source.path(name)) if source else f"{name} {text}"
            yield _Image(place, split, name, source)
