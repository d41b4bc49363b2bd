"""What benchmarks/evidence names is there: the tests, and the lines that its mutants change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from suture.methods import METHODS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from evidence import FOLDER, PAGE, Evidence, read  # noqa: E402

FILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_named_tests_and_lines_exist(path: Path) -> None:
    evidence: Evidence = read(path)
    assert evidence.method == path.stem
    assert evidence.method in METHODS
    for test in evidence.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test
    for mutant in evidence.mutants:
        assert (ROOT / mutant.file).read_text().count(mutant.before) == 1, mutant.before
        assert mutant.before != mutant.after


def test_the_page_has_every_method_that_has_evidence() -> None:
    text = PAGE.read_text()
    assert [path.stem for path in FILES if f"| `{path.stem}` |" not in text] == []
