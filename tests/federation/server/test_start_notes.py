"""The notes of a run at its start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from noted import noted
from suture.execution.progress import following
from suture.federation.loop import Loop, federate
from suture.federation.server.global_model import initial
from suture.federation.server.notes import method_notes
from suture.learning.training import LocalTraining
from suture.methods.base import ClassFacts
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import NormPolicy
from suture.protocol.records import Note
from suture_results.report import write_report

FROZEN = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8), batch_norm="frozen")
NOTE = "mean 0 and variance 1"


@pytest.mark.complete
def test_batch_norm_frozen_at_no_training_is_noted_on_the_page_and_in_the_terminal(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = tiny(FROZEN, rounds=1)
    server = federation.server()
    with following(server.record.folder, "small", "local"):
        federate(server, Loop(federation.sites()))
        write_report(server.record.folder)
    (note,) = noted(server)
    assert NOTE in note
    assert NOTE in " ".join(capsys.readouterr().out.split())
    assert NOTE in (server.record.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("policy", "model", "count"),
    [
        ("frozen", ModelSpec("cnn", size=16), 1),
        ("average", ModelSpec("cnn", size=16), 0),
        ("frozen", ModelSpec("lstm"), 0),  # it has no batch norm, and the methods of text ask for it
        ("frozen", ModelSpec("densenet121", size=32, weights="download"), 0),
    ],
)
def test_only_frozen_norms_without_pretraining_are(
    policy: NormPolicy, model: ModelSpec, count: int, tiny: Any
) -> None:
    plan = replace(tiny(replace(FROZEN, batch_norm=policy)).plan, model=model)
    first = initial(replace(plan, model=replace(model, weights=None)), ("Mass",))
    *noted, last = method_notes(first, plan, ClassFacts(notes=("Mass is rare.",)))
    assert [note.code for note in noted] == ["frozen_batch_norm"] * count
    assert last == Note("method", {"text": "Mass is rare."})


def test_a_model_without_batch_norm_and_a_size_that_is_not_the_pretraining_s_are_noted(tiny: Any) -> None:
    model = ModelSpec("timm:test_vit", size=32, weights="vit.safetensors")
    plan = replace(tiny(replace(FROZEN, batch_norm="frozen")).plan, model=model)
    first = initial(replace(plan, model=replace(model, weights=None)), ("Mass",))
    assert [*method_notes(first, plan, ClassFacts())] == [
        Note("pretrained_size", {"model": "timm:test_vit", "pretrained": 160, "size": 32}),
        Note("no_batch_norm", {"model": "timm:test_vit", "policy": "frozen"}),
    ]
    usual = replace(plan, method=replace(FROZEN, batch_norm="average"), model=replace(model, size=160))
    assert [*method_notes(first, usual, ClassFacts())] == []
