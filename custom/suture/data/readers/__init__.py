"""The registry of data sets: the configuration and the reader of each, by its word in a suture.toml."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import SerializeAsAny, ValidationInfo, WrapValidator
from pydantic_core import PydanticCustomError

from suture.core.entry_points import Registry
from suture.core.errors import ConfigError, DataError, LabelError, check_known
from suture.core.escaping import number_of
from suture.data.closing import close_reading
from suture.data.dataset import DatasetConfig
from suture.data.images import ImageSource, present
from suture.data.published import PublishedTable
from suture.data.readers.fhir import FhirConfig, read_fhir
from suture.data.readers.hospital import HospitalConfig, read_hospital
from suture.data.readers.omop import OmopConfig, read_omop
from suture.data.reading import Reading
from suture.data.table import Table

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSet:
    """An entry of the registry.

    Attributes:
        config: the keys of ``[data]`` for this data set.
        read: reads the table of such a configuration.
        description: one line for people.
        published: tables by which `suture init` recognises this data set.
    """

    config: type[DatasetConfig]
    read: Callable[[Any], Reading]
    description: str
    published: tuple[PublishedTable, ...] = ()


DATASETS: Registry[DataSet] = Registry(
    "suture.datasets",
    "data set",
    {
        "hospital": DataSet(
            HospitalConfig,
            read_hospital,
            "a hospital's own table: image or text, patient, split, one column per label",
        ),
        "omop": DataSet(
            OmopConfig,
            read_omop,
            "a hospital's images, with labels from its OMOP database: MEASUREMENT and OBSERVATION",
        ),
        "fhir": DataSet(
            FhirConfig,
            read_fhir,
            "a hospital's images, with labels from FHIR Observations: NDJSON files or Bundles",
        ),
    },
    "a suture.data.readers.DataSet",
    lambda entry: isinstance(entry, DataSet),
)
"""The data sets of this distribution, by their word in ``[data]``."""


def _choose(value: Any, _handler: Any, info: ValidationInfo) -> DatasetConfig:
    """The configuration of the data set that `dataset` names.

    Its faults are those of the configuration's own keys.
    """
    if isinstance(value, DatasetConfig):
        return value
    if not isinstance(value, Mapping) or "dataset" not in value:
        raise PydanticCustomError("no_dataset", "dataset is missing")
    if str(value["dataset"]) not in DATASETS.names():
        raise PydanticCustomError("unknown_dataset", "unknown data set")
    try:
        kind = DATASETS.find(str(value["dataset"])).config
    except ConfigError as error:
        raise PydanticCustomError("value_error", "cannot be used", {"error": str(error)}) from None
    return kind.model_validate(value, context=info.context)


DataConfig = Annotated[SerializeAsAny[DatasetConfig], WrapValidator(_choose)]
"""The ``[data]`` of a suture.toml; its key `dataset` decides which keys there are."""


def read_table(config: DatasetConfig) -> Reading:
    """Reads a site's table with all its faults, for a person to look at.

    With `partial`, rows whose image is missing from `root` are left out and counted; without it, a missing
    image counts as an unreadable one.

    Raises:
        SutureError: the table cannot be read at all.
    """
    try:
        reading = DATASETS.find(config.dataset).read(config)
    except LabelError as error:  # readers of releases leave out the file
        named = str(config.table) in str(error) or str(error).startswith("[data]")
        raise error if named else LabelError(f"{config.table}: {error}") from error
    table = replace(reading.table, follow_links=config.follow_links, bits=config.bits)
    reading = close_reading(replace(reading, table=table), config)
    for name in config.stated_codes():
        check_known(f"class under [data.codes] (not one of {config.table})", name, table.labels)
    if not config.partial or reading.table.texts is not None:
        return reading
    with ImageSource(config.root, config.follow_links) as source:
        table, absent = present(reading.table, source)
    if not len(table):
        raise DataError(
            f"{config.root} contains none of the {absent} images of {config.table}; correct [data] root"
        )
    return replace(reading, table=table, absent=reading.absent + absent, numbers=())


def load_table(config: DatasetConfig) -> Table:
    """Reads a site's table for training; see `load_reading`."""
    return load_reading(config).table


def load_reading(config: DatasetConfig) -> Reading:
    """Reads a site's table for training, with the number of its rows that are left out.

    Raises:
        SutureError: the table cannot be read, or has any fault; the message gives the first.
    """
    reading = read_table(config)
    if reading.faults:
        more = len(reading.faults) - 1
        also = f" (and {more} more; `suture data check` lists them)" if more else ""
        raise DataError(reading.faults[0] + also)
    if reading.absent:
        what = "an image" if reading.table.texts is None else "a text"
        lost = number_of(reading.absent, "row")
        LOG.warning("%s: left out %s, without %s in %s", config.table, lost, what, config.root)
    return reading
