"""Images of each class of a run whose data lie on this machine, for a report that the user asks for."""

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

from suture.core.errors import ConfigError, DataError
from suture.data.config import SiteConfig, load_server_config, load_site_config
from suture.data.decoding import Pixels, decode_image, resize_pad
from suture.data.images import ImageSource
from suture.data.readers import load_table
from suture.data.table import Table
from suture.learning.prediction import Model, open_model
from suture.protocol.records import Run, read_run
from suture.reports.report import Example
from suture.simulation.partition import SERVER

PER_CLASS = 4
"""Images that are shown of a class."""

SIDE = 128
"""The longest side of a shown image, in pixels."""


def example_images(folder: Path) -> dict[str, list[Example]]:
    """Draw a few test images of each class of a run's model, with the probability that it gives them.

    They are of the server's held-out set, or where there is none of the sites' test splits, all sites in
    turn. The run's seed draws them, so that the same run shows the same images. An image that cannot be read
    is passed over, as it was when the model was tested.

    Args:
        folder: of a run.

    Raises:
        ConfigError: the data lie at the sites or were removed, or the model reads text or is absent.
        DataError: run.json or a site's data cannot be read.
    """
    run = read_run(folder)
    configs = _configs(folder, run)
    model = open_model(folder / "model")
    if model.reads_text:
        raise ConfigError(f"{folder}: --examples shows images, but the model reads text; leave it out")
    tables = {site: _tested(config) for site, config in configs.items()}
    with ExitStack() as stack:
        sources = {
            site: stack.enter_context(ImageSource(table.root, table.follow_links))
            for site, table in tables.items()
        }
        return {
            label: [
                _example(model, label, site, pixels)
                for site, pixels in islice(_readable(tables, sources, label, run.seed, model), PER_CLASS)
            ]
            for label in model.labels
        }


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


def _tested(config: SiteConfig) -> Table:
    table = load_table(config.data)
    return table.rows(np.array([split == "test" for split in table.split], dtype=np.bool_))


def _readable(
    tables: dict[str, Table], sources: dict[str, ImageSource], label: str, seed: int, model: Model
) -> Iterator[tuple[str, Pixels]]:
    """Yield the site and the pixels of the drawn images, as `Model.predict` reads them."""
    for site, row in _drawn(tables, label, seed):
        name = tables[site].images[row]
        try:
            pixels = decode_image(sources[site].raw(name), name, model.prepare.color, tables[site].bits)
        except DataError:
            continue
        yield site, resize_pad(pixels, model.prepare.size)


def _drawn(tables: dict[str, Table], label: str, seed: int) -> Iterator[tuple[str, int]]:
    """Yield the site and the row of each image of a class in a random order, all sites in turn."""
    generator = np.random.default_rng(seed)
    rows = {
        site: generator.permutation(np.flatnonzero(table.y[:, table.labels.index(label)] == 1)).tolist()
        for site, table in tables.items()
        if label in table.labels.names
    }
    for turn in zip_longest(*rows.values()):
        yield from ((site, row) for site, row in zip(rows, turn, strict=True) if row is not None)


def _example(model: Model, label: str, site: str, pixels: Pixels) -> Example:
    image = torch.from_numpy(pixels.copy())
    image = image.permute(2, 0, 1) if model.prepare.color else image[None]
    probability = float(model(image[None])[0, model.labels.index(label)])
    return Example(site, png_uri(pixels, SIDE), probability)


def png_uri(pixels: Pixels, most: int | None = None) -> str:
    """Return an image as a URI that holds a PNG, made smaller where a side has more than `most` pixels."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    if most is not None:
        image.thumbnail((most, most))
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
