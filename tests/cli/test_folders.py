"""Folders on the command line: a run is its model, a study its sites, and nothing of a stranger's is run."""

from __future__ import annotations

import importlib.util
import py_compile
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import suture as api
from hospitals import image, plain
from small_hospitals import small_study
from suture.core.errors import ConfigError
from suture.data.config import load_site_config, site_files
from suture.execution import job_files
from suture.execution.job import load_job
from suture.execution.job_files import known_jobs
from world import Trained, exit_of, refused, suture, write_table

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> Path:
    """A copy of a run, whose model may be changed."""
    return shutil.copytree(trained.run, tmp_path / "run")


@pytest.mark.complete
def test_a_run_is_taken_for_its_model_a_folder_for_its_site_and_files_get_their_folders(
    run: Path, trained: Trained, tmp_path: Path
) -> None:
    study, site, out = trained.study, trained.study / "alpha", tmp_path / "new"
    said = suture("evaluate", run, site, "-o", out / "1/a.json", "--scores", out / "2/b.csv")
    for name in ("1/a.json", "2/b.csv"):
        assert str(out / name) in said
    assert suture("evaluate", run, site) == suture("evaluate", run / "model", site / "suture.toml")
    for number, words in enumerate(([run, site], [run / "model", site / "suture.toml"])):
        suture("predict", *words, "-o", out / f"p{number}" / "p.csv")
    assert (out / "p0" / "p.csv").read_bytes() == (out / "p1" / "p.csv").read_bytes()
    assert len((out / "p0" / "p.csv").read_text().splitlines()) == 61
    assert "+0.000" in suture("compare", run, run / "model", site)
    suture("plot", "features", run, site, "--images", "6", "-o", out / "3" / "b.svg")
    suture("labels", study, "--page", out / "4/b.html", "--excerpt", f"alpha={out / '5/b.toml'}")
    suture("plot", "labels", study, "-o", out / "6")
    suture("egress", "-o", out / "7" / "b.md")
    made = ["3/b.svg", "4/b.html", "5/b.toml", "7/b.md"]
    assert [name for name in (*made, "6/cooccurrence-beta.svg") if not (out / name).is_file()] == []


def test_a_folder_is_taken_for_the_files_of_its_sites(trained: Trained, tmp_path: Path) -> None:
    study = shutil.copytree(trained.study, tmp_path / "study")
    files = [study / name / "suture.toml" for name in ("alpha", "beta", "gamma")]
    assert site_files(study) == files
    (study / "server").mkdir()
    (study / "server" / "suture.toml").write_text("")
    assert site_files(study) == files, "the server's data are no site's"
    assert load_site_config(study / "beta") == load_site_config(files[1])
    with refused(*files, by=ConfigError):
        suture("evaluate", trained.run, study)
    suture("predict", trained.run, study, "-o", tmp_path / "all.csv")
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 3 * 60


@pytest.mark.complete
def test_a_model_is_signed_carded_and_exported_by_the_folder_of_its_run(run: Path, tmp_path: Path) -> None:
    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.write_bytes(secret)
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    for spelling in ("--licence", "--license"):
        suture("model", "card", run / "model", spelling, "apache-2.0")
        assert "license: apache-2.0" in (run / "model" / "README.md").read_text()
        with refused("monai", by=ConfigError):
            suture("model", "export", run, "--to", "torch", "-o", tmp_path / "t", spelling, "MIT")
    suture("model", "sign", run, "--key", private)
    assert str(run / "model") in suture("model", "verify", run, "--key", public)


def test_paths_are_checked_before_anything_is_read_or_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    sites = [f"--site=alpha={plain(tmp_path / 'a')}", f"--site=beta={tmp_path / 'nowhere'}"]
    with refused("beta", "nowhere", by=ConfigError):
        suture("init", tmp_path / "s", *sites)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "s").exists()


def test_what_is_no_model_no_site_and_no_job_is_named(trained: Trained, tmp_path: Path) -> None:
    site, out = trained.study / "alpha", tmp_path / "p.csv"
    with refused("nosuch does not exist", by=ConfigError):
        suture("predict", tmp_path / "nosuch", site, "-o", out)
    with refused("job.toml is a job", "suture.toml", by=ConfigError):
        suture("predict", trained.run, trained.study / "job.toml", "-o", out)
    with refused(trained.run, "suture report", by=ConfigError):
        suture("results", trained.run)


@pytest.mark.complete
def test_a_site_whose_classes_are_all_withheld_sends_no_loss(tmp_path: Path) -> None:
    """Enough images, and too few positive ones: by the losses that are sent, no round could be selected."""
    rows: list[list[object]] = [["image", "patient", "split", "Mass"]]
    for i in range(80):
        image(tmp_path / "a" / f"{i}.png", i)
        split = "train" if i < 40 else "validation"
        rows.append([f"{i}.png", f"p{i}", split, int(i < 10 or 40 <= i < 43)])
    write_table(tmp_path / "a" / "t.csv", rows)
    study = tmp_path / "study"
    suture("init", study, f"--site=alpha={tmp_path / 'a'}", "--yes")
    job = (study / "job.toml").read_text()
    (study / "job.toml").write_text(f'selection = "site_loss"\n{job}')
    said = " ".join(suture("check", study).split())
    assert "in a federation no round can be selected" in said
    assert "alpha: 0 validation images" in said
    suture("run", study, "--env", "local", "--rounds", "1", "--out", tmp_path / "exact")
    as_federated = ("run", study, "--env", "local", "--limits", "--rounds", "1")
    with refused("alpha", "40 validation images"):
        suture(*as_federated, "--out", tmp_path / "r")
    last = ("--set", "selection=last", "--out", tmp_path / "r", "--resume")
    assert "model of round 1" in suture(*as_federated, *last), "as the error has said"
    config = study / "alpha" / "suture.toml"
    config.write_text(config.read_text().replace("min_count = 5", "min_count = 3"))
    suture(*as_federated, "--out", tmp_path / "r2")


PLANTED = """\
from pathlib import Path
Path({mark!r}).write_text("run")
from suture.execution.job import load_job
JOB = load_job("demo")
"""
CODE = ("job.py", "--trust", "job.toml")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What the planted code writes when it is run."""
    return tmp_path / "mark"


@pytest.fixture
def study(tmp_path: Path, mark: Path) -> Path:
    """A study of somebody else, whose job is code."""
    folder = small_study(tmp_path / "study")
    (folder / "job.toml").unlink()
    (folder / "job.py").write_text(PLANTED.format(mark=str(mark)))
    return folder


TABLE = 'title = "t"\nsource = "s"\njob = "{}"\nreference = "a"\n[rows.a]\nname = "A"\n'
TABLE += '[presets.small]\nseeds = [1]\nnote = "n"\n'


def test_no_command_runs_the_code_of_a_folder(study: Path, mark: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "out", tmp_path / "table.toml"
    for command in (
        "run {study} --env local --out {out}",
        "run {study}/../study/ --env sim --out {out}",
        "run {study} --set method=mine --out {out}",
        "export {study} --out {out}",
        "data simulate {study} --out {out}",
        "poc up {study} --dir {out}",
        "poc data {study} --dir {out}",
    ):
        with refused(*CODE, by=ConfigError):
            suture(*command.format(study=study, out=out).split())
    for refuses in (lambda: api.load_job(study), lambda: api.run(study)):
        with refused(*CODE, by=ConfigError):
            refuses()
    for job in (study, study / "job.py", "--trust"):  # a table from a colleague
        table.write_text(TABLE.format(job))
        with refused("--trust" if job == "--trust" else "is code"):
            suture("table", table, "--work", out, "--results", tmp_path / "results")
    assert not mark.exists()
    assert not out.exists()


@pytest.mark.complete
def test_a_check_names_the_code_and_goes_on_without_it(
    study: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert exit_of(monkeypatch, "check", study)
    said = " ".join(capsys.readouterr().out.split())
    assert "--trust" in said
    assert "all sites" in said, "the data are looked at"
    assert not mark.exists()
    exit_of(monkeypatch, "check", study, "--trust")
    assert mark.exists()
    assert "is code" not in capsys.readouterr().out


def test_what_the_user_names_or_trusts_is_run_and_a_link_to_code_is_code(study: Path, mark: Path) -> None:
    for job, trust in ((study / "job.py", False), (study, True)):
        assert load_job(job, trust=trust).name == "demo"
        assert mark.exists()
        mark.unlink()
    # A job.py that was read and found good must not stand for another program in its bytecode.
    job = study / "job.py"
    cached = importlib.util.cache_from_source(str(job))
    py_compile.compile(str(job), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    job.write_text('from suture.execution.job import load_job\nJOB = load_job("demo")\n')
    assert load_job(job).name == "demo"
    job.rename(study / "notes.py")
    (study / "job.toml").symlink_to(study / "notes.py")
    for link in (study, study / "job.toml"):
        with refused("notes.py", by=ConfigError):
            load_job(link)
    assert not mark.exists()


@pytest.mark.complete
def test_jobs_of_the_working_directory_are_no_part_of_the_package(
    study: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package without jobs/ beside it finds those of the folder in which it is called."""
    demo = known_jobs()["demo"]
    for job in ("demo", demo, demo.parent):
        assert load_job(job).name == "demo"
    monkeypatch.chdir(demo.parents[1])
    assert load_job("demo").name == "demo"
    (tmp_path / "jobs" / "demo").mkdir(parents=True)
    (study / "job.py").rename(tmp_path / "jobs" / "demo" / "job.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_files, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "e.py"))
    for word in ("demo", "jobs/demo"):
        with refused(*CODE, by=ConfigError):
            load_job(word)
    suture("list", "jobs")
    assert not mark.exists()
