"""What recommendations are judged by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from recommendations import Advice, Federation, advise, confusion, fitted_on, regrets

from suture_papers.tables.recommendation import Expected, Situation


class Told:
    """A fit that expects the same everywhere."""

    def __init__(self, **gains: float) -> None:
        self.gains = gains

    def expected(self, of: Situation) -> dict[str, Expected]:
        return {row: Expected(g, (g - 0.01, g + 0.01), (g - 0.02, g + 0.02)) for row, g in self.gains.items()}

    def outside(self, of: Situation) -> dict[str, float]:
        """Nothing is."""
        return {}


def federation(**means: float) -> Federation:
    return Federation("one", "study", Situation(0.5, 0.5, 3, 20, 0.1), means)


def test_regret_is_the_distance_from_the_best_row_by_hand() -> None:
    one = federation(vanilla=0.60, surgical=0.63, partial=0.65, combined_distil=0.61)

    found = advise(one, Told(surgical=0.02, partial=0.015))  # type: ignore[arg-type]

    assert (found.recommended, found.best) == ("surgical", "partial")
    assert found.regret == pytest.approx(
        {"recommended": 0.02, "always surgical": 0.02, "always combined": 0.04, "random": 0.65 - 0.6225}
    )
    assert found.told
    assert found.right
    assert found.covered  # .03 is within .02 ± .02


def test_the_control_is_recommended_where_nothing_is_expected_to_gain() -> None:
    found = advise(federation(vanilla=0.60, surgical=0.58), Told(surgical=-0.01))  # type: ignore[arg-type]

    assert (found.recommended, found.told) == ("vanilla", False)


def test_a_row_that_was_not_run_is_not_recommended() -> None:
    assert math.isnan(federation(vanilla=0.6).gain("surgical"))
    assert advise(federation(vanilla=0.6), Told(surgical=1.0)).recommended == "vanilla"  # type: ignore[arg-type]


def advice(recommended: str, best: str, regret: float) -> Advice:
    return Advice(
        "x", recommended, best, {"recommended": regret, "random": 0.1}, True, True, True, 0.0, False
    )


def test_the_tables_by_hand() -> None:
    some = [advice("surgical", "partial", 0.02), advice("surgical", "surgical", 0.0)]

    assert confusion(some).splitlines()[2:] == ["| surgical | 1 | 1 | 2 |", "| partial | 0 | 0 | 0 |"]
    mean = "0.0100 (0.0000 to 0.1371)"  # ± 12.706 · .01414 / √2; no regret is negative
    assert f"| recommended | 2 | {mean} | 0.0180 |" in regrets(some)


def test_a_strategy_is_compared_with_always_surgical_in_pairs() -> None:
    some = [
        replace(one, regret=one.regret | {"always surgical": more + one.regret["recommended"]})
        for one, more in (
            (advice("partial", "partial", 0.0), 0.01),
            (advice("partial", "vanilla", 0.5), 0.03),
        )
    ]

    assert regrets(some).endswith("| recommended less always surgical | 2 | -0.0200 (-0.1471 to +0.1071) | |")


def test_methods_of_few_federations_are_left_out_of_the_fit() -> None:
    every = [
        Federation(str(i), "study", Situation(0.1 + i / 50, i / 30, 2 + i % 5, 10 + i, i / 9), means)
        for i in range(20)
        for means in [{"vanilla": 0.6, "surgical": 0.62} | ({"partial": 0.61} if i < 5 else {})]
    ]

    assert list(fitted_on(every).methods) == ["surgical"]
