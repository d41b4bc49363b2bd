"""What benchmarks/reference.py writes is what is committed, and the committed pages have everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference import _sections, write_pages

from suture.cli.app import documented
from suture.data.config import SiteConfig
from suture.execution import catalogue
from suture.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "reference"


@pytest.mark.complete
def test_what_is_generated_is_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "CATALOGUE_FILE", tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text("{}")
    written = [path.resolve().relative_to(tmp_path) for path in write_pages(documented(), tmp_path / "docs")]
    assert {path.name for path in written} >= {"catalogue.json", "egress.md", "refusals.txt"}
    for path in written[1:]:
        committed = (ROOT / path).read_text()
        assert (tmp_path / path).read_text() == committed, "write it again: python benchmarks/reference.py"


def test_the_pages_have_every_key_method_and_command() -> None:
    keys = [line for section in _sections(SiteConfig) for line in section.splitlines() if "| `" in line[:3]]
    assert len(keys) > 20
    assert not [line for line in keys if line.endswith("|  |")], "no text in `Attributes:`"
    names = ("methods", "configuration", "commands")
    methods, configuration, commands = ((DOCS / f"{name}.md").read_text() for name in names)
    for name in METHODS:
        assert f"| `{name}` [" in methods
        assert f"#### Method `{name}`\n" in configuration
    for name, command in documented().items():
        for word, one in getattr(command, "commands", {"": command}).items():
            full = f"{name} {word}".strip()
            assert (f"### `suture {full}`\n" in commands) is not one.hidden, full
    assert "One of `local`, `sim`, `poc`, `prod`." in commands
