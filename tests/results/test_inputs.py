"""suture_results.inputs: one list of images or documents, whatever they are found by."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from openpyxl import Workbook

from suture.core.errors import ConfigError, DataError
from suture_prepare.discovery import discover
from suture_results.inputs import Kind, find_inputs
from world import refused, write_image, write_table

NAMES = ["b.png", "sub/a.JPG", "sub/c.png"]
HOSPITAL = '[data]\ndataset = "hospital"\nroot = "in"\ntable = "list.csv"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images that differ."""
    for i, name in enumerate(NAMES):
        write_image(tmp_path / "in" / name, i, (4, 4))
    return tmp_path / "in"


def found(*sources: Path, kind: Kind = "image", **options: object) -> list[str]:
    with find_inputs(sources, kind, **options) as inputs:  # type: ignore[arg-type]
        return list(inputs.found)


def archived(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix != ".tar" else "w") as tar:
        for name in sorted((p.relative_to(folder) for p in folder.rglob("*")), reverse=True):
            if (folder / name).is_file():
                tar.add(folder / name, f"./{name}")
    return path


def table(path: Path, *rows: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def test_folder_images_tables_and_configuration_give_one_list(folder: Path, tmp_path: Path) -> None:
    wanted = [str(folder / name) for name in NAMES]
    rows = [f"{name},P{i},train,1" for i, name in enumerate(NAMES)]
    listed = table(tmp_path / "list.csv", "image,patient,split,Mass", *rows)
    toml = table(tmp_path / "suture.toml", HOSPITAL)
    assert found(folder) == wanted
    assert found(*(folder / name for name in NAMES)) == wanted
    assert found(listed, root=folder) == wanted
    assert found(toml) == wanted
    assert found(folder, folder / "b.png", toml, listed, root=folder) == wanted
    with refused("suture.toml", by=DataError):
        found(toml, kind="text")


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_an_archive_is_a_folder(folder: Path, tmp_path: Path, suffix: str) -> None:
    archive = archived(folder, tmp_path / f"a{suffix}")
    listed = table(tmp_path / "list.csv", "image", *reversed(NAMES))
    with find_inputs([archive], "image") as inputs:
        assert list(inputs.found) == [str(archive / name) for name in NAMES]
        for name in NAMES:
            assert inputs.found[str(archive / name)].read() == (folder / name).read_bytes()
    assert found(listed, root=archive) == [str(archive / name) for name in reversed(NAMES)]
    write_image(tmp_path / "both" / "z.png")
    archive.rename(tmp_path / "both" / archive.name)
    assert len(found(tmp_path / "both")) == 4


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(",", "utf-8-sig"), (";", "cp1252"), ("\t", "utf-16"), ("|", "cp1252")]
)
def test_delimiter_encoding_and_image_column_of_a_table_are_found(
    folder: Path, delimiter: str, encoding: str
) -> None:
    rows = [["Größe", "Datei"], ["1", "a.JPG"], ["2", "c"], ["3", "b.png"]]
    listed = write_table(folder / "list.tsv", rows, delimiter, encoding)
    wanted = [str(folder / name) for name in ("sub/a.JPG", "sub/c.png", "b.png")]
    assert found(listed) == wanted
    assert found(listed, column="Datei") == wanted
    with find_inputs([listed], "image") as inputs:
        [note] = inputs.notes
        assert "'Datei'" in note


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("list.csv", ["Export of 2026,,", ",,", "PatientID;Datei;Größe", "7;a.JPG;1", "7;c;2", "8;b.png;3"]),
        ("list.csv", ["PatientID,folder,file", "7,sub,a.JPG", "7,sub,c.png", "8,.,b.png"]),
        ("list.csv", ["PatientID,file", "7,A.png", "7,C.DCM", "8,B"]),
        ("lists/a.csv", ["image,PatientID", "../sub/a.JPG,7", "../sub/c.png,7", "../b.png,8"]),
        (
            "list.json",
            [
                json.dumps(
                    [{"image": f, "PatientID": p} for f, p in (("a.JPG", 7), ("c.png", 7), ("b.png", 8))]
                )
            ],
        ),
    ],
)
def test_a_table_of_images_is_read_as_init_reads_it(folder: Path, name: str, rows: list[str]) -> None:
    write_image(folder / "masks" / "c.png")
    with find_inputs([table(folder / name, *rows)], "image") as inputs:
        wanted = [str(folder / name) for name in ("sub/a.JPG", "sub/c.png", "b.png")]
        assert [*map(os.path.normpath, inputs.found)] == wanted
        assert [one.patient for one in inputs.found.values()] == ["7", "7", "8"]


def test_a_row_without_an_image_is_an_input_that_cannot_be_read(folder: Path) -> None:
    listed = table(folder / "list.csv", "image,age", "b.png,1", ",2", "gone.png,3", "b.png,4")
    with find_inputs([listed], "image") as inputs:
        assert list(inputs.found) == [str(folder / "b.png"), f"{listed} row 3", str(folder / "gone.png")]
        for name, named in ((f"{listed} row 3", "image"), (str(folder / "gone.png"), "gone.png")):
            with refused(named, by=DataError):
                inputs.found[name].read()


def test_what_systems_add_is_passed_over_and_other_files_are_named(folder: Path) -> None:
    for name in (".DS_Store", "Thumbs.db", "._b.png", "DICOMDIR"):
        (folder / name).write_bytes(b"\0" * 128 + b"DICM")
    (folder / "README").write_text("about")
    (folder / "list.csv").write_text("image\nb.png\n")
    with find_inputs([folder], "image") as inputs:
        assert list(inputs.found) == [str(folder / name) for name in NAMES]
        assert {Path(path).name for path in inputs.others} == {"README", "list.csv"}


@pytest.mark.parametrize("suffix", ["", ".tgz"])
def test_masks_are_left_out_and_images_without_a_suffix_known_by_their_first_bytes(
    folder: Path, tmp_path: Path, suffix: str
) -> None:
    masks = [folder / name for name in ("b_mask.png", "masks/a.png", "sub/mask_c.png")]
    for mask in masks:
        write_image(mask)
    for name in ("IM0001", "IM0002"):
        (folder / name).write_bytes(b"\0" * 128 + b"DICM")
    (folder / "b.png").rename(folder / "b")
    (folder / "notes").write_text("x")
    source = archived(folder, tmp_path / f"a{suffix}") if suffix else folder
    with find_inputs([masks[0], source], "image") as inputs:  # what is named itself is wanted
        names = ("IM0001", "IM0002", "b", *NAMES[1:])
        assert [*inputs.found] == [str(masks[0]), *(str(source / name) for name in names)]
        assert len(inputs.others) == len(masks) + 1 - (not suffix)
        of_dicom, of_images = inputs.notes
        assert f"{source}/IM0001" in of_dicom
        assert f"{source}/b" in of_images


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_no_silence(folder: Path) -> None:
    (folder / "sub").chmod(0)
    with find_inputs([folder], "image") as inputs, refused("sub", by=DataError):
        inputs.found[str(folder / "sub")].read()


def test_a_mistake_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    listed = table(folder / "list.csv", "image,age", "b.png,50")
    (tmp_path / "none").mkdir()
    with refused("c.png", by=DataError):
        found(tmp_path / "c.png")
    with refused("'img'", "'image'", "--column", by=DataError):
        found(listed, column="img")
    with refused("--column", "--root", by=ConfigError):
        found(folder, column="a", root=folder)
    with refused("--root", "nowhere", by=DataError):
        found(listed, root=tmp_path / "nowhere")
    with refused("none", by=DataError):
        found(tmp_path / "none")
    (tmp_path / "none" / "a.txt").write_text("x")
    with refused("none", "a.txt", by=DataError):
        found(tmp_path / "none")
    with refused("list.csv", "--column", ": file", by=DataError):
        found(table(listed, "file", "gone.png"))


def test_documents_are_found_as_images_are(tmp_path: Path) -> None:
    home = tmp_path / "notes"
    for name in ("b.txt", "a.txt"):
        table(home / name, f"text of {name}")
    (home / "c.png").write_bytes(b"x")
    wanted = [str(home / "a.txt"), str(home / "b.txt")]
    assert found(home, kind="text") == found(home / "a.txt", home / "b.txt", kind="text") == wanted
    archive = archived(home, tmp_path / "a.tgz")
    assert found(archive, kind="text") == [str(archive / "a.txt"), str(archive / "b.txt")]
    listed = table(tmp_path / "list.csv", "document,Bericht", "P1,first", 'P1,"second\nline; more"')
    with find_inputs([listed], "text", "Bericht") as inputs:
        assert list(inputs.found) == ["P1", f"P1 (text 2 of {listed})"]
        assert inputs.found["P1"].read() == b"first"
    with refused("list.csv", "--column", "Bericht", by=DataError):
        found(listed, kind="text")
    (tmp_path / "note.pdf").write_bytes(b"%PDF")
    with refused("note.pdf", by=DataError):
        found(tmp_path / "note.pdf", kind="text")


NOTES = [
    ("P1", "n-1", "The heart is not enlarged at all.", "0"),
    ("P1", "n-2", "Old fracture, of the left sixth rib.", "1"),
    ("P2", "n-3", "心影增大，左侧第六肋骨陈旧性骨折。", "1"),
]
KEYS = ("patient_id", "note", "report", "Fracture")
OBJECTS = [json.dumps(dict(zip(KEYS, note, strict=True))) for note in NOTES]


def lines_of(delimiter: str, rows: Sequence[Sequence[str]] = (KEYS, *NOTES)) -> str:
    return "".join(delimiter.join(f'"{cell}"' for cell in row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.ndjson", "\n\n".join(OBJECTS)),
        ("NOTES.JSON", f"[{','.join(OBJECTS)}]"),
        ("notes.json", "\n".join(OBJECTS)),
        ("export.TXT", lines_of(";")),
        ("notes.tsv", "Notes of the year 2026\n\n" + lines_of("\t")),
        ("notes.csv", lines_of(",")),
        ("notes.xlsx", ""),
    ],
)
def test_a_file_of_documents_is_read_as_init_reads_it(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    if path.suffix == ".xlsx":
        book = Workbook()
        for row in [["Notes of the year 2026"], [], list(KEYS), *map(list, NOTES)]:
            book.active.append(row)
        book.save(path)
    with find_inputs([path], "text") as inputs:
        assert [(one.name, one.patient, one.read().decode()) for one in inputs.found.values()] == [
            (note, patient, text) for patient, note, text, _ in NOTES
        ]
    guess = discover(path).data
    assert [guess[f"{what}_column"] for what in ("patient", "image", "text")] == [*KEYS[:3]]


@pytest.mark.parametrize(
    "text",
    [
        "Comparison, none\nThe heart is normal in size, and the lungs are clear\n",
        "Patient:\tA\nExam:\tCT\nFindings:\tThe heart is normal in size and shape today\n",
        "The heart, which was large before, is normal now.\nThe lungs, which were wet, are dry.\nNo, a, b\n",
        "Normal.",
    ],
)
def test_a_document_of_lines_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "note.txt"
    path.write_text(text)
    with find_inputs([path], "text") as inputs:
        assert [one.read().decode() for one in inputs.found.values()] == [text]


def test_texts_of_many_lines_do_not_mislead_the_search_for_the_delimiter(tmp_path: Path) -> None:
    """The first 200 lines may end within a quoted cell."""
    cell = '"' + "line, one\n" * 40 + '"'
    listed = table(tmp_path / "list.csv", "document,text", *(f"P{i},{cell}" for i in range(9)))
    assert found(listed, kind="text") == [f"P{i}" for i in range(9)]


def test_a_link_out_of_a_folder_of_documents_and_a_pipe_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a name")
    link, pipe = tmp_path / "in" / "note.txt", tmp_path / "pipe.txt"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "secret")
    os.mkfifo(pipe)
    with find_inputs([link.parent, pipe], "text") as inputs:
        with refused(link.parent, by=DataError):
            inputs.found[str(link)].read()
        with refused(by=OSError):
            inputs.found[str(pipe)].read()
