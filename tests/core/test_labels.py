"""Names, not positions: spellings that are one name, and names that only look like one."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from suture.core import labels
from suture.core.errors import LabelError
from suture.core.labels import LabelSet, Synonyms, canonical, lookalikes, union
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
        ("COPD exacerbation", "COPD Exacerbation"),  # an acronym of the vocabulary's list
        ("malocclusion class iii", "Malocclusion Class III"),
        ("bi-rads 4", "BI-RADS 4"),
        ("Πνευμοθώρακας δεξιά", "Πνευμοθώρακας Δεξιά"),  # a final sigma, in the middle of the name
        ("ΚΑΡΔΙΑΚΟΣ", "Καρδιακος"),
        ("Erguß", "Erguss"),  # as a site writes it in capitals, or in Switzerland
    ],
)
def test_spellings_of_one_name(spelling: str, name: str) -> None:
    assert canonical(spelling) == name


@given(words)
@example("\u0390")  # folding the case takes it apart
@example("a\u03b0")
@example("\u1f50\u01f0")
def test_canonical_is_a_fixed_point(name: str) -> None:
    assert canonical(canonical(name)) == canonical(name)


def test_every_synonym_names_a_canonical_class() -> None:
    assert set(SYNONYMS.values()) <= set(CANONICAL)
    assert all(canonical(name) == name for name in CANONICAL)


def test_a_sites_own_synonyms_go_first() -> None:
    assert canonical("PE", {"pe": "Effusion"}) == "Pleural Effusion"
    assert canonical("Mass", {"Mass": "Lung Lesion"}) == "Lung Lesion"


def test_the_keys_of_a_table_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter[str]()

    def key(name: str) -> str:
        asked[name] += 1
        return name.casefold()

    monkeypatch.setattr(labels, "key", key)
    own = Synonyms({f"code {i}": f"Finding {i}" for i in range(100)})
    for i in range(100):
        assert canonical(f"CODE {i}", own) == f"Finding {i}"
    assert max(asked[spelling] for spelling in own) == 1


@pytest.mark.parametrize("name", ["", "   ", "_", "a\x07b"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(LabelError, match="not a label name"):
        canonical(name)


def test_two_names_that_are_one_are_an_error_naming_both() -> None:
    with pytest.raises(LabelError, match="'Effusion' and 'pleural_effusion' both mean 'Pleural Effusion'"):
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
    with pytest.raises(LabelError, match="label type"):
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
    grades = ["Grade 0", "Grade 1", "Grade 10", "Lesion Type I", "Lesion Type II", "Label 1", "Label 2"]
    assert lookalikes([*grades, "Grade 01"]) == [
        *(("Grade 0", "Grade 01"), ("Grade 01", "Grade 1"), ("Grade 01", "Grade 10"), ("Label 1", "Label 2"))
    ]
    assert lookalikes(CANONICAL) == []


@pytest.mark.parametrize("names", [100, 1_000, 2_000])
def test_the_number_of_comparisons_is_linear_in_the_number_of_names(
    names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the names: here each differs from every other in two characters of 200."""
    compared = []

    def count(a: str, b: str, limit: int) -> bool:
        compared.append((len(a), limit))
        return False

    monkeypatch.setattr(labels, "_within", count)
    lookalikes(f"{chr(0x4E00 + n)}{'x' * 198}{chr(0x4E00 + n)}" for n in range(names))
    assert 0 < len(compared) <= 2 * labels._WINDOW * names
    assert all(limit <= 2 for _, limit in compared)


def test_a_comparison_takes_few_steps_however_long_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    common = labels._common
    monkeypatch.setattr(labels, "_common", lambda a, b: calls.append(1) or common(a, b))
    for length in (20, 200):
        calls.clear()
        assert not labels._within(f"a{'x' * length}b{'x' * length}c", f"d{'x' * length}e{'x' * length}f", 2)
        assert len(calls) <= 1 + 4 + 16


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        *(("mass", "mass", 0), ("mass", "msas", 1), ("mass", "mas", 1), ("nodule", "nodulle", 1)),
        *(("ab", "ba", 1), ("effusion", "efusoin", 2), ("effusion", "fefusino", 2), ("abc", "ca", 3)),
        ("kitten", "sitting", 3),
    ],
)
def test_the_edit_distance_by_hand(a: str, b: str, distance: int) -> None:
    for one, two in ((a, b), (b, a)):
        assert [labels._within(one, two, limit) for limit in range(4)] == [distance <= n for n in range(4)]


@pytest.mark.complete
def test_a_typo_is_found_among_many_names() -> None:
    many = [f"Finding {n * 7919 % 100003:06d}" for n in range(0, 3_000, 3)]
    assert ("Sarcoidosis", "Sarkoidosys") in lookalikes([*many, "Sarcoidosis", "Sarkoidosys"])
    assert ("Xarcoidosis", "Sarcoidosis")[::-1] in lookalikes([*many, "Sarcoidosis", "Xarcoidosis"])


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_edit_distance_is_that_of_the_whole_table(a: str, b: str) -> None:
    """The recursion of the definition (Boytsov 2011), without any shortcut."""

    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        found = min(distance(i - 1, j), distance(i, j - 1)) + 1
        found = min(found, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            found = min(found, distance(i - 2, j - 2) + 1)
        return found

    true = distance(len(a), len(b))
    assert [labels._within(a, b, limit) for limit in range(3)] == [true <= n for n in range(3)]
