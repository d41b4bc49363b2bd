"""A federation whose sites call one class differently and state its code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noted import noted
from small_hospitals import write_hospital
from suture.core.errors import ConfigError, FederationError
from suture.core.files import read_json
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture_prepare.quality import check

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
OWN = {"alpha": ("Hernia", "Fibrosis"), "beta": ("Fibrosis", "Nodule"), "server": ("Fibrosis", "Nodule")}
FIBROSIS = "I10C:J84.10"


def call(folder: Path, name: str, codes: str = "") -> None:
    """Let a site call its class Fibrosis otherwise, and state codes."""
    table, config = folder / "labels.csv", folder / "suture.toml"
    head, rows = table.read_text().split("\n", 1)
    table.write_text(head.replace("Fibrosis", name) + "\n" + rows)
    text = config.read_text().replace('target = "Fibrosis"', f'target = "{name}"')
    config.write_text(text + f"\n[data.codes]\n{codes}\n" if codes else text)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for seed, (name, labels) in enumerate(OWN.items()):
        write_hospital(tmp_path / "data" / name, labels, 25, seed)
    return tmp_path / "data"


def model(run: Any) -> tuple[bytes, dict[str, Any]]:
    folder = run.record.folder / "model"
    return (folder / "model.safetensors").read_bytes(), read_json(folder / "model.json")


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["site_loss", "server_metric"])
def test_a_class_of_two_names_and_one_code_is_trained_as_one_byte_by_byte(
    tiny: Any, sites: Path, selection: str
) -> None:
    # A name of the same place among the site's own: the order of its rows is that of its names.
    plain, facts = model(tiny(METHOD, OWN, selection=selection).run("plain"))
    call(sites / "alpha", "Faserung", f'Faserung = ["{FIBROSIS}", "RADLEX:RID3874"]')
    call(sites / "server", "Tumor", f'Tumor = "{FIBROSIS}"')
    run = tiny(METHOD, OWN, selection=selection).run("coded")
    coded, stated = model(run)
    assert coded == plain
    codes = stated["codes"]["Fibrosis"]
    assert codes == [
        {"system": "I10C", "code": "J84.10", "meaning": "Pulmonary fibrosis, unspecified"},
        {"system": "RADLEX", "code": "RID3874", "meaning": "Fibrosis"},
    ]
    assert stated["site_names"] == {"Faserung": "Fibrosis"}
    assert {**stated, "codes": {**stated["codes"], "Fibrosis": codes[:1]}, "site_names": {}} == facts
    (note,) = (note for note in noted(run) if "codes" in note)
    assert all(fact in note for fact in ("alpha", "'Faserung'", "'Fibrosis'"))
    figures = [read_json(run.record.folder.parent / out / "metrics.json") for out in ("plain", "coded")]
    assert figures[0] == figures[1]


@pytest.mark.complete
def test_a_run_that_continues_has_the_same_classes_and_bytes(tiny: Any, sites: Path) -> None:
    call(sites / "alpha", "Raumforderung", 'Raumforderung = "RADLEX:RID1"')
    call(sites / "beta", "Geschwulst", 'Geschwulst = "RADLEX:RID1"')
    federation = tiny(METHOD, {name: OWN[name] for name in ("alpha", "beta")})
    whole, _ = model(federation.run("whole"))
    first = replace(federation, schedule=replace(federation.schedule, rounds=1))
    first.run("parts")
    run = federation.run("parts")
    continued, facts = model(run)
    assert continued == whole
    assert facts["labels"] == ["Geschwulst", "Hernia", "Nodule"]
    assert facts["codes"]["Geschwulst"][0]["code"] == "RID1"
    assert "new_labels" not in run.record.run


def test_contradicting_codes_end_a_run_before_its_first_round(tiny: Any, sites: Path) -> None:
    call(sites / "alpha", "Geschwulst", 'Geschwulst = "RADLEX:RID1"')
    call(sites / "beta", "geschwulst", 'Geschwulst = "RADLEX:RID2"')
    federation = tiny(METHOD, {name: OWN[name] for name in ("alpha", "beta")})
    with pytest.raises(FederationError, match="'Geschwulst' is RADLEX:RID1 at alpha and RADLEX:RID2 at beta"):
        federation.run()
    assert not list((federation.folder / "run" / "state").glob("round-*"))


def test_a_site_that_states_the_code_of_another_class_is_left_out_with_the_reason(
    tiny: Any, sites: Path
) -> None:
    call(sites / "alpha", "Fibrosis", 'Fibrosis = "SCT:36118008"')
    federation = tiny(METHOD, {name: OWN[name] for name in ("alpha", "beta")}, min_sites=1)
    run = federation.run()
    assert list(run.registry.members) == ["beta"]
    (line,) = [
        e
        for e in map(json.loads, (run.record.folder / "events.jsonl").read_text().splitlines())
        if e["event"] == "begin"
    ]
    assert line["refused"] == {
        "alpha": (
            "'Fibrosis' (alpha) and 'Pneumothorax' (Suture's table, alpha) are the same class by "
            "SCT:36118008, but different classes of the vocabulary; correct the [data] codes of one of "
            "them, or remove them, or map one to the other in label_map of the job"
        )
    }


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        (
            'Fibrosis = "SCT:19242007"',
            "codes: 'Fibrosis': 'SCT:19242007' .*SNOMED CT",
        ),
        (
            'Fibrosis = ["I10:J90", "I10:J93"]',
            "codes: 'Fibrosis' .*I10:J90 and I10:J93",
        ),
        (
            'Fibrosis = "I10:J90"\nHernia = "I10:J90"',
            "codes: 'Fibrosis' and 'Hernia' both have the code I10:J90",
        ),
        ('Fibrosis = "19242006"', "codes: 'Fibrosis': '19242006'.*SYSTEM:CODE"),
        ("Fibrosis = 19242006", r"\[data\] codes.Fibrosis"),
    ],
)
def test_a_faulty_code_is_one_line_that_names_file_class_and_code(sites: Path, codes: str, why: str) -> None:
    call(sites / "alpha", "Fibrosis", codes)
    with pytest.raises(ConfigError, match=why) as caught:
        load_site_config(sites / "alpha" / "suture.toml")
    assert str(sites / "alpha" / "suture.toml") in str(caught.value)


def test_a_code_of_a_class_that_the_site_has_not_is_refused(sites: Path) -> None:
    call(sites / "alpha", "Fibrosis", 'Fibrosi = "RADLEX:RID1"')
    config = load_site_config(sites / "alpha" / "suture.toml")
    with pytest.raises(
        ConfigError, match=r"unknown class under \[data.codes\] .*'Fibrosi'; did you mean 'Fibrosis'"
    ):
        load_table(config.data)
    assert "[data.codes]" in check(config).problems[0]
