"""Seeds: one number for each site, round and purpose, always passed as an argument and never global."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(*parts: str | int) -> int:
    """Return a seed of 63 bits that depends on all parts and their order, and not on the machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(*parts: str | int) -> torch.Generator:
    """Return a CPU generator with the seed of these parts."""
    return torch.Generator().manual_seed(seed_for(*parts))


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators, which dropout uses, within the block; restore their state afterwards."""
    cuda = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if torch.device(device).type == "cpu":
            # `torch.manual_seed` formats a traceback for each kind of device that is not there: 1 ms.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
