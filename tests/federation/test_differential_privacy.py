"""Clipping and noise of what a site sends."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from suture.core.errors import ConfigError
from suture.federation.differential_privacy import Noise, epsilon, gaussian, secret_of, spent
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Payload, Update, ones
from suture.protocol.packing import pack, unpack
from suture.protocol.privacy import PrivacyConfig
from suture.protocol.records import Round, SiteRound, Validation

KEY = bytes(32)


def update(w: list[float], row: list[float], kind: Any = "weights") -> Update:
    return Update(1, ("A",), {"w": torch.tensor(w)}, {"head": torch.tensor([row])}, ones(("A",)), kind=kind)


SENT = Payload("train", 1, 0, shared={"w": torch.tensor([1.0, 1.0])}, head={"head": torch.tensor([[0.0]])})


def test_the_change_is_clipped_as_one_vector() -> None:
    """Changes (3, 0) and 4 have norm 5; to a norm of 1 they become (.6, 0) and .8."""
    clipped = Noise(1.0).apply(update([4.0, 1.0], [4.0]), SENT, KEY)
    assert clipped.shared["w"].tolist() == pytest.approx([1.6, 1.0])
    assert clipped.head["head"].item() == pytest.approx(0.8)


def test_a_gradient_is_clipped_itself_and_a_small_update_is_left() -> None:
    clipped = Noise(1.0).apply(update([3.0, 0.0], [4.0], "gradient"), SENT, KEY)
    assert clipped.shared["w"].tolist() == pytest.approx([0.6, 0.0])
    small = update([1.1, 1.0], [0.1])
    assert torch.equal(Noise(1.0).apply(small, SENT, KEY).shared["w"], small.shared["w"])


def test_noise_has_its_deviation_and_belongs_to_the_secret() -> None:
    n = 20_000
    sent = Payload("train", shared={"w": torch.zeros(n), "v": torch.zeros(n)})
    still = Update(1, (), {"w": torch.zeros(n), "v": torch.zeros(n)}, {}, ones(()))
    one, again, other = (Noise(2.0, 0.5).apply(still, sent, key).shared for key in (KEY, KEY, b"other"))
    assert one["w"].std().item() == pytest.approx(1.0, rel=0.05)
    assert torch.equal(one["w"], again["w"])  # a round that is repeated tells nothing more
    assert not torch.equal(one["w"], other["w"])
    assert abs(torch.corrcoef(torch.stack([one["w"], one["v"]]))[0, 1].item()) < 0.05


def test_another_update_or_payload_has_noise_of_its_own() -> None:
    """Else the difference of two answers would be the difference of two data sets, without any noise."""
    n = 1_000
    zero, tiny = torch.zeros(n), torch.full((n,), 1e-6)
    noisy = Noise(1.0, 1.0)

    def noise(w: Tensor, received: Tensor) -> Tensor:
        sent = Payload("train", shared={"w": received})
        return noisy.apply(Update(1, (), {"w": w}, {}, ones(())), sent, KEY).shared["w"] - w

    base = noise(zero, zero)
    for other in (noise(tiny, zero), noise(zero, tiny)):
        assert (other - base).std().item() == pytest.approx(2**0.5, rel=0.1)


def test_normal_numbers_are_those_of_their_bits() -> None:
    drawn = gaussian((100_000,), b"seed")
    assert drawn.mean().item() == pytest.approx(0, abs=0.02)
    assert drawn.square().mean().item() == pytest.approx(1, abs=0.02)
    assert (drawn.abs() > 1.959964).double().mean().item() == pytest.approx(0.05, abs=0.005)
    first = int.from_bytes(hashlib.shake_256(b"seed").digest(8), "little") >> 12
    assert drawn[0].item() == pytest.approx(NormalDist().inv_cdf((first + 0.5) / 2**52), rel=1e-12)
    assert torch.isfinite(gaussian((3, 4, 5), b"x")).all()
    assert gaussian((), b"x").shape == ()


def test_a_variance_stays_one() -> None:
    """Of 1000 variances the noise would make half negative, and the model no number."""
    name = "backbone.norm.running_var"
    sent = Payload("train", shared={name: torch.zeros(1_000)})
    noisy = Noise(1.0, 1.0).apply(Update(1, (), {name: torch.zeros(1_000)}, {}, ones(())), sent, KEY)
    assert noisy.shared[name].min() == 0
    assert (noisy.shared[name] > 0).double().mean().item() == pytest.approx(0.5, abs=0.06)


def test_what_the_noise_does_not_cover_is_refused() -> None:
    counted = Update(1, (), {"n": torch.tensor(7)}, {}, ones(()))
    with pytest.raises(ConfigError, match="does not cover n"):
        Noise(1.0, 1.0).apply(counted, Payload("train", shared={"n": torch.tensor(3)}), KEY)
    per_class = replace(update([1.0, 1.0], [0.0]), class_tensors={"seen": torch.ones(1)})
    with pytest.raises(ConfigError, match="does not cover seen"):
        Noise(1.0).apply(per_class, SENT, KEY)


def test_the_secret_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    one = secret_of(tmp_path / "a")
    assert (secret_of(tmp_path / "a"), len(one)) == (one, 32)
    assert secret_of(tmp_path / "b") != one
    assert (tmp_path / "a" / "noise.key").stat().st_mode & 0o077 == 0


def test_encryption_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="encrypted updates cannot be validated"):
        PrivacyConfig.model_validate({"encryption": "ckks"})


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_no_change_is_longer_than_the_clip(w: list[float], clip: float) -> None:
    done = Noise(clip).apply(update(w, [5.0]), SENT, KEY)
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


def test_the_report_says_what_was_spent() -> None:
    pytest.importorskip("opacus")
    statuses: list[Any] = ["accepted", "rejected", "abstained", "accepted"]
    history = [
        Round(i, "main", "committed", 1.0, 0, 0, {"a": SiteRound(status)}, Validation())
        for i, status in enumerate(statuses, 1)
    ]
    protection = {"a": {"clip": 1.0, "noise": 2.0, "delta": 1e-5}, "b": {"clip": 3.0, "noise": 0.0}}
    noisy, clipped = spent(protection, history)
    assert f"ε = {epsilon(2.0, 3, 1e-5):.3g} at δ = 1e-05 over 3 updates" in noisy
    assert clipped == "b clips its updates to a norm of 3 and adds no noise."


def test_a_round_that_is_asked_twice_has_one_answer(tiny: Any) -> None:
    """A server that died before it committed asks again; the answer costs the site no more privacy."""
    federation = tiny(
        SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8)), {"alpha": ("Mass", "Nodule")}
    )
    privacy = PrivacyConfig(clip=0.1, noise=1.0, min_count=0, min_loss=0)
    federation.configs["alpha"] = federation.configs["alpha"].model_copy(update={"privacy": privacy})
    sites = [federation.sites()["alpha"] for _ in range(2)]
    server = federation.server()
    info = unpack(server.handshake(["alpha"])["alpha"])
    server.collector.receive("alpha", pack(sites[0].answer(info)))
    server.begin({})
    task = unpack(server.assign()["alpha"])
    one, two = (pack(site.answer(task)) for site in sites)
    assert all(torch.equal(t, two.tensors[name]) for name, t in one.tensors.items())
    moved = torch.cat([(one.tensors[f"shared/{n}"] - t).flatten() for n, t in task.shared.items()])
    assert moved.norm().item() > 1  # a noise of 0.1 on each of about 10^5 numbers, a change of 0.1 in all


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
