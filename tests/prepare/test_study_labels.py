"""suture_prepare.study_labels: lists of labels side by side, and `suture labels`.

Twenty published lists, with the truth about their names by hand.
"""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sentence_folder import sentence_folder
from suture.core.errors import ConfigError, SutureError
from suture.core.labels import canonical
from suture.core.ontology import Atlas, Decision
from suture.data.config import load_site_config
from suture.data.readers import read_table
from suture.execution.job import load_job
from suture_prepare import study_labels
from suture_prepare.study_labels import compare_lists, misspelt
from world import exit_of, refused, site_config, suture, write_table

PADCHEST = """
normal, pulmonary fibrosis, chronic changes, kyphosis, pseudonodule, ground glass pattern, unchanged,
alveolar pattern, interstitial pattern, laminar atelectasis, pleural effusion, apical pleural thickening,
suture material, sternotomy, endotracheal tube, infiltrates, heart insufficiency, hemidiaphragm
elevation, superior mediastinal enlargement, aortic elongation, scoliosis, sclerotic bone lesion, supra
aortic elongation, vertebral degenerative changes, goiter, COPD signs, air trapping, descendent aortic
elongation, aortic atheromatosis, metal, hypoexpansion basal, abnormal foreign body, central venous
catheter, central venous catheter via subclavian vein, vascular hilar enlargement, pacemaker,
atelectasis, hiatal hernia, pneumonia, diaphragmatic eventration, consolidation, calcified densities,
cardiomegaly, fibrotic band, tuberculosis sequelae, volume loss, bronchiectasis, single chamber device,
emphysema, vertebral compression, bronchovascular markings, bullas, hilar congestion, axial hyperostosis,
aortic button enlargement, calcified granuloma, clavicle fracture, pulmonary mass, dual chamber device,
increased density, surgery neck, osteosynthesis material, segmental atelectasis, costophrenic angle
blunting, calcified pleural thickening, callus rib fracture, mediastinal mass, nipple shadow, surgery
heart, pulmonary artery hypertension, central vascular redistribution, tuberculosis, nodule, cavitation,
granuloma, osteopenia, lobar atelectasis, surgery breast, NSG tube, hilar enlargement, gynecomastia,
atypical pneumonia, mediastinal enlargement, major fissure thickening, surgery, azygos lobe, adenopathy,
miliary opacities, surgery lung, humeral fracture, calcified adenopathy, reservoir central venous
catheter, vascular redistribution, hypoexpansion, pleural mass, heart valve calcified, loculated pleural
effusion, vertebral fracture, osteoporosis, lung metastasis, cyst, artificial heart valve, pericardial
effusion, subcutaneous emphysema, pulmonary edema, flattened diaphragm, multiple nodules, prosthesis,
pulmonary hypertension, soft tissue mass, tracheostomy tube, obesity, tracheal shift, rib fracture,
pneumothorax, reticulonodular interstitial pattern, hydropneumothorax, reticular interstitial pattern,
chest drain tube, minor fissure thickening, fissure thickening, breast mass, ascendent aortic elongation,
electrical device, artificial aortic heart valve, total atelectasis, mass, pleural plaques, calcified
pleural plaques, pneumomediastinum, pneumoperitoneo, hyperinflated lung
"""

CHEXPERT = """
No Finding, Enlarged Cardiomediastinum, Cardiomegaly, Lung Opacity, Lung Lesion, Edema, Consolidation,
Pneumonia, Atelectasis, Pneumothorax, Pleural Effusion, Pleural Other, Fracture, Support Devices
"""

TEXTS = {
    "nih": """
        Atelectasis, Cardiomegaly, Effusion, Infiltration, Mass, Nodule, Pneumonia, Pneumothorax,
        Consolidation, Edema, Emphysema, Fibrosis, Pleural_Thickening, Hernia
        """,
    "chexpert": CHEXPERT,
    "mimic": CHEXPERT,
    "brax": CHEXPERT,
    "negbio": CHEXPERT.replace("Lung Opacity", "Airspace Opacity"),
    "vindr": """
        Aortic enlargement, Atelectasis, Calcification, Cardiomegaly, Clavicle fracture, Consolidation,
        Edema, Emphysema, Enlarged PA, ILD, Infiltration, Lung Opacity, Lung cavity, Lung cyst,
        Mediastinal shift, Nodule/Mass, Pleural effusion, Pleural thickening, Pneumothorax, Pulmonary
        fibrosis, Rib fracture, Other lesion, COPD, Lung tumor, Pneumonia, Tuberculosis, Other diseases,
        No finding
        """,
    "vindr, kaggle": """
        Aortic enlargement, Atelectasis, Calcification, Cardiomegaly, Consolidation, ILD, Infiltration,
        Lung Opacity, Nodule/Mass, Other lesion, Pleural effusion, Pleural thickening, Pneumothorax,
        Pulmonary fibrosis
        """,
    "padchest": PADCHEST,
    "rsna": "Normal, No Lung Opacity / Not Normal, Lung Opacity",
    "tbx11k": """
        healthy, sick but non-TB, ActiveTuberculosis, ObsoletePulmonaryTuberculosis, PulmonaryTuberculosis
    """,
    "cxr-lt 2024": """
        Adenopathy, Atelectasis, Azygos Lobe, Calcification of the Aorta, Cardiomegaly, Clavicle Fracture,
        Consolidation, Edema, Emphysema, Enlarged Cardiomediastinum, Fibrosis, Fissure, Fracture,
        Granuloma, Hernia, Hydropneumothorax, Infarction, Infiltration, Kyphosis, Lobar Atelectasis, Lung
        Lesion, Lung Opacity, Mass, Nodule, Normal, Pleural Effusion, Pleural Other, Pleural Thickening,
        Pneumomediastinum, Pneumonia, Pneumoperitoneum, Pneumothorax, Pulmonary Embolism, Pulmonary
        Hypertension, Rib fracture, Round(ed) Atelectasis, Subcutaneous Emphysema, Support Devices,
        Tortuous Aorta, Tuberculosis
        """,
    "kermany": "NORMAL, BACTERIAL PNEUMONIA, VIRAL PNEUMONIA",
    "shenzhen": "normal, tuberculosis",
    "covid": "COVID, Lung_Opacity, Normal, Viral Pneumonia",
    "isic 2018": "MEL, NV, BCC, AKIEC, BKL, DF, VASC",
    "isic 2019": "MEL, NV, BCC, AK, BKL, DF, VASC, SCC",
    "isic 2020": """
        melanoma, nevus, seborrheic keratosis, lentigo NOS, lichenoid keratosis, solar lentigo, cafe-au-
        lait macule, atypical melanocytic proliferation
        """,
    "pad-ufes": "BCC, SCC, ACK, SEK, MEL, NEV",
    "fitzpatrick17k": """
        inflammatory, malignant epidermal, genodermatoses, benign dermal, benign epidermal, malignant
        melanoma, benign melanocyte, malignant cutaneous lymphoma, malignant dermal
        """,
    "ham10000": "akiec, bcc, bkl, df, mel, nv, vasc",
}

LISTS = {site: [" ".join(name.split()) for name in text.split(",")] for site, text in TEXTS.items()}

SAME = [
    "Effusion|Pleural Effusion",
    "Infiltration|infiltrates",
    "Fibrosis|pulmonary fibrosis",
    "Edema|pulmonary edema",
    "Pleural_Thickening|Pleural thickening",
    "Lung_Opacity|Lung Opacity|Airspace Opacity",
    "No Finding|normal|NORMAL|healthy",
    "PulmonaryTuberculosis|Tuberculosis",
    "Pneumoperitoneum|pneumoperitoneo",
    "Lung cavity|cavitation",
    "Rib fracture|rib fracture",
    "MEL|mel|melanoma|malignant melanoma",
    "NV|nv|nevus|NEV",
    "BCC|bcc",
    "AKIEC|akiec",
    "AK|ACK",
    "BKL|bkl",
    "SEK|seborrheic keratosis",
    "DF|df",
    "VASC|vasc",
]
"""Spellings of one class; all other names of the lists are classes of their own."""

FOUND = compare_lists(LISTS, Atlas())

TRUE = {spelling: group.split("|")[0] for group in SAME for spelling in group.split("|")}


def test_twenty_lists_are_merged_without_a_wrong_merge() -> None:
    assert len(LISTS) == 20
    concepts: dict[str, set[str]] = {}
    for name in (name for names in LISTS.values() for name in names):
        concepts.setdefault(canonical(name), set()).add(canonical(TRUE.get(name, name)))
    assert {name: of for name, of in concepts.items() if len(of) > 1} == {}


def test_the_proposals_of_twenty_lists_are_right() -> None:
    """Of three pairs that the vocabulary leaves apart one is found; of 28 kinds none is wrong."""
    groups = ({canonical(spelling) for spelling in group.split("|")} for group in SAME)
    assert [sorted(group) for group in groups if len(group) > 1] == [
        ["Airspace Opacity", "Lung Opacity"],
        ["Pneumoperitoneo", "Pneumoperitoneum"],
        ["Cavitation", "Lung Cavity"],
    ]
    same, child = (
        [(one.name, one.of) for one in FOUND.proposals if one.relation == kind] for kind in ("same", "child")
    )
    assert same == [("Pneumoperitoneo", "Pneumoperitoneum")]
    assert len(child) == 28
    for name, parent in child:  # e.g. "Mediastinal Mass" of "Mass"
        assert {*parent.lower().split()} <= {*name.lower().replace("round(ed)", "rounded").split()}
    assert {name for name, _ in child}.isdisjoint(
        {"COPD Signs", "Fissure Thickening", "Tuberculosis Sequelae"}
    )
    built_in = {
        ("Consolidation", "Lung Opacity"),
        ("Nodule", "Lung Lesion"),
        ("Pacemaker", "Support Devices"),
    }
    assert {*FOUND.contains} >= built_in
    assert ("Pneumonia", "Consolidation") not in FOUND.contains


def decided(name: str, relation: str, of: str) -> Decision:
    return Decision(name=name, relation=relation, of=of, by="M. Ruiz", on=datetime.date(2026, 11, 25))  # type: ignore[arg-type]


def two(first: list[str], second: list[str], atlas: Atlas | None = None) -> list[tuple[str, str, str]]:
    found = compare_lists({"a": first, "b": second}, atlas or Atlas())
    return [(one.name, one.relation, one.of) for one in found.proposals]


@pytest.mark.parametrize(
    ("first", "second", "proposed"),
    [
        (["Cardiomegali"], ["Mass", "Cardiomegaly"], [("Cardiomegali", "same", "Cardiomegaly")]),
        (["Derrame pleurall"], ["Effusion"], [("Derrame Pleurall", "same", "Pleural Effusion")]),
        (
            ["Thickening of the Fissures"],
            ["Fissure Thickening"],
            [("Fissure Thickening", "same", "Thickening Of The Fissures")],
        ),
        (["PCD"], ["Primary Ciliary Dyskinesia"], [("Pcd", "same", "Primary Ciliary Dyskinesia")]),
        (["Small Pleural Effusion"], ["Effusion"], [("Small Pleural Effusion", "child", "Pleural Effusion")]),
        (["Scar or Streak"], ["Scar"], [("Scar", "child", "Scar Or Streak")]),
        (["Surgery Lung"], ["Surgery"], [("Surgery Lung", "child", "Surgery")]),
        (["Cavitating Lesion"], ["Lesion"], [("Cavitating Lesion", "child", "Lesion")]),
        # What happens to a thing, or is left of it, is no kind of it; nor is another thing's shape.
        (["Rib Notching", "Engrosamiento de cisura"], ["Rib", "Cisura"], []),
        (["Thickening of the Fissure", "Ulcer Perforation"], ["Fissure", "Ulcer"], []),
        (["Streak History", "Streak Sequelae"], ["Streak"], []),
        (["Hilar Swelling", "Grade 12"], ["Nodal Swelling", "Grade 13"], []),
        # A negation is no kind of what it denies, and no spelling of it.
        (["No Scar Tissue"], ["Scar Tissue"], []),
        (["Other Lesion"], ["Lesion"], []),
        # Names of the vocabulary are known to differ, and so are two classes of one site.
        (["Emphysema"], ["Subcutaneous Emphysema"], []),
        (["Scar tissue", "Scarr tissue"], ["Mass"], []),
    ],
)
def test_what_is_proposed(first: list[str], second: list[str], proposed: list[tuple[str, str, str]]) -> None:
    assert two(first, second) == proposed


@pytest.mark.parametrize("relation", ["same", "different", "child"])
def test_what_is_decided_is_not_proposed_again_and_takes_its_name(relation: str) -> None:
    atlas = Atlas(decisions=(decided("Cardiomegali", relation, "Cardiomegaly"),))
    assert two(["Cardiomegali"], ["Cardiomegaly"], atlas) == []
    found = compare_lists({"a": ["Cardiomegali"]}, atlas).sites["a"]
    assert found == (("Cardiomegaly",) if relation == "same" else ("Cardiomegali",))


@pytest.mark.complete
@pytest.mark.parametrize("sites", [1, 20])
def test_the_pairs_of_thousands_of_names_are_not_all_looked_at(
    monkeypatch: pytest.MonkeyPatch, sites: int
) -> None:
    """Of 4.5 million pairs."""
    looked = []
    monkeypatch.setattr(study_labels, "_likeness", lambda *pair: looked.append(pair) or 0.0)
    names = [f"{one}{two}{three} lesion" for one in SYLLABLES for two in SYLLABLES for three in SYLLABLES][
        :3000
    ]
    compare_lists({f"s{i}": names[i::sites] for i in range(sites)}, Atlas())
    assert 0 < len(looked) <= 3000 * study_labels._COMPARED


SYLLABLES = ["ca", "ti", "lo", "pne", "mo", "ple", "ra", "ver", "te", "bra", "ster", "no", "cos", "tal", "my"]


@pytest.mark.complete
def test_pairs_do_not_depend_on_the_order_in_which_python_hashes() -> None:
    code = (
        "from suture.core.ontology import Atlas\n"
        "from suture_prepare.study_labels import compare_lists\n"
        "names = [f'{a}{b}osis' for a in ('bar', 'car', 'dar', 'ear') for b in 'abcdefghij']\n"
        "print(compare_lists({'a': names[::2], 'b': names[1::2]}, Atlas()).proposals)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_a_name_of_the_relations_that_nobody_has_is_told_with_the_nearest() -> None:
    atlas = Atlas(
        parents={"Mild Scoliosis": ("Scoliossis",), "Mass": ("Big Shape",)},
        exclusive=(("Pneumothorx", "Spot"),),
    )
    classes = ("Mild Scoliosis", "Spot")
    wrong = misspelt(atlas, classes)
    assert ["'Pneumothorx'" in wrong[0], "'Scoliossis'" in wrong[1], "'Scoliosis'" in wrong[1]] == [True] * 3
    known = atlas.model_copy(update={"decisions": (decided("Scoliosis", "different", "Scoliossis"),)})
    assert len(misspelt(known, classes)) == 1


def test_names_near_in_meaning_are_proposed_with_their_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Haze is nearest to a spelling of Edema; Blur too, but its site has that class; Spot is far from all."""
    angles = {"haze": 0.0, "pulmonary edema": 30.0, "edema": 90.0, "blur": 31.0, "spot": 170.0, "mass": 100.0}
    asked = []

    def vectors(folder: Path, texts: list[str]) -> np.ndarray:
        asked.append(folder)
        turns = np.radians([angles.get(text, 250.0) for text in texts])
        return np.stack([np.cos(turns), np.sin(turns)], axis=1)

    monkeypatch.setattr(study_labels, "_vectors", vectors)
    lists = {"a": ["Haze", "Spot"], "b": ["Edema", "Blur"], "c": ["Mass"]}
    found = compare_lists(lists, Atlas(), Path("minilm")).proposals
    assert [(one.name, one.of, one.score, one.by_meaning) for one in found] == [
        ("Haze", "Edema", 0.87, True),
        ("Blur", "Haze", 0.86, True),
    ]
    assert compare_lists(lists, Atlas()).proposals == ()
    assert asked == [Path("minilm")]
    # Letters go before meaning, and a decision before both.
    lists = {"a": ["Cardiomegali"], "b": ["Cardiomegaly"]}
    (one,) = compare_lists(lists, Atlas(), Path("x")).proposals
    assert (one.by_meaning, one.score) == (False, 0.96)
    known = Atlas(decisions=(decided("Cardiomegali", "different", "Cardiomegaly"),))
    assert compare_lists(lists, known, Path("x")).proposals == ()


def test_the_vectors_of_an_encoder_of_text_have_the_length_one(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder", "bert")
    found = study_labels._vectors(tmp_path / "encoder", ["no effusion", "heart"])
    named = study_labels._vectors(Path(f"hf:{tmp_path / 'encoder'}"), ["no effusion", "heart"])
    assert np.array_equal(named, found), "a folder may be named as in a job, too"
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    (tmp_path / "empty").mkdir()
    with refused("encoder", by=ConfigError):
        study_labels._vectors(tmp_path / "empty", ["mass"])


# `suture labels`

HEADERS = {
    "alpha": "Lung Opacity,Lung Lesion",
    "beta": "Consolidation,Lesion of the Lung",
    "gamma": "Lung Lesion",
}
BY = "--by", "M. Ruiz"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of three sites, whose tables alone are read."""
    for site, header in HEADERS.items():
        names = header.split(",")
        rows = [["image", "patient", "split", *names], ["a.png", 1, "train", *(1 for _ in names)]]
        write_table(tmp_path / site / "labels.csv", rows)
        site_config(tmp_path / site, data={"dataset": "hospital", "root": ".", "table": "labels.csv"})
    job = 'name = "x"\nrounds = 1\n[model]\nname = "cnn"\n[method]\nname = "partial"\n'
    (tmp_path / "job.toml").write_text(job)
    return tmp_path


def labels(study: Path, *words: object) -> str:
    return " ".join(suture("labels", study, *words).split())


def test_lists_side_by_side_and_a_proposal_that_merges_nothing(study: Path) -> None:
    said = labels(study)
    assert "Lung Lesion x x 2" in said
    assert "Lung Opacity: Consolidation, Lung Lesion" in said
    assert "1.00 Lesion Of The Lung the same as Lung Lesion" in said
    assert (
        f"suture labels {shlex.quote(str(study))} --same 'Lesion Of The Lung=Lung Lesion' --by NAME" in said
    )
    assert not (study / "labels.toml").exists()
    assert load_job(study).label_map == {}


def test_a_decision_is_recorded_with_who_and_when_and_the_job_follows_it(study: Path) -> None:
    said = labels(study, "--same", "lesion of the lung=Lung Lesion", *BY)
    assert "Lung Lesion x x x 3" in said
    assert "--same" not in labels(study), "nothing is left to decide"
    text = (study / "labels.toml").read_text()
    assert all(f in text for f in ('by = "M. Ruiz"', f"on = {datetime.date.today().isoformat()}"))
    job = load_job(study)
    assert (job.label_map, job.accept_labels) == ({"Lesion Of The Lung": "Lung Lesion"}, False)
    own = study / "job.toml"
    written = own.read_text()
    own.write_text(written.replace("[method]", '[label_map]\n"Lesion Of The Lung" = "Spot"\n[method]'))
    assert load_job(study).label_map == {"Lesion Of The Lung": "Spot"}, "what the job says itself goes first"
    own.write_text(written)
    labels(study, "--different", "Lesion of the Lung=Lung Lesion", *BY)
    job = load_job(study)
    assert (job.label_map, job.accept_labels) == ({}, ("Lesion Of The Lung",))
    assert (study / "labels.toml").read_text().count("[[decisions]]") == 2, "both stay on record"


def test_a_site_that_names_the_file_learns_a_child_of_its_own_classes(study: Path) -> None:
    """The first decision makes the file, which a site may name already."""
    table = study / "alpha" / "labels.csv"
    table.write_text(table.read_text().replace("train,1,1", "train,,1"))
    config = study / "alpha" / "suture.toml"
    plain = config.read_text()
    config.write_text(plain + 'atlas = "../labels.toml"\n')
    labels(study, "--child", "Lung Lesion=Lung Opacity", *BY)
    assert read_table(load_site_config(config).data).table.y.tolist() == [[1, 1]]
    config.write_text(plain)
    assert read_table(load_site_config(config).data).table.y.tolist()[0][0] != 1


@pytest.mark.complete
def test_a_site_gets_the_part_of_the_file_that_concerns_it(study: Path) -> None:
    labels(study, "--same", "Lesion of the Lung=Lung Lesion", *BY)
    labels(study, "--child", "Lung Lesion=Chest Finding", *BY)
    file, written = study / "beta.toml", (study / "labels.toml").read_text()
    labels(study, "--excerpt", f"beta={file}")
    assert file.read_text() == '[parents]\n"Lesion Of The Lung" = [\n    "Chest Finding",\n]\n'
    for there in (file, study / "labels.toml"):  # the decisions are not written over
        with refused(there, by=ConfigError):
            labels(study, "--excerpt", f"beta={there}")
    assert (study / "labels.toml").read_text() == written
    for wrong in ("betta=x", "beta", "beta="):
        with refused("SITE=FILE", "beta", by=ConfigError):
            labels(study, "--excerpt", wrong)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--same", "Lesion of the Lung=Lung Lesion"], "--by"),
        (["--by", "M. Ruiz"], "--by"),
        (["--same", "Mass", *BY], "--same 'Mass'"),
        (["--child", "Consolidatoin=Lung Opacity", *BY], "'Consolidation'"),
        (["--same", "Consolidation=", *BY], "--same Consolidation="),
        (["--child", "Lung Lesion=lung lesion", *BY], "lung lesion"),
        (["--same", "Lung Opacity=Lung Lesion", *BY], "alpha"),  # which has both
    ],
)
def test_a_decision_that_is_none(study: Path, words: list[str], named: str) -> None:
    with refused(named, by=ConfigError):
        labels(study, *words)
    assert not (study / "labels.toml").exists()


@pytest.mark.complete
def test_a_faulty_file_ends_the_commands_that_read_it(study: Path) -> None:
    (study / "labels.toml").write_text('[parents]\n"A" = ["A"]\n')
    for read in (labels, load_job, partial(suture, "check")):
        with pytest.raises(SutureError):
            read(study)
    (study / "labels.toml").write_text('[parents]\nConsolidation = ["Lung Opacitty"]\n')
    with refused("labels.toml", "'Lung Opacitty'", "'Lung Opacity'", by=ConfigError):
        labels(study)
    labels(study, "--different", "Lung Opacity=Lung Opacitty", *BY)
    said = labels(study, "--child", "Consolidation=Lung Opacityy", *BY)
    assert "'Lung Opacityy'" in said, "a name that nobody has is told"


@pytest.mark.complete
def test_the_check_follows_a_decision_that_two_names_are_one(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike() -> bool:
        exit_of(monkeypatch, "check", study)
        said = " ".join("".join(capsys.readouterr()).split())
        return "'Consolidation' (beta) and 'Consolidations' (alpha)" in said

    for site, name in (("alpha", "Consolidations"), ("beta", "Consolidation")):
        text = (study / site / "labels.csv").read_text()
        (study / site / "labels.csv").write_text(text.replace(HEADERS[site].split(",")[0], name))
    assert alike()
    labels(study, "--same", "Consolidations=Consolidation", *BY)
    assert not alike()
