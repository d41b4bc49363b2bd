"""Seeds are passed in, never global: one number for each site, round and purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(*parts: str | int) -> int:
    """A seed of 63 bits that depends on all parts and their order, on every machine alike."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(*parts: str | int) -> torch.Generator:
    """A CPU generator of that seed."""
    return torch.Generator().manual_seed(seed_for(*parts))


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Lends the global generator (which dropout draws from) a seed, and gives it back as it was."""
    cuda = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield
