"""The arithmetic of the benchmarks' figures, by hand numbers; what they call, they try with `--quick`."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from figures import Figure, cells, compared
from harness import interval

from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.partition import class_lists
from suture_papers.skin_lesions.isic import LABELS as ISIC

ROUND = Figure("rounds", "a round", "s", (2.0, 3.0, 8.0), "flwr", (4.0, 2.0, 4.0))


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    """2/4, 3/2 and 8/4: the median is 1.5, where that of the medians, 3/4, is 0.75."""
    assert ROUND.ratios == (0.5, 1.5, 2.0)
    assert cells(ROUND)[3:8] == ["3", "3.00 (2.00-8.00)", "flwr", "4.00 (2.00-4.00)", "1.50 (0.500-2.00)"]
    assert dataclasses.replace(ROUND, beside=(2.0,)).ratios == (1.0, 1.5, 4.0)  # one sample for all
    with pytest.raises(ValueError, match="a round: 3 samples"):
        dataclasses.replace(ROUND, beside=(1.0, 2.0))


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


def test_an_interval_is_of_students_t() -> None:
    """Of 1, 2 and 3: mean 2, deviation 1, and 4.303 of 1 / sqrt(3) on either side."""
    assert interval([1, 2, 3]) == "+2.000 (-0.484 to +4.484)"
    assert interval([0.5]) == "+0.500"


PRINTED = tomllib.loads((Path(__file__).parents[2] / "benchmarks/fedlsm_counts.toml").read_text())


@pytest.mark.parametrize(("name", "labels", "clients"), [("nih", NIH, 8), ("isic", ISIC, 5)])
def test_fedlsms_sites_have_the_classes_that_the_paper_prints_counts_of(name, labels, clients) -> None:  # type: ignore[no-untyped-def]
    lists = class_lists("round_robin", labels, clients)
    known = {(c, client) for client, own in zip("ABCDEFGH", lists, strict=False) for c in own}
    assert known == {(c, client) for c, counts in PRINTED[name].items() for client in counts}
