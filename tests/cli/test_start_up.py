"""No command imports what it has no use for: torch and its like take seconds and hundreds of megabytes.

What is imported is counted, never a time. Commands of other packages are imported when they are called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from world import write_image, write_table

pytestmark = pytest.mark.complete


HEAVY = ("torch", "torchvision", "monai", "sklearn", "scipy", "pandas", "matplotlib", "nvflare", "PIL")
SCRIPT = f"""
import sys
try:
    {{}}
except SystemExit as end:
    print("code:", end.code, file=sys.stderr)
print("imported:", *(name for name in {HEAVY} if name in sys.modules))
"""


def started(statement: str, *words: str, cwd: Path, **variables: str) -> tuple[str, set[str]]:
    """Return what a statement prints, errors last, and which of the heavy packages it has imported."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(statement), *words]
    env = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, env=env)
    assert done.returncode == 0, done.stderr
    said, _, imported = done.stdout.rpartition("imported:")
    return " ".join((said + done.stderr).split()), set(imported.split())


MAIN = "from suture.cli import main; main()"


@pytest.mark.parametrize(
    ("words", "says", "may_import"),
    [
        ("--help", "--install-completion", set()),
        ("--version", "nvflare 2.", set()),
        ("predict --help", "--device", set()),
        ("list", "chest_all", set()),
        ("rum", "'run'", set()),
        ("run dmo", "code: 2", set()),
        ("run demo --set method=surgcal", "code: 2", set()),
        ("status --startup-kit .", "code: 2", {"nvflare"}),
        ("init study --site alpha=alpha --dry-run", 'dataset = "hospital"', {"PIL"}),
        ("labels .", "contains no site", {"PIL"}),
    ],
)
def test_a_command_imports_only_what_it_needs(
    words: str, says: str, may_import: set[str], tmp_path: Path
) -> None:
    write_table(tmp_path / "alpha" / "labels.csv", [["image", "Mass"], ["a.png", 1], ["b.png", 0]])
    for seed, name in enumerate(("a.png", "b.png")):
        write_image(tmp_path / "alpha" / name, seed, (32, 32))
    said, imported = started(MAIN, *words.split(), cwd=tmp_path)
    assert says in said
    assert imported <= may_import


def test_a_terminal_that_lacks_a_character_ends_no_command(tmp_path: Path) -> None:
    """Latin-1 has no epsilon; a run would end with a traceback when its figures are printed."""
    said, _ = started(MAIN, "ledger", "--help", cwd=tmp_path, PYTHONIOENCODING="latin-1")
    assert "answers, ?, figures" in said


def test_the_package_imports_nothing_and_shows_its_names(tmp_path: Path) -> None:
    said, imported = started("import suture; print(dir(suture))", cwd=tmp_path)
    assert "load_job" in said
    assert imported == set()


ENTRY_POINTS = """[suture.commands]
count = other:count
run = other:count
plot = other:count
broken = other:NUMBER
[suture.datasets]
meadow = farms:MEADOW
[suture.priors]
grass = nowhere:GRASS
[suture.simulations]
Farm = farms:Farm
"""
OTHER = 'print("imported")\nNUMBER = 3\ndef count():\n    """Count sheep."""\n    print("counted")\n'
FARMS = '''from dataclasses import replace
from suture.data.readers import DATASETS
from suture_synthetic.phantom_hospitals import PhantomSites
MEADOW = replace(DATASETS["hospital"], description="Pictures of cows.")
class Farm(PhantomSites):
    """Five farms."""
'''


def test_a_command_of_another_package_is_added_and_replaces_none(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "farms.py").write_text(FARMS)
    path = os.pathsep.join([str(tmp_path), os.getenv("PYTHONPATH", "")])

    def said(*words: str) -> str:
        return started(MAIN, *words, cwd=tmp_path, PYTHONPATH=path, COLUMNS="300")[0]

    assert said("count").startswith("imported counted")
    for words, has in (("--help", "Count sheep."), ("run --help", "--env"), ("plot --help", "labels")):
        shown = said(*words.split())
        assert has in shown
        assert "imported" not in shown or words == "--help"
    for kind, line in (
        ("datasets", "meadow Pictures of cows."),
        ("priors", "grass not usable:"),
        ("simulations", "Farm Five farms."),
    ):
        assert line in said("list", kind)
    assert "error: the command 'broken' of other 1.0 (other:NUMBER)" in said("broken")
