"""Names, not positions: spellings that are one name, and names that only look like one."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from suture.core.errors import LabelError
from suture.core.labels import LabelSet, canonical, lookalikes, union
from suture.core.vocabulary import CANONICAL, SYNONYMS

words = st.text(st.characters(categories=("L", "N"), include_characters=" _-"), min_size=1).filter(
    lambda t: any(c.isalnum() for c in t)
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Effusion", "Pleural Effusion"),
        ("Pleural_Thickening", "Pleural Thickening"),
        ("  pleural   EFFUSION ", "Pleural Effusion"),
        ("Ｅｄｅｍａ", "Edema"),  # full-width letters
        ("oedema", "Edema"),
        ("covid–19", "COVID-19"),  # an en dash
        ("MEL", "Melanoma"),
        ("akiec", "Actinic Keratosis or Intraepithelial Carcinoma"),
        ("lung scar", "Lung Scar"),
        ("LUNG_SCAR", "Lung Scar"),
    ],
)
def test_spellings_of_one_name(spelling: str, name: str) -> None:
    assert canonical(spelling) == name


@given(words)
def test_canonical_is_a_fixed_point(name: str) -> None:
    assert canonical(canonical(name)) == canonical(name)


def test_every_synonym_names_a_canonical_class() -> None:
    assert set(SYNONYMS.values()) <= set(CANONICAL)
    assert all(canonical(name) == name for name in CANONICAL)


def test_a_sites_own_synonyms_go_first() -> None:
    assert canonical("PE", {"pe": "Effusion"}) == "Pleural Effusion"
    assert canonical("Mass", {"Mass": "Lung Lesion"}) == "Lung Lesion"


@pytest.mark.parametrize("name", ["", "   ", "_", "a\x07b"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(LabelError, match="not a label name"):
        canonical(name)


def test_two_names_that_are_one_are_an_error_naming_both() -> None:
    with pytest.raises(LabelError, match="'Effusion' and 'pleural_effusion' are both 'Pleural Effusion'"):
        LabelSet.of(["Effusion", "Mass", "pleural_effusion"])
    with pytest.raises(LabelError, match="empty"):
        LabelSet(())
    with pytest.raises(LabelError, match="'Mass' appears twice"):
        LabelSet(("Mass", "Mass"))


def test_union_align_and_index() -> None:
    one, two = LabelSet(("Mass", "Edema")), LabelSet(("Edema", "Hernia"))
    assert union([one, two]).names == ("Edema", "Hernia", "Mass")
    assert one.align(two) == [1, -1]
    assert two.index("Hernia") == 1
    with pytest.raises(LabelError, match="'Mass' is not among"):
        two.index("Mass")
    with pytest.raises(LabelError, match="one label type"):
        union([one, LabelSet(("Mass",), "multiclass")])


@given(st.permutations(["Mass", "Edema", "Hernia", "Nodule"]), st.integers(1, 3))
def test_union_does_not_depend_on_order(names: list[str], cut: int) -> None:
    sets = [LabelSet(tuple(names[:cut])), LabelSet(tuple(names[cut:]))]
    assert union(sets) == union(sets[::-1])


def test_typos_are_found_and_vocabulary_names_never_are() -> None:
    assert lookalikes(["Atelectasis", "Atelectasys"]) == [("Atelectasis", "Atelectasys")]
    assert lookalikes(["Emphysema", "Emphysmea"]) == [("Emphysema", "Emphysmea")]  # swapped neighbours
    assert lookalikes(["Nodule", "Nodules"]) == [("Nodule", "Nodules")]
    assert lookalikes(["Lung Scar", "Rib Notch"]) == []
    assert lookalikes(CANONICAL) == []
