"""The page of what leaves a site agrees with the code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from suture.cli import app
from suture.methods import METHODS
from suture.models.classifier import Layout
from suture.protocol.egress import declared
from suture.simulation.egress_page import _FIELDS, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "egress.md"


def test_the_committed_page_is_what_the_code_renders(tmp_path: Path) -> None:
    assert PAGE.read_text() == page(), "write it anew: suture egress -o docs/reference/egress.md"
    result = CliRunner().invoke(app, ["egress", "-o", str(tmp_path / "page.md")])
    assert result.exit_code == 0
    assert (tmp_path / "page.md").read_text() == page()
    assert CliRunner().invoke(app, ["egress"]).output == page()


@pytest.mark.parametrize("kind", _FIELDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_on_the_page(kind: Any) -> None:
    assert set(_FIELDS[kind]) == {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", METHODS)
def test_every_number_that_a_method_declares_is_on_the_page(name: str) -> None:
    method: Any = METHODS[name]()
    section = page().split(f"### `{name}`:")[1].split("###")[0]
    if method.limits.pooled:
        assert "No federation" in section
        return
    egress = method.egress(Layout({}, {}))
    for scalar, (low, high) in egress.scalars.items():
        assert f"| {scalar} | a number in [{low:g}, {high:g}] |" in section
    for loss, (low, high) in egress.losses.items():
        assert f"| {loss} | a number in [{low:g}, {high:g}]; withheld below `min_loss` samples |" in section
    assert ("| counts |" in section) == bool(egress.counts)
    assert ("| prior |" in section) == egress.prior
    reasons = {row["field"]: row["why"] for row in declared(egress)}
    assert ("| shared |" in section) == ("shared" in reasons)
    assert ("| head |" in section) == ("head" in reasons and method.share is None)
