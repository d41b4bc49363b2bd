"""What a hospital's figures are told apart by, such as skin tone: a column that training does not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from suture.core.errors import ConfigError, DataError
from suture.data.batch import Samples
from suture.data.config import DataConfig
from suture.data.reading import read_sheet
from suture.data.table import Split
from suture.protocol.messages import MOST_ATTRIBUTES


def with_attributes(samples: Mapping[Split, Samples], config: DataConfig) -> dict[Split, Samples]:
    """The samples with the attribute of each row, where the site names the column of one.

    Raises:
        ConfigError: the data set is no hospital's own table.
        DataError: the table cannot be read, or the column has too many values to be an attribute.
    """
    if config.attribute_column is None:
        return dict(samples)
    of = _attributes(config, config.attribute_column)
    return {
        split: replace(part, attributes=tuple(of[name] for name in part.names))
        for split, part in samples.items()
    }


def _attributes(config: DataConfig, column: str) -> dict[str, str]:
    """The attribute of each image, empty where its cell is blank."""
    if config.dataset != "hospital":
        raise ConfigError(
            f"[data] attribute_column = {column!r} is for dataset = 'hospital', not {config.dataset!r}; "
            "remove it"
        )
    sheet = read_sheet(config.table)
    images = sheet.cells(sheet.position(config.image_column, "[data] image_column"))
    values = sheet.cells(sheet.position(column, "[data] attribute_column"))
    if len(found := {*values} - {""}) > MOST_ATTRIBUTES:
        raise DataError(
            f"{sheet.path}: column {column!r} has {len(found)} values, and figures are given by at most "
            f"{MOST_ATTRIBUTES}; name another [data] attribute_column, or group its values"
        )
    return dict(zip(images, values, strict=True))
