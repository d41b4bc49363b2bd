"""A run where its model is meant, a folder where its suture.toml is, and errors without pydantic's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from hospitals import german, plain
from suture.cli.app import app
from suture.core.errors import ConfigError, SutureError
from suture.data.config import load_site_config, site_files

RUNNER = CliRunner()


def suture(*words: object) -> str:
    result = RUNNER.invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two hospitals, a study of both, one of the first alone, and a run."""
    place = tmp_path_factory.mktemp("place")
    german(place / "a", 280)
    plain(place / "b", 80)
    suture("init", place / "study", f"--site=alpha={place / 'a'}", f"--site=beta={place / 'b'}", "--yes")
    suture("init", place / "one", f"--site=alpha={place / 'a'}", "--yes")
    job = place / "study" / "job.toml"
    job.write_text(job.read_text().replace("rounds = 15", "rounds = 1").replace("size = 64", "size = 32"))
    suture("run", place / "study", "--env", "local", "--out", place / "run")
    return place


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    plain_text = serialization.NoEncryption()
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain_text))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.mark.complete
def test_a_file_that_a_command_writes_gets_its_folder(place: Path, tmp_path: Path) -> None:
    run, site, study = place / "run", place / "study" / "alpha", place / "study"
    said = suture("evaluate", run, site, "-o", tmp_path / "1/a/b.json", "--scores", tmp_path / "2/a/b.csv")
    assert said.endswith(f"written: {tmp_path / '1/a/b.json'}\nwritten: {tmp_path / '2/a/b.csv'}\n")
    suture("predict", run, site, "-o", tmp_path / "3/a/b.csv")
    suture("plot", "features", run, site, "--images", "6", "-o", tmp_path / "4/a/b.svg")
    suture(
        "labels", study, "--page", tmp_path / "5/a/b.html", "--excerpt", f"alpha={tmp_path / '6/a/b.toml'}"
    )
    suture("egress", "-o", tmp_path / "7/a/b.md")
    suture("plot", "labels", study, "-o", tmp_path / "8/a")
    assert len({path.parent.parent for path in tmp_path.glob("?/a/*") if path.is_file()}) == 8


@pytest.mark.complete
def test_a_run_is_taken_for_its_model(place: Path, tmp_path: Path) -> None:
    run, site = place / "run", place / "study" / "alpha"
    by_run = tmp_path / "run.csv"
    suture("predict", run, site, "-o", by_run)
    suture("predict", run / "model", site / "suture.toml", "-o", tmp_path / "model.csv")
    assert by_run.read_bytes() == (tmp_path / "model.csv").read_bytes()
    assert len(by_run.read_text().splitlines()) > 200
    assert suture("evaluate", run, site) == suture("evaluate", run / "model", site / "suture.toml")
    assert "+0.000" in suture("compare", run, run / "model", site)
    suture("explain", run, site, "-o", tmp_path / "maps", "-n", "1")
    assert (tmp_path / "maps" / "001 000.png").is_file()
    suture("decide", run, site, "--overwrite")
    suture("finetune", run, place / "one", "-o", tmp_path / "tuned", "--target", "Mass", "--epochs", "1")
    assert (tmp_path / "tuned" / "tuned.json").is_file()


def test_a_folder_is_taken_for_the_files_of_its_sites(place: Path, tmp_path: Path) -> None:
    study = place / "study"
    files = [study / name / "suture.toml" for name in ("alpha", "beta")]
    assert site_files(study) == files
    (study / "server").mkdir()
    (study / "server" / "suture.toml").write_text("")
    assert site_files(study) == files, "the server's data are no site's"
    assert load_site_config(place / "one") == load_site_config(place / "one" / "alpha" / "suture.toml")
    with pytest.raises(ConfigError, match=r"alpha/suture.toml, .*beta/suture.toml"):
        suture("evaluate", place / "run", study)
    suture("plot", "features", place / "run", study, "-o", tmp_path / "by_study.svg")
    suture("plot", "features", place / "run", *files, "-o", tmp_path / "by_files.svg")
    assert (tmp_path / "by_study.svg").read_bytes() == (tmp_path / "by_files.svg").read_bytes()
    suture("plot", "labels", study, "-o", tmp_path / "labels")
    assert (tmp_path / "labels" / "cooccurrence-beta.svg").is_file()
    suture("predict", place / "run", study, "-o", tmp_path / "all.csv")
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 280 + 79  # one row has no image


@pytest.mark.complete
@pytest.mark.parametrize("spelling", ["--licence", "--license"])
def test_a_licence_is_spelt_in_two_ways(
    spelling: str, place: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    model = place / "run" / "model"
    suture("model", "card", model, spelling, "apache-2.0")  # and the model is taken for its run
    assert "license: apache-2.0" in (model / "README.md").read_text()
    with pytest.raises(ConfigError, match="monai"):
        suture("model", "export", place / "run", "--to", "torch", "-o", tmp_path / "t", spelling, "MIT")
    suture("model", "sign", place / "run", "--key", keys[0])
    assert str(model) in suture("model", "verify", place / "run", "--key", keys[1])


@pytest.mark.complete
def test_paths_are_checked_before_anything_is_read_or_asked(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suture_prepare.commands._can_ask", lambda: True)
    sites = [f"--site=alpha={place / 'a'}", f"--site=beta={tmp_path / 'nowhere'}"]
    result = RUNNER.invoke(app, ["init", str(tmp_path / "s"), *sites], input="y\n")
    assert isinstance(result.exception, ConfigError)
    assert "beta" in str(result.exception)
    assert "nowhere" in str(result.exception)
    assert result.output == ""
    assert not (tmp_path / "s").exists()


SETTINGS = [
    "rounds=0",
    "method.local.lr=-1",
    "method.local.lr=soon",
    "method.local.local_epochs=1.5",
    "decision.sensitivity=2",
    "decision.rule=best",
    "model.size=0",
    "model.backbone=resnet99",
    "validation_loss=3",
    "protection.clip=-1",
    "simulation.sites=[1]",
    "simulation.folder=3",
    "seed=-1",
]
DATA = [
    'most = "many"',
    "bits = 99",
    'root = ""',
    "classes = [1]",
    'classes = ["Mass", ""]',
    'values = { x = "perhaps" }',
    "split = { train = 2.0 }",
    'split = "sometimes"',
    'labels = { "" = 3 }',
]
PRIVACY = [
    "min_count = -1",
    "min_loss = 'x'",
    "epsilon = -1",
    "deny = [1]",
    "round_counts = -1",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_of_a_job_is_refused_in_pydantics_words(setting: str, place: Path) -> None:
    words = ["run", str(place / "study"), "--env", "local", "--set", setting, "--out", str(place / "none")]
    error = RUNNER.invoke(app, words).exception
    assert isinstance(error, SutureError)
    _is_ours(str(error))


@pytest.mark.parametrize(
    "line", [*((f"[data]\n{line}") for line in DATA), *(f"[privacy]\n{p}" for p in PRIVACY)]
)
def test_no_line_of_a_site_is_refused_in_pydantics_words(line: str, place: Path, tmp_path: Path) -> None:
    text = f'[data]\ndataset = "hospital"\nroot = "{place / "b"}"\ntable = "{place / "b"}/labels.csv"\n'
    section, _, key = line.partition("\n")
    (tmp_path / "suture.toml").write_text(
        text.replace(f"{key.split()[0]} =", f"was_{key.split()[0]} =")
        + (f"{key}\n" if section == "[data]" else f"{line}\n")
    )
    with pytest.raises(SutureError) as refused:
        load_site_config(tmp_path / "suture.toml")
    _is_ours(str(refused.value))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seed", "1,5", "must be a whole number"),
        ("--workers", "0", "must be at least 1"),
        ("--rounds", "many", "must be a whole number"),
    ],
)
def test_no_option_is_refused_in_pydantics_words(option: str, value: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "suture", "run", "demo", option, value], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"Invalid value for '{option}': {said} " in done.stderr
    _is_ours(done.stderr)


def test_a_misspelt_study_is_named(place: Path) -> None:
    for word in (place / "studdy", place / "studdy" / ""):
        error = RUNNER.invoke(app, ["run", str(word)]).exception
        assert isinstance(error, ConfigError)
        assert f"did you mean '{place / 'study'}'?" in str(error)


def _is_ours(text: str) -> None:
    for theirs in ("Value error", "Assertion failed", "Input should be", "pydantic", "validation error"):
        assert theirs not in text
