"""suture.methods.base: the members of the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from suture.core.errors import ConfigError
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, Method, hyperparameters
from suture.methods.composed import Composed
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.sharing import Share, SharingSpec

MEMBERS = {
    *("about", "labels", "local", "sharing", "phases", "adapted", "egress"),
    *("loss", "train", "class_facts", "predictor", "aggregate", "merges_by_mean"),
}


def test_the_contract_has_a_dozen_members() -> None:
    named = {name for name in {*vars(Method), *Method.__annotations__} if not name.startswith("_")}
    assert named == MEMBERS


def test_a_composed_method_takes_its_labels_from_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"^Old\.labels: .* label_view and unknown"):
        type("Old", (Composed,), {"__module__": __name__, "labels": LabelUse(view="own")})
    own = FedAvg(label_view="own", unknown="masked")
    assert (own.labels.view, own.labels.unknown) == ("own", "masked")


@hyperparameters
class Halves(LocalAveraging):
    """A method with the settings of what travels."""

    about = About("halves", "Halves", "none")
    labels = LabelUse()
    share: Share | None = None
    keep_local: bool = False


def test_what_travels_follows_the_hyperparameters_of_those_names() -> None:
    assert Halves().sharing == SharingSpec()
    settings: dict[str, Any] = {"share": Share(0.25), "keep_local": True, "batch_norm": "frozen"}
    assert replace(Halves(), **settings).sharing == SharingSpec(**settings)
    assert Halves(share=Share()).sharing.part_at_site
    assert PersonalisedFL(batch_norm="local").sharing == SharingSpec("local", "head")
