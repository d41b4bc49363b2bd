"""`suture forget` after a run on one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suture.cli import app
from suture.cli.common import guard
from suture.models.saved import load_model

pytestmark = pytest.mark.complete


Suture = Callable[..., tuple[int, str]]

SETTINGS = ("method=afl", "model.weights=random", "rounds=1", "images=30", "held_out=30")


@pytest.fixture
def suture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Suture:
    """The command line as a shell calls it: exit code and what was printed."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["suture", *map(str, words)])
        code = 0
        try:
            guard(app)
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return call


def weights(run: Path) -> dict[str, Tensor]:
    return load_model(run / "model")[0].state_dict()


def test_a_site_is_forgotten_once_and_the_others_remain(suture: Suture, tmp_path: Path) -> None:
    run = tmp_path / "r"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    code, said = suture("run", "demo", "--env", "local", "--out", run, *words)
    assert code == 0, said
    kept = run / "state" / "updates" / "000001"
    first, *others = sorted(path.stem for path in kept.iterdir())
    before = weights(run)

    code, said = suture("forget", "nowhere", run)
    assert code != 0
    assert f"has no update of 'nowhere'; it has those of {', '.join([first, *others])}" in said
    assert all(torch.equal(v, before[k]) for k, v in weights(run).items())

    code, said = suture("forget", first, run)
    assert code == 0, said
    assert str(kept / f"{first}.safetensors") in said.replace(" ", "")
    assert f"the model without {first}; fit its thresholds again" in said
    assert sorted(path.stem for path in kept.iterdir()) == others
    assert not list((run / "sites" / first / "state" / "experiments").glob("*"))
    after = weights(run)
    assert any(v.shape != before[k].shape or not torch.equal(v, before[k]) for k, v in after.items())
    assert json.loads((run / "run.json").read_text())["status"] == "finished"

    code, said = suture("forget", first, run)
    assert code != 0
    assert f"has no update of '{first}'; it has those of {', '.join(others)}" in said
    assert all(torch.equal(v, after[k]) for k, v in weights(run).items())
