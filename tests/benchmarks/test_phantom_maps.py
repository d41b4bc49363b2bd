"""The plan of the phantom maps: what is drawn, and what is measured beside the AUROC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from phantom_maps import (
    DESIGNS,
    PARAMETERS,
    PhantomFederation,
    by_parameter,
    federations,
    job_of,
    mechanisms,
    plan,
    taught,
    without_label,
)

from suture.simulation.partition import SERVER


def test_no_parameter_of_an_unseen_federation_lies_in_a_fitted_range() -> None:
    fitted = plan()["fitted"]

    for at in federations(plan(), "unseen"):
        for name, [(low, high)] in fitted.items():
            assert not low <= at[name] <= high or at[name] in (low, high)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_design_is_a_latin_hypercube_over_its_ranges(design: str) -> None:
    every, n = federations(plan(), design), plan()["draws"][design]

    assert len(every) == n
    assert every == federations(plan(), design)
    for name in PARAMETERS:
        values, ranges = np.array([at[name] for at in every]), plan()[design][name]
        assert all(any(low <= value <= high for low, high in ranges) for value in values)
        for low, high in ranges:  # each range has its share of the federations
            widths = [b - a + (name == "sites") for a, b in ranges]
            share = np.mean((low <= values) & (values <= high))
            assert share == pytest.approx((high - low + (name == "sites")) / sum(widths), abs=0.02)


@given(st.integers(2, 12), st.floats(0, 1), st.integers(0, 1000))
def test_every_finding_has_a_site_and_every_site_a_finding(sites: int, overlap: float, seed: int) -> None:
    lists = PhantomFederation(sites=sites, overlap=overlap, seed=seed).lists()

    assert len(lists) == sites
    assert min(map(len, lists.values())) > 0
    assert len({name for own in lists.values() for name in own}) == 10


def test_what_a_method_teaches_and_dilutes(tmp_path: Path) -> None:
    sites = PhantomFederation(
        folder=str(tmp_path), sites=2, overlap=0.0, images=20, test=100, size=16, seed=4
    )
    tables, lists = sites.tables(), sites.lists()
    own = {name: [label in lists[name].names for label in tables[name].labels] for name in lists}
    positives = {name: (tables[name].y == 1).sum(axis=0) for name in lists}
    hidden = sum(int(positives[name][~np.array(own[name])].sum()) for name in lists)

    assert taught(sites) == pytest.approx(hidden / sum(int(p.sum()) for p in positives.values()))
    assert without_label(sites) == pytest.approx(0.5)
    assert len(tables[SERVER]) == 100
    found = {row: mechanisms(sites, job_of(plan(), sites, row).method) for row in plan()["rows"]}
    half, share = 0.5, round(taught(sites), 4)
    assert found["vanilla"] == found["fedprox"] == {"taught": share, "diluted": half}
    assert found["partial"] == {"taught": 0.0, "diluted": half}
    for row in ("surgical", "fedavg_owners", "combined_distil", "individual"):
        assert found[row] == {"taught": 0.0, "diluted": 0.0}


def test_the_gain_in_each_third_of_a_parameter_by_hand() -> None:
    records = [
        {"at": {"images": i}, "rows": {"a": {"mean": 0.6 + 0.1 * (i > 3)}, "c": {"mean": 0.5}}}
        for i in range(6)
    ]

    lines = by_parameter(records, "images", ["a"], "c").splitlines()

    assert lines[2:] == ["| 0 to 1 | 2 | +0.100 |", "| 2 to 3 | 2 | +0.100 |", "| 4 to 5 | 2 | +0.200 |"]
