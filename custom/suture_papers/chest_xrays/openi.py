"""The chest X-ray reports of Indiana University (Demner-Fushman et al., JAMIA 2016), distributed by Open-i.

`table` is the archive `NLMCXR_reports.tgz` or the folder that it unpacks to: an XML file for each report. Its
document is the sections findings and impression. Readers coded it with MeSH terms and terms of RadLex, as in
"Opacity/lung/base/left"; what stands before the first slash is the heading, and a heading is a label here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from xml.etree import ElementTree

from suture.core.errors import DataError
from suture.core.files import within_folder
from suture.core.labels import canonical
from suture.data.archives import reports, unpacking
from suture.data.dataset import DatasetConfig
from suture.data.limits import FOLLOW, MOST_DOCUMENT, file_bytes
from suture.data.readers import DataSet
from suture.data.reading import Reading, frequent, indicators
from suture.data.split import by_patient
from suture.data.table import Table

FINDINGS = (
    *("Pleural Effusion", "Markings", "Cicatrix", "Calcified Granuloma", "Calcinosis", "Atelectasis"),
    *("Cardiomegaly", "Opacity"),
)
"""The eight findings with most reports, the rarest first: the order in which single-target sites are built.

Headings that only name a part of the body ("Lung", "Aorta") are not among them.
"""

THIRTEEN = (
    *("Opacity", "Cardiomegaly", "Atelectasis", "Calcinosis", "Calcified Granuloma", "Cicatrix", "Markings"),
    *("Pleural Effusion", "Atherosclerosis", "Airspace Disease", "Catheters, Indwelling", "Density"),
    "Deformity",
)
"""The thirteen findings and devices with most reports (117 to 455), as many as CheXpert has labels."""

LEAST = 100
"""A heading of fewer reports is a label only where the site names it."""


class OpeniConfig(DatasetConfig):
    """Open-i's reports; `table` is NLMCXR_reports.tgz or its folder. The split is 70/10/20 by report."""

    names_known: ClassVar[bool] = True
    dataset: Literal["openi"] = "openi"

    def idle(self) -> dict[str, str]:
        """As in the base, but for links: the reports are files."""
        return {key: why for key, why in super().idle().items() if key != "follow_links"}

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:  # noqa: ARG003
        """True: the reports are in the archive."""
        return True


_NO_FINDING = ("normal", "Technical Quality of Image Unsatisfactory")
_NOT_CODED = "No Indexing"


@dataclass(frozen=True)
class _Report:
    """One file: `headings` is None where nobody coded the report."""

    name: str
    text: str
    headings: frozenset[str] | None


def read_openi(config: OpeniConfig) -> Reading:
    """Reads the reports that have text; every heading is known of each report that was coded.

    No patients are published: every report counts as a patient of its own, and the split is 70/10/20.

    Raises:
        DataError: the archive cannot be read, or holds no report with text, or none that is coded.
        ConfigError: `labels` names something that no report is coded with.
        LabelError: `labels` names one heading twice.
    """
    found: dict[str, _Report] = {}
    broken, twice = [], []
    for file, data in _files(config):
        report = _parse(data)
        if report is None:
            broken.append(file)
        elif found.setdefault(report.name, report) is not report:
            twice.append(file)
    written = sorted((r for r in found.values() if r.text), key=lambda r: (len(r.name), r.name))
    if not written:
        raise DataError(f"{config.table} contains no report with text; name NLMCXR_reports.tgz or its folder")
    faults = (
        *_fault(config.table, broken, "not an XML report with a uId; fetch the archive again"),
        *_fault(config.table, twice, "a repeated report; remove the file"),
    )
    labels, y = indicators([report.headings for report in written], config.table)
    who = tuple(report.name for report in written)
    texts = tuple(report.text for report in written)
    table = Table(labels, who, who, y, by_patient(who, y, seed=config.seed), config.root, texts)
    return Reading(frequent(table, config, LEAST), faults, absent=len(found) - len(written))


def _parse(data: bytes) -> _Report | None:
    """The report of a file; None where it is not one."""
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError, ValueError):  # the latter two of its encoding
        return None
    uid = root.find("uId")
    name = uid.get("id", "") if uid is not None else ""
    sections = {part.get("Label"): (part.text or "").strip() for part in root.iter("AbstractText")}
    text = " ".join(filter(None, (sections.get("FINDINGS"), sections.get("IMPRESSION"))))
    coded = {(term.text or "").partition("/")[0].strip() for term in root.iter("major")} - {""}
    if not coded or _NOT_CODED in coded:
        return _Report(name, text, None) if name else None
    headings = frozenset(canonical(heading) for heading in coded.difference(_NO_FINDING))
    return _Report(name, text, headings) if name else None


def _files(config: OpeniConfig) -> Iterator[tuple[str, bytes]]:
    """Name and content of each XML file of an archive or a folder."""
    path = config.table
    inside = within_folder(path)
    if not path.is_dir():
        with unpacking(path, "name NLMCXR_reports.tgz or its folder"):
            yield from reports(path, lambda name: name.endswith(".xml"))
        return
    try:
        for file in sorted(path.rglob("*.xml")):
            if not (config.follow_links or inside(file)):
                raise DataError(f"{file} leads out of {path}; {FOLLOW}")
            yield file.name, file_bytes(file, MOST_DOCUMENT)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; name NLMCXR_reports.tgz or its folder") from error


def _fault(path: Path, files: list[str], what: str) -> list[str]:
    if not files:
        return []
    more = f" and {len(files) - 8} more" if len(files) > 8 else ""
    return [f"{path}: {', '.join(files[:8])}{more}: {what}"]


OPENI = DataSet(
    OpeniConfig,
    read_openi,
    "Indiana University's chest X-ray reports, MeSH-coded: NLMCXR_reports.tgz or its folder",
)
