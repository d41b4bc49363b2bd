"""`suture init` and `suture check` on folders as hospitals have them: asked, agreed, written, refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from hospital_tables import CASES
from hospitals import german, image, listed, plain, site
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError, SutureError
from suture.data.config import load_site_config
from suture.data.dataset import DatasetConfig
from suture.data.readers import read_table
from suture.execution.job import load_job
from suture_prepare.quality import check
from suture_results.actions import labelled_data
from world import exit_of, refused, suture, write_table


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return tmp_path / "study"


def init(study: Path, *words: object, **sites: Path) -> str:
    return suture("init", study, *(f"--site={name}={folder}" for name, folder in sites.items()), *words)


def data_of(study: Path, site: str = "a") -> DatasetConfig:
    return load_site_config(study / site / "suture.toml").data


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`init` with the answers of a person."""
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)

    def ask(study: Path, *answers: str, code: int = 0, **sites: Path) -> str:
        words = ["init", str(study), *(f"--site={name}={folder}" for name, folder in sites.items())]
        result = CliRunner().invoke(app, words, input="".join(f"{answer}\n" for answer in answers))
        assert result.exit_code == code, result.output
        return result.output

    return ask


def rows(n: int = 12, **cells: Sequence[object]) -> list[list[object]]:
    """A table of images, their patients, and columns that repeat some cells."""
    lines = ([f"{i}.png", f"p{i}", *(of[i % len(of)] for of in cells.values())] for i in range(n))
    return [["image", "patient", *cells], *lines]


@pytest.mark.complete
def test_splits_are_made_once_and_kept(study: Path, tmp_path: Path) -> None:
    sites = {
        "alpha": german(tmp_path / "a", 60),
        "beta": listed(tmp_path / "b", 60),
        "gamma": plain(tmp_path / "c", 60),
    }
    init(study, "--yes", **sites)
    before = (study / "alpha" / "splits.csv").read_bytes()
    assert before.decode().splitlines()[0] == "patient,split"
    for name, words in (("alpha", ["--yes"]), ("delta", [])):
        result = CliRunner().invoke(app, ["init", str(study), f"--site={name}={sites['alpha']}", *words])
        assert isinstance(result.exception, ConfigError)
        assert result.output == "", "refused before anything is shown"
    assert (study / "alpha" / "splits.csv").read_bytes() == before
    table = sites["alpha"] / "Befunde.csv"
    table.write_bytes(table.read_bytes() + "000b.png;Neu;1,7;50;1;Yes;No;0\r\n".encode("cp1252"))
    image(sites["alpha"] / "Bilder" / "000b.png", 999)
    with refused("1 problem", by=SutureError):
        suture("check", study)


def test_nothing_is_written_in_a_dry_run_where_nobody_can_be_asked_or_of_bad_input(
    study: Path, tmp_path: Path
) -> None:
    folder = german(tmp_path / "a")
    said = init(study, "--dry-run", alpha=folder)
    assert all(line in said for line in ('delimiter = ";"', "[data]", "[privacy]"))
    with refused("--yes", by=ConfigError):
        init(study, alpha=folder)
    with refused("name=PATH", by=ConfigError):
        suture("init", study, "--site", "alpha", "--yes")
    with refused("alpha", tmp_path / "no", by=ConfigError):
        init(study, "--yes", alpha=tmp_path / "no")
    with refused(tmp_path, by=ConfigError):
        suture("check", tmp_path)
    assert not study.exists()


def test_where_nothing_is_doubtful_only_the_writing_is_asked_about(
    study: Path, tmp_path: Path, answered: Callable[..., str]
) -> None:
    folder = german(tmp_path / "a")
    answered(study, "n", code=1, alpha=folder)
    assert not study.exists()
    answered(study, "y", alpha=folder)
    assert (study / "alpha" / "suture.toml").is_file()


def test_one_question_for_each_doubtful_thing(tmp_path: Path, answered: Callable[..., str]) -> None:
    table = [
        ["image", "who", "Mass", "ICU", "smoker"],
        *([f"{i}.png", f"w{i // 2}", i % 2, 1, 0] for i in range(8)),
    ]
    study = tmp_path / "my study"
    said = answered(study, "n", "n", "y", "wo", "who", "y", alpha=site(tmp_path / "a", *table))
    assert all(named in said for named in ("'wo'", "image, who, Mass, ICU, smoker"))
    assert f"suture check '{study}'" in said
    config = data_of(study, "alpha")
    assert (config.labels, config.patient_column) == (("Mass", "smoker"), "who")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("column", "cells", "answer", "keys"),
    [
        ("histology grade", ("low", "high"), "y", {"finding_column": "histology grade"}),
        ("KL", ("0", "1", "2", "3"), "2", {"labels": ("KL",), "values": {"0": 0, "1": 0, "2": 1, "3": 1}}),
        ("KL", ("0", "1", "2", "3"), "c", {"finding_column": "KL"}),
    ],
)
def test_words_and_grades_are_asked_about(
    column: str,
    cells: tuple[str, ...],
    answer: str,
    keys: dict[str, object],
    study: Path,
    tmp_path: Path,
    answered: Callable[..., str],
) -> None:
    answered(study, answer, "y", a=site(tmp_path / "a", *rows(**{column: cells})))
    read = data_of(study)
    assert {key: getattr(read, key) for key in keys} == keys
    assert read_table(read).faults == ()


def test_a_column_called_label_is_named_or_stops_the_study(
    study: Path, tmp_path: Path, answered: Callable[..., str]
) -> None:
    sites = {
        name: site(tmp_path / name, *rows(label=(0, 0, 1, 1)), seed=seed)
        for seed, name in ((0, "a"), (50, "b"))
    }
    init(study, "--yes", **sites)
    assert 'synonyms = { "label" = ' in (study / "a" / "suture.toml").read_text()
    with refused("problem", by=SutureError):
        suture("check", study)
    with refused("a, b", "'Label'", by=SutureError):
        suture("run", study, "--env", "local")
    answered(tmp_path / "t", "y", "Tuberculosis", "y", "Pneumonia", "y", **sites)
    assert data_of(tmp_path / "t").synonyms == {"label": "Tuberculosis"}
    assert [*check(load_site_config(tmp_path / "t" / "b" / "suture.toml")).counts] == ["Pneumonia"]


def test_colour_that_is_read_as_gray_and_a_missing_depth_are_told(study: Path, tmp_path: Path) -> None:
    folder = site(tmp_path / "a", *rows(Mass=(0, 1)), top=4095)
    Image.new("RGB", (24, 24), (250, 10, 10)).save(folder / "images" / "3.png")
    init(study, "--yes", a=folder)
    config = study / "a" / "suture.toml"
    config.write_text(re.sub(r"^bits = .*\n", "", config.read_text(), flags=re.MULTILINE))
    said = "\n".join(check(load_site_config(config)).warnings)
    assert all(named in said for named in ("[data] color = true", "11 images", "[data] bits = 12"))


@pytest.mark.parametrize(("gray", "size"), [((), 24), ((), 130), (("b",), 24)])
def test_colour_and_size_are_those_of_the_images_of_all_sites(
    gray: tuple[str, ...], size: int, study: Path, tmp_path: Path
) -> None:
    for name in "ab":
        for path in (site(tmp_path / name, *rows(n=8, Mass=(0, 1))) / "images").iterdir():
            with Image.open(path) as file:
                picture = file.resize((size, size))
            red = picture.point(lambda level: level // 2)
            (picture if name in gray else Image.merge("RGB", (red, picture, picture))).save(path)
    init(study, "--yes", a=tmp_path / "a", b=tmp_path / "b")
    model = load_job(study).model
    assert {model.color, *(data_of(study, name).color for name in "ab")} == {not gray}
    assert model.size == (128 if size > 64 else 64)


@pytest.mark.parametrize("both", [False, True])
def test_all_sites_have_one_label_type_and_check_refuses_what_run_refuses(
    both: bool, study: Path, tmp_path: Path
) -> None:
    for seed, name in ((0, "a"), (100, "b")):
        edema = (1, 1) if name == "b" and not both else (1, 0)
        site(tmp_path / name, *rows(n=60, Mass=(0, 1), Edema=edema), seed=seed)
    init(study, "--yes", a=tmp_path / "a", b=tmp_path / "b")
    kind, other = ("multiclass", "multilabel") if both else ("multilabel", "multiclass")
    assert {data_of(study, name).label_type for name in "ab"} == {kind}  # type: ignore[attr-defined]
    suture("check", study)
    file = study / "a" / "suture.toml"
    text = re.sub("^label_type.*\n", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(text.replace("[data]", f'[data]\nlabel_type = "{other}"'))
    with refused("1 problem", by=SutureError):
        suture("check", study)
    with refused("a is", "b is", kind, other, by=SutureError):
        suture("run", study, "--env", "local")


def test_a_table_is_divided_by_its_column_of_sites(study: Path, tmp_path: Path) -> None:
    found = ("Mass", "Nodule", "Nodule", "Edema", "Nodule", "Nodule")
    table = rows(n=60, center=("west", "Klinikum Süd", "Klinikum Süd"), Findings=found)
    folder = site(tmp_path / "a", *table)
    assert "--site-column" in init(study, "--yes", "--dry-run", x=folder)
    init(study, "--yes", "--site-column", "center", x=folder)
    tables = {name: read_table(data_of(study, name)).table for name in ("Klinikum-Sud", "west")}
    assert {name: (len(of), {*of.labels}) for name, of in tables.items()} == {
        "Klinikum-Sud": (40, {"Nodule"}),
        "west": (20, {"Mass", "Edema"}),
    }
    table[3][2] = ""
    write_table(folder / "t.csv", table)
    for column, named in (("center", "1 blank"), ("centre", "center")):
        with refused(named, by=DataError):
            init(tmp_path / "t", "--yes", "--site-column", column, x=folder)


def test_a_site_that_cannot_be_made_out_names_the_command_for_it_alone(study: Path, tmp_path: Path) -> None:
    folders = {"a": plain(tmp_path / "a", 60), "b": tmp_path / "b c"}
    write_table(folders["b"] / "t.csv", [["image", "Mass"]])
    with pytest.raises(SutureError) as caught:
        init(study, "--yes", **folders)
    again = shlex.split(str(caught.value).splitlines()[-1].partition("suture ")[2])
    assert (study / "a" / "suture.toml").is_file()
    plain(folders["b"], 60)
    (folders["b"] / "t.csv").unlink()
    suture(*again)
    assert (study / "b" / "suture.toml").is_file()


def test_every_column_is_named_in_the_file_and_no_cell_writes_into_it(study: Path, tmp_path: Path) -> None:
    grades = {"DR\nx = 1": ("1", "2\nmost = 1\x1b")}
    table = rows(Mass=(0, 1), smoker=[0] * 6 + [1] * 6, **grades)
    said = init(study, "--yes", alpha=site(tmp_path / "a", *table))
    written = (study / "alpha" / "suture.toml").read_text()
    assert "#   'DR\\nx = 1': " in written
    assert "1, 2\\nmost = 1\\x1b" in written
    for text in (said, written):
        assert "'smoker'" in text
        assert "\x1b" not in text
    assert data_of(study, "alpha").labels == ("Mass", "smoker")


@pytest.mark.complete
def test_a_study_of_texts_is_written_run_and_measured_on_another_table(study: Path, tmp_path: Path) -> None:
    for name, case in (("a", CASES["reports"]), ("b", CASES["reports without a name"])):
        (tmp_path / name).mkdir()
        case(tmp_path / name)
    assert "'Befundtext'" in init(study, "--yes", a=tmp_path / "a", b=tmp_path / "b")
    suture("check", study)
    suture("run", study, "--env", "local", "--rounds", "1", "--out", tmp_path / "run")
    for name in "ab":  # b is put together anew
        assert "Mass" in suture("evaluate", tmp_path / "run", tmp_path / name)


def test_a_class_folder_is_measured_as_it_is_read(tmp_path: Path) -> None:
    CASES["class folders"](tmp_path)
    with labelled_data(tmp_path, None, "test") as (config, split):
        table = read_table(config.data).table
    assert (split, [*table.labels], len(table)) == ("test", ["Pneumonia"], 24)


@pytest.mark.complete
def test_a_site_without_test_images_is_told_how_to_divide_anew(study: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    CASES["chexpert"](tmp_path / "a")
    init(study, "--yes", a=tmp_path / "a")
    assert '[data] split = "patients"' in " ".join(suture("check", study).split())
    said = suture("run", study, "--env", "local", "--rounds", "1", "--out", tmp_path / "run")
    assert "a has no test images" in " ".join(said.split())


@pytest.mark.complete
def test_columns_without_a_finding_are_asked_for_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    CASES["redcap checkboxes"](tmp_path / "a")
    init(study, "--yes", a=tmp_path / "a")

    def said() -> str:
        exit_of(monkeypatch, "check", study)
        return " ".join("".join(capsys.readouterr()).split())

    assert "'Findings 1', 'Findings 2' (a)" in said()
    config = study / "a" / "suture.toml"
    [line] = [line for line in config.read_text().splitlines() if line.startswith("# synonyms")]
    text = config.read_text().replace(line, "").replace("[data]", f"[data]\n{line.removeprefix('# ')}")
    for name in ("Mass", "Edema"):
        text = text.replace("NAME OF THE FINDING", name, 1)
    config.write_text(text)
    assert "Findings" not in said()
