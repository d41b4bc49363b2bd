"""What labels imply: by hand, and against all ways to fill in the unknown ones."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hypothesis_profiles import examples
from suture.core import ontology as relations
from suture.core.errors import LabelError
from suture.core.ontology import Relations, implied, read_atlas

NAN = np.nan

LUNG = Relations(
    {"Consolidation": ("Lung Opacity",), "Edema": ("Lung Opacity",), "Lung Opacity": ("Abnormal",)},
    exhaustive=(("Lung Opacity", ("Consolidation", "Edema")),),
)
NAMES = ("Abnormal", "Lung Opacity", "Consolidation", "Edema")


def closed(*row: float, own: tuple[str, ...] | None = None, relations: Relations = LUNG) -> list[float]:
    found = implied(np.array([row], dtype=np.float32), NAMES, relations, own)
    assert not found.contradictions
    return [None if np.isnan(value) else int(value) for value in found.labels[0]]  # type: ignore[misc]


def test_a_child_makes_its_ancestors_present_and_an_absent_parent_its_descendants_absent() -> None:
    assert closed(NAN, NAN, 1, NAN) == [1, 1, 1, None]
    assert closed(0, NAN, NAN, NAN) == [0, 0, 0, 0]
    # A present parent, or an absent child alone, says nothing.
    assert closed(NAN, 1, NAN, NAN) == [1, 1, None, None]
    assert closed(NAN, NAN, 0, NAN) == [None, None, 0, None]


def test_an_exhaustive_group_counts_only_where_the_site_annotates_all_of_it() -> None:
    assert closed(NAN, NAN, 0, 0) == [None, 0, 0, 0]
    assert closed(NAN, 1, 0, NAN) == [1, 1, 0, 1]
    some = ("Lung Opacity", "Consolidation")
    assert closed(NAN, 1, 0, NAN, own=some) == [1, 1, 0, None]
    assert closed(NAN, NAN, 0, 0, own=some) == [None, None, 0, 0]
    open_group = Relations(LUNG.parents)
    assert closed(NAN, NAN, 0, 0, relations=open_group) == [None, None, 0, 0]


def line(n: int) -> dict[str, tuple[str, ...]]:
    return {str(i): (str(i - 1),) for i in range(1, n)}


@pytest.mark.parametrize(
    "many",
    [
        {"parents": {str(i): ("top",) for i in range(10_001)}},
        {"parents": line(300)},
        {"parents": {str(i): tuple(map(str, range(i))) for i in range(60)}},
        {"parents": line(30), "exclusive": (("0",),) * 900},
    ],
)
def test_relations_that_would_fill_the_memory_are_refused(
    many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relations, "_MOST_PAIRS", 20_000)
    assert len(Relations(line(190)).ancestors["189"]) == 189
    with pytest.raises(LabelError, match="classes"):
        Relations(**many)


def test_one_of_an_exclusive_group_makes_the_others_absent() -> None:
    kinds = Relations(LUNG.parents, exclusive=(("Consolidation", "Edema"),))
    assert closed(NAN, NAN, 1, NAN, relations=kinds) == [1, 1, 1, 0]
    assert closed(NAN, NAN, 0, NAN, relations=kinds) == [None, None, 0, None]


def test_absence_is_stated_of_own_classes_alone_and_reaches_them_through_others() -> None:
    assert closed(0, NAN, NAN, NAN, own=("Abnormal", "Edema")) == [0, None, None, 0]
    two = implied(np.array([[0, NAN]], dtype=np.float32), ("Abnormal", "Edema"), LUNG)
    np.testing.assert_array_equal(two.labels, [[0, 0]])


TORN = np.array([[NAN, 0, 1, NAN], [1, 1, 1, 0], [NAN, 1, 0, 0]], dtype=np.float32)


def test_contradictions_name_rows_and_can_be_settled() -> None:
    refused = implied(TORN, NAMES, LUNG)
    assert refused.contradictions == {
        "'Lung Opacity' = 0 and 'Consolidation' = 1": (0,),
        "'Lung Opacity' = 1 and what the other labels imply": (2,),
    }
    np.testing.assert_array_equal(refused.labels, TORN)

    children = implied(TORN, NAMES, LUNG, settle="child wins")
    assert (children.contradictions, children.settled) == ({}, (0, 2))
    np.testing.assert_array_equal(children.labels, [[1, 1, 1, NAN], [1, 1, 1, 0], [NAN, 0, 0, 0]])

    without = implied(TORN, NAMES, LUNG, settle="leave out")
    assert (without.contradictions, without.settled) == ({}, (0, 2))
    np.testing.assert_array_equal(without.labels, [[NAN] * 4, [1, 1, 1, 0], [NAN] * 4])


def test_children_that_exclude_each_other_are_not_settled_by_winning() -> None:
    kinds = Relations(LUNG.parents, exclusive=(("Consolidation", "Edema"),))
    both = np.array([[NAN, 0, 1, 1]], dtype=np.float32)
    assert list(implied(both, NAMES, kinds, settle="child wins").contradictions.values()) == [(0,)]
    assert np.isnan(implied(both, NAMES, kinds, settle="leave out").labels).all()


@pytest.mark.parametrize(
    ("relations", "says"),
    [
        (
            {"parents": {"A": ("B",), "B": ("C",), "C": ("A",)}},
            "'A' < 'B' < 'C' < 'A'|'B' < 'C' < 'A' < 'B'|'C' <",
        ),
        ({"parents": {"A": ("A",)}}, "'A' < 'A': a class cannot be its own ancestor"),
        ({"exhaustive": (("A", ("B",)),)}, "'B' is in an exhaustive group of 'A', which is not among"),
        ({"exclusive": (("A", "B", "A"),)}, "has a class twice"),
        ({"exclusive": ((),)}, "is empty"),
        (
            {"parents": {"C": ("A", "B")}, "exclusive": (("A", "B"),)},
            "'C' could never be present: 'B' and 'A'",
        ),
        ({"parents": {"B": ("A",)}, "exclusive": (("A", "B"),)}, "'B' could never be present: 'A' and 'B'"),
    ],
)
def test_relations_that_cannot_be(relations: dict[str, object], says: str) -> None:
    with pytest.raises(LabelError, match=says):
        Relations(**relations)  # type: ignore[arg-type]


def test_ancestors_come_before_descendants_and_unrelated_names_last() -> None:
    assert LUNG.with_ancestors(["Hernia", "Edema"]) == ("Abnormal", "Lung Opacity", "Edema", "Hernia")


LETTERS = "ABCDEF"


@st.composite
def cases(draw: st.DrawFn, exhaustive: bool) -> tuple[Relations, set[str], np.ndarray]:
    """Relations of a random DAG of six classes, the own classes of a site, and labels."""
    parents = {
        name: tuple(draw(st.sets(st.sampled_from(LETTERS[:i]), max_size=2)))
        for i, name in enumerate(LETTERS)
        if i
    }
    groups = []
    for parent in LETTERS if exhaustive else ():
        children = [name for name in parents if parent in parents[name]]
        if children and draw(st.sampled_from([True, False])):
            groups.append((parent, tuple(children)))
    exclusive = draw(st.lists(st.sets(st.sampled_from(LETTERS), min_size=2, max_size=3), max_size=2))
    try:
        relations = Relations(parents, tuple(groups), tuple(tuple(sorted(group)) for group in exclusive))
    except LabelError:
        relations = Relations(parents, tuple(groups))
    own = draw(st.sets(st.sampled_from(LETTERS), min_size=1))
    row = draw(st.lists(st.sampled_from([0.0, 1.0, NAN, NAN]), min_size=6, max_size=6))
    return relations, own, np.array(row, dtype=np.float32)


def models(relations: Relations, own: set[str], row: np.ndarray) -> np.ndarray:
    """All ways [m, 6] to fill in a row that keep the rules; an exhaustive group is one if it is own."""
    kept = []
    for values in itertools.product([0, 1], repeat=6):
        of = dict(zip(LETTERS, values, strict=True))
        if (
            all(np.isnan(known) or known == value for known, value in zip(row, values, strict=True))
            and all(of[child] <= of[p] for child, above in relations.parents.items() for p in above)
            and all(
                of[p] <= sum(of[c] for c in group) for p, group in relations.exhaustive if {*group} <= own
            )
            and all(sum(of[name] for name in group) <= 1 for group in relations.exclusive)
        ):
            kept.append(values)
    return np.array(kept).reshape(-1, 6)


@pytest.mark.complete
@examples(150)
@given(cases(exhaustive=False))
def test_what_is_implied_is_what_all_models_share(case: tuple[Relations, set[str], np.ndarray]) -> None:
    relations, own, row = case
    found, possible = implied(row[None], LETTERS, relations, own), models(relations, own, row)
    if not len(possible):
        assert list(found.contradictions.values()) == [(0,)]
        return
    assert not found.contradictions
    for i, name in enumerate(LETTERS):
        shared = {*possible[:, i].tolist()}
        if len(shared) == 2 or (shared == {0} and name not in own and row[i] != 0):
            assert np.isnan(found.labels[0, i])
        else:
            assert found.labels[0, i] == shared.pop()


@pytest.mark.complete
@examples(150)
@given(cases(exhaustive=True))
def test_with_exhaustive_groups_all_that_is_implied_is_true(
    case: tuple[Relations, set[str], np.ndarray],
) -> None:
    relations, own, row = case
    found, possible = implied(row[None], LETTERS, relations, own), models(relations, own, row)
    if found.contradictions:
        assert not len(possible)
    for i in np.flatnonzero(~np.isnan(found.labels[0])) if len(possible) else ():
        assert {*possible[:, i].tolist()} == {found.labels[0, i]}
    again = implied(found.labels, LETTERS, relations, own)
    np.testing.assert_array_equal(again.labels, found.labels)


@pytest.mark.complete
@given(cases(exhaustive=True))
def test_an_unrelated_class_changes_nothing(case: tuple[Relations, set[str], np.ndarray]) -> None:
    relations, own, row = case
    wider = implied(np.append(row, np.float32(1))[None], [*LETTERS, "Z"], relations, {*own, "Z"})
    np.testing.assert_array_equal(wider.labels[:, :6], implied(row[None], LETTERS, relations, own).labels)
    assert wider.labels[0, 6] == 1


@pytest.mark.complete
def test_ten_thousand_classes_are_closed_over_every_level() -> None:
    """A tree of ten children each, whose groups of siblings are exhaustive and exclude each other."""
    names = [f"C{i}" for i in range(10_000)]
    parents = {names[i]: (names[(i - 1) // 10],) for i in range(1, len(names))}
    groups = [(names[i], tuple(names[10 * i + 1 : 10 * i + 11])) for i in range(999)]
    relations = Relations(parents, tuple(groups), tuple(group for _, group in groups))
    leaves = np.array([1_111, 5_000, 9_990])
    labels = np.full((3, 10_000), NAN, dtype=np.float32)
    labels[np.arange(3), leaves] = 1
    found = implied(labels, names, relations).labels
    # Of a present leaf and each of its ancestors nine siblings are absent, and all that these include.
    assert (found == 1).sum(axis=1).tolist() == [4 + 1, 4 + 1, 4 + 1]
    for row, leaf in enumerate(leaves):
        siblings = np.setdiff1d(10 * ((leaf - 1) // 10) + np.arange(1, 11), leaf)
        assert (found[row, siblings] == 0).all()
        assert (found[row, 1:11] == 0).sum() == 9


@pytest.mark.parametrize(
    ("known", "implied_"),
    [
        ({"No Finding": 1}, {"Hernia": 0, "Mass": 0}),
        ({"Mass": 1}, {"No Finding": 0}),
        ({"Support Devices": 1}, {}),
        ({"Pacemaker": 1}, {"Support Devices": 1}),
        ({"No Finding": 1, "Support Devices": 1}, {"Hernia": 0, "Mass": 0}),
        # Another finding, which the site does not list, may be there.
        ({"No Finding": 0, "Mass": 0, "Hernia": 0}, {}),
        ({"Mass": 0, "Hernia": 0}, {}),
    ],
)
def test_no_finding_is_the_absence_of_the_sites_own_classes(
    known: dict[str, int], implied_: dict[str, int]
) -> None:
    relations = Relations({"Pacemaker": ("Support Devices",)}, nothing={"No Finding": ("Support Devices",)})
    own = ("No Finding", "Mass", "Hernia", "Support Devices", "Pacemaker")
    names = (*own, "Nodule")  # which the site does not annotate
    row = np.array([[known.get(name, NAN) for name in names]], dtype=np.float32)
    found = implied(row, names, relations, own).labels[0]
    assert {name: int(y) for name, y in zip(names, found, strict=True) if not np.isnan(y)} == known | implied_


def test_the_atlas_has_no_finding_with_the_exception_of_chexpert() -> None:
    assert read_atlas("chest").relations().nothing == {"No Finding": ("Support Devices",)}
    assert read_atlas("skin").relations().nothing == {}
    torn = implied(
        np.array([[1, 1]], dtype=np.float32), ("No Finding", "Hernia"), read_atlas("chest").relations()
    )
    assert list(torn.contradictions) == ["'No Finding' = 1 and 'Hernia' = 1"]
