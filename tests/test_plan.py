"""suture.plan: what every party knows, and the hash that tells one package from another."""

from __future__ import annotations

from pathlib import Path

import pytest

import suture.plan
from suture.data.transforms import Augmentation
from suture.errors import ConfigError
from suture.methods import METHODS
from suture.models import ModelSpec
from suture.plan import Plan, Schedule, code_hash


@pytest.mark.parametrize("changed", ["methods/fedavg.py", "data/clinical_words.txt"])
def test_a_change_of_source_or_of_the_vocabulary_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(suture.plan, "__file__", str(tmp_path / "plan.py"))
    for name in ("plan.py", "methods/fedavg.py", "data/clinical_words.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = code_hash.__wrapped__()
    (tmp_path / "report.html").write_text("whatever is made of the data is no part of it")
    assert code_hash.__wrapped__() == before
    (tmp_path / changed).write_text("another")
    assert code_hash.__wrapped__() != before


@pytest.mark.parametrize("name", ["fedlsm", "fedmas"])
def test_a_method_of_images_is_refused_a_model_of_text(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"needs images, and the model 'lstm' reads text; .* both: surgical,"
    ):
        Plan(METHODS[name](), ModelSpec("lstm"), Augmentation(), 1, "run", "code")
    assert Plan(METHODS["fedavg"](), ModelSpec("lstm"), Augmentation(), 1, "run", "code").model.name == "lstm"


def test_a_second_head_that_nobody_trains_is_refused() -> None:
    spec = ModelSpec("cnn", projection=8, second_head=True)
    for kind in METHODS.values():
        if kind().prior is None:
            with pytest.raises(ConfigError, match=r"never train a second head; set model.second_head=false"):
                Plan(kind(), spec, Augmentation(), 1, "run", "code")
    assert {name for name, kind in METHODS.items() if kind().prior is not None} == {"fedmas"}


def test_patience_without_a_best_round_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patience=3 would never stop .* or remove patience"):
        Schedule(5, selection="last", patience=3)
    assert Schedule(5, selection="server_metric", patience=3).patience == 3
    assert Schedule(5, selection="last").patience is None
