"""The ledger's tables in a terminal of the usual width."""

from __future__ import annotations

from rich.console import Console

from suture.protocol.messages import Spent
from suture_admin.ledger import Statement, _BudgetLine, ledger_tables

NAME = "surgical_nih-20261126-081530-a1b2c3d4"


def test_they_fit_80_columns_with_every_number_whole() -> None:
    figures = {"Pleural_Thickening": 123456}
    of = {"experiment": NAME, "clip": 0.125, "noise": 0.0, "delta": 1e-5, "answers": 1234, "updates": 1200}
    rest = {"epsilon": 3.97, "steps": "1200 steps, σ 1.51, q 0.13", "figures": figures, "numbers": 7654321}
    line = _BudgetLine(**of, **rest, last="2026-11-26T08:15:30")
    one = {"Pleural_Thickening": 9000}
    spent = Spent(3.97, 1200, 0, 1, 123456, 7654321)
    found = Statement([line], spent, 1e-5, figures, {NAME: 766}, {NAME: 3}, one, 1, 50, 10.0, [], [], None)
    console = Console(width=80, record=True)
    for table in ledger_tables(found):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for number in ("1234", "766", "3", "123456", "7654321", "2026-11-26", "0.125", "1200", "3.97", "9000"):
        assert number in words, number
    assert NAME in "".join(w for w in words if w in NAME and not w.isdigit())  # folded, not cut off
