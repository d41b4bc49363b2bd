"""The one training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from suture.data.batch import Samples
from suture.data.transforms import MILD
from suture.labels import LabelSet
from suture.losses import masked_bce
from suture.models import ModelSpec, build
from suture.training import LocalTraining, NonFiniteLoss, Workbench, fit, on_known, predict

SPEC = ModelSpec("cnn", size=16, hidden=6, dropout=0.5)
LOCAL = LocalTraining(lr=1e-2, batch_size=4)


def bench(n: int = 9) -> Workbench:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 1, 16, 16), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 2, (n, 2), generator=g).float()
    samples = Samples({"image": pixels}, y, tuple(str(i) for i in range(n)))
    model = build(SPEC, LabelSet(("Edema", "Mass")), 1, pretrained=False)
    return Workbench("a", model, {"train": samples}, SPEC.preprocessing, MILD, torch.device("cpu"))


def train(site: Workbench, round_: int = 1, moments: Any = None, **options: Any) -> Any:
    chosen = {"policy": "average", "head_only": False, "local": LOCAL, **options}
    local = chosen.pop("local")
    return fit(site, on_known(masked_bce), local, moments=moments or {}, seed=1, round_=round_, **chosen)


def state(site: Workbench) -> dict[str, torch.Tensor]:
    return {k: t.clone() for k, t in site.model.state_dict().items()}


def test_moments_carry_over_and_matter() -> None:
    one, two, three = bench(), bench(), bench()
    first = train(one)
    kept = {k: t.clone() for k, t in first.moments.items()}
    train(one, 2, first.moments)
    train(two)
    train(two, 2, kept)
    train(three)
    train(three, 2)
    assert all(torch.equal(t, state(two)[k]) for k, t in state(one).items())
    assert any(not torch.equal(t, state(three)[k]) for k, t in state(one).items())
    assert {k.rsplit("/", 1)[1] for k in kept} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_row_more_starts_its_moments_afresh() -> None:
    site = bench()
    moments = train(site).moments
    moments["head.weight/exp_avg"] = torch.zeros(5, 6)
    train(site, 2, moments)


def test_rounds_and_sites_draw_their_own_numbers() -> None:
    results = []
    for round_ in (1, 1, 2):
        site = bench()
        train(site, round_)
        results.append(state(site)["head.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_head_only_leaves_the_backbone_alone() -> None:
    site = bench()
    before = state(site)
    train(site, head_only=True)
    for name, tensor in state(site).items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name


def test_a_loss_that_is_no_number_names_site_and_step() -> None:
    site = bench()
    with torch.no_grad():
        site.model.head.bias.fill_(float("nan"))
    with pytest.raises(
        NonFiniteLoss, match=r"a: the loss of round 1, step 1 is nan; lower the learning rate"
    ):
        train(site)


def test_a_sites_own_learning_rate_and_batch_size_go_first() -> None:
    import dataclasses

    mine = dataclasses.replace(bench(), lr=0.5, batch_size=2).own(LOCAL)
    assert (mine.lr, mine.batch_size, mine.epochs) == (0.5, 2, 1)


def test_a_last_batch_of_one_image_trains() -> None:
    """Nine images in batches of four: the lone ninth joins the batch before it."""
    site = bench(9)
    assert [len(b) for b in site.samples["train"].batches(4)] == [4, 5]
    train(site)
    assert predict(site, site.samples["train"]).shape == (9, 2)
