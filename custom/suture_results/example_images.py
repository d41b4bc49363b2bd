"""Images that a run's model decides rightly, wrongly or barely, for a report that the user asks for."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, DataError
from suture.data.config import SiteConfig, load_server_config, load_site_config
from suture.data.decoding import Pixels, decode_image, resize_pad
from suture.data.images import ImageSource
from suture.data.readers import load_table
from suture.data.table import Table
from suture.execution.study import SERVER
from suture.protocol.decisions import Decisions
from suture.protocol.records import Run, read_run
from suture_results.decided_predictions import decisions_of, threshold_of
from suture_results.model_export.explanation import Map, explain
from suture_results.prediction import Model, open_model
from suture_results.report import Example, Examples

SHOWN = 3
"""Images that are shown of a class and an outcome."""

_LOOKED = 40
"""Images with a class, and as many without it, among which those that are shown are looked for."""

SIDE = 128
"""The longest side of a shown image, in pixels."""


def example_images(folder: Path) -> Examples:
    """Draw test images of each class: found, missed, false alarms and borderline.

    An image is positive at or above the threshold of its site, or that of all sites; without thresholds, 0.5.
    Borderline images are those closest to it.

    They are of the server's held-out set, or where there is none of the sites' test splits, all sites in
    turn. The run's seed draws them, so that the same run shows the same images. An image that cannot be read
    is passed over, as it was when the model was tested.

    Args:
        folder: of a run.

    Raises:
        ConfigError: the data lie at the sites or were removed, or the model reads text or is absent.
        DataError: run.json or a site's data cannot be read.
    """
    needed("matplotlib", "--examples", "plots")
    run = read_run(folder)
    configs = _configs(folder, run)
    model = open_model(folder / "model")
    if model.reads_text:
        raise ConfigError(f"{folder}: --examples shows images, but the model reads text; leave it out")
    decisions = decisions_of(folder / "model")
    tables = {site: _read_tested(config) for site, config in configs.items()}
    with ExitStack() as stack:
        sources = {
            site: stack.enter_context(ImageSource(table.root, table.follow_links))
            for site, table in tables.items()
        }
        return {
            label: _outcomes(
                [
                    _Seen(model, label, site, pixels, bool(present), _threshold(decisions, label, site))
                    for present in (1, 0)
                    for site, pixels in islice(
                        _readable(tables, sources, label, present, run.seed, model), _LOOKED
                    )
                ]
            )
            for label in model.labels
        }


class _Seen:
    """An image and the probability that a model gives it of a class."""

    def __init__(
        self, model: Model, label: str, site: str, pixels: Pixels, present: bool, threshold: float
    ) -> None:
        image = torch.from_numpy(pixels.copy())
        image = image.permute(2, 0, 1) if model.prepare.color else image[None]
        self.model, self.label, self.site, self.pixels = model, label, site, pixels
        self.present, self.threshold = present, threshold
        self.probability = float(model(image[None])[0, model.labels.index(label)])
        self.positive = self.probability >= threshold

    def example(self) -> Example:
        """Return it with the map of what speaks for the class."""
        map_ = explain(self.model, self.pixels, (self.label,)).maps[self.label]
        images = png_uri(self.pixels, SIDE), png_uri(_overlaid(self.pixels, map_), SIDE)
        return Example(self.site, *images, self.probability, self.threshold, self.present)


def _outcomes(seen: list[_Seen]) -> dict[str, list[Example]]:
    found = {
        "Found": [one for one in seen if one.present and one.positive],
        "Missed": [one for one in seen if one.present and not one.positive],
        "False alarms": [one for one in seen if not one.present and one.positive],
        "Borderline": sorted(seen, key=lambda one: abs(one.probability - one.threshold)),
    }
    return {outcome: [one.example() for one in of[:SHOWN]] for outcome, of in found.items() if of}


def _threshold(decisions: Decisions | None, label: str, site: str) -> float:
    found = threshold_of(label, decisions, site)[1] if decisions else None
    return 0.5 if found is None else found


def _overlaid(pixels: Pixels, map_: Map) -> Pixels:
    """Lay a map over an image: the more speaks for the class, the less of the image is seen."""
    from matplotlib import colormaps

    weight = 0.7 * map_[..., None]
    gray = pixels if pixels.ndim == 3 else pixels[..., None]
    mixed: Pixels = (gray * (1 - weight) + 255 * colormaps["magma"](map_)[..., :3] * weight).astype(np.uint8)
    return mixed


def _configs(folder: Path, run: Run) -> dict[str, SiteConfig]:
    """Return the configuration of the server's held-out data, or those of the sites."""
    if run.env in ("poc", "prod"):
        raise ConfigError(f"{folder}: the images are at the sites only; leave out --examples")
    server = folder / "sites" / SERVER / "suture.toml"
    if server.is_file() and (held_out := load_server_config(server).held_out):
        return {SERVER: held_out}
    paths = {path.parent.name: path for path in sorted(folder.glob("sites/*/suture.toml")) if path != server}
    if not paths:
        raise ConfigError(
            f"{folder}/sites has no suture.toml, so its images are not found; leave out --examples"
        )
    return {site: load_site_config(path) for site, path in paths.items()}


def _read_tested(config: SiteConfig) -> Table:
    table = load_table(config.data)
    return table.rows(np.array([split == "test" for split in table.split], dtype=np.bool_))


def _readable(
    tables: dict[str, Table],
    sources: dict[str, ImageSource],
    label: str,
    present: int,
    seed: int,
    model: Model,
) -> Iterator[tuple[str, Pixels]]:
    """Yield the site and the pixels of the drawn images, as `Model.predict` reads them."""
    for site, row in _draw(tables, label, present, seed):
        name = tables[site].images[row]
        try:
            pixels = decode_image(sources[site].raw(name), name, model.prepare.color, tables[site].bits)
        except DataError:
            continue
        yield site, resize_pad(pixels, model.prepare.size)


def _draw(tables: dict[str, Table], label: str, present: int, seed: int) -> Iterator[tuple[str, int]]:
    """Yield the site and the row of each image with or without a class, at random, all sites in turn."""
    generator = np.random.default_rng(seed)
    rows = {
        site: generator.permutation(np.flatnonzero(table.y[:, table.labels.index(label)] == present)).tolist()
        for site, table in tables.items()
        if label in table.labels.names
    }
    for turn in zip_longest(*rows.values()):
        yield from ((site, row) for site, row in zip(rows, turn, strict=True) if row is not None)


def png_uri(pixels: Pixels, most: int | None = None) -> str:
    """Return an image as a URI that holds a PNG, made smaller where a side has more than `most` pixels."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    if most is not None:
        image.thumbnail((most, most))
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
