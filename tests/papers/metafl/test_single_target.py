"""Sites of one disease each, the tables that they get, and the tasks that no site has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from official import Report, write_openi
from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.labels import LabelSet
from suture.data.config import load_server_config, load_site_config
from suture.data.readers import load_table
from suture.data.table import Table
from suture.execution.job import FineTuning, Job, with_settings
from suture.execution.run import run_job
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.models import ModelSpec
from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.metafl.fl import FL
from suture_papers.metafl.single_target import SingleTargetSites, build_disease_tables
from world import refused, write_table

# Disease tables

CLASSES = ("A", "B", "C")


def table(*columns: list[float]) -> Table:
    y = np.array(columns, dtype=np.float32).T
    names = tuple(f"r{i}" for i in range(len(y)))
    texts = tuple(f"text {name}" for name in names)
    return Table(
        LabelSet(CLASSES[: len(columns)]), names, names, y, ("train",) * len(y), Path("t.csv"), texts
    )


def names(own: Table, value: float) -> set[str]:
    return {name for name, y in zip(own.images, own.y[:, 0], strict=True) if y == value}


def test_the_first_class_takes_its_positives_and_the_next_what_is_left() -> None:
    nan = float("nan")
    data = table([1, 1, 0, 0, 0, nan], [1, 0, 0, 0, 1, 1])
    tables = build_disease_tables(data, ("A", "B"), seed=1)
    assert list(tables) == ["A", "B"]
    assert tables["A"].labels.names == ("A",)
    assert names(tables["A"], 1) == {"r0", "r1"}
    assert len(names(tables["A"], 0)) == 2
    assert "r5" not in tables["A"].images
    assert tables["A"].texts == tuple(f"text {name}" for name in tables["A"].images)
    # Of B's negatives r1 to r3, at most one is left; of its positives r0 is gone.
    other = tables["B"]
    assert names(other, 1) <= {"r4", "r5"} - set(tables["A"].images)
    assert len(names(other, 1)) == len(names(other, 0)) == 1


def test_a_cap_and_the_rule_of_eicu() -> None:
    data = table([1] * 5 + [0] * 9)
    assert [len(build_disease_tables(data, ("A",), 1, cap)["A"]) for cap in (None, 3, 20)] == [10, 6, 10]
    own = build_disease_tables(data, ("A",), 1, 3, "negatives")["A"]
    assert (len(names(own, 1)), len(names(own, 0))) == (3, 3)
    own = build_disease_tables(data, ("A",), 1, 7, "negatives")["A"]
    assert (len(names(own, 1)), len(names(own, 0))) == (5, 7)


def test_a_seed_decides_what_is_drawn() -> None:
    data = table([1] * 5 + [0] * 50)
    first = build_disease_tables(data, ("A",), 1)["A"]
    assert build_disease_tables(data, ("A",), 1)["A"].images == first.images
    assert build_disease_tables(data, ("A",), 2)["A"].images != first.images
    assert first.y[:, 0].tolist() not in ([1] * 5 + [0] * 5, [0] * 5 + [1] * 5)


def test_a_class_of_which_nothing_is_left_is_named() -> None:
    with refused("t.csv", "positive", "'B'", by=DataError):
        build_disease_tables(table([1, 0, 0], [1, 0, 0]), ("A", "B"), 1)
    with refused("negative", "'B'", by=DataError):
        build_disease_tables(table([1, 0, 0], [0, 0, 1], [0, 0, 0]), ("A", "B"), seed=_leaving("r2"))
    with refused("'C'", by=LabelError):
        build_disease_tables(table([1, 0], [1, 0]), ("C",), 1)


def _leaving(row: str) -> int:
    """A seed with which the table of A leaves this row."""
    data = table([1, 0, 0], [0, 0, 1], [0, 0, 0])
    return next(
        seed for seed in range(100) if row not in build_disease_tables(data, ("A",), seed)["A"].images
    )


VALUES = st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=3, max_size=3)


@given(st.lists(VALUES, min_size=1, max_size=40), st.none() | st.integers(1, 6), st.integers(0, 3))
def test_tables_are_disjoint_and_half_positive(rows: list[list[float]], cap: int | None, seed: int) -> None:
    data = table(*map(list, zip(*rows, strict=True)))
    try:
        tables = build_disease_tables(data, CLASSES, seed, cap)
    except DataError:
        return
    used = [name for own in tables.values() for name in own.images]
    assert len(used) == len(set(used))
    free = set(data.images)
    for column, own in enumerate(tables.values()):
        positives = {n for n, y in zip(data.images, data.y[:, column], strict=True) if y == 1 and n in free}
        negatives = {n for n, y in zip(data.images, data.y[:, column], strict=True) if y == 0 and n in free}
        assert names(own, 1) <= positives
        assert names(own, 0) <= negatives
        size = min(len(positives), len(negatives), cap or len(data))
        assert len(names(own, 1)) == len(names(own, 0)) == size
        free -= set(own.images)


# Sites

FINDINGS = ("Calcified Granuloma", "Mass", "Pulmonary Edema")
REPORTS: list[Report] = [
    (f"It shows {FINDINGS[i % 3].lower()}.", "", (f"{FINDINGS[i % 3]}/mild",))
    if i % 4 == 0
    else ("Clear.", "", ("normal",))
    for i in range(240)
]
"""Twenty reports of each finding, and 180 of none."""

SITES = SingleTargetSites(order=FINDINGS, training=FINDINGS[:2], targets=FINDINGS[2:])


@pytest.fixture
def openi(tmp_path: Path) -> Path:
    return write_openi(tmp_path / "openi", REPORTS).parent


def test_each_training_disease_is_a_site_and_each_target_lies_beside_them(
    openi: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    names = replace(SITES, root=str(openi)).prepare(folder, tmp_path, 1, METHODS["pmfl"]())
    assert names == ["calcified-granuloma", "mass"]
    assert sorted(path.parent.name for path in folder.glob("*/suture.toml")) == [*names, "server"]
    assert load_server_config(folder / "server" / "suture.toml").storage.state == tmp_path
    (target,) = (folder / "targets").glob("*/suture.toml")
    assert target.parent.name == "edema"
    used: set[str] = set()
    for place, name in zip(
        [*(folder / n for n in names), target.parent], ("Calcified Granuloma", "Mass", "Edema"), strict=True
    ):
        config = load_site_config(place / "suture.toml")
        table = load_table(config.data)
        assert config.data.target == name
        assert table.labels.names == (name,)
        assert len(table) == 2 * table.y.sum() >= 20
        assert set(table.split) == ({"train", "test"} if place.name in names else {"train"})
        assert not used & set(table.images)
        used |= set(table.images)
        assert table.texts is not None
        assert {text for text, y in zip(table.texts, table.y[:, 0], strict=True) if not y} >= {"Clear."}


@pytest.mark.parametrize(("test", "expected"), [(0.1, [4, 4]), (0.25, [10, 8]), (0, [0, 0])])
def test_sites_of_40_and_32_documents_test_on_a_share_of_them(
    test: float, expected: list[int], openi: Path, tmp_path: Path
) -> None:
    """A tenth in the paper (Sec. IV-A); half of them are positive. A site of its program trains on all."""
    folder = tmp_path / "s"
    names = replace(SITES, root=str(openi), test=test).prepare(folder, tmp_path, 1, METHODS["pmfl"]())
    for name, rows, n in zip(names, (40, 32), expected, strict=True):
        table = load_table(load_site_config(folder / name / "suture.toml").data)
        held = [y for y, split in zip(table.y[:, 0], table.split, strict=True) if split == "test"]
        assert (len(table), len(held), sum(held)) == (rows, n, n / 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"targets": ("mass",)}, ["'Mass'", "target"]),
        ({"targets": ("Masss",)}, ["'Masss'", "'Mass'"]),
        ({"training": ("Mass", "mass")}, ["'Mass'", "simulation.training"]),
        ({"targets": ("Edema", "Pulmonary Edema")}, ["'Edema'", "simulation.targets"]),
        ({"order": (*FINDINGS, "mass")}, ["'Mass'", "simulation.order"]),
        ({"root": "nowhere"}, ["NLMCXR_reports.tgz", "simulation.root"]),
        ({"root": "nowhere", "corpus": "mimic_reports"}, ["mimic-cxr-2.0.0-chexpert.csv"]),
    ],
)
def test_diseases_that_contradict_each_other_are_refused(
    changes: dict[str, Any], named: list[str], openi: Path, tmp_path: Path
) -> None:
    sites = replace(SITES, **{"root": str(openi), **changes})
    with refused(*named, by=ConfigError):
        sites.prepare(tmp_path / "s", tmp_path, 1, METHODS["pmfl"]())
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["mimic-cxr-reports.zip", "mimic-cxr-reports.tar.gz"])
def test_reports_of_mimic_may_be_packed(name: str, tmp_path: Path) -> None:
    one, two = (SPELLINGS.index(finding) for finding in ("Lung Lesion", "Edema"))
    rows: list[list[str]] = [["subject_id", "study_id", *SPELLINGS]]
    for i in range(24):
        who, study = f"1{i:07d}", f"5{i:07d}"
        rows.append([who, study, *("1.0" if k == (one, two)[i % 2] else "" for k in range(len(SPELLINGS)))])
        report = tmp_path / "unpacked" / "files" / "p10" / f"p{who}" / f"s{study}.txt"
        report.parent.mkdir(parents=True)
        report.write_text("FINDINGS: something")
    write_table(tmp_path / "mimic-cxr-2.0.0-chexpert.csv", rows)
    stem, _, kind = name.partition(".")
    shutil.make_archive(str(tmp_path / stem), {"zip": "zip", "tar.gz": "gztar"}[kind], tmp_path / "unpacked")
    two_classes = {"order": ("Lung Lesion", "Edema"), "training": ("Lung Lesion",), "targets": ("Edema",)}
    sites = SingleTargetSites(corpus="mimic_reports", cap=6, root=str(tmp_path), **two_classes)
    assert sites.prepare(tmp_path / "s", tmp_path, 1, METHODS["fl"]()) == ["lung-lesion"]
    table = load_table(load_site_config(tmp_path / "s" / "targets" / "edema" / "suture.toml").data)
    assert (len(table), table.y.sum()) == (12, 6)


def test_what_the_documents_of_eicu_are_made_of_is_passed_on(tmp_path: Path) -> None:
    stay = "patientunitstayid"
    stays = [(i, ("CVA", "CHF", "other")[i % 3], f"P{i}") for i in range(1, 31)]
    write_table(tmp_path / "patient.csv", [(stay, "apacheadmissiondx", "uniquepid"), *stays])
    write_table(tmp_path / "admissionDrug.csv", [(stay, "drugname"), *((i, "LASIX") for i in range(1, 31))])
    paths = [(i, word) for i in range(1, 31) for word in ("first", "last")]
    write_table(tmp_path / "admissionDx.csv", [(stay, "admitdxpath"), *paths])
    two_classes = {"order": ("CVA", "CHF"), "training": ("CVA",), "targets": ("CHF",)}
    documents: dict[str, Any] = {"texts": ("admissionDrug",), "leaking_text": True}
    sites = SingleTargetSites(corpus="eicu", root=str(tmp_path), **two_classes, **documents)
    sites.prepare(tmp_path / "s", tmp_path, 1, METHODS["pmfl"]())
    table = load_table(load_site_config(tmp_path / "s" / "cva" / "suture.toml").data)
    assert set(table.texts or ()) == {"LASIX , first , last"}


def job(openi: Path) -> Job:
    words = ("It", "shows", "calcified", "granuloma", "mass", "pulmonary", "edema", "Clear", ".")
    return Job(
        name="small",
        title="reports, FL (of the inner loop)",
        method=FL(local=LocalTraining(lr=0.05, iterations=2, optimiser="sgd", momentum=0.0), batches=4),
        model=ModelSpec("lstm", vocabulary=words),
        rounds=2,
        selection="last",
        simulation=replace(SITES, root=str(openi)),
        finetuning=FineTuning(runs=2, epochs=3, batch_size=8, lr=0.02),
    )


@pytest.mark.complete
def test_a_run_ends_with_its_model_fine_tuned(openi: Path, tmp_path: Path) -> None:
    """And one that was cut off after its rounds goes on with what is missing."""
    out = tmp_path / "r"

    def tuned(words: Sequence[str] = (), resume: bool = True) -> bytes:
        run_job(with_settings(job(openi), words), "local", out, resume=resume)
        return (out / "tuned.json").read_bytes()

    first = tuned(resume=False)
    (task,) = json.loads(first)["targets"].values()
    data = load_table(load_site_config(out / "sites" / "targets" / "edema" / "suture.toml").data)
    assert [one["train"] + one["test"] for one in task["runs"]] == [len(data)] * 2
    assert json.loads((out / "metrics.json").read_text())["n"] == 2 * 4
    with refused("2 rounds", by=ConfigError):
        tuned()
    (out / "tuned.json").unlink()
    assert tuned() == first
    before = (out / "tuned.json").stat().st_mtime_ns
    tuned(["rounds=3"])
    assert (out / "tuned.json").stat().st_mtime_ns > before


def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_trained(openi: Path, tmp_path: Path) -> None:
    nowhere = replace(job(openi), simulation=replace(SITES, root=str(openi), targets=()))
    individual = with_settings(job(openi), ["method=individual"])
    for made, named in ((nowhere, "simulation.targets"), (individual, "fine-tune")):
        with refused(named, by=ConfigError):
            run_job(made, "local", tmp_path / "r")
    assert not (tmp_path / "r").exists()
