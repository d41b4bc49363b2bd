"""suture_papers.metafl.eicu_sites: sites that share no group of diagnoses, and the server's test stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.core.errors import ConfigError
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.execution.job import load_job, with_settings
from suture_papers.metafl.eicu_sites import EicuSites

GROUPS = ("renal|failure", "pulmonary|failure", "neurologic|stroke")


@pytest.fixture
def eicu(tmp_path: Path) -> Path:
    """Of 390 stays a third has each group; 90 more have a diagnosis too rare to be a label."""
    root = tmp_path / "eicu"
    root.mkdir()
    stays = range(480)
    tables = {
        "patient": ("patientunitstayid,apacheadmissiondx,uniquepid", (f"{i},,P{i // 2}" for i in stays)),
        "diagnosis": (
            "patientunitstayid,diagnosisstring",
            (f"{i},{GROUPS[i % 3] if i < 390 else 'rare|one'}|detail" for i in stays),
        ),
        "admissionDrug": ("patientunitstayid,drugname", (f"{i},DRUG {i % 7}" for i in stays)),
        "pastHistory": ("patientunitstayid,pasthistorypath", ("0,notes/Past History/x/CHF",)),
        "medication": ("patientunitstayid,drugname", ("0,HEPARIN",)),
    }
    for name, (head, rows) in tables.items():
        (root / f"{name}.csv").write_text("\n".join([head, *rows, ""]))
    return root


def test_sites_share_no_group_and_the_server_tests_on_all(eicu: Path, tmp_path: Path) -> None:
    job = with_settings(load_job("surgical_eicu"), [f"simulation.root={eicu}"])
    assert isinstance(job.simulation, EicuSites)
    names = job.simulation.prepare(tmp_path / "sites", tmp_path, 1, job.method)
    tables = {
        name: load_table(load_site_config(tmp_path / "sites" / name / "suture.toml").data)
        for name in (*names, "server")
    }
    known = [tuple(tables[name].labels) for name in names]
    every = {"Neurologic: Stroke", "Pulmonary: Failure", "Renal: Failure"}
    assert [len(own) for own in known] == [1, 1, 1]
    assert {one for own in known for one in own} == every == set(tables["server"].labels)
    tested = tables["server"].of("test")
    assert len(tested) == pytest.approx(480 / 5, abs=8)
    assert not any(tables[name].of("test").patients for name in names)
    trained = [who for name in names for who in tables[name].patients]
    assert not set(trained) & set(tested.patients)


def test_a_folder_without_the_table_is_named(tmp_path: Path) -> None:
    job = with_settings(load_job("surgical_eicu"), [f"simulation.root={tmp_path}"])
    assert job.simulation is not None
    with pytest.raises(
        ConfigError, match=r"has no patient\.csv; name its folder with --set simulation\.root"
    ):
        job.simulation.prepare(tmp_path / "sites", tmp_path, 1, job.method)
