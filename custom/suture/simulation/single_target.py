"""Clinical text in silos, each with a task of its own, and tasks that no site has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError, unknown
from suture.core.labels import LabelSet, canonical
from suture.core.validation import STRICT
from suture.data.config import DataConfig, SiteConfig, write_site_config
from suture.data.datasets import EICU_TEXTS, EicuText
from suture.data.readers import load_table
from suture.data.readers.openi import TASKS
from suture.data.table import Table
from suture.learning.finetuning import TARGETS
from suture.methods.base import Method
from suture.simulation.disease_tables import First, build_disease_tables
from suture.simulation.folders import data_folder
from suture.simulation.machine import this_machine
from suture.simulation.partition import TEXT, write_site
from suture.simulation.writing import write_sites

Corpus = Literal["openi", "eicu", "mimic_reports"]

_FOLDERS: dict[Corpus, tuple[str, str]] = {
    "openi": ("openi_reports", "the archive of Open-i's reports"),
    "eicu": ("eicu_demo", "eICU"),
    "mimic_reports": ("mimic_cxr", "MIMIC-CXR's reports"),
}
_TABLES: dict[Corpus, str] = {
    "openi": "NLMCXR_reports.tgz",
    "eicu": "patient.csv*",
    "mimic_reports": "mimic-cxr-2.0.0-chexpert.csv*",
}
_REPORTS = ("mimic-cxr-reports.zip", "mimic-cxr-reports.tar.gz")
"""Names of the archive of MIMIC's reports, where files/ is not unpacked."""


@dataclass(frozen=True, config=STRICT)
class SingleTargetSites:
    """Silos of one disease each, disjoint and with as many positives as negatives, as in PMFL.

    Attributes:
        corpus: where the documents are from.
        order: the diseases in the order in which their silos are built, the rarest first.
        training: the sites: those whose silos train; the default is PMFL's first list, by places in `order`.
        targets: those to whose tasks the trained model is put; none of `training`.
        cap: positives of a silo at most; of eICU's rule, negatives.
        first: see `suture.simulation.disease_tables.build_silos`.
        labels_from, texts, leaking_text, admission_paths: of eICU, see `DataConfig`.
        root: folder of the data; by default that of the corpus in SUTURE_DATA.
        seed: of the silos.
    """

    corpus: Corpus = "openi"
    order: Annotated[tuple[str, ...], Field(min_length=2)] = TASKS
    training: Annotated[tuple[str, ...], Field(min_length=1)] = (*TASKS[1:5], TASKS[7])
    targets: tuple[str, ...] = (TASKS[5], TASKS[6], TASKS[0])
    cap: Annotated[int, Field(ge=1)] | None = None
    first: First = "positives"
    labels_from: Literal["apache", "diagnosis"] = "apache"
    texts: Annotated[tuple[EicuText, ...], Field(min_length=1)] = EICU_TEXTS
    leaking_text: bool = False
    admission_paths: Literal["all", "last"] = "all"
    root: str | None = None
    seed: Annotated[int, Field(ge=0)] = 1337

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Writes a site for each training silo, and the data of each target; see `PhantomSites.prepare`.

        Raises:
            ConfigError: there are no data, a name is not in `order` or stands twice, or a target also trains.
            DataError: no row is left for a silo.
        """
        order, training, targets = (
            tuple(map(canonical, n)) for n in (self.order, self.training, self.targets)
        )
        _check(order, training, targets)
        silos = build_disease_tables(load_table(self._pooled()), order, self.seed, self.cap, self.first)
        for name in targets:
            place = folder / TARGETS / slug(name)
            data = _write(place, silos[name], name)
            write_site_config(place / "suture.toml", SiteConfig(data=data, training=this_machine()))
        sites = {slug(name): _write(folder / slug(name), silos[name], name) for name in training}
        return write_sites(folder, runs, sites, method, {})

    def _pooled(self) -> DataConfig:
        name, title = _FOLDERS[self.corpus]
        root = data_folder(self.root, name, title)
        tables = sorted(root.glob(_TABLES[self.corpus]))
        if not tables:
            raise ConfigError(
                f"{root} has no {_TABLES[self.corpus]}; name the folder of {title} with --set "
                "simulation.root=DIR"
            )
        packed = [path for path in (root / name for name in _REPORTS) if path.exists()]
        return DataConfig(
            dataset=self.corpus,
            root=packed[0] if packed and self.corpus == "mimic_reports" else root,
            table=tables[0],
            labels=self.order if self.corpus != "eicu" else None,
            labels_from=self.labels_from,
            texts=self.texts,
            leaking_text=self.leaking_text,
            admission_paths=self.admission_paths,
        )


def _check(order: tuple[str, ...], training: tuple[str, ...], targets: tuple[str, ...]) -> None:
    for name in (*training, *targets):
        if name not in order:
            raise unknown("silo", name, order)
    if both := set(training) & set(targets):
        raise ConfigError(f"{min(both)!r} is a training silo and a target; remove it from one of them")
    for kind, names in (("order", order), ("training", training), ("targets", targets)):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]!r} stands twice in simulation.{kind}; remove one")


def _write(place: Path, silo: Table, name: str) -> DataConfig:
    """One silo as a hospital's own table, all of which trains."""
    whole = replace(silo, split=("train",) * len(silo))
    table = write_site(place, whole, LabelSet((name,)))
    return DataConfig(dataset="hospital", root=table, table=table, text_column=TEXT, target=name)


def slug(name: str) -> str:
    """A class name as the name of a site."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
