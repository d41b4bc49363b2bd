"""`suture list models NAME`: what a model reads, before it is used."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from suture.cli.app import app


def shown(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["list", *words], env={"COLUMNS": "200"})
    return done.exit_code, " ".join((done.output or str(done.exception)).split())


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "timm:test_vit",
            (
                "model.size=160, as in its pretraining",
                "64 for each image",
                "batch norm none",
                "adapters blocks.*.attn.qkv, blocks.*.attn.proj, blocks.*.mlp.fc1, blocks.*.mlp.fc2",
                "a file or folder",
            ),
        ),
        (
            "cnn",
            (
                "1 channel; model.size=64, for example; 16 or more",
                "97,392",
                "4 layers",
                "adapters conv1, conv2, conv3, conv4",
                "a file or folder",
            ),
        ),
        ("torchvision:densenet121", ("denseblock*.denselayer*.conv2, features.transition*.conv",)),
        ("efficientnet_lite0", ("adapters of kind bias only",)),
        ("resnet18", ("mean [0.485, 0.456, 0.406]", "512 for each image", "a file or folder, download")),
        ("vectors", ("256 for each text", "none: it is trained from the beginning")),
    ],
)
def test_a_model_is_described(name: str, parts: tuple[str, ...]) -> None:
    code, text = shown("models", name)
    assert code == 0, text
    for part in parts:
        assert part in text


def test_only_a_model_is_described_and_a_slip_is_answered() -> None:
    code, text = shown("jobs", "demo")
    assert code != 0
    assert "write suture list models NAME" in text
    code, text = shown("models", "timm:test_vitt")
    assert code != 0
    assert "did you mean 'test_vit'?" in text


def test_a_kind_in_the_singular_is_answered_and_a_part_of_a_name_is_searched() -> None:
    code, text = shown("model")
    assert code != 0
    assert "did you mean 'models'?" in text
    code, text = shown("models", "timm:dinov3")
    assert code != 0
    assert "contain it: " in text
    assert "vit_small_patch16_dinov3" in text
    assert "resnet50" not in text
