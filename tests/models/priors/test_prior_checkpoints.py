"""The formats of published checkpoints: MoCo v2's ResNet-50 and CLIP's image encoder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from suture.core.errors import ConfigError
from suture.models.priors import PriorSpec, load_prior
from suture_papers.fedmas.priors import VisionTower, moco_resnet50, rename_tensors

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # else mean 0 and variance 1 would hide a mix-up
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def official(model: torch.nn.Module) -> dict[str, object]:
    """The file of the authors: the query encoder with its projection, and what else was being trained."""
    state = {f"module.encoder_q.{k}": t for k, t in model.state_dict().items() if not k.startswith("fc.")}
    state |= {f"module.encoder_q.fc.{i}.weight": torch.zeros(2, 2) for i in (0, 2)}
    state |= {"module.queue": torch.zeros(2, 2), "module.encoder_k.conv1.weight": torch.zeros(64, 3, 7, 7)}
    return {"epoch": 800, "arch": "resnet50", "state_dict": state}


@pytest.mark.complete
def test_moco_gives_torchvisions_features(theirs: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "moco_v2_800ep_pretrain.pth.tar"
    torch.save(official(theirs), path)
    prior = load_prior(PriorSpec("moco_resnet50", str(path)))
    assert (prior.width, prior.preprocessing.size) == (2048, 224)
    theirs.fc = torch.nn.Identity()
    x = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(prior.features(x), theirs((x / 255 - MEAN) / STD), rtol=0, atol=1e-5)
    assert prior.features(x[:, :1, :32, :32]).shape == (2, 2048)
    assert moco_resnet50(path, 64).preprocessing.size == 64


def test_files_that_are_not_mocos_say_so(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"x\.pth cannot be read .*moco_v2_800ep"):
        moco_resnet50(path)
    torch.save({"state_dict": {"conv1.weight": torch.ones(1)}}, path)
    with pytest.raises(ConfigError, match=r"x\.pth has no tensors module\.encoder_q\.\*.*moco_v2_800ep"):
        moco_resnet50(path)
    torch.save({"state_dict": {"module.encoder_q.conv1.weight": torch.ones(1)}}, path)
    with pytest.raises(ConfigError, match=r"x\.pth .*ResNet-50.*conv1\.weight"):
        moco_resnet50(path)
    torch.save([torch.ones(1)], path)
    with pytest.raises(ConfigError, match=r"x\.pth contains a list"):
        moco_resnet50(path)


def block(x: Tensor, t: dict[str, Tensor], name: str, heads: int = 12) -> Tensor:
    """A transformer block from its definition, with the checkpoint's words."""
    t = {key.removeprefix(name): value for key, value in t.items()}
    width = x.shape[-1]
    y = F.layer_norm(x, (width,), t["ln_1.weight"], t["ln_1.bias"])
    qkv = y @ t["attn.in_proj_weight"].T + t["attn.in_proj_bias"]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    seen = (q @ k.transpose(-1, -2) / math.sqrt(width // heads)).softmax(-1) @ v
    x = x + seen.transpose(1, 2).flatten(2) @ t["attn.out_proj.weight"].T + t["attn.out_proj.bias"]
    y = F.layer_norm(x, (width,), t["ln_2.weight"], t["ln_2.bias"])
    y = y @ t["mlp.c_fc.weight"].T + t["mlp.c_fc.bias"]
    return x + (y * torch.sigmoid(1.702 * y)) @ t["mlp.c_proj.weight"].T + t["mlp.c_proj.bias"]


def test_clips_encoder_is_its_definition() -> None:
    torch.manual_seed(0)
    width = 768
    shapes = {"class_embedding": (width,), "positional_embedding": (5, width), "proj": (width, 512)}
    shapes |= {"conv1.weight": (width, 3, 32, 32)}
    shapes |= {f"ln_{when}.{k}": (width,) for when in ("pre", "post") for k in ("weight", "bias")}
    at = "transformer.resblocks.0."
    for layer, (rows, columns) in {
        "attn.in_proj_": (3 * width, width),
        "attn.out_proj.": (width, width),
        "mlp.c_fc.": (4 * width, width),
        "mlp.c_proj.": (width, 4 * width),
    }.items():
        shapes |= {f"{at}{layer}weight": (rows, columns), f"{at}{layer}bias": (rows,)}
    shapes |= {f"{at}ln_{i}.{k}": (width,) for i in (1, 2) for k in ("weight", "bias")}
    t = {name: torch.randn(shape) * 0.03 + ("ln_" in name) for name, shape in shapes.items()}
    x = torch.randn(2, 3, 64, 64)
    patches = F.conv2d(x, t["conv1.weight"], stride=32).flatten(2).transpose(1, 2)
    tokens = torch.cat([t["class_embedding"].expand(2, 1, -1), patches], 1) + t["positional_embedding"]
    tokens = block(F.layer_norm(tokens, (width,), t["ln_pre.weight"], t["ln_pre.bias"]), t, at)
    expected = F.layer_norm(tokens[:, 0], (width,), t["ln_post.weight"], t["ln_post.bias"]) @ t["proj"]
    tower = VisionTower(layers=1, size=64).eval()
    tower.load_state_dict(rename_tensors(t))
    with torch.no_grad():
        torch.testing.assert_close(tower(x), expected, rtol=0, atol=1e-4)


@pytest.mark.complete
def test_files_that_are_not_clips_say_so(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"vision_model.x": torch.ones(1)}, path)
    with pytest.raises(ConfigError, match=r"x\.safetensors has no tensors visual\.\*"):
        load_prior(PriorSpec("clip_vitb32", str(path)))
    save_file({"visual.conv1.weight": torch.ones(1)}, path)
    with pytest.raises(ConfigError, match=r"x\.safetensors .*image encoder of CLIP"):
        load_prior(PriorSpec("clip_vitb32", str(path)))
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"x\.safetensors is damaged, or not a safetensors file of CLIP"):
        load_prior(PriorSpec("clip_vitb32", str(path)))
