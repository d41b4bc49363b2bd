"""The registry of data sets: the configuration and the reader of each, by its word in a suture.toml."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from suture.core.errors import DataError, LabelError, unknown
from suture.data.dataset import DatasetConfig
from suture.data.images import ImageSource, present
from suture.data.readers.chexpert import ChexpertConfig, read_chexpert
from suture.data.readers.eicu import EicuConfig, read_eicu
from suture.data.readers.fhir import FhirConfig, read_fhir
from suture.data.readers.flamby import FlambyConfig, read_flamby
from suture.data.readers.hospital import HospitalConfig, read_hospital
from suture.data.readers.hyperkvasir import HyperKvasirConfig, read_hyperkvasir
from suture.data.readers.isic import IsicConfig, read_isic
from suture.data.readers.mimic import MimicConfig, MimicReportsConfig, read_mimic, read_mimic_reports
from suture.data.readers.mtsamples import MtsamplesConfig, read_mtsamples
from suture.data.readers.nih import NihConfig, read_nih
from suture.data.readers.omop import OmopConfig, read_omop
from suture.data.readers.openi import OpeniConfig, read_openi
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
    """

    config: type[DatasetConfig]
    read: Callable[[Any], Reading]
    description: str


DATASETS: dict[str, DataSet] = {
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
    "nih": DataSet(
        NihConfig,
        read_nih,
        "NIH ChestX-ray14 in its official format: Data_Entry_2017*.csv",
    ),
    "chexpert": DataSet(
        ChexpertConfig,
        read_chexpert,
        "CheXpert in its official format: train.csv, valid.csv",
    ),
    "mimic": DataSet(
        MimicConfig,
        read_mimic,
        "MIMIC-CXR-JPG in its official format, or with the labels of CXR-LT",
    ),
    "isic2018": DataSet(
        IsicConfig,
        read_isic,
        "ISIC 2018 Task 3 / HAM10000 in its official formats: ground truth or metadata CSV",
    ),
    "flamby_isic": DataSet(
        FlambyConfig,
        read_flamby,
        "ISIC 2019 as FLamby divides it: its split CSV, or the list of one of six centres",
    ),
    "hyperkvasir": DataSet(
        HyperKvasirConfig,
        read_hyperkvasir,
        "HyperKvasir's labelled images: image-labels.csv or a CSV of official folds",
    ),
    "openi": DataSet(
        OpeniConfig,
        read_openi,
        "Indiana University's chest X-ray reports, MeSH-coded: NLMCXR_reports.tgz or its folder",
    ),
    "eicu": DataSet(
        EicuConfig,
        read_eicu,
        "eICU's drugs, past history and medication as text: patient.csv and the tables beside it",
    ),
    "mimic_reports": DataSet(
        MimicReportsConfig,
        read_mimic_reports,
        "MIMIC-CXR's free-text reports with the labels of CheXpert",
    ),
    "mtsamples": DataSet(
        MtsamplesConfig,
        read_mtsamples,
        "MTSamples, transcribed notes under their specialties: mtsamples.csv",
    ),
}

DataConfig = Annotated[
    HospitalConfig
    | OmopConfig
    | FhirConfig
    | NihConfig
    | ChexpertConfig
    | MimicConfig
    | IsicConfig
    | FlambyConfig
    | HyperKvasirConfig
    | OpeniConfig
    | EicuConfig
    | MimicReportsConfig
    | MtsamplesConfig,
    Field(discriminator="dataset"),
]
"""The ``[data]`` of a suture.toml; its key `dataset` decides which of these it is."""


def read_table(config: DatasetConfig) -> Reading:
    """Reads a site's table with all its faults, for a person to look at.

    With `partial`, rows whose image is missing from `root` are left out and counted; without it, a missing
    image counts as an unreadable one.

    Raises:
        SutureError: the table cannot be read at all.
    """
    try:
        reading = DATASETS[config.dataset].read(config)
    except LabelError as error:  # readers of releases leave out the file
        named = str(config.table) in str(error) or str(error).startswith("[data]")
        raise error if named else LabelError(f"{config.table}: {error}") from error
    table = replace(reading.table, follow_links=config.follow_links, bits=config.bits)
    reading = replace(reading, table=table)
    for name in config.stated_codes():
        if name not in table.labels:
            raise unknown(f"class under [data.codes] (not one of {config.table})", name, table.labels)
    if not config.partial or reading.table.texts is not None:
        return reading
    with ImageSource(config.root, config.follow_links) as source:
        table, absent = present(reading.table, source)
    if not len(table):
        raise DataError(
            f"{config.root} contains none of the {absent} images of {config.table}; correct [data] root"
        )
    return replace(reading, table=table, absent=absent)


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
        what = "image" if reading.table.texts is None else "text"
        LOG.warning("%s: %d rows of %s have no %s", config.root, reading.absent, config.table, what)
    return reading
