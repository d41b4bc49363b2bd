"""Silos of clinical text as sites, and the tasks that no site has."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from official import Report, write_openi
from suture.core.errors import ConfigError
from suture.data.config import load_server_config, load_site_config
from suture.data.readers import load_table
from suture.execution.job import FineTuning, Job, with_settings
from suture.execution.run import run_job
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.models import ModelSpec
from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.metafl.fl import FL
from suture_papers.metafl.single_target import SingleTargetSites, slug

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
    ("changes", "says"),
    [
        ({"targets": ("mass",)}, "'Mass' is both a training site and a target; remove it from one of them"),
        ({"targets": ("Masss",)}, r"unknown disease 'Masss'; did you mean 'Mass'\?"),
        ({"training": ("Mass", "mass")}, r"'Mass' occurs twice in simulation\.training"),
        ({"targets": ("Edema", "Pulmonary Edema")}, r"'Edema' occurs twice in simulation\.targets"),
        ({"order": (*FINDINGS, "mass")}, r"'Mass' occurs twice in simulation\.order"),
        ({"root": "nowhere"}, r"has no NLMCXR_reports\.tgz; name the folder .* --set simulation\.root=DIR"),
        ({"root": "nowhere", "corpus": "mimic_reports"}, "mimic-cxr-2.0.0-chexpert.csv"),
    ],
)
def test_diseases_that_contradict_each_other_are_refused(
    changes: dict[str, object], says: str, openi: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(SITES, **{"root": str(openi), **changes}).prepare(
            tmp_path / "s", tmp_path, 1, METHODS["pmfl"]()
        )
    assert not (tmp_path / "s").exists()


def test_a_slug_is_made_of_words() -> None:
    assert slug("Enlarged Cardiom. (x/y)") == "enlarged-cardiom-x-y"


def pack_reports(path: Path, files: dict[str, str]) -> None:
    """An archive as PhysioNet has it, or as a hospital may make one."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize("name", ["mimic-cxr-reports.zip", "mimic-cxr-reports.tar.gz"])
def test_reports_of_mimic_may_be_packed(name: str, tmp_path: Path) -> None:
    rows, files = ["subject_id,study_id," + ",".join(SPELLINGS)], {}
    place = {name: i for i, name in enumerate(SPELLINGS)}
    for i in range(24):
        cells = [""] * len(SPELLINGS)
        cells[place["Lung Lesion"]], cells[place["Edema"]] = ("1.0", "") if i % 2 else ("", "1.0")
        rows.append(f"1{i:07d},5{i:07d}," + ",".join(cells))
        files[f"files/p10/p1{i:07d}/s5{i:07d}.txt"] = "FINDINGS: something"
    (tmp_path / "mimic-cxr-2.0.0-chexpert.csv").write_text("\n".join(rows) + "\n")
    pack_reports(tmp_path / name, files)
    sites = SingleTargetSites(
        corpus="mimic_reports",
        order=("Lung Lesion", "Edema"),
        training=("Lung Lesion",),
        targets=("Edema",),
        cap=6,
        root=str(tmp_path),
    )
    assert sites.prepare(tmp_path / "s", tmp_path, 1, METHODS["fl"]()) == ["lung-lesion"]
    table = load_table(load_site_config(tmp_path / "s" / "targets" / "edema" / "suture.toml").data)
    assert (len(table), table.y.sum()) == (12, 6)


def test_what_the_documents_of_eicu_are_made_of_is_passed_on(tmp_path: Path) -> None:
    stays = "".join(f"{i},{('CVA', 'CHF', 'other')[i % 3]},P{i}\n" for i in range(1, 31))
    (tmp_path / "patient.csv").write_text("patientunitstayid,apacheadmissiondx,uniquepid\n" + stays)
    drugs = "".join(f"{i},LASIX\n" for i in range(1, 31))
    (tmp_path / "admissionDrug.csv").write_text("patientunitstayid,drugname\n" + drugs)
    paths = "".join(f"{i},first\n{i},last\n" for i in range(1, 31))
    (tmp_path / "admissionDx.csv").write_text("patientunitstayid,admitdxpath\n" + paths)
    sites = SingleTargetSites(
        corpus="eicu",
        order=("CVA", "CHF"),
        training=("CVA",),
        targets=("CHF",),
        texts=("admissionDrug",),
        leaking_text=True,
        root=str(tmp_path),
    )
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


def run(made: Job, out: Path, *, resume: bool = False) -> bytes:
    run_job(made, "local", out, resume=resume, overwrite=False, workers=None)
    return (out / "tuned.json").read_bytes()


@pytest.mark.complete
def test_a_run_ends_with_its_model_fine_tuned_and_a_page_that_says_so(openi: Path, tmp_path: Path) -> None:
    """And one that was cut off after its rounds goes on with what is missing."""
    out = tmp_path / "r"
    tuned = run(job(openi), out)
    (task,) = json.loads(tuned)["targets"].values()
    data = load_table(load_site_config(out / "sites" / "targets" / "edema" / "suture.toml").data)
    assert [one["train"] + one["test"] for one in task["runs"]] == [len(data)] * 2
    assert json.loads((out / "metrics.json").read_text())["n"] == 2 * 4
    page = (out / "report.html").read_text()
    assert "Fine-tuned on tasks that no site has" in page
    with pytest.raises(ConfigError, match="with all its 2 rounds"):
        run(job(openi), out, resume=True)
    (out / "tuned.json").unlink()
    assert run(job(openi), out, resume=True) == tuned
    before = (out / "tuned.json").stat().st_mtime_ns
    run(with_settings(job(openi), ["rounds=3"]), out, resume=True)
    assert (out / "tuned.json").stat().st_mtime_ns > before


@pytest.mark.complete
def test_where_no_site_tests_the_page_shows_the_tasks_alone(openi: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    run(with_settings(job(openi), ["simulation.test=0"]), out)
    assert json.loads((out / "metrics.json").read_text())["auroc"] == {"Target": None}
    page = (out / "report.html").read_text()
    assert "Fine-tuned on tasks that no site has" in page
    assert "Results by class" not in page
    assert "0 images" not in page


def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_trained(openi: Path, tmp_path: Path) -> None:
    nowhere = replace(job(openi), simulation=replace(SITES, root=str(openi), targets=()))
    with pytest.raises(ConfigError, match=r"no task to fine-tune on; name some in simulation\.targets"):
        run(nowhere, tmp_path / "r")
    with pytest.raises(ConfigError, match="a global model to fine-tune"):
        run(with_settings(job(openi), ["method=individual"]), tmp_path / "r")
    assert not (tmp_path / "r").exists()
