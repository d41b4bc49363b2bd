"""What does an image look like that a site has trained on? Gradient inversion of a small network.

    Geiping, Bauermeister, Dröge, Moeller. Inverting Gradients. NeurIPS 2020.

A site, one of 4, trains the whole of a small network by SGD, on one image in one step (`step`) or on two
images in a whole round of three steps (`round`), and sends the change Δ. The server knows the network, the
labels and the settings. It searches the x in [0, 1] whose own training gives the change Δ(x) with the least

    1 - cos(Δ(x), Δ) + 0.001 TV(x),    TV the mean absolute difference of neighbouring pixels,

by Adam on signs of gradients. Success is the peak signal-to-noise ratio (dB) of the images found, mean over
the victims of a seed; guessing the mean image of others is the line without an attack. With secure
aggregation the server has the sum of the 4 sites' changes and searches the images of all 4, knowing which
labels are of one site.

`feature` needs no search: of a linear head, one step on one image changes each row by a multiple of its
features, and the row's bias by the same multiple. Success is the cosine of what is read to the features; the
line without an attack is that of the mean features of others.

With ε the site adds the noise of DP-SGD at a site of 1,000 patients with batches of 100, in 10 rounds of
4 steps. The attacker is taken to know all other patients of the batch: only the noise is in its way.
"""

from __future__ import annotations

import time
from functools import cache
from statistics import mean
from typing import Any

import liars
import numpy as np
import secure
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call

from suture.core.labels import LabelSet
from suture.data.batch import FEATURES, Batch
from suture.federation.site.releases import count_mechanism
from suture.learning.dp_sgd import PatientPrivacy
from suture.learning.steps import masked_bce
from suture.learning.training import on_known
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier
from suture.privacy.differential_privacy import Mechanism, multiplier_for

SIZE, SITES, VICTIMS, SEARCH, LR = 16, 4, 1, 300, 0.05
MODEL = ModelSpec("cnn", size=SIZE)
KINDS = {"step": (1, 1), "round": (2, 3)}
"""Images and steps."""

Tensors = dict[str, Tensor]


@cache
def images(data: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """200 images as numbers in [0, 1], ``[n, 1, s, s]``, and their labels."""
    found, y, names = liars.pool(data)
    small = nn.functional.adaptive_avg_pool2d(found[:200, :1].float() / 255, SIZE)
    return small, y[:200], names


@cache
def noise(epsilon: float) -> float:
    """σ of the site, at δ = 1e-5."""
    return multiplier_for(epsilon, 1e-5, [Mechanism(0.0, 0.1, 40)], count_mechanism(epsilon))


def change(model: Classifier, inputs: Tensors, y: Tensor, steps: int, defence: str, seed: int) -> Tensors:
    """What a site sends after some steps of SGD: the change of each trained parameter."""
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    batch, objective = Batch(inputs, y, torch.ones_like(y, dtype=torch.bool)), on_known(masked_bce)
    for _ in range(steps):
        if not defence.startswith("ε"):
            objective(model, batch).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            sgd.zero_grad()
        else:
            draw = np.random.default_rng(seed).bytes
            private = PatientPrivacy(1.0, noise(float(defence.split()[1])), 1000, draw)
            private.step(model, objective, sgd, batch, len(y))
            seed += 1000
    after = dict(model.named_parameters())
    return {name: after[name].detach() - tensor for name, tensor in before.items()}


def simulated(model: Classifier, x: Tensor, y: Tensor, steps: int) -> Tensors:
    """The same without a defence, as a function of the images."""
    start = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    values, known = start, torch.ones_like(y, dtype=torch.bool)
    for _ in range(steps):
        loss = masked_bce(functional_call(model, values, ({"image": normal(x)},)), y, known)
        slopes = torch.autograd.grad(loss, list(values.values()), create_graph=True)
        values = {n: t - LR * g for (n, t), g in zip(values.items(), slopes, strict=True)}
    return {name: tensor - start[name] for name, tensor in values.items()}


def normal(x: Tensor) -> Tensor:
    """Images in [0, 1] as the network reads them."""
    spec = MODEL.preprocessing
    return (x - spec.mean[0]) / spec.std[0]


def search(model: Classifier, sent: Tensors, ys: list[Tensor], steps: int, seed: int) -> Tensor:
    """The images, one site's after the other's, whose training would give nearly the change that was sent.

    Args:
        ys: the labels of each site that has a part in the change.
    """
    draw, ends = torch.Generator().manual_seed(seed), np.cumsum([len(y) for y in ys]).tolist()
    x = torch.rand((ends[-1], 1, SIZE, SIZE), generator=draw).requires_grad_()
    adam = torch.optim.Adam([x], 0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [SEARCH // 2, SEARCH * 3 // 4], 0.2)
    flat = torch.cat([sent[name].flatten() for name in sent])
    for _ in range(SEARCH):
        own = [
            simulated(model, part, y, steps) for part, y in zip(x.tensor_split(ends[:-1]), ys, strict=True)
        ]
        total = torch.stack([torch.cat([change[n].flatten() for n in sent]) for change in own]).sum(0)
        distance = 1 - torch.cosine_similarity(total, flat, dim=0)
        rough = x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
        (x.grad,) = torch.autograd.grad(distance + 0.001 * rough, [x])
        x.grad = x.grad.sign()
        adam.step()
        schedule.step()
        x.data.clamp_(0, 1)
    return x.detach()


def psnr(found: Tensor, true: Tensor) -> float:
    """The mean signal-to-noise ratio of images in dB, in the order that fits best."""
    error = (found[:, None] - true).square().mean((2, 3, 4))
    ratios = (-10 * error.clamp_min(1e-10).log10()).numpy()
    return float(ratios[linear_sum_assignment(ratios, maximize=True)].mean())


def inverted(data: str, kind: str, defence: str, seed: int) -> dict[str, Any]:
    """PSNR of the victims, and of the mean image in their place."""
    (number, steps), (x, y, names) = KINDS[kind], images(data)
    began, found, blind = time.process_time(), [], []
    for victim in range(VICTIMS):
        sites = of_sites(number, VICTIMS * (seed - 1) + victim, defence)
        parts = []
        for rows in sites:
            model = build(MODEL, LabelSet(names), seed, pretrained=False).eval()
            inputs = {"image": normal(x[rows])}
            parts.append(change(model, inputs, y[rows], steps, defence, 100 * seed + victim))
        sent = parts[0] if len(parts) == 1 else secure.sum_of(parts, names)
        model = build(MODEL, LabelSet(names), seed, pretrained=False).eval()
        true = x[[row for rows in sites for row in rows]]
        found.append(psnr(search(model, sent, [y[rows] for rows in sites], steps, seed), true))
        blind.append(psnr(x[100:].mean(0, keepdim=True).expand_as(true), true))
    seconds = (time.process_time() - began) / VICTIMS
    return {"success": mean(found), "without": mean(blind), "seconds": seconds, "bytes": size(sent, defence)}


def of_sites(number: int, victim: int, defence: str) -> list[list[int]]:
    """The images of each site that has a part in what the server sees; the victim is the first one."""
    sites = SITES if defence == secure.DEFENCE else 1
    return [[(20 * site + victim) * number % 100 + i for i in range(number)] for site in range(sites)]


def size(sent: Tensors, defence: str) -> int:
    """The bytes of an update; masked numbers have eight."""
    return sum(t.numel() for t in sent.values()) * (8 if defence == secure.DEFENCE else 4)


def feature(data: str, defence: str, seed: int) -> dict[str, Any]:
    """The cosine of what is read from a row's change to the features of the image."""
    features, (_, y, names) = liars.inputs_of(data)[FEATURES], liars.pool(data)
    began, found, blind = time.process_time(), [], []
    for victim in range(5):
        sites, parts = of_sites(1, 5 * (seed - 1) + victim, defence), []
        for rows in sites:
            torch.manual_seed(seed)
            model = Classifier(nn.Identity(), features.shape[1], LabelSet(names), trains="head").eval()
            parts.append(change(model, {FEATURES: features[rows]}, y[rows], 1, defence, 100 * seed + victim))
        sent = parts[0] if len(parts) == 1 else secure.sum_of(parts, names)
        label, true = int(sent["head.bias"].abs().argmax()), features[sites[0][0]]
        read = sent["head.weight"][label] / sent["head.bias"][label]
        found.append(float(torch.cosine_similarity(read, true, dim=0)))
        blind.append(float(torch.cosine_similarity(features[100:200].mean(0), true, dim=0)))
    seconds = (time.process_time() - began) / 5
    return {"success": mean(found), "without": mean(blind), "seconds": seconds, "bytes": size(sent, defence)}
