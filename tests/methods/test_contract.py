"""suture.methods.base: the members of the contract."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

import suture.learning
import suture.methods
import suture_papers
from suture.core.errors import ConfigError
from suture.learning.training import Fitted
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, Method, Share, SharingSpec, hyperparameters
from suture.methods.composed import Composed
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL

MEMBERS = {
    *("about", "labels", "local", "sharing", "phases", "adapted", "egress"),
    *("loss", "train", "class_facts", "predictor", "aggregate", "merges_by_mean"),
}


def test_no_update_lacks_what_was_measured() -> None:
    """All methods make theirs by one function, of numbers that none can leave out."""
    makers = {
        (path.stem, function.name)
        for package in (suture.methods, suture.learning, suture_papers)
        for path in Path(str(package.__file__)).parent.rglob("*.py")
        if "Update(" in (text := path.read_text())
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Update"
    }
    assert makers == {("averaging", "update_of")}
    assert all(one.default is one.default_factory is MISSING for one in fields(Fitted))


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
