"""Clinical text at single-target sites, each with a disease of its own, and diseases that no site has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, DataError, check_known
from suture.core.labels import LabelSet, canonical
from suture.core.runtime import seed_for
from suture.core.validation import JOB_PATH, LARGEST_SEED, LIMIT, STRICT
from suture.data.config import SiteConfig, parse_data, write_site_config
from suture.data.readers import DataConfig, load_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import by_patient
from suture.data.table import Table
from suture.execution.sites import TARGETS, TEXT, Destination, this_machine, write_site, write_sites
from suture.methods.base import Method
from suture_papers.chest_xrays.mimic import MimicReportsConfig
from suture_papers.chest_xrays.openi import FINDINGS, OpeniConfig
from suture_papers.metafl.eicu import TEXTS, EicuText
from suture_papers.public_data import data_folder, table_in

_Corpus = Literal["openi", "eicu", "mimic_reports"]

_FOLDERS: dict[_Corpus, tuple[str, str]] = {
    "openi": ("openi_reports", "the archive of Open-i's reports"),
    "eicu": ("eicu_demo", "eICU"),
    "mimic_reports": ("mimic_cxr", "MIMIC-CXR's reports"),
}
_EICU = ("texts", "leaking_text")

_TABLES: dict[_Corpus, str] = {
    "openi": "NLMCXR_reports.tgz",
    "eicu": "patient.csv*",
    "mimic_reports": "mimic-cxr-2.0.0-chexpert.csv*",
}
_REPORTS = ("mimic-cxr-reports.zip", "mimic-cxr-reports.tar.gz")
"""Names of the archive of MIMIC's reports, where files/ is not unpacked."""

First = Literal["positives", "negatives"]


@validated(frozen=True, config=STRICT)
class SingleTargetSites:
    """Sites of one disease each, with disjoint documents, half of them positive, as in PMFL.

    Attributes:
        corpus: the source of the documents.
        order: the diseases in the order in which their tables are built, the rarest first.
        training: the diseases whose sites train; the default is the first list of PMFL's program, by
            positions in `order`.
        targets: the diseases that the trained model is fine-tuned on; none of `training`.
        cap: the largest number of positives of a site; with eICU's rule, of negatives.
        first: see `build_disease_tables`.
        test: share of a training site's documents that it tests on, a tenth in the paper; in its published
            program sites train on all of them (0). Documents of a patient stay together.
        texts, leaking_text: for eICU, see `EicuConfig`.
        root: folder of the data; by default that of the corpus in SUTURE_DATA.
        seed: of the disease tables.
    """

    corpus: _Corpus = "openi"
    order: Annotated[tuple[str, ...], Field(min_length=2)] = FINDINGS
    training: Annotated[tuple[str, ...], Field(min_length=1)] = (*FINDINGS[1:5], FINDINGS[7])
    targets: tuple[str, ...] = (FINDINGS[5], FINDINGS[6], FINDINGS[0])
    cap: Annotated[int, Field(ge=1, le=LIMIT)] | None = None
    first: First = "positives"
    test: Annotated[float, Field(ge=0, lt=1)] = 0.1
    texts: Annotated[tuple[EicuText, ...], Field(min_length=1)] = TEXTS
    leaking_text: StrictBool = False
    root: Annotated[str | None, JOB_PATH] = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1337

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write a site for each training disease, and the data of each target; see `PhantomSites.prepare`.

        Raises:
            ConfigError: there are no data, a name is not in `order` or occurs twice, or a target also trains.
            DataError: no row is left for a disease.
        """
        order, training, targets = (
            tuple(map(canonical, n)) for n in (self.order, self.training, self.targets)
        )
        _check(order, training, targets)
        tables = build_disease_tables(load_table(self._pool()), order, self.seed, self.cap, self.first)
        for name in targets:
            own = folder / TARGETS / slug(name)
            data = _write(own, tables[name], name, ("train",) * len(tables[name]))
            write_site_config(own / "suture.toml", SiteConfig(data=data, training=this_machine()))
        sites: dict[str, DataConfig] = {
            slug(name): _write(folder / slug(name), tables[name], name, self._split(tables[name], name))
            for name in training
        }
        return write_sites(Destination(folder, runs, method), sites)

    def _split(self, table: Table, name: str) -> tuple[str, ...]:
        """The split of each row of a training site: with as many positives as negatives in both parts."""
        shares = (1 - self.test, 0.0, self.test)
        return by_patient(table.patients, table.y, shares, seed_for(self.seed, "site's test", name))

    def _pool(self) -> DataConfig:
        root = data_folder(self.root, *_FOLDERS[self.corpus])
        table = table_in(root, _TABLES[self.corpus])
        if self.corpus == "openi":
            return OpeniConfig(root=table, table=table, labels=self.order)
        if self.corpus == "mimic_reports":
            archives = [path for path in (root / name for name in _REPORTS) if path.exists()]
            return MimicReportsConfig(root=(*archives, root)[0], table=table, labels=self.order)
        values = {key: getattr(self, key) for key in _EICU}
        return parse_data({"dataset": "eicu", "table": table, **values}, "simulation")


def _check(order: tuple[str, ...], training: tuple[str, ...], targets: tuple[str, ...]) -> None:
    for name in (*training, *targets):
        check_known("disease", name, order)
    if both := set(training) & set(targets):
        raise ConfigError(f"{min(both)!r} is both a training site and a target; remove it from one of them")
    for kind, names in (("order", order), ("training", training), ("targets", targets)):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]!r} occurs twice in simulation.{kind}; remove one")


def _write(folder: Path, table: Table, name: str, split: tuple[str, ...]) -> HospitalConfig:
    """Write a disease's table as a hospital's own."""
    path = write_site(folder, replace(table, split=split), LabelSet((name,)))
    return HospitalConfig(root=path, table=path, text_column=TEXT, target=name)


def slug(name: str) -> str:
    """Return the name of the site of a class."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def build_disease_tables(
    table: Table, classes: Sequence[str], seed: int, cap: int | None = None, first: First = "positives"
) -> dict[str, Table]:
    """Build one table for each class, of rows that no earlier table has.

    With `first = "positives"` a table takes all unused positives, and as many unused negatives, drawn at
    random; where negatives run short, positives are drawn too. With ``negatives``, PMFL's rule for eICU, it
    takes unused negatives up to `cap`, and then positives up to as many. Rows with an unknown label are not
    used.

    Source: PMFL (Zhang et al., arXiv:2112.05321), Sec. IV: tables without overlap, as many positive as
    negative samples in each. The paper builds the largest class first, so that no table dominates; its
    program builds the rarest first, so that it keeps all its positives. Here the caller decides the order.

    Args:
        classes: some or all of the table's, in the order in which their tables are built.
        seed: of the draws and of the order of rows.
        cap: the largest number of positives (or negatives, where these are first).

    Returns:
        the rows of each class in a random order, with that one label; splits and patients stay as they are. A
        patient of several documents may be in several tables.

    Raises:
        LabelError: the table lacks a class.
        DataError: a class has no unused positive row, or no unused negative one.
    """
    free = np.ones(len(table), dtype=np.bool_)
    tables: dict[str, Table] = {}
    for name in classes:
        rng = np.random.default_rng(seed_for(seed, "silo", name))  # another word would give other rows
        rows = _draw(table, name, free, rng, cap, first)
        free[rows] = False
        tables[name] = table.rows(rows).restrict(LabelSet((name,), table.labels.label_type))
    return tables


def _draw(
    table: Table, name: str, free: NDArray[np.bool_], rng: np.random.Generator, cap: int | None, first: First
) -> NDArray[np.intp]:
    """The rows of one class's table, of those that are `free`, in a random order."""
    y = table.y[:, table.labels.index(name)]
    positives, negatives = (rng.permutation(np.flatnonzero(free & (y == value))) for value in (1, 0))
    for kind, rows in (("positive", positives), ("negative", negatives)):
        if not len(rows):
            raise DataError(
                f"{table.root}: no {kind} row is left for {name!r}; build it earlier, or set a cap"
            )
    return rng.permutation(np.concatenate(_size(positives, negatives, cap, first)))


def _size(
    positives: NDArray[np.intp], negatives: NDArray[np.intp], cap: int | None, first: First
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows that a table takes of the unused ones."""
    if first == "negatives":
        negatives = negatives[:cap]
        return positives[: len(negatives)], negatives
    n = min(len(positives), len(negatives))
    n = n if cap is None else min(n, cap)
    return positives[:n], negatives[:n]
