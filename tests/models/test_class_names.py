"""The classes of a saved model are found in data that call them otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_hospitals import small_study
from suture import compare, decide, evaluate
from suture.core.errors import ConfigError, LabelError
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.models.class_names import class_names
from suture_results.method_comparison import compare_methods


def described(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text(json.dumps(facts))
    return folder


def code(text: str) -> dict[str, str]:
    system, number = text.split(":")
    return {"system": system, "code": number, "meaning": "x"}


def test_a_class_is_known_by_its_name_then_by_that_of_a_site_then_by_a_code(tmp_path: Path) -> None:
    folder = described(
        tmp_path,
        labels=["Mass", "Nodule", "Pneumothorax"],
        codes={"Pneumothorax": [code("SCT:36118008")], "Mass": [code("SCT:4147007")]},
        site_names={"Wobbet": "Nodule", "Mass": "Nodule", "Gone": "Hernia"},
    )
    stated = {"Ptx": ("SCT:36118008",), "Other": ("SCT:4147007",)}
    found = class_names(folder, ["Mass", "Wobbet", "Ptx", "Other", "Gone"], stated)
    assert found == {
        "Mass": "Mass",
        "Wobbet": "Nodule",
        "Ptx": "Pneumothorax",
        "Other": "Other",  # the code of a mass means a shape in any organ
        "Gone": "Gone",
    }
    older = described(tmp_path, labels=["Mass"])
    assert class_names(older, ["Mass", "Wobbet"], {}) == {"Mass": "Mass", "Wobbet": "Wobbet"}


def test_a_built_in_code_is_that_of_the_class_that_states_it(tmp_path: Path) -> None:
    folder = described(tmp_path, labels=["Ptx"], codes={"Ptx": [code("SCT:36118008")]})
    assert class_names(folder, ["Pneumothorax"], {}) == {"Pneumothorax": "Ptx"}


def test_two_classes_that_are_one_are_refused(tmp_path: Path) -> None:
    folder = described(tmp_path, labels=["Nodule"], site_names={"Wobbet": "Nodule"})
    with pytest.raises(LabelError, match="'Nodule' and 'Wobbet' of the data are both the class 'Nodule'"):
        class_names(folder, ["Nodule", "Wobbet"], {})
    codes = {"A": [code("SCT:36118008")], "B": [code("I10:J93.9")]}
    folder = described(tmp_path, labels=["A", "B"], codes=codes)
    with pytest.raises(LabelError, match="the codes of 'Ptx' are of 'A' and 'B'"):
        class_names(folder, ["Ptx"], {"Ptx": ("SCT:36118008", "I10:J93.9")})
    with pytest.raises(ConfigError, match="site_names"):
        class_names(described(tmp_path, labels=["A"], site_names=[1]), ["A"], {})


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Beta calls a nodule Wobbet, by the label map; alpha and gamma have two words for a class, by a code."""
    study = small_study(tmp_path / "study", images=60)
    for site, name, own in (("beta", "Nodule", "Wobbet"), ("gamma", "Fibrosis", "Brimble")):
        table, config = study / site / "labels.csv", study / site / "suture.toml"
        table.write_text(table.read_text().replace(name, own, 1))
        config.write_text(config.read_text().replace(f'target = "{name}"', f'target = "{own}"'))
    for site, name in (("gamma", "Brimble"), ("alpha", "Quorrel")):
        config = study / site / "suture.toml"
        config.write_text(config.read_text() + f'[data.codes]\n{name} = "RADLEX:RID99999"\n')
    table = study / "alpha" / "labels.csv"
    table.write_text(table.read_text().replace("Mass", "Quorrel", 1))
    config = study / "alpha" / "suture.toml"
    config.write_text(config.read_text().replace('target = "Mass"', 'target = "Quorrel"'))
    job = study / "job.toml"
    job.write_text(job.read_text().replace("rounds = 2", 'rounds = 1\nlabel_map = { Wobbet = "Nodule" }'))
    return study


@pytest.mark.complete
@pytest.mark.parametrize("methods", [["surgical", "vanilla"], ["central", "pfl"]])
def test_methods_are_compared_on_classes_that_sites_call_differently(
    methods: list[str], mixed: Path, tmp_path: Path
) -> None:
    done = compare_methods(load_job(mixed), methods, tmp_path / "out")
    assert done.missing == []
    assert {site: set(of) for site, of in done.sites.items()} == {
        "alpha": {"Quorrel", "Nodule"},
        "beta": {"Wobbet", "Hernia"},
        "gamma": {"Brimble", "Nodule", "Mass"},
    }


@pytest.mark.complete
def test_a_model_is_measured_on_data_that_call_its_classes_otherwise(mixed: Path, tmp_path: Path) -> None:
    runs = tmp_path / "one", tmp_path / "two"
    for seed, run in enumerate(runs):
        run_job(with_settings(load_job(mixed), [f"seed={seed}"]), "local", run)
    facts = json.loads((runs[0] / "model" / "model.json").read_text())
    assert facts["site_names"] == {"Quorrel": "Brimble", "Wobbet": "Nodule"}
    for site, names in (("beta", {"Wobbet", "Hernia"}), ("gamma", {"Brimble", "Nodule", "Mass"})):
        config = mixed / site / "suture.toml"
        done = evaluate(runs[0], config)
        assert set(done.columns) == names
        assert done.unlearned == ()
        assert done.mean is not None
        assert set(done.classes) <= {"Brimble", "Hernia", "Mass", "Nodule"}
        assert set(compare(*runs, config)) == names
        assert set(decide(runs[0], config, "all", overwrite=True)) == set(done.classes)
