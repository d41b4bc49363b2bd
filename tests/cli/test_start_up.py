"""No command imports what it has no use for: torch and its like take seconds and hundreds of megabytes.

What is imported is counted, never a time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

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


def started(statement: str, *words: str, cwd: Path) -> tuple[str, set[str]]:
    """Return what a statement prints, errors last, and which of the heavy packages it has imported."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(statement), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    said, _, imported = done.stdout.rpartition("imported:")
    return " ".join((said + done.stderr).split()), set(imported.split())


@pytest.mark.parametrize(
    ("words", "says", "may_import"),
    [
        (["--help"], "Train one model", set()),
        (["--version"], "nvflare 2.", set()),
        (["run", "--help"], "--rounds", set()),
        (["predict", "--help"], "--device", set()),
        (["list"], "chest_all", set()),
        (["rum"], "Did you mean 'run'", set()),
        (["run", "dmo"], "unknown job or study folder 'dmo'; did you mean 'demo'? code: 2", set()),
        (["run", "demo", "--set", "method=surgcal"], "'surgcal'; did you mean 'surgical'? code: 2", set()),
        (["status", "--startup-kit", "."], "code: 2", {"nvflare"}),
        (["init", "study", "--site", "alpha=alpha", "--dry-run"], 'dataset = "hospital"', {"PIL"}),
        (["labels", "."], "contains no site", {"PIL"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(
    words: list[str], says: str, may_import: set[str], tmp_path: Path
) -> None:
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / "labels.csv").write_text("image,Mass\na.png,1\nb.png,0\n")
    for name in ("a.png", "b.png"):
        Image.new("L", (32, 32)).save(tmp_path / "alpha" / name)
    said, imported = started("from suture.cli import main; main()", *words, cwd=tmp_path)
    assert says in said
    assert imported <= may_import


def test_a_terminal_that_lacks_a_character_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latin-1 has no epsilon; a run would end with a traceback when its figures are printed."""
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    said, _ = started("from suture.cli import main; main()", "ledger", "--help", cwd=tmp_path)
    assert "answers, ?, figures" in said


def test_the_package_imports_nothing_and_shows_its_names(tmp_path: Path) -> None:
    said, imported = started("import suture; print(dir(suture))", cwd=tmp_path)
    assert "load_job" in said
    assert imported == set()
