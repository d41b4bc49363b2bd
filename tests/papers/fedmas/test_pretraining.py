"""MoCo v2: its loss, its queue, a short training, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from suture.cli import app
from suture.core.errors import ConfigError, DataError
from suture.learning.training import NonFiniteLoss
from suture.models.priors import PriorSpec, load_prior, read_prior
from suture_papers.fedmas.pretraining import (
    Encoder,
    Pretraining,
    Queue,
    Trainer,
    Views,
    follow,
    info_nce,
    pretrain,
)

SHORT = Pretraining(
    size=16,
    epochs=2,
    batch_size=8,
    lr=1.0,
    momentum=0.99,
    queue=64,
    views=Views(crop=0.6, flip=0.0, tone=0.1),  # sixteen steps are few
)


def scenes(n: int = 64, side: int = 16) -> torch.Tensor:
    """Images that differ in more than noise: uint8 ``[n, 1, side, side]``."""
    coarse = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 255
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear").to(torch.uint8)


def test_info_nce_by_hand() -> None:
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    queue = Queue(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), torch.tensor([7, 1, 8]))
    # Image 0 has three negative keys; image 1 has two, because the key of row 1 is its own.
    first = -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(2.0) + math.exp(0.0) + math.exp(1.6)))
    second = -math.log(math.exp(2.0) / (math.exp(2.0) + math.exp(0.0) + math.exp(1.2)))
    loss = info_nce(queries, keys, queue, torch.tensor([0, 1]), temperature=0.5)
    assert loss.item() == pytest.approx((first + second) / 2, abs=1e-6)


def test_the_queue_keeps_the_newest() -> None:
    queue = Queue(torch.arange(5.0).view(5, 1), torch.arange(5))
    queue.push(torch.tensor([[10.0], [11.0]]), torch.tensor([10, 11]))
    assert queue.keys.flatten().tolist() == [10, 11, 0, 1, 2]
    queue.push(torch.arange(20.0, 27.0).view(7, 1), torch.arange(20, 27))
    assert queue.rows.tolist() == [20, 21, 22, 23, 24]


def test_the_key_encoder_follows() -> None:
    key, query = (Encoder(torch.nn.Identity(), 2, 3) for _ in range(2))
    before = [p.detach().clone() for p in key.parameters()]
    follow(key, query, 0.75)
    for was, now, other in zip(before, key.parameters(), query.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * was + 0.25 * other)


def test_a_key_comes_back_to_its_image_from_another_group() -> None:
    trainer = Trainer(scenes(), SHORT, 1, "cpu")
    trainer.key.eval()  # groups do not matter then
    rows = torch.arange(64)
    trainer.views = lambda rows: trainer.prepare(trainer.images[rows])  # type: ignore[method-assign]
    expected = trainer.key(trainer.prepare(trainer.images))
    torch.testing.assert_close(trainer.keys(rows), expected, rtol=0, atol=1e-5)


@pytest.mark.complete
def test_it_learns_and_the_same_seed_gives_the_same_tensors() -> None:
    state = torch.get_rng_state()
    one, again = (pretrain(scenes(), SHORT, 1) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.losses[-1] < one.losses[0] - 0.1
    assert one.losses == again.losses
    for name, tensor in one.network.state_dict().items():
        assert torch.equal(tensor, again.network.state_dict()[name])
    other = pretrain(scenes(), SHORT, 2)
    assert other.losses != one.losses


def test_a_batch_of_a_single_image_joins_the_one_before() -> None:
    trainer = Trainer(scenes(33), SHORT, 1, "cpu")
    assert [len(rows) for rows in trainer.batches()] == [8, 8, 8, 9]
    assert len(trainer.queue.keys) == 33  # as many as there are images


def test_what_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        Pretraining(backbone="resnet8")
    with pytest.raises(ConfigError, match="too small for resnet18; 33"):
        Pretraining(backbone="resnet18", size=32)
    with pytest.raises(DataError, match="two or more"):
        pretrain(scenes(1), SHORT, 1)
    with pytest.raises(NonFiniteLoss, match=r"epoch 1, step 2 .*--set lr="):
        pretrain(scenes(), Pretraining(size=16, epochs=1, batch_size=16, lr=1e38), 1)


WORDS = ["--size", "16", "--epochs", "2"]
WORDS += ["--set", "batch_size=16", "--set", "lr=0.3", "--set", "momentum=0.9"]


@pytest.mark.complete
def test_the_command_writes_a_prior(tmp_path: Path, hospital: Callable[..., Path]) -> None:
    sites = [str(hospital(tmp_path / name, ("Mass",), 30, i)) for i, name in enumerate(("a", "b"))]
    out = tmp_path / "made" / "prior"
    done = CliRunner().invoke(
        app, ["pretrain", *sites, *WORDS, "--out", str(out), "--licence", "CC0"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "36 images of 2 data sets" in done.stdout
    assert "epoch 2/2  loss" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["prior.json", "prior.safetensors"]
    facts = json.loads((out / "prior.json").read_text())
    assert facts["data"] == [{"dataset": "hospital", "images": 18}] * 2
    assert (facts["backbone"], facts["width"], facts["licence"]) == ("cnn", 128, "CC0")
    assert facts["final_loss"] == facts["losses"][-1]
    prior = load_prior(PriorSpec("checkpoint", str(out)))
    assert prior.digest == facts["digest"]
    again = CliRunner().invoke(app, ["pretrain", *sites, *WORDS, "--out", str(out)])
    assert isinstance(again.exception, ConfigError)
    assert "--overwrite" in str(again.exception)
    again = CliRunner().invoke(app, ["pretrain", *sites, *WORDS, "--out", str(out), "--overwrite"])
    assert again.exit_code == 0
    assert json.loads((out / "prior.json").read_text())["digest"] == facts["digest"]
    broken_files_say_so(out)


@pytest.mark.complete
def test_views_can_be_changed(tmp_path: Path, hospital: Callable[..., Path]) -> None:
    config = str(hospital(tmp_path / "a", ("Mass",), 30, 0))
    command = ["pretrain", config, *WORDS, "--out", str(tmp_path / "out")]
    assert (
        CliRunner().invoke(app, [*command, "--set", "views.crop=0.5", "--set", "views.flip=0"]).exit_code == 0
    )
    facts = json.loads((tmp_path / "out" / "prior.json").read_text())
    assert (facts["training"]["views"]["crop"], facts["training"]["views"]["flip"]) == (0.5, 0.0)
    for words, message in (
        (["views.crp=1"], "did you mean 'crop'"),
        (["views.crop"], "views.crop=0.4"),
        (["views.crop=2"], "crop"),
        (["views=2", "views.crop=1"], "views.crop=1"),
        (["rate=2"], "rate"),
        (["a.b.c=1"], "a.b"),
    ):
        sets = [part for word in words for part in ("--set", word)]
        wrong = CliRunner().invoke(app, [*command, "--overwrite", *sets])
        assert isinstance(wrong.exception, ConfigError)
        assert message in str(wrong.exception)


def broken_files_say_so(folder: Path) -> None:
    weights = folder / "prior.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"prior\.safetensors does not match prior\.json"):
        read_prior(folder)
    weights.write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"cannot be read as a prior.*copy prior\.json"):
        read_prior(folder)
    (folder / "prior.json").unlink()
    with pytest.raises(ConfigError, match=r"does not contain prior\.json.*suture pretrain"):
        read_prior(folder)


def test_ctrl_c_leaves_nothing_half_written(
    tmp_path: Path, hospital: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: Trainer, index: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "epoch", pressed)
    config = hospital(tmp_path / "a", ("Mass",), 30, 0)
    done = CliRunner().invoke(app, ["pretrain", str(config), *WORDS, "--out", str(tmp_path / "out")])
    assert done.exit_code == 130
    assert not list((tmp_path / "out").iterdir())
