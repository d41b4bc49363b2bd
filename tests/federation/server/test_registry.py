"""Which site annotates which label, and what a site learns of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from suture.core import labels
from suture.core.errors import FederationError, LabelError
from suture.core.vocabulary import CANONICAL, SYNONYMS
from suture.federation.server.registry import Agreement, agree, misfits
from suture.methods.base import LabelStatistics
from suture.protocol.messages import SiteInfo, Update, ones


def info(*labels: str) -> SiteInfo:
    return SiteInfo(labels, {"train": 3}, 1, "code")


def test_union_is_sorted_and_owners_are_known() -> None:
    registry = agree({"b": info("Mass", "Edema"), "a": info("Mass")}, Agreement())
    assert registry.labels == ("Edema", "Mass")
    assert registry.owners() == {"Edema": ("b",), "Mass": ("a", "b")}
    assert registry.rows_for("b", "own") == ("Edema", "Mass")  # whatever the site's order
    assert registry.rows_for("a", "all") == ("Edema", "Mass")


def test_spellings_meet_and_each_site_keeps_its_own() -> None:
    registry = agree({"a": info("Effusion"), "b": info("pleural_effusion")}, Agreement())
    assert registry.labels == ("Pleural Effusion",)
    assert registry.to_site("b", registry.rows_for("b", "own")) == ("pleural_effusion",)
    update = Update(1, ("pleural_effusion",), {}, {"w": torch.ones(1, 2)}, ones(("x",)))
    assert registry.from_site("b", update).labels == ("Pleural Effusion",)


def test_lookalikes_are_refused_with_their_sites_and_the_remedy() -> None:
    sites = {"a": info("Lung Scar"), "b": info("Lung Scra")}
    with pytest.raises(FederationError, match=r"'Lung Scar' \(a\) and 'Lung Scra' \(b\)") as caught:
        agree(sites, Agreement())
    assert "label_map" in str(caught.value)
    assert agree(sites, Agreement(accept=True)).labels == ("Lung Scar", "Lung Scra")
    assert agree(sites, Agreement(accept=("lung scra",))).labels == ("Lung Scar", "Lung Scra")
    mapped = agree(sites, Agreement((), {"lung_scra": "Lung Scar"}))
    assert mapped.labels == ("Lung Scar",)
    assert mapped.to_site("b", ("Lung Scar",)) == ("Lung Scra",)


def test_a_class_of_which_all_sites_know_positives_alone_is_left_out() -> None:
    below = replace(info("Mass", "Lung Lesion"), one_sided=("Lung Lesion",))
    registry = agree({"a": below, "b": info("Mass")}, Agreement())
    assert registry.labels == ("Mass",)
    assert registry.members["a"].names == ("Mass",)
    # It stays in an experiment that has it, whoever annotated it then.
    assert agree({"a": below}, Agreement(("Lung Lesion", "Mass"))).members["a"].one_sided == ("Lung Lesion",)


def test_a_class_of_which_a_site_knows_positives_alone_has_owners_elsewhere() -> None:
    below = replace(info("Mass", "Lung Lesion"), one_sided=("Lung Lesion",))
    registry = agree({"a": below, "b": info("lung_lesion")}, Agreement())
    assert registry.rows_for("a", "own") == ("Lung Lesion", "Mass")
    assert registry.owners() == {"Lung Lesion": ("b",), "Mass": ("a",)}


def test_an_ancestor_that_the_site_has_under_another_name_is_no_further_class() -> None:
    site = replace(info("Mass", "Blob", "Lung Lesion"), one_sided=("Lung Lesion",))
    member = agree({"a": site}, Agreement((), {"Blob": "Lung Lesion"})).members["a"]
    assert (member.own, member.names) == (("Mass", "Blob"), ("Mass", "Lung Lesion"))
    assert member.one_sided == ()


GENERIC = (
    *("label", "Target", "class_1", "Diagnosis", "y", "class_label", "1", "A", "Label (0/1)", "has_disease"),
    *(
        "target variable",
        "is_abnormal",
        "true label",
        "case",
        "Classes",
        "Label (yes/no)",
        "Finding (binary)",
    ),
    *("disease_class", "is_positive", "Class A", "image_label", "target_value", "12", "any abnormality"),
)


@pytest.mark.parametrize("name", GENERIC)
def test_two_sites_with_a_name_that_says_nothing_are_not_taken_for_one_class(name: str) -> None:
    sites = {"a": info(name, "Mass"), "b": info(name), "c": info("Mass")}
    with pytest.raises(FederationError, match=r"a, b each have a class .*synonyms"):
        agree(sites, Agreement())
    assert len(agree(sites, Agreement(accept=(name,))).labels) == 2
    assert len(agree(sites, Agreement(accept=True)).labels) == 2
    assert len(agree({"a": info(name), "c": info("Mass")}, Agreement()).labels) == 2
    assert agree(sites, Agreement((), {name: "Tuberculosis"})).labels == ("Mass", "Tuberculosis")
    coded = replace(info(name), codes={name: ("I10C:A15.0",)})
    assert len(agree({"a": coded, "b": coded}, Agreement()).labels) == 1


def test_a_newcomer_with_such_a_name_does_not_stop_the_experiment() -> None:
    sites = {"a": info("Label", "Mass"), "b": info("Mass"), "z": info("label")}
    so_far = Agreement(("Label", "Mass"), {}, False, owners={"Label": {"a"}, "Mass": {"a", "b"}})
    assert misfits(sites, so_far).keys() == {"z"}
    assert misfits(sites, replace(so_far, accept=("label",))) == {}


def test_the_classes_of_the_data_sets_say_what_they_mean() -> None:
    names = {
        *CANONICAL,
        *SYNONYMS,
        "Other",
        "Normal",
        "Abnormal",
        "Class I Malocclusion",
        "Diagnosis (tuberculosis)",
    }
    names |= {
        "Heart Disease",
        "Cold Case",
        "Grade 3",
        "Skin Condition",
        "Disease of the Heart",
        "Lung Finding",
    }
    assert not [name for name in names if labels.is_generic(name)]


def test_a_map_that_makes_two_names_of_a_site_one_is_an_error() -> None:
    with pytest.raises(LabelError, match="a: 'Lung Scar' and another"):
        agree({"a": info("Lung Scar", "Scarring")}, Agreement((), {"Scarring": "Lung Scar"}))


def test_a_class_whose_owner_left_stays() -> None:
    assert agree({"a": info("Mass")}, Agreement(("Edema", "Mass"))).labels == ("Edema", "Mass")


def test_sites_of_two_tasks_are_refused_by_name() -> None:
    single = replace(info("Mass"), label_type="multiclass")
    with pytest.raises(FederationError) as caught:
        agree({"a": info("Mass"), "b": single}, Agreement())
    for words in ("a is multilabel", "b is multiclass", "[data] label_type"):
        assert words in str(caught.value)
    registry = agree({"a": single, "b": single}, Agreement())
    assert registry.label_type == registry.to_dict()["label_type"] == "multiclass"
    assert agree({"a": info("Mass")}, Agreement()).label_type == "multilabel"


def test_a_census_is_under_the_federations_names() -> None:
    one = replace(info("Effusion", "Mass"), counts={"Effusion": (1, 2), "Mass": None})
    two = SiteInfo(("pleural_effusion",), {"test": 4}, 1, "code", counts={"pleural_effusion": (0, 5)})
    registry = agree({"b": one, "a": two}, Agreement())
    assert registry.statistics({"b": one, "a": two}) == LabelStatistics(
        ("Mass", "Pleural Effusion"),
        {"a": 0, "b": 3},
        {"a": {"Pleural Effusion": (0, 5)}, "b": {"Pleural Effusion": (1, 2), "Mass": None}},
    )
    silent = {"b": replace(one, counts={}), "a": replace(two, counts={})}
    assert registry.statistics(silent).counts == {
        "a": {"Pleural Effusion": None},
        "b": {"Pleural Effusion": None, "Mass": None},
    }


def test_values_of_a_site_get_the_federations_names() -> None:
    registry = agree({"a": info("Effusion", "Mass"), "b": info("Edema")}, Agreement())
    # Edema is the federation's own spelling of a class that this site does not know.
    assert registry.rename_keys("a", {"Mass": 1, "Effusion": 2, "Edema": 3}) == {
        "Mass": 1,
        "Pleural Effusion": 2,
        "Edema": 3,
    }


@pytest.mark.complete
@pytest.mark.parametrize(
    "made",
    [lambda i: f"{i * 7919 % 100003:06d}" * 30, lambda i: f"{'a' * 90}{i:05d}{'b' * 90}"],
    ids=["far", "near"],
)
def test_the_names_of_a_long_hello_are_compared_few_times(
    made: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    within = labels._within
    monkeypatch.setattr(labels, "_within", lambda *args: compared.append(args) or within(*args))
    infos = {"beta": info(*(made(i) for i in range(9_000))), "alpha": info("Mass"), "gamma": info("Mass")}
    found = misfits(infos, Agreement((), {}, False))
    infos = {site: one for site, one in infos.items() if site not in found}
    agree(infos, Agreement())
    assert len(compared) < 400_000


def test_an_error_lists_few_pairs_of_names() -> None:
    far = [
        f"{i * 7919 % 100003:06d}".translate(str.maketrans("0123456789", "abcdefghij")) * 3 for i in range(60)
    ]
    infos = {"a": info(*far), "b": info(*(f"{name}x" for name in far))}
    with pytest.raises(
        FederationError, match=r"(?s)nearly the same:(\n  [^\n]*){20}\n  and \d+ more pairs\n"
    ) as error:
        agree(infos, Agreement())
    assert len(str(error.value)) < 5_000
