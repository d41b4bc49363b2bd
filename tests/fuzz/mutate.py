"""Mutations: of values like those of JSON, of tensors and of bytes. The same `Random` gives the same ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONG = "x" * 300

PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e-7, 1e308, math.nan, math.inf, -math.inf),
    *(17, 30_000, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**20, 10**400, -(10**12)),
    *(
        "",
        " ",
        "x",
        "1",
        "1.0",
        "nan",
        "main",
        "train",
        "Mass",
        "a b",
        "a\nb",
        "a\x00b",
        "\ud800",
        "ü",
        "a/b",
    ),
    *("../../x", "~nobody/x", "/dev/zero", "\u202egnp", LONG, "y" * 70_000),
    *([], {}, [[]], [None], [1, "x"], {"x": 1}, {"": None}, [[1, 2]], ["Mass", "Mass"], [0], [0.0, 1.0]),
)
"""What JSON can carry, valid somewhere or nowhere."""

FOREIGN: tuple[Any, ...] = (
    *(b"x", b"", (1, 2), {1, 2}, {1: 2}, {None: 1}, {(1, 2): 3}, {b"x": 1}, 1j, range(3), object()),
    *(np.float32(1), np.float64(math.nan), np.int64(3), np.zeros(2), torch.ones(2), torch.tensor(1.0), len),
)
"""What only a serialiser of Python objects can carry."""

KEYS = ("x", "", "round", "labels", "type", "shared", "a b", "\ud800", "x" * 300, "__class__", "n", "ü")


def nested(depth: int, table: bool = False) -> Any:
    """A value within as many lists, or tables."""
    value: Any = 0
    for _ in range(depth):
        value = {"x": value} if table else [value]
    return value


NESTS = tuple(nested(depth, table) for depth in (5, 7, 30, 400) for table in (False, True))
DEEP = tuple(nested(depth, table) for depth in (3_000, 20_000) for table in (False, True))
"""Deeper than Python writes JSON: `TEXTS` has the like for files."""


def odd(rng: Random, near: Any, foreign: bool) -> Any:
    """A value in place of `near`: a neighbour of it, one of the lists, or a deep nest."""
    dice = rng.random()
    if dice < 0.3:
        return neighbour(rng, near)
    if foreign and dice < 0.5:
        return rng.choice(FOREIGN)
    if dice < 0.55:
        return rng.choice(NESTS + DEEP if foreign else NESTS)
    return rng.choice(PLAIN)


def neighbour(rng: Random, value: Any) -> Any:
    """A value that differs little from this one."""
    if isinstance(value, bool) or value is None:
        return rng.choice((not value, int(bool(value)), str(value)))
    if isinstance(value, (int, float)):
        return rng.choice(
            (
                -value,
                value + 1,
                value - 1,
                value * 2,
                f"{value:.3g}" if abs(value) < 1e300 else "x",
                [value],
                bool(value),
            )
        )
    if isinstance(value, str):
        return rng.choice(
            (value + "x", value[:-1], value.upper(), [value], list(value), value + "\n", value[:200] * 90)
        )
    if isinstance(value, dict):
        return rng.choice((list(value), list(value.items()), {"x": value}, "x"))
    if isinstance(value, (list, tuple)):
        some = list(value)
        return rng.choice(
            (some + some, some[:-1], some[::-1], dict(enumerate(some)), [some], tuple(some), some[:20] * 700)
        )
    return value


def mutated(value: Any, rng: Random, foreign: bool = False) -> Any:
    """A copy of a tree of values with one to three of its nodes changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng, foreign)
    return value


def _changed(value: Any, rng: Random, foreign: bool) -> Any:
    if not (isinstance(value, (dict, list, tuple)) and value) or rng.random() < 0.1:
        return odd(rng, value, foreign)
    if isinstance(value, dict):
        copy, key, dice = dict(value), rng.choice(list(value)), rng.random()
        if dice < 0.08:
            del copy[key]
        elif dice < 0.14:
            copy[rng.choice(KEYS)] = copy.pop(key)
        elif dice < 0.2:
            copy[rng.choice(KEYS)] = odd(rng, copy[key], foreign)
        else:
            copy[key] = _changed(copy[key], rng, foreign)
        return copy
    items, place = list(value), rng.randrange(len(value))
    items[place] = _changed(items[place], rng, foreign)
    return items


DAMAGE: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.bfloat16(),
    lambda t: t.long(),
    lambda t: t.bool(),
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.float8_e4m3fn),
    lambda t: t.flatten(),
    lambda t: t[None],
    lambda t: t.flatten()[:0],
    lambda t: t.new_zeros(()),
    lambda t: t.new_zeros(0),
    lambda t: t.new_zeros((1,) * 30),
    lambda t: t.new_zeros(t.numel() * 7 + 1000),
    lambda t: t * math.nan,
    lambda t: t + math.inf,
    lambda t: torch.full_like(t, 1e38) if t.is_floating_point() else t,
    lambda t: torch.full_like(t, 1e-40) if t.is_floating_point() else t,
    lambda t: -t.abs() - 1,
)
"""Other tensors than the right one, which a file can hold."""

STRANGE: tuple[Callable[[Tensor], Any], ...] = (
    lambda _: None,
    lambda t: t.tolist(),
    lambda t: t.detach().numpy(),
    lambda t: t.to_sparse(),
    lambda t: t.double().reshape(1, -1).to_sparse_csr(),
    lambda t: t.to("meta"),
    lambda t: t.new_zeros(1).expand(10**12),
    lambda t: t.new_zeros(1).expand(t.shape) if t.dim() else t,
    lambda _: torch.empty_strided((2, 2), (1, 1)),
    lambda t: t.new_zeros(2, *t.shape).transpose(0, -1)[0],
    lambda t: t.new_zeros(100_000)[5 : 5 + t.numel()].view(t.shape),
    lambda t: t.new_zeros(t.numel(), 2)[:, 0].view(t.shape),
    lambda t: t.double().requires_grad_(),
    lambda t: t.detach().float().requires_grad_(),
    lambda t: torch.nn.Parameter(t.float()),
    lambda t: torch._neg_view(t.float()),
    lambda t: torch.complex(t.float(), t.float()).conj(),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]]),
    lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]], layout=torch.jagged),
)
"""Further ones, which only live in a process."""


def damaged(tensors: dict[str, Tensor], rng: Random, foreign: bool = False) -> dict[str, Any]:
    """A copy with one tensor changed, left out, renamed, doubled or added."""
    copy: dict[Any, Any] = dict(tensors)
    name = rng.choice(sorted(copy))
    dice = rng.random()
    if dice < 0.1:
        del copy[name]
    elif dice < 0.2:
        group = name.partition("/")[0]
        other: Any = rng.choice(
            (f"{group}/x", f"{group}/", name + "\n", "x", "", "fixed/x", "\ud800", LONG, "/")
        )
        copy[7 if foreign and dice < 0.12 else other] = copy.pop(name)
    elif dice < 0.3:
        copy[rng.choice(sorted(copy))] = copy[name]
    elif dice < 0.31:
        copy |= {f"shared/x{i}": copy[name] for i in range(2_001)}
    else:
        copy[name] = rng.choice(DAMAGE + STRANGE if foreign else DAMAGE)(copy[name])
    return copy


TEXTS = {
    '"@digits"': "9" * 5_000,
    '"@hex"': "0x" + "f" * 5_000,
    '"@deep"': "[" * 100_000 + "]" * 100_000,
    '"@rather deep"': "[" * 700 + "]" * 700,
    '"@objects"': '{"x":' * 20_000 + "1" + "}" * 20_000,
    '"@open"': "[" * 100_000,
    '"@key of many parts"': "{" + ".".join("a" * 40_000) + " = 1}",
    '"@quoted key of many parts"': '[{ b = """x"""", ' + " . ".join(['"a"'] * 40_000) + " = 1}]",
    '"@e"': "1e99999",
    '"@date"': "1979-05-27T07:32:00-24:00",
    '"@time"': "07:32:00.999999999",
}
"""What a file can hold and no value of Python is written as."""


def text_of(value: Any, rng: Random, write: Callable[[Any], str] = json.dumps) -> str:
    """A tree as text, into which further damage is written at times."""
    if rng.random() < 0.1 and isinstance(value, dict) and value:
        value = {**value, rng.choice(list(value)): rng.choice(list(TEXTS))[1:-1]}
    text = write(value)
    for mark, damage in TEXTS.items():
        text = text.replace(mark, damage)
    return text


def flipped(data: bytes, rng: Random) -> bytes:
    """Bytes with a few changed, cut, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, dice = rng.randrange(len(changed) or 1), rng.random()
        if dice < 0.6 and changed:
            changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), 0, 255, rng.randrange(256)))
        elif dice < 0.75:
            del changed[at : at + rng.choice((1, 4, 64, 100_000))]
        elif dice < 0.9:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        else:
            changed[at:at] = changed[at : at + 64]
    return bytes(changed)
