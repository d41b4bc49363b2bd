"""`suture init`, `suture check` and `suture run` on folders as hospitals have them, without an edit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from hospital_tables import CASES
from hospitals import german, image, listed, plain, table
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError, SutureError
from suture.data.config import load_site_config
from suture.data.readers import read_table
from suture.execution.job import load_job
from suture_prepare.quality import check
from suture_results.actions import labelled_data

RUNNER = CliRunner()


def suture(*words: str) -> str:
    """Run a command; an error of the user is raised."""
    result = RUNNER.invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of three hospitals whose tables differ in everything."""
    german(tmp_path / "a", 280)
    listed(tmp_path / "b", 280)
    plain(tmp_path / "c", 80)
    sites = [
        f"--site={name}={tmp_path / folder}"
        for name, folder in zip(("alpha", "beta", "gamma"), "abc", strict=True)
    ]
    suture("init", str(tmp_path / "study"), *sites, "--yes")
    job = tmp_path / "study" / "job.toml"
    job.write_text(job.read_text().replace("rounds = 15", "rounds = 1").replace("size = 64", "size = 32"))
    return tmp_path / "study"


@pytest.mark.complete
def test_three_commands_give_a_model(study: Path, tmp_path: Path) -> None:
    said = " ".join(suture("check", str(study)).split())
    assert "1 of 80" in said or "left out" in said
    assert "gamma has 20 validation images" not in said
    assert "Yes' is read as present" in said
    out = tmp_path / "runs" / "r"
    suture("run", str(study), "--env", "local", "--out", str(out))
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["labels"] == ["Edema", "Mass", "Nodule"]
    assert (out / "model" / "model.safetensors").is_file()
    kept = {path.suffix for state in study.rglob("state") for path in state.rglob("*")}
    assert ".safetensors" not in kept, "the states of a run belong to the run"


@pytest.mark.complete
def test_splits_are_made_once_and_kept(study: Path) -> None:
    before = (study / "alpha" / "splits.csv").read_bytes()
    assert before.decode().splitlines()[0] == "patient,split"
    with pytest.raises(ConfigError, match=r"alpha/suture\.toml exists"):
        suture("init", str(study), f"--site=alpha={study.parent / 'a'}", "--yes")
    assert (study / "alpha" / "splits.csv").read_bytes() == before
    tsv = study.parent / "a" / "Befunde.csv"
    tsv.write_bytes(tsv.read_bytes() + "000b.png;Neu;1,7;50;1;Yes;No;0\r\n".encode("cp1252"))
    image(study.parent / "a" / "Bilder" / "000b.png", 999)
    with pytest.raises(SutureError, match="1 problem;"):
        suture("check", str(study))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    said = suture("init", str(tmp_path / "s"), f"--site=alpha={german(tmp_path / 'a')}", "--dry-run")
    assert 'delimiter = ";"' in said
    assert "[data]" in said
    assert "[privacy]" in said
    assert not (tmp_path / "s").exists()


def test_an_image_in_two_splits_and_names_that_look_alike_are_found(tmp_path: Path) -> None:
    rows = [["image", "patient", "split", "Pneumothorax"]]
    for i in range(8):
        image(tmp_path / "a" / f"{i}.png", i % 6)
        rows.append([f"{i}.png", f"p{i}", "train" if i < 6 else "test", str(i % 2)])
    table(tmp_path / "a" / "t.csv", rows)
    for i in range(8):
        image(tmp_path / "b" / f"{i}.png", 50 + i)
    rows[0][3] = "Pneumathorax"
    table(tmp_path / "b" / "t.csv", rows)
    suture("init", str(tmp_path / "s"), f"--site=a={tmp_path / 'a'}", f"--site=b={tmp_path / 'b'}", "--yes")
    result = RUNNER.invoke(app, ["check", str(tmp_path / "s")])
    said = " ".join(result.output.split())
    assert "such as '0.png' and '6.png'" in said
    assert "'Pneumathorax' (b) and 'Pneumothorax' (a) are nearly the same" in said
    assert 'accept_labels = ["Pneumothorax"]' in said
    assert isinstance(result.exception, SutureError)


@pytest.mark.complete
def test_an_image_that_one_site_trains_on_and_another_tests_with_is_a_problem(tmp_path: Path) -> None:
    for site, first, top in (("a", 0, 255), ("b", 8, 4095)):
        rows = [["image", "patient", "split", "Mass"]]
        for i in range(first, first + 12):
            image(tmp_path / site / f"{i}.png", i, 255 if i == 8 else top)
            rows.append([f"{i}.png", f"p{i}", ("train", "validation", "test")[i % 3], str(i % 4 // 2)])
        table(tmp_path / site / "t.csv", rows)
    rows[1][2] = "train"
    table(tmp_path / "b" / "t.csv", rows)
    study = tmp_path / "s"
    said = suture("init", str(study), f"--site=a={tmp_path / 'a'}", f"--site=b={tmp_path / 'b'}", "--yes")
    written = (study / "b" / "suture.toml").read_text()
    assert "bits = 12  # of 12 images looked at, 11 store 16 bits; their largest value is" in written
    result = RUNNER.invoke(app, ["check", str(study)])
    said = " ".join(result.output.split())
    assert "problem 1 image is at several sites: '8.png' of a (test) = '8.png' of b (train)" in said
    assert "leave the split of such a row blank at one of the sites" in said
    assert "warning stored with 8 bits: a; with more: b." in said
    assert "nearly" not in said
    assert isinstance(result.exception, SutureError), "after the page was written"
    assert f"page: {study / 'check.html'} (data of patients: it stays on this machine)" in said
    assert (study / "check.html").is_file()


def test_colour_that_is_read_as_gray_and_a_missing_depth_are_told(tmp_path: Path) -> None:
    rows = [["image", "patient", "split", "Mass"]]
    for i in range(8):
        image(tmp_path / "a" / f"{i}.png", i, 4095)
        rows.append([f"{i}.png", f"p{i}", ("train", "validation", "test", "test")[i % 4], str(i // 4)])
    Image.new("RGB", (24, 24), (250, 10, 10)).save(tmp_path / "a" / "3.png")
    table(tmp_path / "a" / "t.csv", rows)
    suture("init", str(tmp_path / "s"), f"--site=a={tmp_path / 'a'}", "--yes")
    config = tmp_path / "s" / "a" / "suture.toml"
    config.write_text(re.sub(r"^bits = .*\n", "", config.read_text(), flags=re.MULTILINE))
    said = " ".join(RUNNER.invoke(app, ["check", str(tmp_path / "s")]).output.split())
    assert "write [data] color = true" in said
    assert "7 images store 16 bits and have no value above" in said
    assert "write [data] bits = 12" in said


@pytest.mark.parametrize(("gray", "size"), [((), 24), ((), 130), (("b",), 24)])
def test_colour_and_size_are_those_of_the_images_of_all_sites(
    gray: tuple[str, ...], size: int, tmp_path: Path
) -> None:
    for site in "ab":
        rows = [["image", "patient", "Mass"]]
        for i in range(8):
            path = tmp_path / site / f"{i}.png"
            image(path, i)
            with Image.open(path) as picture:
                picture = picture.resize((size, size))
            red = picture.point(lambda level: level // 2)
            (picture if site in gray else Image.merge("RGB", (red, picture, picture))).save(path)
            rows.append([f"{i}.png", f"p{i}", str(i % 2)])
        table(tmp_path / site / "t.csv", rows)
    said = suture(
        "init", str(tmp_path / "s"), *(f"--site={site}={tmp_path / site}" for site in "ab"), "--yes"
    )
    model = load_job(tmp_path / "s").model
    configs = [load_site_config(tmp_path / "s" / site / "suture.toml").data for site in "ab"]
    assert {model.color, *(config.color for config in configs), "are in colour" in said} == {not gray}
    assert model.size == (128 if size > 64 else 64)


@pytest.mark.parametrize("both", [False, True])
def test_all_sites_have_one_label_type_and_check_refuses_what_run_refuses(both: bool, tmp_path: Path) -> None:
    for site in "ab":
        rows = [["image", "patient", "Mass", "Edema"]]
        for i in range(60):
            image(tmp_path / site / f"{i}.png", i + 100 * (site == "b"))
            rows.append([f"{i}.png", f"p{i}", str(i % 2), str(int(i % 2 == 0 or (site == "b" and not both)))])
        table(tmp_path / site / "t.csv", rows)
    study, sites = tmp_path / "s", [f"--site={site}={tmp_path / site}" for site in "ab"]
    said = suture("init", str(study), *sites, "--yes")
    assert ("only at a every image has exactly one class" in said) is not both
    files = {site: study / site / "suture.toml" for site in "ab"}
    kind = "multiclass" if both else "multilabel"
    assert {load_site_config(file).data.label_type for file in files.values()} == {kind}
    suture("check", str(study))
    other = "multilabel" if both else "multiclass"
    text = re.sub("^label_type.*\n", "", files["a"].read_text(), flags=re.MULTILINE)
    files["a"].write_text(text.replace("[data]", f'[data]\nlabel_type = "{other}"'))
    for command in ("check", "run"):
        with pytest.raises(SutureError, match=r"1 problem|is multi\w+ and \w is multi"):
            suture(command, str(study), *(["--env", "local"] if command == "run" else []))


def test_a_table_is_divided_by_its_column_of_sites(tmp_path: Path) -> None:
    rows = [["image", "patient", "center", "Findings"]]
    for i in range(60):
        image(tmp_path / "a" / f"{i}.png", i)
        where, found = ("Klinikum Süd", "Nodule") if i % 3 else ("west", ("Mass", "Edema")[i // 3 % 2])
        rows.append([f"{i}.png", f"p{i}", where, found])
    table(tmp_path / "a" / "t.csv", rows)
    words = ["init", str(tmp_path / "s"), f"--site=x={tmp_path / 'a'}", "--yes"]
    assert "--site-column" in suture(*words, "--dry-run")
    suture(*words, "--site-column", "center")
    tables = {
        site: read_table(load_site_config(tmp_path / "s" / site / "suture.toml").data).table
        for site in ("Klinikum-Sud", "west")
    }
    assert {site: (len(of), {*of.labels}) for site, of in tables.items()} == {
        "Klinikum-Sud": (40, {"Nodule"}),
        "west": (20, {"Mass", "Edema"}),
    }
    rows[3][2] = ""
    table(tmp_path / "a" / "t.csv", rows)
    for column, wrong in (("center", "1 blank cell"), ("centre", "did you mean .center")):
        with pytest.raises(DataError, match=wrong):
            suture("init", str(tmp_path / "t"), *words[2:], "--site-column", column)


@pytest.mark.parametrize(
    ("column", "cells", "answers", "keys"),
    [
        ("histology grade", ("low", "high"), ["y"], {"finding_column": "histology grade"}),
        ("KL", ("0", "1", "2", "3"), ["2"], {"labels": ["KL"], "values": {"0": 0, "1": 0, "2": 1, "3": 1}}),
        ("KL", ("0", "1", "2", "3"), ["c"], {"finding_column": "KL"}),
    ],
)
def test_words_and_grades_are_asked_about(
    column: str,
    cells: tuple[str, ...],
    answers: list[str],
    keys: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    rows = [["image", "patient", column]]
    for i in range(20):
        image(tmp_path / "a" / f"{i}.png", i)
        rows.append([f"{i}.png", f"p{i}", cells[i % len(cells)]])
    table(tmp_path / "a" / "t.csv", rows)
    words = ["init", str(tmp_path / "s"), f"--site=a={tmp_path / 'a'}"]
    result = RUNNER.invoke(app, words, input="\n".join([*answers, "y"]) + "\n")
    assert result.exit_code == 0, result.output
    config = load_site_config(tmp_path / "s" / "a" / "suture.toml").data
    read = config.model_dump()
    assert {key: list(read[key]) if key == "labels" else read[key] for key in keys} == keys
    assert read_table(config).faults == ()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write name=PATH"):
        suture("init", str(tmp_path / "s"), "--site", "alpha", "--yes")
    with pytest.raises(ConfigError, match=r"alpha: .* does not exist"):
        suture("init", str(tmp_path / "s"), f"--site=alpha={tmp_path / 'no'}", "--yes")
    with pytest.raises(ConfigError, match="contains no site"):
        suture("check", str(tmp_path))
    (tmp_path / "job.toml").write_text('rounds = 2\n[method]\nname = "surgcal"\n')
    with pytest.raises(ConfigError, match=r"did you mean .surgical.\?"):
        suture("run", str(tmp_path / "job.toml"), "--env", "local")
    assert not (tmp_path / "s").exists()


def test_nothing_is_written_where_nobody_can_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--yes"):
        suture("init", str(tmp_path / "s"), f"--site=alpha={german(tmp_path / 'a')}")
    assert not (tmp_path / "s").exists()


def test_too_few_validation_images_for_a_federation_are_told_before_the_run(tmp_path: Path) -> None:
    suture("init", str(tmp_path / 'my "study"'), f"--site=alpha={german(tmp_path / 'a', 40)}", "--yes")
    said = " ".join(suture("check", str(tmp_path / 'my "study"')).split())
    assert "in a federation no round can be selected" in said


def doubtful(folder: Path) -> Path:
    """A table whose patients have no plain name, and with columns of 1 and 0 that may be no finding."""
    rows = [["image", "who", "Mass", "ICU", "smoker"]]
    for i in range(8):
        image(folder / "x" / f"{i}.png", i)
        rows.append([f"{i}.png", f"w{i // 2}", str(i % 2), "1", "0"])
    return table(folder / "t.csv", rows)


def test_one_question_for_each_doubtful_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    words = ["init", str(tmp_path / "my study"), f"--site=alpha={doubtful(tmp_path / 'a')}"]
    answers = ["n", "n", "y", "wo", "who", "y"]
    result = RUNNER.invoke(app, words, input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "there is no column 'wo'; the columns are image, who, Mass, ICU, smoker" in result.output
    config = load_site_config(tmp_path / "my study" / "alpha" / "suture.toml").data
    assert config.labels == ("Mass", "smoker")
    assert config.patient_column == "who"
    assert f"next: suture check '{tmp_path}/my study'" in result.output
    assert f"then: suture run '{tmp_path}/my study' --env local" in result.output


def test_a_column_called_label_is_named_or_stops_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site in "ab":
        rows = [["image", "patient", "label"]]
        for i in range(8):
            image(tmp_path / site / "x" / f"{i}.png", i + 10 * (site == "b"))
            rows.append([f"{i}.png", f"w{i // 2}", str(i // 2 % 2)])
        table(tmp_path / site / "t.csv", rows)
    sites = [f"--site={site}={tmp_path / site}" for site in "ab"]
    suture("init", str(tmp_path / "s"), *sites, "--yes")
    assert 'synonyms = { "label" = ' in (tmp_path / "s" / "a" / "suture.toml").read_text()
    result = RUNNER.invoke(app, ["check", str(tmp_path / "s")])
    assert "a, b each have a class 'Label'" in " ".join(result.output.split())
    with pytest.raises(SutureError, match="a, b each have a class 'Label'"):
        suture("run", str(tmp_path / "s"), "--env", "local", "--out", str(tmp_path / "r"))

    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    answers = ["y", "Tuberculosis", "y", "Pneumonia", "y"]
    result = RUNNER.invoke(app, ["init", str(tmp_path / "t"), *sites], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    read = load_site_config(tmp_path / "t" / "a" / "suture.toml").data
    assert read.synonyms == {"label": "Tuberculosis"}
    assert [*check(load_site_config(tmp_path / "t" / "b" / "suture.toml")).counts] == ["Pneumonia"]


def test_where_nothing_is_doubtful_only_the_writing_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    words = ["init", str(tmp_path / "s"), f"--site=alpha={german(tmp_path / 'a')}"]
    assert RUNNER.invoke(app, words, input="n\n").exit_code == 1
    assert not (tmp_path / "s").exists()
    assert RUNNER.invoke(app, words, input="y\n").exit_code == 0
    assert (tmp_path / "s" / "alpha" / "suture.toml").is_file()


@pytest.mark.complete
def test_what_is_refused_is_refused_before_anything_is_shown(study: Path, tmp_path: Path) -> None:
    for name, words in (("alpha", ["--yes"]), ("delta", [])):
        result = RUNNER.invoke(app, ["init", str(study), f"--site={name}={tmp_path / 'a'}", *words])
        assert isinstance(result.exception, ConfigError)
        assert result.output == ""


def test_a_site_that_cannot_be_made_out_names_the_command_for_it_alone(tmp_path: Path) -> None:
    plain(tmp_path / "a", 60)
    table(tmp_path / "b c" / "t.csv", [["image", "Mass"]])
    sites = [f"--site=a={tmp_path / 'a'}", f"--site=b={tmp_path / 'b c'}"]
    result = RUNNER.invoke(app, ["init", str(tmp_path / "s"), *sites, "--yes"])
    *_, command = str(result.exception).splitlines()
    again = shlex.split(command.removeprefix("then: suture "))
    assert (tmp_path / "s" / "a" / "suture.toml").is_file()
    plain(tmp_path / "b c", 60)
    (tmp_path / "b c" / "t.csv").unlink()
    assert f"written: {tmp_path / 's' / 'b' / 'suture.toml'}" in suture(*again)


def test_every_column_is_named_in_the_file_and_no_cell_writes_into_it(tmp_path: Path) -> None:
    rows = [["image", "patient", "Mass", "smoker", '"DR\nx = 1"']]
    for i in range(12):
        image(tmp_path / "a" / "x" / f"{i}.png", i)
        grade = '"2\nmost = 1\x1b"' if i % 2 else "1"
        rows.append([f"{i}.png", f"p{i}", str(i % 2), str(i // 6), grade])
    table(tmp_path / "a" / "t.csv", rows)
    said = suture("init", str(tmp_path / "s"), f"--site=alpha={tmp_path / 'a'}", "--yes")
    written = (tmp_path / "s" / "alpha" / "suture.toml").read_text()
    assert "#   'DR\\nx = 1': its values are 1, 2\\nmost = 1\\x1b" in written
    for text in (said, written):
        assert "is 'smoker' a finding? If not, remove it from labels" in text
        assert "\x1b" not in text
    assert load_site_config(tmp_path / "s" / "alpha" / "suture.toml").data.labels == ("Mass", "smoker")


@pytest.mark.complete
def test_words_with_a_plain_meaning_are_notes_and_no_warnings(tmp_path: Path) -> None:
    suture("init", str(tmp_path / "s"), f"--site=alpha={german(tmp_path / 'a', 280)}", "--yes")
    said = " ".join(suture("check", str(tmp_path / "s")).split())
    assert "note" in said.partition("'Yes' is read as present")[0][-200:]
    found = check(load_site_config(tmp_path / "s" / "alpha" / "suture.toml"))
    assert any("'Yes' is read as present" in note for note in found.notes)
    assert not any("is read as" in warning for warning in found.warnings)


@pytest.mark.complete
def test_a_study_of_texts_is_written_run_and_measured_on_another_table(tmp_path: Path) -> None:
    for name, case in (("a", CASES["reports"]), ("b", CASES["reports without a name"])):
        (tmp_path / name).mkdir()
        case(tmp_path / name)
    sites = [f"--site={name}={tmp_path / name}" for name in "ab"]
    said = suture("init", str(tmp_path / "s"), *sites, "--yes")
    assert "documents: column 'Befundtext'" in said
    assert "other image" not in said
    suture("check", str(tmp_path / "s"))
    suture("run", str(tmp_path / "s"), "--env", "local", "--rounds", "1", "--out", str(tmp_path / "run"))
    for name in "ab":  # b is put together anew
        assert "Mass" in suture("evaluate", str(tmp_path / "run"), str(tmp_path / name))


def test_a_class_folder_is_measured_as_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    CASES["class folders"](tmp_path / "a")
    with labelled_data(tmp_path / "a", None, "test") as (config, split):
        table = read_table(config.data).table
    assert split == "test"
    assert [*table.labels] == ["Pneumonia"]
    assert len(table) == 24


@pytest.mark.complete
def test_a_site_without_test_images_is_told_how_to_divide_anew(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    CASES["chexpert"](tmp_path / "a")
    suture("init", str(tmp_path / "s"), f"--site=a={tmp_path / 'a'}", "--yes")
    said = " ".join(suture("check", str(tmp_path / "s")).split())
    assert 'to the final figures; [data] split = "patients" divides its patients anew' in said
    assert "no site has a positive test image" not in said
    out = tmp_path / "run"
    said = suture("run", str(tmp_path / "s"), "--env", "local", "--rounds", "1", "--out", str(out))
    assert "The final figures are lacking: a has no test images" in " ".join(said.split())


@pytest.mark.complete
def test_columns_without_a_finding_are_asked_for_it_and_not_called_alike(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    CASES["redcap checkboxes"](tmp_path / "a")
    suture("init", str(tmp_path / "s"), f"--site=a={tmp_path / 'a'}", "--yes")
    said = " ".join(RUNNER.invoke(app, ["check", str(tmp_path / "s")]).output.split())
    assert "'Findings 1', 'Findings 2' (a) do not say which findings they are" in said
    assert '"Findings 1" = "NAME OF THE FINDING", "Findings 2" = "NAME OF THE FINDING"' in said
    assert "alike" not in said
    config = tmp_path / "s" / "a" / "suture.toml"
    [line] = [line for line in config.read_text().splitlines() if line.startswith("# synonyms")]
    text = config.read_text().replace(line, "").replace("[data]", f"[data]\n{line.removeprefix('# ')}")
    for name in ("Mass", "Edema"):
        text = text.replace("NAME OF THE FINDING", name, 1)
    config.write_text(text)
    said = RUNNER.invoke(app, ["check", str(tmp_path / "s")]).output
    assert "Findings" not in said
    assert "Edema" in said
