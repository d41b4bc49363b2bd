"""What is said of a run at its end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from suture.learning.training import LocalTraining
from suture.methods.fedlsm.fedlsm import FedLSM
from suture.methods.partial import PartialLoss

LOCAL = LocalTraining(lr=1e-2, batch_size=8, iterations=2)


@pytest.mark.parametrize(("method", "notes"), [(FedLSM(local=LOCAL), ["told"]), (PartialLoss(), [])])
def test_rows_that_pseudo_labels_took_over_are_noted_of_methods_that_make_some(
    method: Any, notes: list[str], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run_away(history: Any, owners: Any) -> list[str]:
        asked.append((len(history), owners["Hernia"]))
        return ["told"]

    monkeypatch.setattr("suture.federation.server.finish.run_away", run_away)
    server = tiny(method, rounds=1).run()
    assert json.loads((server.record.folder / "run.json").read_text())["notes"] == notes
    assert asked == [(1, ("beta",))] * len(notes)
