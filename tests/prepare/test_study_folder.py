"""A study folder on this machine: moved, called from elsewhere, continued, and with a site more."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from hospitals import german
from small_hospitals import JOB_TOML, LABELS, small_study, write_hospital
from suture.cli import run_job_file
from suture.core.errors import ConfigError, DataError, FederationError
from suture.core.files import hold
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.federation.site.ledger import LEDGER_FILE
from suture.flare.simulate import simulator_workspace
from suture_admin.ledger import read_statement
from suture_admin.poc import simulate
from suture_prepare.new_study import look, write_study
from suture_results.method_comparison import compare_methods
from world import refused, suture

JOB_PY = """\
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.execution.study import StudySites
from suture.execution.job import Job

JOB = Job(
    name="study",
    title="a small study",
    method=SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=16)),
    model=ModelSpec("cnn", size=16),
    rounds=2,
    seed=3,
    simulation={simulation},
)
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three sites and a job.toml."""
    return small_study(tmp_path / "study")


def model(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def record(out: Path) -> dict[str, object]:
    return dict(json.loads((out / "run.json").read_text()))


def run(study: Path | str, out: Path, *settings: str, resume: bool = False) -> Path:
    return run_job(with_settings(load_job(study), settings), "local", out, resume=resume)


def sites_of(study: Path | str, trust: bool = False) -> list[str]:
    return list(load_job(study, trust=trust).simulation.configs())  # type: ignore[union-attr]


@pytest.mark.complete
def test_a_study_runs_from_anywhere_after_it_was_moved_and_continues_with_the_same_bytes(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = run_job(load_job("study"), "local", "one/r")
    cut = run(study, tmp_path / "cut" / "r", "rounds=1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = study.rename(tmp_path / "other name")
    after = run("../other name", Path("two/r"), "name=study")
    assert model(after) == model(tmp_path / whole)
    assert record(after)["status"] == "finished"
    assert model(run(moved, cut, "name=study", resume=True)) == model(after)
    assert not study.exists(), "nothing was written where the study was"
    with refused("--out", "--resume", by=ConfigError):
        run(moved, cut, "name=study")
    with hold(cut / ".lock", 0), pytest.raises(ConfigError):
        run(moved, cut, "rounds=3", "name=study", resume=True)
    monkeypatch.chdir(moved)
    within = run_job(with_settings(load_job("."), ["rounds=1"]))
    assert within.parent == moved / "runs"
    assert sites_of(".") == list(LABELS), "its runs are no sites of it"


@pytest.mark.complete
@pytest.mark.parametrize("simulation", ["None", "StudySites(folder='../study')"])
def test_a_job_py_gives_the_same_model_as_a_job_toml_and_is_a_command_too(
    simulation: str, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = run(study, tmp_path / "toml" / "r", "rounds=1")
    (study / "job.toml").unlink()
    (study / "job.py").write_text(JOB_PY.format(simulation=simulation))
    monkeypatch.chdir(tmp_path)
    for word in ("study", "study/job.py", str(study)):
        assert sites_of(word, trust=True) == list(LABELS)
    out = tmp_path / "py" / "r"
    monkeypatch.setattr("sys.argv", ["study/job.py", "--rounds", "1", "--out", str(out)])
    spec = importlib.util.spec_from_file_location("own_job", study / "job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit, match="0"):
        run_job_file(module.JOB)
    assert (record(out)["status"], record(out)["env"]) == ("finished", "local"), "as of suture run"
    assert model(out) == model(toml)


def test_a_job_without_sites_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB_PY.format(simulation="None"))
    job = load_job(tmp_path, trust=True)
    for start in (lambda: run_job(job, "local", tmp_path / "r"), lambda: simulate(job, tmp_path / "poc")):
        with refused("suture.toml", "`suture init`", by=ConfigError):
            start()
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_a_study_of_two_jobs_asks_which(study: Path) -> None:
    (study / "job.py").write_text(JOB_PY.format(simulation="None"))
    with refused("job.py and job.toml", by=ConfigError):
        load_job(study)
    assert load_job(study / "job.py").rounds == load_job(study / "job.toml").rounds
    (study / "job.py").unlink()
    (study / "job.toml").write_text(JOB_TOML, encoding="utf-16")
    with refused("job.toml", "UTF-8", by=ConfigError):
        load_job(study)


def test_the_sites_of_a_study_are_not_written_over(study: Path) -> None:
    before = (study / "alpha" / "suture.toml").read_bytes()
    with pytest.raises(ConfigError):
        suture("data", "simulate", study, "--out", study)
    assert (study / "alpha" / "suture.toml").read_bytes() == before


def test_a_hospital_takes_its_folder_of_the_study_along(tmp_path: Path) -> None:
    """Its suture.toml and its splits, to local/ of its kit; without the splits the error names them."""
    write_study(tmp_path / "study", look({"alpha": german(tmp_path / "data")}))
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    shutil.copy(tmp_path / "study" / "alpha" / "suture.toml", local)
    config = load_site_config(local / "suture.toml")
    with refused("kit/local/splits.csv", by=DataError):
        load_table(config.data)
    shutil.copy(tmp_path / "study" / "alpha" / "splits.csv", local)
    shutil.rmtree(tmp_path / "study")
    assert len(load_table(config.data)) == 30


def test_the_folder_of_a_job_toml_starts_at_the_file(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    job = JOB_TOML + '[simulation]\nfolder = "../study"\nsites = ["beta"]\n'
    (tmp_path / "jobs" / "job.toml").write_text(job)
    monkeypatch.chdir("/")
    assert study.exists()
    assert sites_of(tmp_path / "jobs") == ["beta"]


@pytest.mark.complete
def test_a_site_added_later_takes_part_and_a_run_writes_little_into_the_study(
    study: Path, tmp_path: Path
) -> None:
    """Nothing but the cache of decoded images, and each site's ledger: two runs keep apart."""
    before = {path.relative_to(study) for path in study.rglob("*")}
    out = run(study, tmp_path / "r", "rounds=1")
    new = {path.relative_to(study) for path in study.rglob("*")} - before
    assert {path.parts[1] for path in new} == {"cache", "state"}
    assert {p.name for p in new if p.parts[1] == "state"} == {"state", LEDGER_FILE, f".{LEDGER_FILE}.lock"}
    write_hospital(study / "delta", ("Hernia",), 25, 9)
    run(study, out, resume=True)
    assert {*record(out)["threads"]} == {*LABELS, "delta", "server"}  # type: ignore[misc]
    last = json.loads((out / "history.jsonl").read_text().splitlines()[-1])
    assert set(last["sites"]) == {*LABELS, "delta"}


@pytest.mark.complete
def test_a_site_has_one_ledger_wherever_its_runs_are_started(study: Path, tmp_path: Path) -> None:
    """Runs of the same name are experiments of their own; what is not noted by site is refused."""
    toml = study / "alpha" / "suture.toml"
    toml.write_text(f"{toml.read_text()}clip = 1e-3\nnoise = 8.0\nmax_epsilon = 1.9\nmax_experiments = 1\n")
    run(study, tmp_path / "x" / "r", "rounds=1")
    run(study, tmp_path / "y" / "r", "rounds=1")
    run(study, tmp_path / "y" / "r", "rounds=2", resume=True)
    found = read_statement(study / "alpha")
    assert [(line.experiment, line.updates) for line in found.lines] == [("r", 1), ("r-2", 2)]
    assert read_statement(tmp_path / "x" / "r" / "sites" / "alpha").spent == found.spent
    for method, named in (("surgical", "max_epsilon"), ("central", "alpha")):
        with refused("alpha", named, by=FederationError):
            run(study, tmp_path / method, f"method={method}")
    with refused("max_epsilon", by=FederationError):
        compare_methods(load_job(study), ["surgical"], tmp_path / "c", folds=3)
    assert read_statement(study / "alpha").spent.updates == 3


def test_every_way_to_run_a_study_names_the_ledgers_of_its_sites(study: Path, tmp_path: Path) -> None:
    job = load_job(study)
    simulator_workspace(job, tmp_path / "w")
    simulate(job, tmp_path / "poc")
    assert job.simulation.prepare(tmp_path / "run", tmp_path, 1, job.method)  # type: ignore[union-attr]
    written = [path for path in tmp_path.rglob("alpha/suture.toml") if study not in path.parents]
    assert len(written) == 4, "also the data of FLARE's own simulator"
    assert {load_site_config(path).storage.ledger for path in written} == {study / "alpha" / "state"}


@pytest.mark.parametrize("name", ['my "study" of 2026', "Größe", ".hidden"])
def test_a_study_in_a_folder_of_any_name_has_a_job_with_a_valid_one_and_its_data_move_with_it(
    name: str, study: Path, tmp_path: Path
) -> None:
    (study / "job.toml").unlink()
    named = study.rename(study.parent / name)
    for path in named.rglob("suture.toml"):
        path.unlink()
    write_study(named, look({site: named / site for site in LABELS}))
    assert str(tmp_path) not in (named / "alpha" / "suture.toml").read_text()
    moved = tmp_path / "elsewhere" / name
    moved.parent.mkdir()
    named.rename(moved)
    job = load_job(moved)
    assert all(site in job.title for site in LABELS)
    assert job.simulation.configs()["alpha"].data.root == moved / "alpha" / "images"  # type: ignore[union-attr]
    (moved / "job.toml").write_text(JOB_TOML)
    assert load_job(moved).name == job.name


@pytest.mark.parametrize("site", ["st.mary", "server"])
def test_a_name_that_another_environment_refuses_is_refused_at_once(site: str, study: Path) -> None:
    with refused(site, by=ConfigError):
        look({site: study / "alpha"})
    (study / "alpha").rename(study / site)
    if site != "server":
        with refused(site, by=ConfigError):
            sites_of(study)
