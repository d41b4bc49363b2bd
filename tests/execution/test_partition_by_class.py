"""suture.execution.partition: sites that are alike, unlike, or dominated by an attribute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesions import ROWS, table, together
from suture.core.errors import DataError
from suture.data.readers import load_table
from suture.data.split import classes
from suture.data.table import SPLITS
from suture.execution.partition import by_attribute, dirichlet, iid
from suture_papers.fedmas.hyperkvasir import FOLDS, HyperKvasirConfig

KEYS = [(kind, validation) for kind in range(4) for validation in (False, True)]


@given(ROWS, st.integers(1, 8), st.integers(0, 5))
def test_sites_that_are_alike(rows: list[tuple[int, int]], k: int, seed: int) -> None:
    rows = [(0, 0), *rows]
    whole = table(rows)
    k = min(k, sum(lesion % 3 < 2 for lesion in {lesion for lesion, _ in rows}))
    site = iid(whole, k, seed)
    assert len(site) == len(whole)
    assert set(site[np.array(whole.split) == "train"].tolist()) == set(range(k))
    assert together(whole.patients, site)
    first = {lesion: min(kind % 4 for other, kind in rows if other == lesion) for lesion, _ in rows}
    of = dict(zip(whole.patients, site.tolist(), strict=True))
    for own in (list(first), *([x for x in first if (first[x], x % 3 == 2) == key] for key in KEYS)):
        counts = np.bincount([of[f"L{lesion}"] for lesion in own], minlength=k)
        assert counts.max() - counts.min() <= 1


@given(ROWS, st.integers(1, 4), st.sampled_from([0.3, 0.5, 5.0]), st.integers(0, 5))
def test_sites_that_are_unlike(rows: list[tuple[int, int]], k: int, alpha: float, seed: int) -> None:
    rows = [(0, 0), *rows]
    whole = table(rows)
    k = min(k, 1 + sum(lesion % 3 < 2 for lesion in {lesion for lesion, _ in rows}) // 5)
    site = dirichlet(whole, k, alpha, seed)
    assert len(site) == len(whole)
    assert set(site[np.array(whole.split) == "train"].tolist()) == set(range(k))
    assert together(whole.patients, site)
    np.testing.assert_array_equal(site, dirichlet(whole, k, alpha, seed))


def test_a_larger_alpha_is_more_alike() -> None:
    whole = table([(i, i % 3) for i in range(3000)], ("train",))
    for alpha, low, high in ((0.1, 0.5, 1.0), (1000.0, 0.0, 0.05)):
        site = dirichlet(whole, 4, alpha, seed=3)
        shares = np.array([np.bincount(site[classes(whole.y) == k], minlength=4) / 1000 for k in range(3)])
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        assert low <= float((shares.max(axis=1) - 0.25).max()) <= high


def test_validation_images_follow_the_shares_of_their_class() -> None:
    whole = table([(i, i % 3) for i in range(3000)], ("train", "validation"))
    site = dirichlet(whole, 4, 0.5, seed=3)
    for kind in range(3):
        of = [site[(classes(whole.y) == kind) & (np.array(whole.split) == part)] for part in SPLITS[:2]]
        train, validation = (np.bincount(rows, minlength=4) for rows in of)
        assert abs(train - validation).max() <= 1


def test_too_few_images_are_refused() -> None:
    whole = table([(i, 0) for i in range(3)], ("train",))
    with pytest.raises(DataError, match=r"images\.tar: too few training images for 4 sites; take fewer"):
        iid(whole, 4, seed=0)
    with pytest.raises(DataError, match=r"1000 draws of Dir\(0\.5\) each left one of 4 sites without"):
        dirichlet(whole, 4, 0.5, seed=0)


@given(st.integers(40, 80), st.integers(120, 300), st.integers(2, 5), st.integers(0, 3))
def test_the_last_site_is_dominated_by_the_rarer_attribute(few: int, many: int, k: int, seed: int) -> None:
    whole = table([(i, i % 3) for i in range(few + many)], ("train",))
    tone = ["dark"] * few + ["light"] * many
    site = by_attribute(whole, tone, k, 0.9, seed)
    dark = np.array(tone) == "dark"
    last = site == k - 1
    assert dark[last].mean() == pytest.approx(0.9, abs=0.06)
    assert last[dark].mean() == pytest.approx(0.9, abs=0.06)
    for other in range(k - 1):
        assert dark[site == other].mean() < 0.2
        # Each of three classes of two attributes is cut by itself, with at most one too many or too few.
        assert abs(int((site == other).sum()) - int((~last).sum()) / (k - 1)) <= 6


def test_a_lesion_of_two_attributes_counts_for_the_rarer() -> None:
    whole = table([(i // 2, 0) for i in range(100)], ("train",))
    tone = ["dark" if i % 2 and i < 60 else "light" for i in range(100)]
    site = by_attribute(whole, tone, 2, 1.0, seed=0)
    assert together(whole.patients, site)
    assert site.tolist() == [1] * 60 + [0] * 40
    with pytest.raises(DataError, match="images of light; two attributes are needed"):
        by_attribute(whole, ["light"] * 100, 2, 0.9, seed=0)


@pytest.mark.data
def test_the_real_folds_make_eight_sites(data_root: Path) -> None:
    path = data_root / "hyperkvasir_splits" / f"{FOLDS}.gz"
    read = load_table(HyperKvasirConfig(root=path.parent, table=path))
    training = read.rows(np.array(read.split) != "test")
    alike = iid(training, 8, seed=1337)
    unlike = dirichlet(training, 8, 0.5, seed=1337)
    counts = [
        np.array([(training.y[site == i] == 1).sum(axis=0) for i in range(8)]) for site in (alike, unlike)
    ]
    assert np.ptp(counts[0], axis=0).max() <= 2  # one of training and one of validation
    assert np.ptp(counts[1], axis=0).max() > 300
    assert [c.sum() for c in counts] == [len(training)] * 2
