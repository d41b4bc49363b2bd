"""The arithmetic of benchmarks/figures.py, by hand numbers."""

from __future__ import annotations

import dataclasses
import json

import pytest
from figures import HEAD, Figure, Target, cells, compared, number, spread

ROUND = Figure("rounds", "a round", "s", (2.0, 3.0, 8.0), "flwr", (4.0, 2.0, 4.0))


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    """2/4, 3/2 and 8/4: the median is 1.5, where that of the medians, 3/4, is 0.75."""
    assert ROUND.ratios == (0.5, 1.5, 2.0)
    assert cells(ROUND)[3:8] == ["3", "3.00 (2.00-8.00)", "flwr", "4.00 (2.00-4.00)", "1.50 (0.500-2.00)"]


def test_one_sample_of_an_anchor_stands_beside_each() -> None:
    assert dataclasses.replace(ROUND, beside=(2.0,)).ratios == (1.0, 1.5, 4.0)


def test_samples_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="a round: 3 samples beside 2 of its anchor"):
        dataclasses.replace(ROUND, beside=(1.0, 2.0))


@pytest.mark.parametrize(
    ("targets", "reached"),
    [
        ((), None),
        ((Target("figure", "≤", 3.0),), True),
        ((Target("figure", "<", 3.0),), False),
        ((Target("ratio", "≥", 1.5),), True),
        ((Target("ratio", "≥", 1.6),), False),
        ((Target("figure", "≤", 3.0), Target("ratio", "<", 1.0)), False),
    ],
)
def test_all_targets_are_of_medians(targets: tuple[Target, ...], reached: bool | None) -> None:
    assert dataclasses.replace(ROUND, targets=targets).reached is reached


def test_a_target_of_what_is_missing_is_not_reached_and_its_row_says_why() -> None:
    alone = Figure(
        "rounds", "a round", "s", (1.0,), "flwr", (), (Target("ratio", "<", 1),), missing="no flwr"
    )
    row = dict(zip(HEAD, cells(alone), strict=True))
    assert (row["its figure"], row["ratio"], row["reached"]) == ("not measured: no flwr", "", "no")
    failed = Figure("rounds", "all", "", (), targets=(Target("figure", "<", 1),), missing="OSError: full")
    row = dict(zip(HEAD, cells(failed), strict=True))
    assert (row["n"], row["Suture"], row["reached"]) == ("0", "not measured: OSError: full", "no")


@pytest.mark.parametrize(
    ("samples", "more", "cell"),
    [
        # The other run has 2, 3 and 8: its worst is 8 seconds, or 2 images a second.
        ((8.4, 8.4, 8.4), False, "2.80"),
        ((8.5, 8.5, 8.5), False, "2.83 slower"),
        ((1.9, 1.95, 9.0), True, "0.65"),
        ((1.8, 1.9, 9.0), True, "0.63 slower"),
    ],
)
def test_slower_is_a_median_beyond_the_worst_sample_and_5_percent(
    samples: tuple[float, ...], more: bool, cell: str
) -> None:
    before = dataclasses.replace(ROUND, more=more)
    assert compared([dataclasses.replace(before, samples=samples)], [before]) == ([cell], [])


def test_a_figure_that_only_one_run_has_is_said() -> None:
    other = dataclasses.replace(ROUND, anchor="tensors alone")
    lost = dataclasses.replace(ROUND, samples=(), beside=())
    assert compared([other], [ROUND]) == (["new"], ["rounds: a round: s: flwr"])
    cpu = dataclasses.replace(ROUND, unit="s of CPU", samples=(1.5, 1.5, 1.5))
    assert compared([ROUND, cpu], [ROUND, cpu]) == (["1.00", "1.00"], [])
    assert compared([ROUND], [lost]) == (["not comparable"], [])


def test_a_figure_that_was_0_has_no_ratio_to_it() -> None:
    none = Figure("training", "host reads", "reads", (0.0,))
    assert compared([none], [none]) == (["equal"], [])
    assert compared([dataclasses.replace(none, samples=(1.0,))], [none]) == (["slower"], [])


def test_a_figure_is_the_same_after_json() -> None:
    figure = dataclasses.replace(ROUND, targets=(Target("ratio", "<", 1.0),), more=True)
    assert Figure.of(json.loads(json.dumps(dataclasses.asdict(figure)))) == figure


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0, 0.0296, 1.5, 99.94, 1024.4)] == [
        "0",
        "0.0296",
        "1.50",
        "99.9",
        "1,024",
    ]
    assert spread((2.0, 2.0)) == "2.00"
