"""Label lists of sites side by side: twenty published lists, with the truth about their names by hand."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest

from sentence_folder import sentence_folder
from suture.core.errors import ConfigError
from suture.core.labels import canonical
from suture.core.ontology import Atlas, Decision
from suture_prepare import study_labels
from suture_prepare.study_labels import compare_lists, misspelt

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


def test_what_the_vocabulary_does_not_merge_is_known_here() -> None:
    apart = [
        {canonical(spelling) for spelling in group.split("|")}
        for group in SAME
        if len({canonical(spelling) for spelling in group.split("|")}) > 1
    ]
    assert apart == [
        {"Lung Opacity", "Airspace Opacity"},
        {"Pneumoperitoneum", "Pneumoperitoneo"},
        {"Lung Cavity", "Cavitation"},
    ]


def test_proposals_that_names_are_one_class() -> None:
    """Of the three pairs that remain, one is found and two are missed; none is wrong."""
    proposed = [(one.name, one.of) for one in FOUND.proposals if one.relation == "same"]
    assert proposed == [("Pneumoperitoneo", "Pneumoperitoneum")]


def test_proposals_that_a_class_is_a_kind_of_another() -> None:
    """All 28 are right: of a fissure's thickening, COPD's signs and what tuberculosis leaves is none."""
    proposed = [(one.name, one.of) for one in FOUND.proposals if one.relation == "child"]
    assert len(proposed) == 28
    for child, parent in proposed:  # e.g. "Mediastinal Mass" of "Mass"
        assert {*parent.lower().split()} <= {*child.lower().replace("round(ed)", "rounded").split()}
    named = {child for child, _ in proposed}
    assert named.isdisjoint({"COPD Signs", "Fissure Thickening", "Tuberculosis Sequelae"})


def test_what_contains_what_is_by_the_built_in_relations() -> None:
    assert ("Consolidation", "Lung Opacity") in FOUND.contains
    assert ("Nodule", "Lung Lesion") in FOUND.contains
    assert ("Pacemaker", "Support Devices") in FOUND.contains
    assert ("Pneumonia", "Consolidation") not in FOUND.contains
    assert len(FOUND.contains) > 50


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


def test_what_is_decided_is_not_proposed_again_and_takes_its_name() -> None:
    on = datetime.date(2026, 11, 25)
    values = {"name": "Cardiomegali", "of": "Cardiomegaly", "by": "M. Ruiz", "on": on}
    for relation in ("same", "different", "child"):
        decided = Atlas(decisions=(Decision(relation=relation, **values),))  # type: ignore[arg-type]
        assert two(["Cardiomegali"], ["Cardiomegaly"], decided) == []
        found = compare_lists({"a": ["Cardiomegali"]}, decided).sites["a"]
        assert found == (("Cardiomegaly",) if relation == "same" else ("Cardiomegali",))


def test_of_hundreds_of_numbered_names_each_is_compared_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Counted(SequenceMatcher[str]):
        def ratio(self) -> float:
            nonlocal compared
            compared += 1
            return 0.0

    monkeypatch.setattr(study_labels, "SequenceMatcher", Counted)
    names = [f"Finding {i // 10} of kind {i:04d}" for i in range(600)]
    two(names[:300], names[300:])
    assert 0 < compared <= 600 * study_labels._COMPARED


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
    assert [text.partition("; did")[0] for text in wrong] == [
        "no site and no atlas has 'Pneumothorx'",
        "no site and no atlas has 'Scoliossis'",
    ]
    assert "did you mean 'Scoliosis'?" in wrong[1]
    values = {"name": "Scoliosis", "of": "Scoliossis", "by": "M. Ruiz", "on": datetime.date(2026, 11, 25)}
    decided = atlas.model_copy(update={"decisions": (Decision(relation="different", **values),)})  # type: ignore[arg-type]
    assert len(misspelt(decided, classes)) == 1


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
    assert asked == [Path("minilm")]
    assert compare_lists(lists, Atlas()).proposals == ()
    assert len(asked) == 1


def test_letters_go_before_meaning_and_a_decision_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_labels, "_vectors", lambda _, texts: np.ones((len(texts), 1)))
    lists = {"a": ["Cardiomegali"], "b": ["Cardiomegaly"]}
    (one,) = compare_lists(lists, Atlas(), Path("x")).proposals
    assert (one.by_meaning, one.score) == (False, 0.96)
    values = {"name": "Cardiomegali", "of": "Cardiomegaly", "by": "x", "on": datetime.date(2026, 11, 25)}
    decided = Atlas(decisions=(Decision(relation="different", **values),))  # type: ignore[arg-type]
    assert compare_lists(lists, decided, Path("x")).proposals == ()


def test_the_vectors_of_an_encoder_of_text_have_the_length_one(tmp_path: Path) -> None:
    sentence_folder(tmp_path / "encoder", "bert")
    found = study_labels._vectors(tmp_path / "encoder", ["no effusion", "heart"])
    named = study_labels._vectors(Path(f"hf:{tmp_path / 'encoder'}"), ["no effusion", "heart"])
    assert np.array_equal(named, found), "a folder may be named as in a job, too"
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_a_folder_that_is_no_encoder_of_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json|encoder"):
        study_labels._vectors(tmp_path, ["mass"])
