import json
from dataclasses import asdict, replace

from example_run import run_record
from suture.data.batch import Augmentation
from suture.methods import method_class
from suture.models import ModelSpec
from suture.protocol.records import Run, parse
from suture_results.report import configuration


def run_with(**changes: object) -> Run:
    method = run_record()["method"] | {"hyperparameters": asdict(method_class("surgical")())}
    parts = {"method": method, "model": asdict(ModelSpec("cnn")), "augmentation": asdict(Augmentation())}
    base = json.loads(json.dumps(parts))  # as run.json has it
    return parse(Run, run_record() | base | changes, "test")


def test_what_was_changed_or_matters_is_shown_and_nothing_is_lost() -> None:
    changed = asdict(replace(Augmentation(), rotation=33.0))
    method, model, augmentation = configuration(run_with(augmentation=changed))
    assert augmentation.shown == (("rotation", 33.0),)
    assert dict(augmentation.shown + augmentation.rest) == changed
    assert {"local.lr", "local.epochs", "local.batch_size"} == {name for name, _ in method.shown}
    assert ("local.momentum", 0.9) in method.rest
    assert [name for name, _ in model.shown] == ["name", "size"]


def test_a_robust_merge_is_shown() -> None:
    *_, robust = configuration(run_with(robust={"kind": "median", "liars": 1}))
    assert (robust.title, robust.shown) == ("Robust merge", (("kind", "median"), ("liars", 1)))


def test_the_settings_of_an_unknown_method_were_all_set() -> None:
    record = {"name": "elsewhere", "title": "", "paper": "", "hyperparameters": {"a": {"b": None}, "c": 1}}
    method = configuration(run_with(method=record))[0]
    assert (method.shown, method.rest) == ((("a.b", None), ("c", 1)), ())
