"""What does an image look like that a site has trained on? Gradient inversion of a small network.

    Geiping, Bauermeister, Dröge, Moeller. Inverting Gradients. NeurIPS 2020.

A site trains the whole of a small network by SGD, on one image in one step (`step`) or on two images in a
round of three steps (`round`), and sends the change Δ. The server knows the network, the labels and the
settings. It searches images x in [0, 1] whose own training gives the change Δ(x) with the least

    1 - cos(Δ(x), Δ) + 0.001 TV(x),    TV the mean absolute difference of neighbouring pixels,

by Adam on signs of gradients. Success is the peak signal-to-noise ratio (dB) of the images found, mean over
`VICTIMS` victims; guessing the mean image of others is the line without an attack.

`feature` needs no search: of a linear head, one step on one image changes each row by a multiple of its
features, and the row's bias by the same multiple. Success is the cosine of what is read to the features.

With ε the site adds the noise of DP-SGD at a site of 1,000 patients with batches of 100, in 10 rounds of
4 steps. The attacker is taken to know all other patients of the batch: only the noise is in its way.
"""

from __future__ import annotations

import itertools
import time
from functools import cache
from statistics import mean
from typing import Any

import liars
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from suture.core.labels import LabelSet
from suture.data.batch import FEATURES, Batch
from suture.federation.accounting import Mechanism, multiplier_for
from suture.federation.site.patient_privacy import count_mechanism
from suture.learning.losses import masked_bce
from suture.learning.patient_privacy import PatientPrivacy
from suture.learning.training import on_known
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier

SIZE, VICTIMS, SEARCH, LR = 16, 3, 300, 0.05
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
        if defence == "none":
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


def search(model: Classifier, sent: Tensors, y: Tensor, steps: int, seed: int) -> Tensor:
    """The images whose training would give nearly the change that was sent."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand((len(y), 1, SIZE, SIZE), generator=draw).requires_grad_()
    adam = torch.optim.Adam([x], 0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [SEARCH // 2, SEARCH * 3 // 4], 0.2)
    flat = torch.cat([sent[name].flatten() for name in sent])
    for _ in range(SEARCH):
        own = simulated(model, x, y, steps)
        distance = 1 - torch.cosine_similarity(torch.cat([own[n].flatten() for n in sent]), flat, dim=0)
        rough = x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
        (x.grad,) = torch.autograd.grad(distance + 0.001 * rough, [x])
        x.grad = x.grad.sign()
        adam.step()
        schedule.step()
        x.data.clamp_(0, 1)
    return x.detach()


def psnr(found: Tensor, true: Tensor) -> float:
    """The mean signal-to-noise ratio of images in dB, in the order that fits best."""
    orders = itertools.permutations(range(len(true)))
    errors = [(found[list(order)] - true).square().mean((1, 2, 3)) for order in orders]
    return max(float((-10 * error.clamp_min(1e-10).log10()).mean()) for error in errors)


def inverted(data: str, kind: str, defence: str, seed: int) -> dict[str, Any]:
    """PSNR of the victims, and of the mean image in their place."""
    (number, steps), (x, y, names) = KINDS[kind], images(data)
    began, found, blind = time.process_time(), [], []
    for victim in range(VICTIMS):
        rows = [number * (10 * seed + victim) + i for i in range(number)]
        model = build(MODEL, LabelSet(names), seed, pretrained=False).eval()
        sent = change(model, {"image": normal(x[rows])}, y[rows], steps, defence, 100 * seed + victim)
        model = build(MODEL, LabelSet(names), seed, pretrained=False).eval()
        found.append(psnr(search(model, sent, y[rows], steps, seed), x[rows]))
        blind.append(psnr(x[100:].mean(0, keepdim=True).repeat(number, 1, 1, 1), x[rows]))
    size = sum(t.numel() * 4 for t in sent.values())
    seconds = (time.process_time() - began) / VICTIMS
    return {"success": mean(found), "without": mean(blind), "seconds": seconds, "bytes": size}


def feature(data: str, defence: str, seed: int) -> dict[str, Any]:
    """The cosine of what is read from a row's change to the features of the image."""
    features, (_, y, names) = liars.inputs_of(data)[FEATURES], liars.pool(data)
    began, found = time.process_time(), []
    for victim in range(10):
        row = slice(10 * seed + victim, 10 * seed + victim + 1)
        model = Classifier(nn.Identity(), features.shape[1], LabelSet(names), trains="head").eval()
        sent = change(model, {FEATURES: features[row]}, y[row], 1, defence, 100 * seed + victim)
        label = int(sent["head.bias"].abs().argmax())
        read = sent["head.weight"][label] / sent["head.bias"][label]
        found.append(float(torch.cosine_similarity(read, features[row][0], dim=0)))
    size = sum(t.numel() * 4 for t in sent.values())
    return {"success": mean(found), "seconds": (time.process_time() - began) / 10, "bytes": size}
