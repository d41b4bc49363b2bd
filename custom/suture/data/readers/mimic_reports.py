"""The free-text reports of MIMIC-CXR (Johnson et al., Sci Data 2019) with the labels of CheXpert.

`table` is `mimic-cxr-2.0.0-chexpert.csv`, a row per study; a report lies at
``files/p10/p10000032/s50414267.txt`` in `root`, which is a folder or the archive of it,
`mimic-cxr-reports.zip` or `.tar.gz`.
"""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from suture.core.errors import DataError
from suture.data.dataset import DatasetConfig
from suture.data.readers.chexpert import LABELS, SPELLINGS, Uncertain, values
from suture.data.reading import Reading, Sheet, fault, read_sheet, read_text, restricted, row_faults
from suture.data.split import by_patient
from suture.data.table import Table

_KEY = 'dataset = "mimic_reports"'


class MimicReportsConfig(DatasetConfig):
    """The reports of MIMIC-CXR; `table` is mimic-cxr-2.0.0-chexpert.csv, and `root` holds the reports.

    Attributes:
        root: the folder that holds files/, or its archive.
        split: ``patients`` cuts the patients 70/10/20; ``test`` uses every report for testing.
        uncertain: read a label of -1 as absent (``zeros``), as present (``ones``) or as unknown (``ignore``).
    """

    dataset: Literal["mimic_reports"] = "mimic_reports"
    split: Literal["patients", "test"] = "patients"
    uncertain: Uncertain = "zeros"


def read_mimic_reports(config: MimicReportsConfig) -> Reading:
    """Reads the report of each labelled study: subject and study number join the two, never their order.

    Source: PMFL (Zhang et al., arXiv:2112.05321): blank and uncertain findings are absent. A report whose
    study has no labels is left out, as MIMIC has a few; a study without a report is a fault unless `partial`.

    Raises:
        DataError: the table or `root` cannot be read, or no study has a report.
        ConfigError: `labels` names something that is not among the thirteen.
        LabelError: `labels` names one finding twice.
    """
    sheet = read_sheet(config.table)
    patients, studies = (
        [cell.lstrip("ps") for cell in sheet.column(name, _KEY)] for name in ("subject_id", "study_id")
    )
    y, faults = values(sheet, SPELLINGS, _KEY, config.uncertain)
    names = [f"files/p{who[:2]}/p{who}/s{study}.txt" for who, study in zip(patients, studies, strict=True)]
    texts = _texts(config.root, names)
    here = np.array([bool(text) for text in texts], dtype=np.bool_)
    if not here.any():
        raise DataError(f"{config.root} has no report of {config.table}; the first would be {names[0]}")
    split = ("test",) * len(names) if config.split == "test" else by_patient(patients, y, seed=config.seed)
    faults += row_faults(sheet, studies, patients, split, "document")
    if not config.partial:
        faults += _absent(sheet, texts)
    table = Table(LABELS, tuple(studies), tuple(patients), y, split, config.root, tuple(texts)).rows(here)
    return Reading(restricted(table, config), tuple(faults), absent=int((~here).sum()))


def _texts(root: Path, names: Sequence[str]) -> list[str]:
    """The report of each name; the empty string where there is none."""
    if root.is_dir():
        paths = [root / name for name in names]
        return [read_text(path).strip() if path.is_file() else "" for path in paths]
    try:
        found = {name: data.decode("utf-8").strip() for name, data in _members(root, frozenset(names))}
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, UnicodeDecodeError) as error:
        raise DataError(
            f"{root} cannot be read: {error}; take the folder of files/, or its archive"
        ) from error
    return [found.get(name, "") for name in names]


def _members(archive: Path, wanted: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of those files; the archive may have a folder of its own around files/."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for path in packed.namelist():
                name = path[path.find("files/") :]
                if name in wanted:
                    yield name, packed.read(path)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name[member.name.find("files/") :]
            file = tar.extractfile(member) if name in wanted else None
            if file is not None:
                yield name, file.read()


def _absent(sheet: Sheet, texts: Sequence[str]) -> list[str]:
    lost = [number for number, text in zip(sheet.numbers, texts, strict=True) if not text]
    return fault(sheet, lost, "a study without a report; correct [data] root, or set partial")
