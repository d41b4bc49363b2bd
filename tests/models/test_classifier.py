"""A head whose rows are classes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.validation import parse
from suture.methods.base import SharingSpec
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, Layout, head_rows, relabel, split_state

AB = LabelSet(("Edema", "Mass"))


def test_a_class_begins_alike_whatever_the_others_are() -> None:
    one = head_rows(AB, 8, seed=3)
    two = head_rows(LabelSet(("Nodule", "Mass", "Hernia")), 8, seed=3)
    assert torch.equal(one["head.weight"][1], two["head.weight"][1])
    assert torch.equal(one["head.bias"][1], two["head.bias"][1])
    assert not torch.equal(one["head.weight"][0], one["head.weight"][1])
    assert not torch.equal(one["head.weight"], head_rows(AB, 8, seed=4)["head.weight"])
    assert bool((one["head.weight"].abs() <= 8**-0.5).all())


def test_build_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = build(ModelSpec(), AB, 1, pretrained=False)
    assert torch.equal(torch.rand(1), expected)
    two = build(ModelSpec(), AB, 1, pretrained=False)
    assert all(torch.equal(t, two.state_dict()[k]) for k, t in one.state_dict().items())


def test_names_and_shapes_of_what_is_shared() -> None:
    model = build(ModelSpec("cnn", hidden=4, dropout=0.3), AB, 1, pretrained=False)
    shared, head = split_state(model.state_dict())
    assert {name.split(".")[0] for name in shared} == {"backbone", "hidden"}
    assert {name: tuple(t.shape) for name, t in head.items()} == {"head.weight": (2, 4), "head.bias": (2,)}
    layout = Layout.of({name: shared[name] for name in SharingSpec("average").shared(model)}, head)
    assert layout.head == {"head.weight": ((4,), "torch.float32"), "head.bias": ((), "torch.float32")}
    assert layout.shared["hidden.0.weight"] == ((4, 128), "torch.float32")


def test_the_rows_of_a_second_head_are_classes_too() -> None:
    model = build(ModelSpec("cnn", projection=5, second_head=True), AB, 1, pretrained=False)
    shared, head = split_state(model.state_dict())
    layout = Layout.of({name: shared[name] for name in SharingSpec("average").shared(model)}, head)
    assert {name: shape for name, (shape, _) in layout.head.items()} == {
        "head.weight": (128,),
        "head.bias": (),
        "second_head.weight": (5,),
        "second_head.bias": (),
    }
    assert not {name for name in shared if "head" in name}
    assert torch.equal(head["second_head.weight"], head_rows(AB, 5, 1, "second_head")["second_head.weight"])
    grown = relabel(head, AB.names, ("Hernia", "Edema", "Mass"), 1)
    for name, rows in head.items():
        assert torch.equal(grown[name][1:], rows)
    assert grown["second_head.weight"].shape == (3, 5)


def test_gray_images_are_repeated_for_a_backbone_of_colour() -> None:
    prepare = ModelSpec("densenet121", size=32).preprocessing
    out = prepare(torch.full((2, 1, 32, 32), 255, dtype=torch.uint8))
    assert out.shape == (2, 3, 32, 32)
    assert out[0, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, abs=1e-5)
    cnn = ModelSpec("cnn", size=32).preprocessing
    assert cnn(torch.zeros(1, 1, 32, 32, dtype=torch.uint8)).unique().tolist() == [-2.0]


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'densenet121'"):
        ModelSpec("densnet121")


def test_a_modality_is_a_code_of_dicom() -> None:
    assert ModelSpec(modalities=("CR", "DX")).modalities == ("CR", "DX")
    for wrong in ("dx", "", " DX", "X-RAY", "A" * 17, "DX\n"):
        with pytest.raises(ValueError, match="DICOM's Modality"):
            ModelSpec(modalities=(wrong,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("densenet121", size=28), "model.size 28 is too small for densenet121; 29 or more"),
        (ModelSpec("lstm", weights="x.pth"), "model.weights: lstm"),
        (ModelSpec("cnn", dropout=0.3), "model.dropout"),
        (ModelSpec("cnn", second_head=True), "model.second_head"),
        (ModelSpec("cnn", mean=(0.5, 0.5, 0.5)), "model.mean has 3 values; cnn takes 1 channels"),
        (ModelSpec("densenet121", std=(0.2,)), "model.std has 1 values; densenet121 takes 3 channels"),
        (ModelSpec("lstm", modalities=("DX",)), "model.modalities"),
    ],
)
def test_settings_that_contradict_each_other(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(spec, AB, 1, pretrained=False)


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf")])
def test_a_standard_deviation_that_divides_by_nothing(std: float) -> None:
    with pytest.raises(ConfigError, match=r"model: std\.0: "):
        parse(ModelSpec, {"std": (std,)}, "model")


@pytest.mark.parametrize(
    "part", [nn.LSTM(2, 2), nn.GRU(2, 2), nn.RNN(2, 2), nn.LSTMCell(2, 2), nn.GRUCell(2, 2)]
)
def test_no_recurrent_network_computes_in_mixed_precision(part: nn.Module) -> None:
    plain, recurrent = (Classifier(nn.Sequential(nn.Linear(2, 2), *more), 2, AB) for more in ((), (part,)))
    for model in (plain, recurrent):
        model.compute_in(torch.bfloat16)
    assert (plain.amp_dtype, recurrent.amp_dtype) == (torch.bfloat16, None)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_precision_ends_with_the_backbone(half: torch.dtype) -> None:
    model = Classifier(nn.Linear(2, 4), 4, AB, hidden=3, neck=5, reads=("x",))
    model.compute_in(half)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    inputs = {"x": torch.rand(3, 2)}
    assert model(inputs).dtype == model.features(inputs).dtype == torch.float32
    assert seen.pop("backbone") == half
    assert set(seen.values()) == {torch.float32}
    model.compute_in(None)
    model(inputs)
    assert set(seen.values()) == {torch.float32}
