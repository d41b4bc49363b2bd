"""The page of what leaves a site agrees with the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from suture.cli import app
from suture.methods import METHODS
from suture.models.classifier import Layout
from suture.protocol.decisions import CELLS
from suture.protocol.egress import list_declared
from suture.protocol.messages import KEYS, Reason, Reply
from suture_admin.egress_page import _MEANT, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "egress.md"


@pytest.mark.complete
def test_the_committed_page_is_what_the_code_renders(tmp_path: Path) -> None:
    assert PAGE.read_text() == page(), "write it anew: suture egress -o docs/reference/egress.md"
    result = CliRunner().invoke(app, ["egress", "-o", str(tmp_path / "page.md")])
    assert result.exit_code == 0
    assert (tmp_path / "page.md").read_text() == page()
    assert CliRunner().invoke(app, ["egress"]).output == page()


def answers(kind: Any = Reply) -> Iterator[type[Any]]:
    """Every class that an answer of a site consists of."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        parts: Any = get_type_hints(kind).values()
    else:
        parts = get_args(kind)
    for part in parts:
        yield from answers(part)


@pytest.mark.parametrize("kind", sorted(set(answers()), key=lambda kind: kind.__name__))
def test_every_field_of_an_answer_is_on_the_page(kind: type[Any]) -> None:
    """A field that its docstring does not name would leave a site unnoticed."""
    (section,) = [part for part in page().split("\n## ") if part.startswith(f"{_MEANT[kind]}\n")]
    named = {line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[4:]}
    assert named == {field.name for field in dataclasses.fields(kind)}


def test_a_field_without_a_word_about_it_makes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Age:
        """Of whom.

        Attributes:
            mean: of the patients.
        """

        mean: float
        oldest: float

    monkeypatch.setitem(_MEANT, Age, "Age")
    with pytest.raises(KeyError, match="oldest"):
        page()


@pytest.mark.complete
def test_the_page_has_the_words_and_sizes_of_the_code() -> None:
    for word in (*get_args(Reason), *KEYS, str(CELLS)):
        assert word in page()


@pytest.mark.parametrize("name", METHODS)
def test_every_number_that_a_method_declares_is_on_the_page(name: str) -> None:
    method: Any = METHODS[name]()
    section = page().split(f"### `{name}`:")[1].split("###")[0]
    if method.about.pooled:
        assert "No federation" in section
        return
    egress = method.egress(Layout({}, {}))
    for scalar, (low, high) in egress.scalars.items():
        assert f"| {scalar} | a number in [{low:g}, {high:g}] |" in section
    for loss, (low, high) in egress.losses.items():
        assert f"| {loss} | a number in [{low:g}, {high:g}]; withheld below `min_loss` samples |" in section
    assert ("| counts |" in section) == bool(egress.counts)
    assert ("| prior |" in section) == (method.sharing.prior is not None)
    reasons = {row["field"]: row["why"] for row in list_declared(egress)}
    assert ("| shared |" in section) == ("shared" in reasons)
    assert ("| head |" in section) == ("head" in reasons and method.sharing.share is None)
