"""What leaves a site: the page of `suture egress` agrees with the code, and the ledger fits a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from rich.console import Console

from suture.protocol.decisions import CELLS
from suture.protocol.messages import KEYS, Reason, Reply, Spent
from suture_admin.egress_page import _MEANT, page
from suture_admin.ledger import Statement, _BudgetLine, ledger_tables
from world import suture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "egress.md"


@pytest.mark.complete
def test_the_committed_page_is_what_the_code_renders(tmp_path: Path) -> None:
    committed = PAGE.read_text()
    assert committed == suture("egress"), "write it anew: suture egress -o docs/reference/egress.md"
    suture("egress", "-o", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == committed
    assert [word for word in (*get_args(Reason), *KEYS, str(CELLS)) if word not in committed] == []


def answers(kind: Any = Reply) -> Iterator[type[Any]]:
    """Every class that an answer of a site consists of."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        parts: Any = get_type_hints(kind).values()
    else:
        parts = get_args(kind)
    for part in parts:
        yield from answers(part)


def test_every_field_of_an_answer_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that its docstring does not name would leave a site unnoticed."""
    whole = page()
    for kind in set(answers()):
        (section,) = [part for part in whole.split("\n## ") if part.startswith(f"{_MEANT[kind]}\n")]
        named = {line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()[4:]}
        assert named == {field.name for field in dataclasses.fields(kind)}

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


LONG = "surgical_nih-20261126-081530-a1b2c3d4"


def test_the_ledgers_tables_fit_80_columns_with_every_number_whole() -> None:
    figures = {"Pleural_Thickening": 123456}
    of = {"experiment": LONG, "clip": 0.125, "noise": 0.0, "delta": 1e-5, "answers": 1234, "updates": 1200}
    rest = {"epsilon": 3.97, "steps": "1200 steps, σ 1.51, q 0.13", "figures": figures, "numbers": 7654321}
    line = _BudgetLine(**of, **rest, last="2026-11-26T08:15:30")
    one = {"Pleural_Thickening": 9000}
    spent = Spent(3.97, 1200, 0, 1, 123456, 7654321)
    found = Statement([line], spent, 1e-5, figures, {LONG: 766}, {LONG: 3}, one, 1, 50, 10.0, [], [], None)
    console = Console(width=80, record=True)
    for table in ledger_tables(found):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for number in ("1234", "766", "3", "123456", "7654321", "2026-11-26", "0.125", "1200", "3.97", "9000"):
        assert number in words, number
    assert LONG in "".join(w for w in words if w in LONG and not w.isdigit())  # folded, not cut off
