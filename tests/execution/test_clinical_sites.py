"""Sites whose labels are in an OMOP database or in FHIR Observations, in a federation."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from small_hospitals import small_study
from suture.core.files import atomic_write
from suture.data.config import load_site_config
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture_prepare.quality import check

pytestmark = pytest.mark.complete


DAY = "2024-03-01"


def rows_of(site: Path) -> list[dict[str, str]]:
    with (site / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def as_omop(site: Path, classes: tuple[str, ...]) -> None:
    """Write the labels of a site as rows of OBSERVATION, and read them from there."""
    rows = rows_of(site)
    images = (f"{row['image']},{row['patient']},{DAY},{row['split']}\n" for row in rows)
    (site / "images.csv").write_text("image,person_id,date,split\n" + "".join(images))
    answers = (
        f"{row['patient']},,{100 + concept},{DAY},{4188539 if row[name] == '1' else 4188540}\n"
        for concept, name in enumerate(classes)
        for row in rows
    )
    header = "person_id,visit_occurrence_id,observation_concept_id,observation_date,value_as_concept_id\n"
    (site / "observation.csv").write_text(header + "".join(answers))
    codes = ", ".join(f'"{name}" = {100 + concept}' for concept, name in enumerate(classes))
    own = f'dataset = "omop"\nobservations = "observation.csv"\nclasses = {{ {codes} }}'
    change(site, own)


def as_fhir(site: Path, classes: tuple[str, ...]) -> None:
    """Write the labels of a site as Observations, and read them from there."""
    rows = rows_of(site)
    images = (f"{row['image']},{row['patient']},{DAY},{row['split']}\n" for row in rows)
    (site / "images.csv").write_text("image,patient,date,split\n" + "".join(images))
    answers = (
        {
            "resourceType": "Observation",
            "status": "final",
            "code": {"coding": [{"system": "http://x", "code": name}]},
            "subject": {"reference": f"Patient/{row['patient']}"},
            "effectiveDateTime": DAY,
            "valueBoolean": row[name] == "1",
        }
        for name in classes
        for row in rows
    )
    (site / "o.ndjson").write_text("".join(f"{json.dumps(one)}\n" for one in answers))
    codes = ", ".join(f'"{name}" = "http://x|{name}"' for name in classes)
    change(site, f'dataset = "fhir"\nobservations = ["o.ndjson"]\nclasses = {{ {codes} }}')


def change(site: Path, own: str) -> None:
    """Write another data set into a site's suture.toml."""
    text = (site / "suture.toml").read_text().replace('dataset = "hospital"', own)
    atomic_write(site / "suture.toml", text.replace("labels.csv", "images.csv").encode())
    (site / "labels.csv").unlink()


def test_the_same_labels_from_a_clinical_database_make_the_same_model(tmp_path: Path) -> None:
    job = with_settings(load_job(small_study(tmp_path / "study")), ["rounds=1"])
    tables = run_job(job, "local", tmp_path / "tables")
    as_omop(tmp_path / "study" / "alpha", ("Mass", "Nodule"))
    as_fhir(tmp_path / "study" / "beta", ("Nodule", "Hernia"))
    clinical = run_job(job, "local", tmp_path / "clinical")
    for name in ("model/model.safetensors", "metrics.json"):
        assert (clinical / name).read_bytes() == (tables / name).read_bytes()
    for site in ("alpha", "beta"):
        findings = check(load_site_config(tmp_path / "study" / site / "suture.toml"))
        assert not findings.problems
        assert findings.notes == (
            f"50 of 50 answers belong to an image of {tmp_path}/study/{site}/images.csv",
        )
