"""The conformance check of an encoder of another package; `suture.testing` exports it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.models import MODELS, ModelSpec, build
from suture.models.classifier import Classifier
from suture.models.encoders import Backbone

_NAME = "encoder under check"


def check_encoder(entry: Backbone, size: int = 64, *, color: bool = False) -> None:
    """Check that an encoder keeps what training and saved models rely on.

    Args:
        entry: what the entry point ``suture.encoders`` names.
        size: side of the images, in pixels.
        color: whether they are in colour.

    Raises:
        AssertionError: naming what does not hold.
        ConfigError: it is not built for images of that size.
    """
    assert isinstance(entry, Backbone), f"{entry!r} is not a suture.models.Backbone"
    assert entry.reads == "image", "it must read images"
    MODELS[_NAME] = entry
    try:
        _check(ModelSpec(_NAME, size=size, color=color))
    finally:
        del MODELS[_NAME]


def _check(spec: ModelSpec) -> None:
    before = torch.get_rng_state()
    model, again, other = (build(spec, LabelSet(("A", "B")), seed, pretrained=False) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before), "building it changes torch's global random numbers"
    state = model.state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor, again.state_dict()[name]), f"{name}: the same seed gives other numbers"
        kept = tensor.is_floating_point() or name in model.counters
        assert kept, f"{name}: {tensor.dtype} cannot be averaged; register it with persistent=False"
    shape, fixed = (3, spec.preprocessing.channels, spec.size, spec.size), torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=fixed)
    found = _features(model, images)
    wanted = (3, model.head.in_features)
    assert found.shape == wanted, f"features are {list(found.shape)}; `build` states {list(wanted)}"
    assert found.dtype == torch.float32, f"features are {found.dtype}, not float32"
    assert bool(torch.isfinite(found).all()), "features are not finite"
    single = torch.cat([_features(model, image[None]) for image in images])
    alone = torch.allclose(single, found, rtol=1e-4, atol=1e-5)
    assert alone, "the features of an image depend on the others of its batch"
    other.load_state_dict(state)
    for twin in (other, copy.deepcopy(model)):
        same = torch.equal(_features(twin, images), found)
        assert same, "a copy with the same tensors gives other features: it keeps something outside of them"
    _check_training(model, images)


def _check_training(model: Classifier, images: Tensor) -> None:
    model.train()
    for batch in (images, images[:1]):  # the last batch of an epoch may have one image
        loss = nn.functional.softplus(model({"image": batch})).sum()
        trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        unused = [name for name, gradient in zip(trained, found, strict=True) if gradient is None]
        assert not unused, f"{unused[0]} takes no part in the features; leave it out"


@torch.no_grad()
def _features(model: Classifier, images: Tensor) -> Tensor:
    return model.eval().features({"image": images})
