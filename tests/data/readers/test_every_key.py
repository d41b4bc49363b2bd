"""Every key of every data set changes what is read, or is refused: none is passed over without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from official import write_chexpert, write_ham10000, write_mimic, write_nih, write_openi
from suture.core.errors import ConfigError, SutureError
from suture.data.config import parse_data
from suture.data.decoding import decode_image
from suture.data.images import ImageSource
from suture.data.readers import DATASETS, read_table
from suture.testing import check_dataset
from world import refused

Values = dict[str, Any]

ELSEWHERE = {
    "dataset": "chooses the reader",
    "target": "tests/learning: the class of methods that train one",
    "truth": "tests/federation: what pseudo-labels are compared with",
    "groups": "tests/federation: the server's figures; a site refuses it, see below",
}


def lines(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def hospital(root: Path) -> Values:
    write_ham10000(root)
    splits = ("train", "test")
    rows = [
        f"ISIC_{i:07d}.jpg,P{i},{splits[i % 2]},{i % 2},{i % 3 // 2},{'yn'[i % 2]},lump|b-c,{i % 4},v"
        for i in range(40)
    ]
    header = "image,patient,split,Mass,lump,Edema,found,other,tone"
    table = lines(root / "list.csv", header, *rows)
    return {"root": root / "images", "table": table, "labels": ["Mass", "lump", "Edema"]}


def documents(root: Path) -> Values:
    rows = (f"{i},P{i},train,{i % 2},{'yn'[i % 2]},lump|x,x{i},{i % 4},v" for i in range(30))
    table = lines(root / "list.csv", "image,patient,split,Mass,lump,found,text,other,tone", *rows)
    return {"table": table, "text_column": "text", "labels": ["Mass", "lump"]}


def nih(root: Path) -> Values:
    names = [f"{i:08d}_000.png" for i in range(120)]
    write_nih(root)
    for folder, cut in ((root, 90), (root / "other", 60)):
        lines(folder / "train_val_list.txt", *names[:cut])
        lines(folder / "test_list.txt", *names[cut:])
    return {"root": root / "images", "table": root / "Data_Entry_2017.csv"}


def chexpert(root: Path) -> Values:
    write_chexpert(root)
    lines(root / "other" / "valid.csv", *(root / "valid.csv").read_text().splitlines()[:5])
    return {"root": root, "table": root / "train.csv"}


def mimic(root: Path) -> Values:
    write_mimic(root)
    name = "mimic-cxr-2.0.0-metadata.csv"
    header, first, *rest = (root / name).read_text().splitlines()
    lines(root / "other" / name, header, first.replace("PA", "LATERAL"), *rest)
    return {"root": root, "table": root / "mimic-cxr-2.0.0-chexpert.csv"}


def mimic_reports(root: Path) -> Values:
    for i in range(30):
        lines(root / f"files/p10/p1{i:07d}/s5{i:07d}.txt", f"report {i}")
    return mimic(root)


def isic(root: Path) -> Values:
    write_ham10000(root)
    names = [f"ISIC_{i:07d}" for i in range(140)]
    classes = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    rows = [",".join([n, *(str(float(k == i % 7)) for k in range(7))]) for i, n in enumerate(names)]
    table = lines(root / "truth.csv", f"image,{','.join(classes)}", *rows)
    for folder, of in ((root, 1), (root / "other", 7)):
        groups = (f"{n},L{i // of},x" for i, n in enumerate(names))
        lines(folder / "ISIC2018_Task3_Training_LesionGroupings.csv", "image,lesion_id,x", *groups)
    return {"root": root / "images", "table": table}


def flamby(root: Path) -> Values:
    write_ham10000(root)
    table = lines(root / "list.csv", ",image_name,dx", *(f"{i},ISIC_{i:07d},{i % 8}" for i in range(140)))
    for folder, of in ((root, 1), (root / "other", 8)):
        of_lesion = (f"ISIC_{i:07d},L{i % 8}-{i // 8 // of}" for i in range(140))
        lines(folder / "ISIC_2019_Training_Metadata.csv", "image,lesion_id", *of_lesion)
    return {"root": root / "images", "table": table, "split": "lesions"}


def hyperkvasir(root: Path) -> Values:
    write_ham10000(root)
    names = [f"ISIC_{i:07d}" for i in range(140)]
    table = lines(root / "labels.csv", "Video file,Finding", *(f"{n},polyps" for n in names))
    for folder, shift in ((root, 0), (root / "other", 1)):
        folds = (f"{n}.jpg;polyp;{(i + shift) % 5}" for i, n in enumerate(names))
        lines(folder / "5_fold_split.csv", "file-name;class-name;split-index", *folds)
    return {"root": root / "images", "table": table}


def openi(root: Path) -> Values:
    path = write_openi(root, [(f"a{i}", "b", ("Opacity", "Mass")) for i in range(110)])
    (root / "linked").mkdir()
    (root / "linked" / "1.xml").symlink_to(root / "ecgen-radiology" / "1.xml")
    return {"table": path.parent / "ecgen-radiology", "labels": ["Opacity"]}


def eicu(root: Path) -> Values:
    stays = range(40)
    for folder, word in ((root, "x"), (root / "other", "y")):
        for name, column in (
            ("admissionDrug", "drugname"),
            ("pastHistory", "pasthistorypath"),
            ("medication", "drugname"),
            ("admissionDx", "admitdxpath"),
            ("diagnosis", "diagnosisstring"),
        ):
            rows = (f"{i},{name}{word}{k}" for i in stays for k in (1, 2))
            lines(folder / f"{name}.csv", f"patientunitstayid,{column}", *rows)
    rows = (f"{i},{('Sepsis', 'CHF')[i % 2]},P{i}" for i in stays)
    table = lines(root / "patient.csv", "patientunitstayid,apacheadmissiondx,uniquepid", *rows)
    return {"table": table, "labels": ["Sepsis", "CHF"]}


def mtsamples(root: Path) -> Values:
    rows = (f"{i},{('Surgery', 'Urology')[i % 2]},note {i}" for i in range(40))
    return {"table": lines(root / "t.csv", "note_id,medical_specialty,transcription", *rows)}


def listed_images(root: Path, patient: str, visit: str) -> Values:
    write_ham10000(root)
    rows = (f"ISIC_{i:07d}.jpg,{i},{i % 5},2024-03-01,v,{('train', 'test')[i % 2]}" for i in range(40))
    table = lines(root / "list.csv", f"image,{patient},{visit},date,tone,split", *rows)
    return {"root": root / "images", "table": table, "labels": ["Mass", "lump"]}


def omop(root: Path) -> Values:
    header = "person_id,visit_occurrence_id,{0}_concept_id,{0}_date,value_as_concept_id"
    for name in ("measurement", "observation"):
        rows = (f"{i},{i % 4 or ''},{1 + i % 2},2024-03-01,{4188539 + i % 3 // 2}" for i in range(40))
        lines(root / f"{name}.csv", header.format(name), *rows)
    files = {"measurements": root / "measurement.csv", "observations": root / "observation.csv"}
    return (
        listed_images(root, "person_id", "visit_occurrence_id") | files | {"classes": {"Mass": 1, "lump": 2}}
    )


def fhir(root: Path) -> Values:
    shared = '"resourceType": "Observation", "status": "final", "effectiveDateTime": "2024-03-01"'
    rows = (
        f'{{{shared}, "code": {{"coding": [{{"system": "http://x", "code": "{1 + i % 2}"}}]}}, '
        f'"valueCodeableConcept": {{"coding": [{{"code": "{"yn"[i % 3 // 2]}"}}]}}, '
        f'"subject": {{"reference": "Patient/{i}"}}, '
        f'"encounter": {{"reference": "Encounter/{i % 4}"}}}}'
        for i in range(40)
    )
    files = [str(lines(root / "observations.ndjson", *rows))]
    codes: Values = {"classes": {"Mass": "1", "lump": "http://x|2"}, "values": {"y": 1, "n": 0}}
    return listed_images(root, "patient", "encounter") | {"observations": files} | codes


CASES: dict[str, tuple[str, Callable[[Path], Values], Values]] = {
    "hospital": ("hospital", hospital, {}),
    "hospital, drawn": ("hospital", hospital, {"split": "patients"}),
    "hospital, texts": ("hospital", documents, {}),
    "hospital, findings": ("hospital", hospital, {"labels": None, "finding_column": "found"}),
    "omop": ("omop", omop, {}),
    "omop, drawn": ("omop", omop, {"split": "patients"}),
    "omop, by person": ("omop", omop, {"link": "person"}),
    "fhir": ("fhir", fhir, {}),
    "nih": ("nih", nih, {"split": "patients"}),
    "nih, official": ("nih", nih, {"split": "official"}),
    "chexpert": ("chexpert", chexpert, {}),
    "chexpert, official": ("chexpert", chexpert, {"split": "official"}),
    "mimic": ("mimic", mimic, {}),
    "mimic, CXR-LT": ("mimic", mimic, {"table": "cxr-lt.csv", "split": "patients"}),
    "isic2018": ("isic2018", isic, {}),
    "isic2018, images": ("isic2018", isic, {"split": "images"}),
    "flamby_isic": ("flamby_isic", flamby, {"split": "lesions"}),
    "flamby_isic, official": ("flamby_isic", flamby, {"split": "official"}),
    "hyperkvasir": ("hyperkvasir", hyperkvasir, {}),
    "hyperkvasir, images": ("hyperkvasir", hyperkvasir, {"split": "images"}),
    "openi": ("openi", openi, {}),
    "eicu": ("eicu", eicu, {}),
    "eicu, leaking": ("eicu", eicu, {"leaking_text": True}),
    "mimic_reports": ("mimic_reports", mimic_reports, {"split": "patients"}),
    "mimic_reports, test": ("mimic_reports", mimic_reports, {"split": "test"}),
    "mtsamples": ("mtsamples", mtsamples, {}),
}
"""The data set, what writes its data and returns its keys, and other keys."""


def given(case: str, root: Path) -> Values:
    """Write the data of a case; its keys."""
    _, write, more = CASES[case]
    values = write(root) | more
    if "table" in more:
        values["table"] = root / more["table"]
    return {name: value for name, value in values.items() if value is not None}


OTHER: Values = {
    "root": "elsewhere",
    "table": "elsewhere.csv",
    "synonyms": {"lump": "Nodule"},
    "codes": {"None of These": "SCT:36118008"},  # refused; of a class that there is, it changes no label
    "atlas": "elsewhere.toml",  # refused; tests/data/test_closing.py: what an atlas changes
    "contradictions": "child wins",
    "ancestors": True,
    "seed": 2,
    "color": True,
    "bits": 12,
    "partial": True,
    "follow_links": True,
    "lists": "other",
    "views": "all",
    "uncertain": "ignore",
    "fold": 1,
    "labels_from": "diagnosis",
    "texts": ["medication"],
    "leaking_text": True,
    "image_column": "patient",
    "text_column": "found",
    "patient_column": "image",
    "attribute_column": "tone",
    "delimiter": ";",
    "encoding": "utf-16",
    "image_match": "stem",
    "repeated": "merge",
    "split_column": "tone",
    "split_file": "splits.csv",
    "finding_column": "found",
    "finding_separator": "-",
    "finding_path": "-",
    "value_column": "tone",
    "values": {"y": 0, "n": 1},
    "label_type": "multiclass",
    "classes": {"lump": 1, "Mass": 2},
    "measurements": "elsewhere.csv",
    "observations": "elsewhere.csv",
    "link": "person",
    "visit_column": "tone",
    "date_column": "tone",
}
"""Another value of each key; those of labels and split depend on the data set."""


SPOILED = {"repeated", "bits", "uncertain", "views", "image_match", "partial", "follow_links"}
"""Keys for which `spoiled` changes the data."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Values]]:
    """Writes the data of a case, once for the keys that only read them."""

    @cache
    def written(case: str) -> tuple[Path, Values]:
        root = tmp_path_factory.mktemp("case") / "data"
        root.mkdir()
        return root, given(case, root)

    return written


def spoiled(root: Path, given: Values, key: str) -> None:
    """Give the data what a key is for: a link, a missing image, an uncertain label, several rows."""
    table = given["table"]
    if key == "repeated":
        text = table.read_text()
        table.write_text(text + text.splitlines()[-1] + "\n")
    if key == "bits":
        deep = Image.fromarray(np.full((8, 8), 2048, dtype=np.uint16))
        for path in (p for p in root.rglob("*") if p.suffix in (".png", ".jpg")):
            deep.save(path, "PNG")
    if key == "uncertain":
        table.write_text(table.read_text().replace("1.0", "-1.0"))
    if key == "views":
        for name in ("train.csv", "mimic-cxr-2.0.0-metadata.csv"):
            if (path := root / name).exists():
                path.write_text(
                    path.read_text().replace(",Frontal,", ",Lateral,", 1).replace(",AP", ",LL", 1)
                )
    if key == "image_match":
        table.write_text(table.read_text().replace(".jpg", ""))
    if key == "partial":
        table.write_text(table.read_text().replace(",x0,", ",,")) if table.is_file() else None
        found = [p for p in root.rglob("*") if p.suffix in (".png", ".jpg") or p.parent.name[0] == "p"]
        for path in sorted(filter(Path.is_file, found), key=lambda p: (p.suffix != ".txt", p))[:1]:
            path.unlink()
    if key == "follow_links" and table.is_dir():
        (root / "elsewhere.xml").write_text((table / "1.xml").read_text())
        (table / "1.xml").unlink()
        (table / "1.xml").symlink_to(root / "elsewhere.xml")
    elif key == "follow_links":
        for path in (p for p in sorted(root.rglob("*")) if p.suffix in (".jpg", ".png", ".txt")):
            away = root.parent / "away" / path.name
            away.parent.mkdir(exist_ok=True)
            path.rename(away)
            path.symlink_to(away)


def outcome(values: Values) -> Any:
    """What is read: a table with its first images, or the text of the error."""
    try:
        config = parse_data(values, "suture.toml")
        reading = read_table(config)
    except SutureError as error:
        return str(error)
    table = reading.table
    pixels: Any = None
    if table.texts is None:
        try:
            with ImageSource(table.root, table.follow_links) as source:
                first = table.images[0]
                pixels = decode_image(source.raw(first), first, config.color, config.bits).tolist()
        except SutureError as error:
            pixels = str(error)
    shown = (table.labels, table.images, table.patients, table.y.tobytes(), table.split, table.texts)
    return *shown, table.attributes, reading.faults, reading.absent, pixels


@cache
def first_outcome(text: str) -> Any:
    """The outcome of values as JSON, which most keys of a case share, but for spoiled data."""
    return outcome(json.loads(text))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (case, key)
        for case, (word, *_) in CASES.items()
        for key in DATASETS[word].config.model_fields
        if key not in ELSEWHERE
    ],
)
def test_a_key_changes_something_or_is_refused(case: str, key: str, written: Any, tmp_path: Path) -> None:
    word = CASES[case][0]
    if key in SPOILED:
        root = tmp_path / "data"
        root.mkdir()
        own = given(case, root)
        spoiled(root, own, key)
    else:
        root, own = written(case)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}
    values["dataset"] = word
    if key == "synonyms" and word != "hospital":
        values.pop("labels", None)
    if key == "text_column":
        values.pop("root", None)  # which is for images
    before = outcome(values) if key in SPOILED else first_outcome(json.dumps(values))
    if key == "labels":
        assert not isinstance(before, str), before
        value: Any = [before[0].names[-1]] if len(before[0]) > 1 else ["Mass"]
    elif key == "split":
        words = DATASETS[word].config.model_fields["split"].annotation.__args__  # type: ignore[union-attr]
        value = next(one for one in words if one != values.get("split", words[0]))
    else:
        value = OTHER[key]
        assert key in OTHER, f"add another value of the new key {key!r}"
    if value in ("other", "elsewhere", "elsewhere.csv"):
        value = str(root / value)
    if values.get(key) == value:
        value = {"text_column": None, "finding_column": None, "leaking_text": False, "link": "visit"}[key]
    after = outcome(values | {key: value})
    if isinstance(after, str) and "has no effect" in after:
        assert f"[data] {key} has no effect " in after
    else:
        assert after != before, f"{key} = {value!r} is passed over"


@pytest.mark.parametrize(
    ("case", "more", "named"),
    [
        ("hospital", {"finding_separator": ";"}, ["finding_separator", "finding_column"]),
        ("hospital", {"seed": 2}, ["seed", 'split = "column"']),
        ("hospital, findings", {"values": {"y": 1}}, ["values", "finding_column"]),
        ("hospital, texts", {"color": True}, ["color"]),
        ("nih", {"lists": "other"}, ["lists", 'split = "patients"']),
        ("nih", {"synonyms": {"a": "Mass"}}, ["synonyms", "labels"]),
    ],
)
def test_a_key_without_effect_is_refused(case: str, more: Values, named: list[str], tmp_path: Path) -> None:
    with refused("suture.toml: [data]", *named, by=ConfigError):
        parse_data({"dataset": CASES[case][0], **given(case, tmp_path), **more}, "suture.toml")


@pytest.mark.parametrize("case", CASES)
def test_every_reader_conforms(case: str, written: Callable[[str], tuple[Path, Values]]) -> None:
    assert {word for word, *_ in CASES.values()} == set(DATASETS)
    config = parse_data({"dataset": CASES[case][0], **written(case)[1]}, "test")
    check_dataset(DATASETS[config.dataset], config.model_dump(exclude_defaults=True))
