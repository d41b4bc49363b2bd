"""The job of a study travels alone: neither its folder nor its sites' data are named in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_hospitals import JOB_TOML, LABELS, small_study
from suture.flare.recipe import export_job
from suture.simulation.job import load_job


@pytest.mark.parametrize("bundle", [False, True])
@pytest.mark.parametrize("sites", [(), tuple(LABELS)])
def test_an_exported_study_names_no_folder_of_this_machine(
    sites: tuple[str, ...], bundle: bool, tmp_path: Path
) -> None:
    study = small_study(tmp_path / "ward-of-dr-quux" / "quux-study", images=1)
    (study / "job.toml").write_text('name = "lungs"\n' + JOB_TOML)
    out = tmp_path / "exported"
    export_job(load_job(study), out, "lungs-1", sites, bundle)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) >= 3
    apps = [path for path in files if "custom" not in path.parts]  # the package travels there
    for word in (str(tmp_path), "quux"):
        assert not [path for path in files if word.encode() in path.read_bytes()], word
    for word in ("labels.csv", "suture.toml", "images"):
        assert not [path for path in apps if word.encode() in path.read_bytes()], word
    meta = (out / "lungs" / "meta.json").read_text()
    assert all((site in meta) == bool(sites) for site in LABELS)


def test_the_lead_of_a_study_needs_no_data_to_export_its_job(tmp_path: Path) -> None:
    """In production the hospitals keep their suture.toml; the folder of the lead holds the job alone."""
    (tmp_path / "lungs").mkdir()
    (tmp_path / "lungs" / "job.toml").write_text(JOB_TOML)
    whole = small_study(tmp_path / "whole" / "lungs")
    exported = [
        export_job(load_job(study), tmp_path / f"exported{i}", "lungs-1", tuple(LABELS))
        for i, study in enumerate((tmp_path / "lungs", whole))
    ]
    one, two = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.json")}
        for folder in exported
    )
    assert one == two
