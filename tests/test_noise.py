"""Clipping and noise of what a site sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suture.messages import Payload, Update, ones
from suture.methods.surgical import SurgicalAggregation
from suture.noise import Noise, epsilon
from suture.privacy import PrivacyConfig
from suture.server.protection import spent
from suture.training import LocalTraining


def update(w: list[float], row: list[float], kind: Any = "weights") -> Update:
    return Update(1, ("A",), {"w": torch.tensor(w)}, {"head": torch.tensor([row])}, ones(("A",)), kind=kind)


SENT = Payload("train", 1, 0, shared={"w": torch.tensor([1.0, 1.0])}, head={"head": torch.tensor([[0.0]])})


def test_the_change_is_clipped_as_one_vector() -> None:
    """Changes (3, 0) and 4 have norm 5; to a norm of 1 they become (.6, 0) and .8."""
    clipped = Noise(1.0).apply(update([4.0, 1.0], [4.0]), SENT)
    assert clipped.shared["w"].tolist() == pytest.approx([1.6, 1.0])
    assert clipped.head["head"].item() == pytest.approx(0.8)


def test_a_gradient_is_clipped_itself_and_a_small_update_is_left() -> None:
    clipped = Noise(1.0).apply(update([3.0, 0.0], [4.0], "gradient"), SENT)
    assert clipped.shared["w"].tolist() == pytest.approx([0.6, 0.0])
    small = update([1.1, 1.0], [0.1])
    assert torch.equal(Noise(1.0).apply(small, SENT).shared["w"], small.shared["w"])


def test_noise_has_its_deviation_and_is_drawn_anew() -> None:
    n = 20_000
    sent = Payload("train", shared={"w": torch.zeros(n)})
    still = Update(1, (), {"w": torch.zeros(n)}, {}, ones(()))
    one, two = (Noise(2.0, 0.5).apply(still, sent).shared["w"] for _ in range(2))
    assert one.std().item() == pytest.approx(1.0, rel=0.05)
    assert not torch.equal(one, two)


def test_counters_pass_as_they_are() -> None:
    counted = Update(1, (), {"n": torch.tensor(7)}, {}, ones(()))
    assert Noise(1.0, 1.0).apply(counted, Payload("train", shared={"n": torch.tensor(3)})).shared["n"] == 7


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_no_change_is_longer_than_the_clip(w: list[float], clip: float) -> None:
    done = Noise(clip).apply(update(w, [5.0]), SENT)
    change = torch.cat([done.shared["w"] - SENT.shared["w"], done.head["head"][0]])
    assert change.norm().item() <= clip * (1 + 1e-4) + 1e-4


def test_more_rounds_spend_more_and_more_noise_spends_less() -> None:
    pytest.importorskip("opacus")
    assert epsilon(2.0, 1, 1e-5) < epsilon(2.0, 15, 1e-5)
    assert epsilon(4.0, 15, 1e-5) < epsilon(2.0, 15, 1e-5)
    assert epsilon(2.0, 15, 1e-5) == pytest.approx(24.83, abs=0.01)  # of 15 Gaussian mechanisms with sigma 1


def test_noise_without_a_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="set clip"):
        PrivacyConfig(noise=1.0)


def test_the_report_says_what_was_spent(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    lines = [{"sites": {"a": {"status": s}}} for s in ("accepted", "rejected", "abstained", "accepted")]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    protection = {"a": {"clip": 1.0, "noise": 2.0, "delta": 1e-5}, "b": {"clip": 3.0, "noise": 0.0}}
    noisy, clipped = spent(tmp_path, protection)
    assert f"ε = {epsilon(2.0, 3, 1e-5):.3g} at δ = 1e-05 over 3 updates" in noisy
    assert clipped == "b clips its updates to a norm of 3 and adds no noise."


def test_a_federation_whose_site_protects_itself(tiny: Any) -> None:
    federation = tiny(SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8)))
    config = federation.configs["alpha"]
    federation.configs["alpha"] = config.model_copy(
        update={"privacy": PrivacyConfig(clip=1e-6, min_count=0, min_loss=0)}
    )
    server = federation.run()
    run = json.loads((Path(server.record.folder) / "run.json").read_text())
    assert run["protection"] == {"alpha": {"clip": 1e-6, "noise": 0.0, "delta": 1e-5}}
    assert "alpha clips its updates to a norm of 1e-06 and adds no noise." in run["notes"]
