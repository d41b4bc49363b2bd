"""The eICU Collaborative Research Database (Pollard et al., Sci Data 2018) and its demo, as text.

`table` is `patient.csv`, a row for each stay in a unit; the other tables lie beside it or in `lists`, each
gzipped or not. The document of a stay is what a person wrote down of its drugs and its past history.

Source: PMFL (Zhang et al., arXiv:2112.05321), whose documents are `admissionDrug` and the `admitdxpath` of
`admissionDx`. That one repeats the diagnosis which is the label, so it is left out here unless the site
sets `leaking_text`, and past history and medication take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictBool

from suture.core.errors import DataError
from suture.core.labels import canonical
from suture.data.dataset import ReleaseConfig
from suture.data.readers import DataSet
from suture.data.reading import Reading, frequent, indicators, read_columns, read_sheet, row_faults
from suture.data.split import by_patient
from suture.data.table import Table

_APACHE = ("CVA", "CHF", "Sepsis", "Asthma", "pulmonary", "Pneumonia", "Cardiomyopathy")
"""What PMFL looks for among the parts of `apacheadmissiondx`, which ", " separates."""

LEAST = 100
"""A group of diagnoses of fewer stays is a label only where the site names it."""

_STAY = "patientunitstayid"
_KEY = 'dataset = "eicu"'

Documents = dict[str, dict[str, None]]
"""The entries of each stay, each entry once, in the order of the file."""

EicuText = Literal["admissionDrug", "pastHistory", "medication"]
"""Tables that a document may be made of, besides the one that names the label."""

TEXTS: tuple[EicuText, ...] = ("admissionDrug", "pastHistory", "medication")


class EicuConfig(ReleaseConfig):
    """eICU as text; `table` is patient.csv. The split is 70/10/20 by patient.

    Attributes:
        lists: the folder of the database's other tables. By default, the folder of `table`.
        labels_from: ``apache`` takes the labels from PMFL's words in `apacheadmissiondx`; ``diagnosis`` takes
            the first two levels of `diagnosisstring`.
        texts: the tables whose entries make the document of a stay.
        leaking_text: add `admitdxpath`, which names the label, to the documents, as PMFL does.
    """

    dataset: Literal["eicu"] = "eicu"
    labels_from: Literal["apache", "diagnosis"] = "apache"
    texts: Annotated[tuple[EicuText, ...], Field(min_length=1)] = TEXTS
    leaking_text: StrictBool = False

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:  # noqa: ARG003
        """True: the documents are made of the database's tables."""
        return True


def read_eicu(config: EicuConfig) -> Reading:
    """Reads the stays that have text, with labels from `apacheadmissiondx` or from `diagnosisstring`.

    A stay without any diagnosis in the column that labels are made of is unknown, not negative. The stays of
    a patient stay together in a split.

    Raises:
        DataError: a table cannot be read or is missing, or no stay has text or a label.
        ConfigError: `labels` names something that no stay has.
        LabelError: `labels` names one thing twice.
    """
    sheet = read_sheet(config.table)
    stays, patients, diagnoses = (
        sheet.column(name, _KEY) for name in (_STAY, "uniquepid", "apacheadmissiondx")
    )
    if config.labels_from == "apache":
        labels, y = indicators([_apache(cell) if cell else None for cell in diagnoses], config.table)
    else:
        groups = _gather(config, "diagnosis", "diagnosisstring", _group)
        labels, y = indicators([groups.get(stay) for stay in stays], config.table)
    texts = _texts(stays, config)
    here = np.array([bool(text) for text in texts], dtype=np.bool_)
    if not here.any():
        raise DataError(
            f"{config.table}: no stay has text in {', '.join(config.texts)}; correct [data] lists or texts"
        )
    split = by_patient(patients, y, seed=config.seed)
    faults = row_faults(sheet, stays, patients, split, "document")
    table = Table(labels, tuple(stays), tuple(patients), y, split, config.root, tuple(texts))
    least = LEAST if config.labels_from == "diagnosis" else 1
    return Reading(frequent(table, config, least).rows(here), tuple(faults), absent=int((~here).sum()))


def _apache(cell: str) -> set[str]:
    """The labels of PMFL that a cell names: "Sepsis, pulmonary" is two of them."""
    return {canonical(part) for part in cell.split(", ") if part in _APACHE}


def _group(diagnosis: str) -> str:
    """The first two levels: "pulmonary|respiratory failure|ARDS" is "Pulmonary: Respiratory Failure"."""
    return canonical(": ".join(part.strip() for part in diagnosis.split("|")[:2]))


def _texts(stays: Iterable[str], config: EicuConfig) -> list[str]:
    """The document of each stay: its entries in each of the tables that make it."""
    meanings: dict[EicuText, tuple[str, Callable[[str], str]]] = {
        "admissionDrug": ("drugname", lambda name: name.split(" " * 7)[0].strip()),
        "pastHistory": ("pasthistorypath", _history),
        "medication": ("drugname", str.strip),
    }
    sources = [_gather(config, name, *how) for name, how in meanings.items() if name in config.texts]
    if config.leaking_text:
        sources.append(_gather(config, "admissionDx", "admitdxpath", str.strip))
    return [" , ".join(item for source in sources for item in source.get(stay, ())) for stay in stays]


def _history(path: str) -> str:
    """The disease and its detail; the entry that a history was taken carries no information."""
    parts = path.split("/")
    if "Organ Systems" in parts:
        return " ".join(parts[-2:])
    return "" if parts[-1] == "Performed" else parts[-1]


def _gather(config: EicuConfig, table: str, column: str, meaning: Callable[[str], str]) -> Documents:
    """The entries of each stay in one table; blank ones are left out."""
    found: Documents = {}
    for stay, cell in read_columns(_beside(config, table), (_STAY, column), _KEY):
        item = meaning(cell)
        if item:
            found.setdefault(stay, {})[item] = None
    return found


def _beside(config: EicuConfig, name: str) -> Path:
    """One of the database's tables; releases differ in how large they write its first letters.

    Raises:
        DataError: it is not there.
    """
    folder = config.lists_folder
    wanted = {f"{name}.csv".casefold(), f"{name}.csv.gz".casefold()}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.casefold() in wanted:
            return path
    raise DataError(f"{folder / name}.csv (or .csv.gz) is missing; set [data] lists to its folder")


EICU = DataSet(
    EicuConfig,
    read_eicu,
    "eICU's drugs, past history and medication as text: patient.csv and the tables beside it",
)
