"""Sdist and wheel, installed outside of a clone: everything that a command reads travels with them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from small_hospitals import LABELS, small_study, write_hospital

pytestmark = pytest.mark.complete

ROOT = Path(__file__).resolve().parents[1]
TRAVELS = ("custom", "jobs", "poc_workspace", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
COMMANDS = """
list
demo --rounds 1 --out demo
report demo
init study --yes --site alpha=alpha --site beta=beta
check study
run study --rounds 1 --out run --set model.size=32
model export demo --to torch --out model
export demo --out exported --bundle
"""


def wheel(source: Path, out: Path) -> Path:
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*words, "--wheel-dir", str(out), str(source)], check=True)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel of a clone and that of its sdist; the clone is gone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in TRAVELS:  # setuptools leaves what it builds beside them
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / "clone" / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, folder / "clone" / name)
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", sdist], cwd=folder / "clone", check=True, stdout=subprocess.DEVNULL)
    [archive] = folder.glob("*.tar.gz")
    built = wheel(folder / "clone", folder / "of_clone"), wheel(archive, folder / "of_sdist")
    shutil.rmtree(folder / "clone")
    return built


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would put into site-packages."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    return site


def test_the_sdist_has_all_that_the_wheel_of_a_clone_has(built: tuple[Path, Path]) -> None:
    of_clone, of_sdist = (
        {(file.filename, file.CRC) for file in zipfile.ZipFile(path).infolist()} for path in built
    )
    assert of_sdist == of_clone


def python(*words: str, folder: Path, path: Path) -> str:
    """What Python prints in a folder, with the modules of a path; it has to end well."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def test_its_commands_find_all_that_they_read(installed: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("alpha", "beta")):
        write_hospital(tmp_path / name, LABELS[name], 25, seed)
        (tmp_path / name / "suture.toml").unlink()
    origin = "import suture, suture_papers; print(suture.__file__, suture_papers.__file__)"
    commands = [["-m", "suture", *shlex.split(line)] for line in COMMANDS.strip().splitlines()]
    for words in (["-c", origin], *commands):
        assert str(ROOT) not in python(*words, folder=tmp_path, path=installed), words
    assert (tmp_path / "run" / "report.html").is_file()
    jobs = installed / "suture_jobs"
    folders = {path.parent for path in jobs.glob("*/job.*")}
    plans = {path.parents[2] for path in jobs.glob("*/app/config/plan.json")}
    flares_own = {path.parent for path in jobs.glob("*/client.py")}
    assert plans == folders - flares_own
    assert {path.parent for path in jobs.glob("*/meta.json")} == folders
    code = {path.name for path in (tmp_path / "exported").rglob("custom/*")}
    assert {"suture", "suture_papers"} <= code
    assert not code & {"suture_prepare", "suture_synthetic"}


@pytest.mark.parametrize("env", ["local", "sim"])
def test_the_engine_alone_trains_on_tables(installed: Path, tmp_path: Path, env: str) -> None:
    """Without any package beside it; it ends with the figures, and no page."""
    alone = tmp_path / "site"
    shutil.copytree(installed / "suture", alone / "suture")
    [info] = installed.glob("suture-*.dist-info")
    shutil.copytree(info, alone / info.name)
    points = (alone / info.name / "entry_points.txt").read_text().splitlines()
    own = [line for line in points if "suture_" not in line]
    (alone / info.name / "entry_points.txt").write_text("\n".join(own))
    small_study(tmp_path / "study")
    words = ["run", "study", "--env", env, "--rounds", "1", "--out", "run"]
    # No file of the clone is on the path: -S leaves out the installation that the tests run in.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    start = f"import sys; sys.path += {libraries!r}; from suture.cli import main; main()"
    python("-S", "-c", start, *words, folder=tmp_path, path=alone)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["auroc"]
    assert not (tmp_path / "run" / "report.html").exists()
