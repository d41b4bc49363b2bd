"""Tables as hospitals have them: what `init` writes is read with the values that are meant."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hospitals import image, table
from suture.core.errors import ConfigError, DataError
from suture.data.config import load_site_config
from suture.data.readers import load_reading
from suture.data.table import Table
from suture_prepare.description import Discovery
from suture_prepare.discovery import discover
from suture_prepare.new_study import summary, write_study

N = 24


def images(folder: Path, names: Sequence[str]) -> None:
    for seed, name in enumerate(names):
        image(folder / name, seed)


def read(folder: Path) -> tuple[Discovery, Table]:
    """What `init` finds in a folder, and the table of the site that it writes."""
    found = discover(folder)
    study = folder.parent / f"study of {folder.name}"
    write_study(study, {"s": found})
    assert len(summary("s", found, study)) <= 10
    return found, load_reading(load_site_config(study / "s" / "suture.toml").data).table


def of(of_table: Table, name: str) -> list[float]:
    """The labels of a class, in the order of the images; -1 for unknown."""
    order = np.argsort(of_table.images)
    column = of_table.y[order, of_table.labels.index(name)]
    return np.where(np.isnan(column), -1, column).tolist()


def sheet(path: Path, rows: Sequence[Sequence[object]], title: str = "", more: str = "") -> None:
    """Write a workbook, with lines of titles above its rows and maybe another sheet."""
    import openpyxl

    book = openpyxl.Workbook()
    for row in [[title], [], *rows] if title else rows:
        book.active.append(row)
    if more:
        book.create_sheet(more).append(["ja", "Befund vorhanden"])
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)


@pytest.mark.parametrize(
    ("cells", "delimiter"),
    [
        (("['mass']", "['edema', 'mass']", "[]"), ";"),
        (('["mass"]', '["edema", "mass"]', "[]"), "\t"),
        (("['mass']", "['edema' 'mass']", "['normal']"), ","),
        (("[mass]", "[edema, mass]", "[No Finding]"), "\t"),
    ],
)
def test_a_cell_may_be_a_list_of_python_json_or_numpy(
    cells: Sequence[str], delimiter: str, tmp_path: Path
) -> None:
    rows = [["id", "Patient", "Diagnosen", "datei"]]
    for i in range(N):
        images(tmp_path / "a", [f"x/{i:02}.png"])
        cell = cells[i % 3]
        quoted = '"' + cell.replace('"', '""') + '"'
        rows.append([str(i), f"p{i // 2}", quoted, f"{i:02}.png"])
    rows[-1][2] = "?"
    table(tmp_path / "a" / "t.csv", rows, delimiter)
    _, found = read(tmp_path / "a")
    assert of(found, "Mass") == [1, 1, 0] * 7 + [1, 1, -1]
    assert of(found, "Edema") == [0, 1, 0] * 7 + [0, 1, -1]


def test_a_comma_within_the_name_of_a_class_does_not_separate(tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    names = ("Melanoma, invasive", "Nevus", "Keratosis, solar")
    rows = [["image", "dx"], *([f"{i:02}.png", f'"{names[i % 3]}"'] for i in range(N))]
    table(tmp_path / "a" / "t.csv", rows)
    _, found = read(tmp_path / "a")
    assert sorted(found.labels) == ["Keratosis, Solar", "Melanocytic Nevus", "Melanoma, Invasive"]


@pytest.mark.parametrize("names", [("train", "val", "test"), ("my_training", "dev-set", "Test 2")])
def test_tables_named_after_splits_are_the_splits(names: Sequence[str], tmp_path: Path) -> None:
    for part, name in enumerate(names):
        rows = [["mrn", "Mass", "file"]]
        for i in range(8 * part, 8 * part + 8):
            images(tmp_path / "a" / "img", [f"{i:02}.png"])
            rows.append([f"p{i}", str(i % 2), f"{i:02}.png"])
        table(tmp_path / "a" / f"{name}.csv", rows)
    _, found = read(tmp_path / "a")
    order = np.argsort(found.images)
    assert [found.split[i] for i in order] == ["train"] * 8 + ["validation"] * 8 + ["test"] * 8
    assert of(found, "Mass") == [0, 1] * 12
    assert [found.patients[i] for i in order] == [f"p{i}" for i in range(N)]


def test_labels_in_one_table_and_patients_in_another_are_joined_by_the_image(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:02}.png" for i in range(N)])
    table(tmp_path / "a" / "y.csv", [["Mass", "img"], *([str(i % 2), f"{i:02}"] for i in range(N))], ";")
    meta = [["name", "subject_id"], *([f"{i:02}.png", f"s{i // 4}"] for i in reversed(range(N)))]
    table(tmp_path / "a" / "meta.tsv", meta, "\t", "utf-16")
    _, found = read(tmp_path / "a")
    assert of(found, "Mass") == [0, 1] * 12
    assert dict(zip(found.images, found.patients, strict=True))["05.png"] == "s1"
    meta[0].append("Mass")
    for row in meta[1:]:
        row.append("1")
    table(tmp_path / "a" / "meta.tsv", meta, "\t")
    with pytest.raises(DataError, match="column 'Mass' differs from that of"):
        discover(tmp_path / "a")


@pytest.mark.parametrize("suffix", ["", ".png"])
def test_the_folder_and_the_file_of_an_image_may_be_in_two_columns(suffix: str, tmp_path: Path) -> None:
    rows = [["vue", "Effusion", "dossier"]]
    for i in range(N):
        images(tmp_path / "a" / "radios", [f"P{i // 2:02}/v{i % 2}.png"])
        rows.append([f"v{i % 2}{suffix}", ("oui", "non")[i % 2], f"P{i // 2:02}"])
    table(tmp_path / "a" / "t.csv", rows, ";", "cp1252")
    _, found = read(tmp_path / "a")
    assert found.images[3] == "P01/v1.png"
    assert of(found, "Pleural Effusion") == [1, 0] * 12


@pytest.mark.parametrize("order", ["{split}/{name}", "{name}/{split}", "{name}"])
def test_folders_are_the_classes_and_the_splits(order: str, tmp_path: Path) -> None:
    for i in range(N):
        split, name = ("training", "valid", "TEST")[i % 3], ("Polyp", "Ulcer", "Normal")[i // 8]
        images(tmp_path / "a", [f"{order.format(split=split, name=name)}/{i:02}.JPEG"])
    found, read_table = read(tmp_path / "a")
    by = {Path(name).stem: row for row, name in enumerate(read_table.images)}
    ulcer = read_table.y[:, read_table.labels.index("Ulcer")]
    assert [ulcer[by[f"{i:02}"]] for i in range(N)] == [0] * 8 + [1] * 8 + [0] * 8
    if "split" in order:
        parts = ("train", "validation", "test")
        assert [read_table.split[by[f"{i:02}"]] for i in range(N)] == [parts[i % 3] for i in range(N)]
    assert sorted(read_table.labels) == ["Polyps", "Ulcer"]  # Normal is No Finding
    assert found.sheet is not None


def test_a_list_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    images(tmp_path, ["a.png"])
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match=r"deep\.json is not JSON"):
        discover(tmp_path)


def test_class_folders_of_more_levels_are_refused(tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i % 3}/{i % 2}/{i}.png" for i in range(N)])
    with pytest.raises(DataError, match="2 levels of folders"):
        discover(tmp_path / "a")


@pytest.mark.complete
@pytest.mark.parametrize("more", ["", "Legende"])
def test_a_workbook_with_titles_two_header_rows_and_another_sheet(more: str, tmp_path: Path) -> None:
    images(tmp_path / "a" / "bilder", [f"{i + 17:06}.png" for i in range(N)])
    rows: list[list[object]] = [["Bild", "Patient", "Befunde", None], [None, None, "Mass", "Edema"]]
    rows += [[i + 17, i // 2, ("ja", "nein")[i % 2], ("nein", "ja", None)[i % 3]] for i in range(N)]
    sheet(tmp_path / "a" / "Befunde.xlsx", rows, "Klinikum, Liste 2023", more)
    _, found = read(tmp_path / "a")
    assert found.images[0] == "000017.png"  # whose zeros the workbook has lost
    assert of(found, "Mass") == [1, 0] * 12
    assert of(found, "Edema") == [0, 1, -1] * 8


def test_lines_of_titles_above_a_csv(tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    rows = [["Exported 2024"], [], ["image", "pat_id", "Mass"]]
    rows += [[f"{i:02}.png", f"p{i}", str(i % 2)] for i in range(N)]
    table(tmp_path / "a" / "t.csv", rows)
    assert of(read(tmp_path / "a")[1], "Mass") == [0, 1] * 12


def datalist(key: str) -> Callable[[int], dict[str, object]]:
    return lambda i: {"image": f"img/{i:02}.png", "label": i % 3, "patient": f"p{i}", key: None}


def test_a_datalist_of_monai_with_its_legend(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:02}.png" for i in range(N)])
    row = datalist("x")
    lists = {"training": [row(i) for i in range(16)], "test": [row(i) for i in range(16, N)]}
    text = json.dumps({"labels": {"0": "healthy", "1": "Polyp", "2": "Ulcer"}, "name": "x", **lists})
    (tmp_path / "a" / "datalist.json").write_text(text)
    _, found = read(tmp_path / "a")
    assert of(found, "Ulcer") == [0, 0, 1] * 8
    assert found.split == ("train",) * 16 + ("test",) * 8


def test_lists_of_ones_and_zeros_are_a_column_for_each_class(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:02}.png" for i in range(N)])
    rows = [{"file": f"{i:02}.png", "y": [i % 2, 1 - i % 2]} for i in range(N)]
    (tmp_path / "a" / "list.json").write_text(
        json.dumps({"labels": {"0": "Mass", "1": "Edema"}, "train": rows})
    )
    _, found = read(tmp_path / "a")
    assert of(found, "Mass") == [0, 1] * 12
    assert of(found, "Edema") == [1, 0] * 12


@pytest.mark.parametrize("header", [["code", "Name"], ["7", "unused"]])
def test_numbers_of_classes_have_the_names_of_a_legend(header: list[str], tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:04}.png" for i in range(N)])
    table(tmp_path / "a" / "y.csv", [["target", "image"], *([str(i % 3), f"{i:04}.png"] for i in range(N))])
    table(tmp_path / "a" / "key.csv", [header, ["0", "Nevus"], ["1", "Melanoma"], ["2", "Keratosis"]], ";")
    _, found = read(tmp_path / "a")
    assert of(found, "Melanoma") == [0, 1, 0] * 8
    assert found.labels.label_type == "multiclass"


def test_numbers_without_a_legend_are_asked_about_in_a_draft(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:04}.png" for i in range(N)])
    table(tmp_path / "a" / "y.csv", [["target", "image"], *([str(i % 3), f"{i:04}.png"] for i in range(N))])
    found = discover(tmp_path / "a")
    assert found.is_draft
    assert any('finding_column = "target"' in warning for warning in found.warnings)
    (_, config, _) = [None, *write_study(tmp_path / "s", {"s": found})]
    assert "names of the classes" in config.read_text()


VOTES = [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("chosen", "values"),
    [("majority", [1, 1, 0, 0]), ("merge", [1, 1, 1, 0]), (0.3, [1, 1, 1, 0]), (1.0, [1, 0, 0, 0])],
)
@pytest.mark.parametrize("rater", ["Reader", "annotator_id", "radiologist"])
def test_readers_of_an_image_vote(chosen: str | float, values: list[int], rater: str, tmp_path: Path) -> None:
    rows = [[rater, "name", "Mass"]]
    for i in range(N):
        images(tmp_path / "a" / "img", [f"{i:02}.png"])
        rows += [[f"R{j}", f"{i:02}", str(vote)] for j, vote in enumerate(VOTES[i % 4])]
    table(tmp_path / "a" / "y.csv", rows)
    found, _ = read(tmp_path / "a")
    assert found.data["repeated"] == "majority"
    config = load_site_config(tmp_path / "study of a" / "s" / "suture.toml").data
    reading = load_reading(config.model_copy(update={"repeated": chosen}))
    assert of(reading.table, "Mass") == values * 6
    assert any("12 images with rows that contradict" in note for note in reading.notes)


def test_numbers_between_0_and_1_are_no_label_without_a_threshold(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:02}.png" for i in range(N)])
    rows = [["name", "Mass", "Edema"], *([f"{i:02}", f"0.{i + 10}", str(i % 2)] for i in range(N))]
    table(tmp_path / "a" / "y.csv", rows)
    found = discover(tmp_path / "a")
    assert found.data["labels"] == ["Edema"]
    assert any("'Mass' is left out" in text and "threshold" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("yes", "no"),
    [("ja", "nein"), ("Sí", "No"), ("Oui", "NON"), ("Checked", "Unchecked"), ("pos", "neg"), ("tak", "nie")],
)
def test_plain_words_of_other_languages_are_read(yes: str, no: str, tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    rows = [["Mass", "image"], *([(yes, no, "")[i % 3], f"{i:02}.png"] for i in range(N))]
    table(tmp_path / "a" / "y.csv", rows, ";")
    assert of(read(tmp_path / "a")[1], "Mass") == [1, 0, -1] * 8


def test_a_mark_beside_blanks_is_present_and_the_blank_absent_unless_other_blanks_are_unknown(
    tmp_path: Path,
) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    rows = [["image", "Mass", "Edema"]]
    rows += [[f"{i:02}.png", ("x", "")[i % 2], ("", "X", "")[i % 3]] for i in range(N)]
    table(tmp_path / "a" / "y.csv", rows)
    _, found = read(tmp_path / "a")
    assert of(found, "Mass") == [1, 0] * 12
    assert of(found, "Edema") == [0, 1, 0] * 8
    for i, row in enumerate(rows[1:]):
        row[2] = ("1", "0", "")[i % 3]
    table(tmp_path / "a" / "y.csv", rows)
    mixed = discover(tmp_path / "a")
    assert mixed.data["labels"] == ["Edema"]
    assert any("'Mass' is left out: it is marked or blank" in text for text in mixed.warnings)


def test_words_that_only_a_person_can_explain_stop_that_draft_alone(tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    rows = [["image", "Mass"], *([f"{i:02}.png", ("wohl", "kaum")[i % 2]] for i in range(N))]
    table(tmp_path / "a" / "y.csv", rows)
    found = discover(tmp_path / "a")
    assert found.is_draft
    write_study(tmp_path / "s", {"s": found})
    config = tmp_path / "s" / "s" / "suture.toml"
    written = config.read_text()
    for labels, line, wrong in (("[]", "", "labels"), ('["Mass"]', '"kaum" = "?", "wohl" = "?"', "values")):
        assert line in written
        config.write_text(written.replace("labels = []", f"labels = {labels}\nvalues = {{ {line} }}"))
        with pytest.raises(ConfigError, match=wrong):
            load_site_config(config)
    meant = written.replace("labels = []", 'labels = ["Mass"]\nvalues = { "wohl" = 1, "kaum" = 0 }')
    config.write_text(meant)
    assert of(load_reading(load_site_config(config).data).table, "Mass") == [1, 0] * 12


@pytest.mark.parametrize(
    "words", [("0", "2", "0", "1"), ("Incomplete", "Complete", "Incomplete", "Unverified")]
)
def test_forms_of_redcap_that_were_never_filled_in_are_unknown(words: Sequence[str], tmp_path: Path) -> None:
    images(tmp_path / "a" / "files", [f"{i:02}.png" for i in range(N)])
    state = "scan_complete" if words[0] == "0" else "Complete?"
    rows = [["record_id", "datei", "Befund (choice=Mass)", "Befund (choice=Edema)", state]]
    rows += [[f"{i // 2}", f"{i:02}.png", str(int(i % 4 == 1)), "0", words[i % 4]] for i in range(N)]
    table(tmp_path / "a" / "y.csv", rows)
    _, found = read(tmp_path / "a")
    assert of(found, "Mass") == [-1, 1, -1, 0] * 6
    assert of(found, "Edema") == [-1, 0, -1, 0] * 6
    assert found.patients[:4] == ("0", "0", "1", "1")


@pytest.mark.parametrize(
    ("file", "cell"),
    [
        (lambda i: f"Case{i:02}.PNG", lambda i: f"CASE{i:02}.png"),
        (lambda i: unicodedata.normalize("NFD", f"é{i:02}.png"), lambda i: f"é{i:02}.PNG"),
        (lambda i: f"{i + 1000:08}.png", lambda i: f'"{i + 1000:,}"'),
        (lambda i: f"sub/{i + 1:05}.png", lambda i: f"{i + 1}.0"),
        (lambda i: f"deep/{i:02}/v.png", lambda i: f"Release-v1/deep/{i:02}/v.jpg"),
    ],
)
def test_names_that_are_spelled_otherwise_are_found_and_said(
    file: Callable[[int], str], cell: Callable[[int], str], tmp_path: Path
) -> None:
    names = [file(i) for i in range(N)]
    images(tmp_path / "a" / "img", [*names, "other/unrelated.png"])
    table(tmp_path / "a" / "y.csv", [["bild", "Mass"], *([cell(i), str(i % 2)] for i in range(N))])
    found, read_table = read(tmp_path / "a")
    assert found.data["image_match"] == "loose"
    assert of(read_table, "Mass") == [0, 1] * 12
    assert [Path(name).name for name in read_table.images] == [Path(name).name for name in names]


def test_rows_of_two_spellings_of_one_image_are_refused(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", [f"{i:04}.png" for i in range(N)])
    rows = [["bild", "Mass"], *([f"{i}", str(i % 2)] for i in range(N)), ["0003", "1"]]
    table(tmp_path / "a" / "y.csv", rows)
    values = discover(tmp_path / "a").data | {"split": "patients", "repeated": "refuse"}
    from suture.data.config import parse_data
    from suture.data.readers import read_table

    assert any("a repeated image" in fault for fault in read_table(parse_data(values, "y")).faults)


def test_where_nothing_matches_names_of_both_are_shown_escaped(tmp_path: Path) -> None:
    images(tmp_path / "a" / "img", ["e\u0301 1.png", "b.png"])
    table(tmp_path / "a" / "y.csv", [["bild", "Mass"], ["x\u00a01.png", "1"], ["y.png", "0"]])
    with pytest.raises(DataError) as raised:
        discover(tmp_path / "a")
    assert (
        r"y.csv has 'x\xa01.png', 'y.png' in column 'bild', and the folder 'b.png', 'e\u0301 1.png'"
        in str(raised.value)
    )


def test_a_patient_in_the_folders_of_a_path_is_found(tmp_path: Path) -> None:
    names = [f"train/patient{i // 4:05}/study{i % 2}/{i}.png" for i in range(N)]
    images(tmp_path / "a", names)
    table(
        tmp_path / "a" / "y.csv",
        [["Path", "Mass"], *([f"v1/{name}", str(i % 2)] for i, name in enumerate(names))],
    )
    _, found = read(tmp_path / "a")
    assert len({*found.patients}) == 6


def test_images_that_are_links_are_counted_and_asked_about(tmp_path: Path) -> None:
    images(tmp_path / "elsewhere", [f"{i:02}.png" for i in range(N)])
    (tmp_path / "a" / "img").mkdir(parents=True)
    for i in range(N):
        (tmp_path / "a" / "img" / f"{i:02}.png").symlink_to(tmp_path / "elsewhere" / f"{i:02}.png")
    table(tmp_path / "a" / "y.csv", [["image", "Mass"], *([f"{i:02}.png", str(i % 2)] for i in range(N))])
    found = discover(tmp_path / "a")
    assert any(
        "24 of 24 images are links" in text and "follow_links = true" in text for text in found.warnings
    )


def test_columns_with_one_value_are_one_line(tmp_path: Path) -> None:
    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    rows = [["image", "Mass", "Sex", "Maker", "Rows"]]
    rows += [[f"{i:02}.png", str(i % 2), "F", "AGFA", "3408"] for i in range(N)]
    table(tmp_path / "a" / "y.csv", rows)
    read(tmp_path / "a")
    text = (tmp_path / "study of a" / "s" / "suture.toml").read_text()
    assert "# Columns with one value in every row: 'Sex', 'Maker', 'Rows'\n" in text
    assert text.count("AGFA") == 0


def test_a_site_that_cannot_be_made_out_does_not_stop_the_others(tmp_path: Path) -> None:
    from suture_prepare.new_study import look

    images(tmp_path / "a", [f"{i:02}.png" for i in range(N)])
    table(tmp_path / "a" / "y.csv", [["image", "Mass"], *([f"{i:02}.png", str(i % 2)] for i in range(N))])
    (tmp_path / "b").mkdir()
    refused: dict[str, str] = {}
    found = look({"a": tmp_path / "a", "b": tmp_path / "b"}, refused=refused)
    assert list(found) == ["a"]
    assert refused["b"].startswith("b: ")
    with pytest.raises(DataError, match=r"^b: "):
        look({"a": tmp_path / "a", "b": tmp_path / "b"})
