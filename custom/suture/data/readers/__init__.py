"""The readers of data sets, by the word that a `suture.toml` has for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from suture.core.errors import DataError
from suture.data.config import DataConfig
from suture.data.datasets import Dataset
from suture.data.images import ImageSource, present
from suture.data.readers.chexpert import read_chexpert
from suture.data.readers.eicu import read_eicu
from suture.data.readers.flamby import read_flamby
from suture.data.readers.hospital import read_hospital
from suture.data.readers.hyperkvasir import read_hyperkvasir
from suture.data.readers.isic import read_isic
from suture.data.readers.mimic import read_mimic
from suture.data.readers.mimic_reports import read_mimic_reports
from suture.data.readers.mtsamples import read_mtsamples
from suture.data.readers.nih import read_nih
from suture.data.readers.openi import read_openi
from suture.data.reading import Reading
from suture.data.table import Table

LOG = logging.getLogger(__name__)


DATASETS: dict[Dataset, str] = {
    "hospital": "a hospital's own CSV: image or text, patient, split, one column per label",
    "nih": "NIH ChestX-ray14 in its official format: Data_Entry_2017*.csv",
    "chexpert": "CheXpert in its official format: train.csv, valid.csv",
    "mimic": "MIMIC-CXR-JPG in its official format, or with the labels of CXR-LT",
    "isic2018": "ISIC 2018 Task 3 / HAM10000 in its official formats: ground truth or metadata CSV",
    "flamby_isic": "ISIC 2019 as FLamby divides it: its split CSV, or the list of one of six centres",
    "hyperkvasir": "HyperKvasir's labelled images: image-labels.csv or a CSV of official folds",
    "openi": "Indiana University's chest X-ray reports, MeSH-coded: NLMCXR_reports.tgz or its folder",
    "eicu": "eICU's drugs, past history and medication as text: patient.csv and the tables beside it",
    "mimic_reports": "MIMIC-CXR's free-text reports with the labels of CheXpert",
    "mtsamples": "MTSamples, transcribed notes under their specialties: mtsamples.csv",
}

_READERS: dict[Dataset, Callable[[DataConfig], Reading]] = {
    "hospital": read_hospital,
    "nih": read_nih,
    "chexpert": read_chexpert,
    "mimic": read_mimic,
    "isic2018": read_isic,
    "flamby_isic": read_flamby,
    "hyperkvasir": read_hyperkvasir,
    "openi": read_openi,
    "eicu": read_eicu,
    "mimic_reports": read_mimic_reports,
    "mtsamples": read_mtsamples,
}


def read_table(config: DataConfig) -> Reading:
    """Reads a site's table with all its faults, for a person to look at.

    Where the site says that its table is longer than its image folder (`partial`), rows without an image are
    left out and counted; otherwise a missing image is an unreadable one. Documents are in the table.

    Raises:
        SutureError: the table cannot be read at all.
    """
    reading = _READERS[config.dataset](config)
    if not config.partial or reading.table.texts is not None:
        return reading
    with ImageSource(config.root) as source:
        table, absent = present(reading.table, source)
    if not len(table):
        raise DataError(
            f"{config.root} has none of the {absent} images of {config.table}; correct [data] root"
        )
    return replace(reading, table=table, absent=absent)


def load_table(config: DataConfig) -> Table:
    """Reads a site's table for training.

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
    return reading.table
