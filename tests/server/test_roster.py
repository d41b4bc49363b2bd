"""Who knows which label, and what a site is told of it."""

from __future__ import annotations

import pytest
import torch

from suture.errors import FederationError, LabelError
from suture.messages import Hello, Update, ones
from suture.server.roster import agree


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
