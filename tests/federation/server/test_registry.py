"""Who knows which label, and what a site is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from suture.core.errors import FederationError, LabelError
from suture.federation.server.registry import agree
from suture.methods.base import Census
from suture.protocol.messages import Hello, Update, ones


def hello(*labels: str) -> Hello:
    return Hello(labels, {"train": 3}, 1, "code")


def test_union_is_sorted_and_owners_are_known() -> None:
    roster = agree({"b": hello("Mass", "Edema"), "a": hello("Mass")}, (), {}, False)
    assert roster.labels == ("Edema", "Mass")
    assert roster.owners() == {"Edema": ("b",), "Mass": ("a", "b")}
    assert roster.rows_for("b", "own") == ("Mass", "Edema")  # the site's own order
    assert roster.rows_for("a", "all") == ("Edema", "Mass")


def test_spellings_meet_and_each_site_keeps_its_own() -> None:
    roster = agree({"a": hello("Effusion"), "b": hello("pleural_effusion")}, (), {}, False)
    assert roster.labels == ("Pleural Effusion",)
    assert roster.to_site("b", roster.rows_for("b", "own")) == ("pleural_effusion",)
    update = Update(1, ("pleural_effusion",), {}, {"w": torch.ones(1, 2)}, ones(("x",)))
    assert roster.from_site("b", update).labels == ("Pleural Effusion",)


def test_lookalikes_are_refused_with_their_sites_and_the_remedy() -> None:
    sites = {"a": hello("Lung Scar"), "b": hello("Lung Scra")}
    with pytest.raises(FederationError, match=r"'Lung Scar' \(a\) and 'Lung Scra' \(b\)") as caught:
        agree(sites, (), {}, False)
    assert "label_map" in str(caught.value)
    assert agree(sites, (), {}, True).labels == ("Lung Scar", "Lung Scra")
    assert agree(sites, (), {}, ("lung scra",)).labels == ("Lung Scar", "Lung Scra")
    mapped = agree(sites, (), {"lung_scra": "Lung Scar"}, False)
    assert mapped.labels == ("Lung Scar",)
    assert mapped.to_site("b", ("Lung Scar",)) == ("Lung Scra",)


def test_a_map_that_makes_two_names_of_a_site_one_is_an_error() -> None:
    with pytest.raises(LabelError, match="a: 'Lung Scar' and another"):
        agree({"a": hello("Lung Scar", "Scarring")}, (), {"Scarring": "Lung Scar"}, False)


def test_a_class_whose_owner_left_stays() -> None:
    assert agree({"a": hello("Mass")}, ("Edema", "Mass"), {}, False).labels == ("Edema", "Mass")


def test_sites_of_two_tasks_are_refused_by_name() -> None:
    single = replace(hello("Mass"), task="multiclass")
    with pytest.raises(FederationError) as caught:
        agree({"a": hello("Mass"), "b": single}, (), {}, False)
    for words in ("a is multilabel", "b is multiclass", "[data] task"):
        assert words in str(caught.value)
    roster = agree({"a": single, "b": single}, (), {}, False)
    assert roster.task == roster.to_dict()["task"] == "multiclass"
    assert agree({"a": hello("Mass")}, (), {}, False).task == "multilabel"


def test_a_census_is_under_the_federations_names() -> None:
    one = replace(hello("Effusion", "Mass"), counts={"Effusion": (1, 2), "Mass": None})
    two = Hello(("pleural_effusion",), {"test": 4}, 1, "code", counts={"pleural_effusion": (0, 5)})
    roster = agree({"b": one, "a": two}, (), {}, False)
    assert roster.census({"b": one, "a": two}) == Census(
        ("Mass", "Pleural Effusion"),
        {"a": 0, "b": 3},
        {"a": {"Pleural Effusion": (0, 5)}, "b": {"Pleural Effusion": (1, 2), "Mass": None}},
    )
    silent = {"b": replace(one, counts={}), "a": replace(two, counts={})}
    assert roster.census(silent).counts == {
        "a": {"Pleural Effusion": None},
        "b": {"Pleural Effusion": None, "Mass": None},
    }


def test_values_of_a_site_get_the_federations_names() -> None:
    roster = agree({"a": hello("Effusion", "Mass"), "b": hello("Edema")}, (), {}, False)
    # Edema is the federation's own spelling of a class that this site does not know.
    assert roster.named("a", {"Mass": 1, "Effusion": 2, "Edema": 3}) == {
        "Mass": 1,
        "Pleural Effusion": 2,
        "Edema": 3,
    }
