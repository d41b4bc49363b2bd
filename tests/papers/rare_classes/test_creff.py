"""CReFF: its equations by hand and as loops, what it shares with FedAvg, and its augmentation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hypothesis_profiles import examples
from rounds import conformant, train_round
from suture.core.runtime import generator_for, seed_for
from suture.learning.training import ready_inputs
from suture.methods.base import GlobalModel, Phase, RoundContext, with_channels
from suture.methods.fedavg import FedAvg
from suture.protocol.messages import Update, ones
from suture_papers.rare_classes import creff
from suture_papers.rare_classes.creff import FEATURES, GRADIENTS, RETRAINED, CReFF, join
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

METHOD = conformant("creff")
assert isinstance(METHOD, CReFF)
CTX = RoundContext(1, Phase("main", 1), 7)


def federation(method: Any = METHOD, **more: Any) -> Trial:
    return Trial(method, SMALL, "multiclass", **more)


def test_gradients_and_distances_by_hand() -> None:
    head = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # W = I, b = 0
    y = torch.tensor([[1.0, 0.0]])
    measured = creff.head_gradient(torch.eye(2), y, head)
    # p is (.731059, .268941), and the reverse: the errors of class 0 are -.268941 and -.731059.
    expected = [[-0.134471, -0.365529, -0.5], [0.134471, 0.365529, 0.5]]
    assert measured.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]
    for feature, away in (((1.0, 1.0), 0.184490), ((1.0, 0.0), 1.309495)):
        synthetic = creff.head_gradient(torch.tensor([feature]), y, head)
        assert float(creff.distance(synthetic, measured)) == pytest.approx(away, abs=1e-6)


def slow_gradient(features: Tensor, label: int, head: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy of features of one class, image by image, by autograd."""
    total = torch.zeros_like(head)
    for h in features:
        layer = nn.Linear(len(h), len(head)).double()
        with torch.no_grad():
            layer.weight.copy_(head[:, :-1])
            layer.bias.copy_(head[:, -1])
        F.cross_entropy(layer(h)[None], torch.tensor([label])).backward()
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        total += torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
    return total / len(features)


def slow_distance(one: Tensor, other: Tensor) -> Tensor:
    def away(a: Tensor, b: Tensor) -> Tensor:
        return 1 - (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt() + 1e-6)

    rows = [away(one[m, :-1], other[m, :-1]) for m in range(len(one))]
    return torch.stack([*rows, away(one[:, -1], other[:, -1])]).sum()


@examples(8)
@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 3), st.integers(1, 4))
def test_the_servers_half_is_the_papers(seed: int, classes: int, width: int, n: int) -> None:
    """Loops over classes and features, with torch's own cross-entropy, SGD and linear layer."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(classes, width + 1, generator=g).double()
    target = torch.randn(classes, classes, width + 1, generator=g).double()
    start = torch.randn(classes, n, width, generator=g).double()
    how = creff.FederatedFeatures(per_class=n)
    with mock.patch.object(creff, "STEPS", 3):
        found = how.match(start, torch.arange(classes), head, target)
    for c in range(classes):
        features = start[c].clone().requires_grad_()
        optimiser = torch.optim.SGD([features], lr=0.1)
        for _ in range(3):
            p = torch.softmax(features @ head[:, :-1].T + head[:, -1], dim=1)
            error = p - F.one_hot(torch.tensor(c), classes)
            gradient = torch.cat([error.T @ features, error.sum(0)[:, None]], dim=1) / n
            assert torch.allclose(gradient, slow_gradient(features.detach(), c, head), atol=1e-10)
            optimiser.zero_grad()
            slow_distance(gradient, target[c]).backward()
            optimiser.step()
        assert torch.allclose(found[c], features.detach(), rtol=1e-10, atol=1e-10)
    fresh = torch.randn(classes, width + 1, generator=g).double()
    layer = nn.Linear(width, classes).double()
    with torch.no_grad():
        layer.weight.copy_(fresh[:, :-1])
        layer.bias.copy_(fresh[:, -1])
    sgd, order = torch.optim.SGD(layer.parameters(), lr=0.3), torch.Generator().manual_seed(1)
    x, y = found.reshape(-1, width), torch.arange(classes).repeat_interleave(n)
    for _ in range(2):
        shuffled = torch.randperm(len(x), generator=order)
        for i in range(0, len(x), 3):
            sgd.zero_grad()
            F.cross_entropy(layer(x[shuffled[i : i + 3]]), y[shuffled[i : i + 3]]).backward()
            sgd.step()
    with mock.patch.multiple(creff, BATCH=3, HEAD_EPOCHS=2, HEAD_RATE=0.3):
        rows = how.retrain(found, fresh, torch.Generator().manual_seed(1))
    assert torch.allclose(
        rows, torch.cat([layer.weight, layer.bias[:, None]], 1).detach(), rtol=1e-10, atol=1e-10
    )


def test_the_sites_half_is_the_papers() -> None:
    """Draw by draw and image by image, under the received backbone in eval mode."""
    with federation() as trial:
        payload = trial.payload("gamma")
        site = trial.context("gamma", payload)
        head = creff.retrained_rows(payload.head, payload.channels)
        found = creff.ClassGradients(draws=3, images=2).of(site, head, 5)
        expected, train = torch.zeros_like(found).double(), site.samples["train"]
        site.model.eval().double()
        for c in range(len(payload.labels)):
            rows = [i for i in range(len(train)) if train.y[i, c] == 1]
            g = generator_for(5, payload.labels[c])
            for _ in range(3 if rows else 0):
                picked = torch.tensor(rows)[torch.randperm(len(rows), generator=g)[:2]]
                image = creff.siamese(ready_inputs(site, train.batch(picked)).inputs["image"], g).double()
                with torch.no_grad():
                    features = site.model.features({"image": image})
                expected[c] += slow_gradient(features, c, head.double()) / 3
    present = expected.flatten(1).any(dim=1)
    # gamma annotates Fibrosis, Mass and Nodule, and not Hernia.
    assert dict(zip(payload.labels, present.tolist(), strict=True)) == {
        "Fibrosis": True,
        "Hernia": False,
        "Mass": True,
        "Nodule": True,
    }
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.equal(found.flatten(1).any(dim=1), present)


@pytest.mark.complete
def test_backbone_and_head_are_those_of_fedavg() -> None:
    """Bit for bit: to measure gradients moves neither the model nor what training draws."""
    plain = FedAvg(local=METHOD.local, class_weights="none")
    with federation(rounds=2) as one, federation(plain, rounds=2) as other:
        one.run()
        other.run()
        for group in ("shared", "head"):
            for name, tensor in getattr(other.server.model, group).items():
                assert torch.equal(getattr(one.server.model, group)[name], tensor)
        assert not torch.equal(
            one.server.select_model().head["head.weight"], other.server.model.head["head.weight"]
        )


# The server, from updates by hand


LABELS = ("A", "B", "C")


def head_of(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"head.weight": torch.randn(3, 2, generator=g), "head.bias": torch.randn(3, generator=g)}


def model() -> GlobalModel:
    return with_channels(GlobalModel(LABELS, {"w": torch.zeros(2)}, head_of()), METHOD)


def sent(classes: dict[str, float], weight: float, seed: int = 0) -> Update:
    """An update whose gradient of each of its classes is that number everywhere."""
    gradients = torch.stack([torch.full((3, 3), classes.get(name, 0.0)) for name in LABELS])
    shared, of_class = {"w": torch.full((2,), float(seed))}, weight * ones(LABELS)
    return Update(1, LABELS, shared, head_of(seed), of_class, weight, channels={GRADIENTS: gradients})


def test_a_row_that_was_re_trained_predicts_and_the_heads_own_where_none_was() -> None:
    head = model().head
    predicts = METHOD.predictor(head, {RETRAINED: torch.tensor([[1.0, 2, 3], [0, 0, 0], [4, 5, 6]])})
    assert predicts["head.weight"].tolist() == [[1, 2], head["head.weight"][1].tolist(), [4, 5]]
    assert predicts["head.bias"].tolist() == [3, head["head.bias"][1].item(), 6]


def test_gradients_are_averaged_equally_over_the_sites_that_have_the_class() -> None:
    updates = [sent({"A": 1.0, "B": 2.0}, weight=100), sent({"A": 4.0}, weight=1), sent({"A": 1.0}, weight=7)]
    mean, classes = creff.mean_gradients(model(), updates)
    assert classes.tolist() == [0, 1]
    assert [mean[c].unique().tolist() for c in range(3)] == [[2.0], [2.0], [0.0]]


def test_gradients_are_averaged_by_name_on_both_axes() -> None:
    gradients = torch.arange(27.0).view(3, 3, 3) + 1
    update = replace(sent({}, 1), labels=("C", "A", "B"), channels={GRADIENTS: gradients})
    mean, _ = creff.mean_gradients(model(), [update])
    order = torch.tensor([1, 2, 0])
    assert torch.equal(mean.float(), gradients[order][:, order])


def test_a_class_that_nobody_ever_sent_keeps_its_row_and_has_no_features() -> None:
    one = METHOD.aggregate(model(), [sent({"A": 1.0}, 1), sent({"B": -1.0}, 1, seed=1)], CTX)
    assert one.channels[FEATURES].flatten(1).any(dim=1).tolist() == [True, True, False]
    assert torch.equal(one.channels[RETRAINED][2], join(one.head)[2])
    for c in (0, 1):
        assert not torch.equal(one.channels[RETRAINED][c], join(one.head)[c])
    two = METHOD.aggregate(one, [sent({"A": 2.0}, 1)], replace(CTX, round=2))
    assert torch.equal(two.channels[FEATURES][1], one.channels[FEATURES][1])
    assert not torch.equal(two.channels[FEATURES][0], one.channels[FEATURES][0])
    assert not torch.equal(two.channels[RETRAINED][1], one.channels[RETRAINED][1])  # reinitialised
    assert torch.equal(two.channels[RETRAINED][2], join(two.head)[2])


def test_features_match_gradients_under_the_head_that_the_sites_used() -> None:
    """It is psi~ of the round before: neither psi, received or merged, nor the head of this round."""
    rows = torch.randn(3, 3, generator=torch.Generator().manual_seed(4))
    before = replace(model(), channels={**model().channels, RETRAINED: rows})
    after = METHOD.aggregate(before, [sent({"A": 1.0, "B": -1.0, "C": 0.5}, 1)], CTX)
    target, classes = creff.mean_gradients(before, [sent({"A": 1.0, "B": -1.0, "C": 0.5}, 1)])
    n = METHOD.federated_features.per_class
    start = torch.stack(
        [
            torch.randn(n, 2, generator=generator_for(CTX.seed, f"features/{c}"), dtype=torch.float64)
            for c in LABELS
        ]
    )
    found = after.channels[FEATURES]
    heads = [rows, join(before.head), join(after.head), after.channels[RETRAINED]]
    how = METHOD.federated_features
    matched = [how.match(start, classes, head.double(), target).float() for head in heads]
    assert [torch.allclose(one, found) for one in matched] == [True, False, False, False]


def test_a_site_measures_gradients_of_the_re_trained_head() -> None:
    with federation() as trial:
        payload = trial.payload("gamma")
        site = trial.context("gamma", payload)
        rows = torch.randn(payload.channels[RETRAINED].shape, generator=torch.Generator().manual_seed(2))
        other = replace(payload, channels={**payload.channels, RETRAINED: rows})
        update, _ = train_round(METHOD, site, other, CTX)
        for head, same in ((rows, True), (join(payload.head), False)):
            site = trial.context("gamma", payload)
            found = METHOD.class_gradients.of(site, head, seed_for(CTX.seed, "gamma", 1, GRADIENTS))
            assert torch.equal(update.channels[GRADIENTS], found) == same


def test_with_one_site_the_merge_is_its_own_tensors() -> None:
    update = sent({"A": 1.0, "C": 2.0}, 1)
    after = METHOD.aggregate(model(), [update], CTX)
    for name, tensor in {**update.shared, **update.head}.items():
        assert torch.equal({**after.shared, **after.head}[name], tensor)


def test_finite_gradients_of_any_size_leave_finite_features_and_rows() -> None:
    lie = sent({"A": 3e38, "B": 1e-38}, 1)
    one = METHOD.aggregate(model(), [lie, sent({"A": 1.0, "B": 1.0, "C": 1.0}, 1)], CTX)
    two = METHOD.aggregate(one, [lie], replace(CTX, round=2))
    for after in (one, two):
        for tensor in after.channels.values():
            assert bool(torch.isfinite(tensor).all())


# What leaves a site


def test_gradients_of_fewer_images_than_the_smallest_count_are_not_sent() -> None:
    """Of the class with as many images as the smallest count the gradient leaves, of the others none does."""
    with federation() as trial:
        site = trial.context("gamma", trial.payload("gamma"))
        counts = torch.nan_to_num(site.samples["train"].y).sum(dim=0)
        most = int(counts.max())
        assert (counts == most).sum() < (counts > 0).sum()
        head = join(trial.payload("gamma").head)
        found = METHOD.class_gradients.of(replace(site, min_count=most), head, 0)
    assert found.flatten(1).any(dim=1).tolist() == (counts == most).tolist()


# One augmentation for all images of a draw


def test_all_images_are_changed_alike_and_each_kind_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 16, 16, generator=g)
    images = image.expand(4, -1, -1, -1)
    for kind in creff._KINDS:
        monkeypatch.setattr(creff, "_KINDS", (kind,))
        changed = creff.siamese(images, torch.Generator().manual_seed(3))
        assert changed.shape == images.shape
        for one in changed[1:]:
            assert torch.equal(one, changed[0])
        assert torch.equal(changed, creff.siamese(images, torch.Generator().manual_seed(3)))
        assert kind is creff.flip or not torch.equal(changed, images)


def test_the_odds_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    kinds = [lambda x, *_, name=kind.__name__: drawn.append(name) or x for kind in creff._KINDS]
    monkeypatch.setattr(creff, "_KINDS", kinds)
    g = torch.Generator().manual_seed(0)
    for _ in range(600):
        creff.siamese(torch.zeros(1, 1, 2, 2), g)
    counts = [drawn.count(name) for name in ("colour", "crop", "cut", "flip", "zoom", "rotate")]
    assert sum(counts) == 600
    assert min(counts) > 70


def test_colour_and_mirror_by_hand() -> None:
    """Brightness; no saturation is the mean of channels; and contrast, 1.5 times around 2."""
    image = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    draws = ((1.0, 0.5, 0.5), (0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 1.0, 0.5), (0.5, 0.5, 1.0))
    found = [creff.colour(image, *drawn).flatten().tolist() for drawn in draws]
    assert found == [[1.5, 3.5], [0.5, 2.5], [2, 2], [0, 4], [0.5, 3.5]]
    image = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3)
    assert creff.flip(image, 0.4).flatten().tolist() == [3, 2, 1]
    assert creff.flip(image, 0.6).flatten().tolist() == [1, 2, 3]


def test_a_crop_moves_by_an_eighth_of_the_side_at_most() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8) + 1
    assert torch.equal(creff.crop(image, 0.5, 0.5, 0.0), image)
    up_left, down_right = creff.crop(image, 0.0, 0.0, 0.0), creff.crop(image, 0.999, 0.999, 0.0)
    assert torch.equal(up_left[..., 1:, 1:], image[..., :-1, :-1])
    assert torch.equal(down_right[..., :-1, :-1], image[..., 1:, 1:])
    assert not up_left[..., 0, :].any()
    assert not down_right[..., -1].any()


def test_a_hole_has_half_the_side() -> None:
    image = torch.ones(2, 1, 8, 8)
    holed = creff.cut(image, 0.5, 0.5, 0.0)
    assert int((holed == 0).sum()) == 2 * 16
    assert not holed[..., 2:6, 2:6].any()
    beyond = creff.cut(image, 0.0, 0.0, 0.0)  # half of each side is out of the image
    assert int((beyond == 0).sum()) == 2 * 4
    assert image.all()


def test_zoom_and_rotation_leave_the_image_in_the_middle_of_their_range() -> None:
    image = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    middle = (1 - 1 / 1.2) / (1.2 - 1 / 1.2)
    for same in (creff.zoom(image, middle, middle, 0.0), creff.rotate(image, 0.5)):
        torch.testing.assert_close(same, image)
    # 15 degrees move the corners and not the centre.
    for turned in (creff.rotate(image, 0.0), creff.rotate(image, 1.0)):
        torch.testing.assert_close(turned[..., 4, 4], image[..., 4, 4])
        assert not torch.allclose(turned[..., 0, 0], image[..., 0, 0])
    closer = creff.zoom(image, 0.0, 0.0, 0.0)
    torch.testing.assert_close(closer[..., 4, 4], image[..., 4, 4])
    # Of a line in the middle column, 1 / 1.2 of the width is seen: what is beyond x = .83 is out of sight.
    ramp = torch.arange(9.0).view(1, 1, 1, 9).expand(1, 1, 9, 9)
    assert creff.zoom(ramp, 0.0, 0.0, 0.0)[0, 0, 4, 0].item() == pytest.approx(4 - 4 / 1.2)
    assert creff.zoom(ramp, 1.0, 1.0, 0.0)[0, 0, 4, 1].item() == pytest.approx(max(4 - 3 * 1.2, 0))
