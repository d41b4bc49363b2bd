"""The command line, as a person types it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from suture.cli.app import app
from suture.cli.common import guard, literal
from suture.cli.run import export


def started(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "suture", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def suture(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, which need not import torch again."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch("sys.argv", ["suture", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            guard(partial(literal(app), prog_name="suture"))
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


SMALL = ["--env", "local", "--rounds", "1", "--set", "images=40", "--set", "held_out=60"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "r"
    done = started("run", "demo", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "Cardiomegaly" in done.stdout
    assert str(out / "report.html") in done.stdout
    return out


@pytest.mark.complete
def test_list_names_everything() -> None:
    said = " ".join(suture("list").stdout.split())  # as wide as a terminal may be
    for word in (
        "surgical",
        "vanilla",
        "partial",
        "cnn",
        "densenet121",
        "suture[lite]",
        "moco_resnet50",
        "CC BY-NC",
        "hospital",
        "nih",
        "demo",
        "surgical_nih",
        "chest_all",
    ):
        assert word in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "dmeo"], "did you mean 'demo'"),
        (["run", "demo", "--set", "rouns=2"], "did you mean 'rounds'"),
        (["run", "demo", "--env", "prod"], "startup kit"),
        (["run", "demo", "--env", "loca"], "'--env': 'loca' is not one of"),
        (["report", "nowhere"], "nowhere"),
        (["predict", "nowhere", "x.png", "-o", "o.csv"], "model.json"),
        (["data", "check", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_mistake_is_one_clear_line_and_a_code(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = suture(*words)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.complete
def test_a_process_of_its_own_says_the_same_and_ends_with_the_code(tmp_path: Path) -> None:
    done = started("report", "nowhere", cwd=tmp_path)
    assert done.returncode == suture("report", str(tmp_path / "nowhere")).returncode != 0
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_second_run_report_and_predict(run: Path, tmp_path: Path) -> None:
    again = suture("run", "demo", *SMALL, "--out", str(run))
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert "Mean (" in suture("report", str(run)).stdout
    images = run / "sites" / "harbor" / "images"
    (tmp_path / "broken.png").write_bytes(b"x")
    (tmp_path / "good.png").write_bytes((images / "00000.png").read_bytes())
    done = suture("predict", str(run / "model"), str(tmp_path), "-o", str(tmp_path / "p.csv"))
    assert done.returncode == 1
    assert "1 of 2 images cannot be used; " in done.stderr
    assert "broken.png" in done.stdout
    assert "broken.png" in (tmp_path / "p.left_out.csv").read_text()
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert len(rows) == 1
    assert len(rows[0]) == 1 + 10 + 1
    assert all(0 <= float(v) <= 1 for k, v in rows[0].items() if k not in ("image", "model digest"))


def test_data_check_of_a_simulated_site_and_of_a_broken_one(run: Path) -> None:
    config = run / "sites" / "lakeside" / "suture.toml"
    good = suture("data", "check", str(config))
    assert good.returncode == 0, good.stderr
    assert "Emphysema" in good.stdout
    table = config.parent / "labels.csv"
    text = table.read_text()
    table.write_text(text.replace(",train,", ",trian,", 1))
    bad = suture("data", "check", str(config))
    table.write_text(text)
    assert bad.returncode != 0
    assert "trian" in bad.stdout + bad.stderr


def test_the_ledger_of_a_site_is_a_table(run: Path) -> None:
    site = run / "sites" / "harbor"
    done = suture("ledger", str(site / "state"))
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "repeats left figures other numbers last r 4 ≥ 10⁶ 3 18 17 20" in text
    assert "updates clip noise ε r 1 none none ∞ " in text
    assert "all experiments: 1 updates, 1 of them without noise; ε = ∞" in text
    found = json.loads(suture("ledger", str(site), "--json").stdout)
    assert (found["lines"][0]["updates"], found["lines"][0]["epsilon"]) == (1, None)
    assert set(found["figures"]) == set(found["lines"][0]["figures"])
    refused = suture("ledger", str(run))
    assert (refused.returncode, "has no ledger.jsonl" in refused.stderr) == (2, True)


def test_export_has_the_options_of_run_that_change_the_job(tmp_path: Path) -> None:
    settings = ["rounds=5", "seed=7", 'accept_labels=["Mass"]']
    export("demo", tmp_path / "set", "trial", settings=settings, sites="harbor")
    export("demo", tmp_path / "options", "trial", rounds=5, seed=7, accept_labels=["Mass"], sites="harbor")
    by_set, by_options = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "set", tmp_path / "options")
    )
    assert by_set == by_options
    assert b'"rounds": 5' in by_set["demo/app_server/config/schedule.json"]
