"""The job of a study travels alone: neither its folder nor its sites' data are named in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_hospitals import JOB_TOML, LABELS, small_study
from suture.execution.job import load_job, with_settings
from suture.flare.recipe import export_job
from suture.flare.simulate import simulator_workspace


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


@pytest.mark.parametrize("at_hand", [False, True])
def test_an_encoder_beside_the_job_travels_by_its_bare_name(
    at_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    study = small_study(tmp_path / "quux-study", images=1)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(study / "encoder")
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 16, "width": 16}}
    (study / "encoder" / "preprocessor_config.json").write_text(json.dumps(mean))
    (study / "job.toml").write_text(
        'name = "lungs"\n' + JOB_TOML.replace('"cnn"', '"hf:encoder"') + 'train = "head"\n'
    )
    job = load_job(study)
    if at_hand:  # as on a command line that is typed in the folder
        monkeypatch.chdir(study / "encoder")
        job = with_settings(job, ["model.name=hf:."])
    exported = export_job(job, tmp_path / "exported", "lungs-1", tuple(LABELS))
    for path in (path for path in exported.rglob("*") if path.is_file()):
        assert b"quux" not in path.read_bytes(), path
    plans = [json.loads(path.read_text()) for path in exported.rglob("plan.json")]
    assert [(plan["model"]["name"], plan["model"]["weights"]) for plan in plans] == [
        ("hf:vit", "encoder")
    ] * 2
    simulator_workspace(job, tmp_path / "w")
    for path in (study / "encoder").iterdir():
        assert (tmp_path / "w" / "files" / "encoder" / path.name).read_bytes() == path.read_bytes()


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
