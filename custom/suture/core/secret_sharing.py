"""Shamir's secret sharing: any `threshold` of the shares give the secret, fewer say nothing of it.

    Shamir. How to Share a Secret. Communications of the ACM 22 (11), 1979.

The secret is the value at 0 of a random polynomial over the integers modulo a prime, and a share its value at
1, 2, ... Of the packages that do this, pycryptodome's alone is widely kept: it shares 16 bytes at a time and
would be a second cryptographic library, for the few lines of arithmetic below. `cryptography` and FLARE have
none. Randomness is the system's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
"""A Mersenne prime, above every secret of 64 bytes."""

SHARE = 66
"""Bytes of a share."""


def split(secret: bytes, parties: int, threshold: int) -> list[bytes]:
    """Return the shares of a secret of at most 64 bytes, of the parties 1, 2, ... in turn."""
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, parties + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE))
    return shares


def combine(shares: Mapping[int, bytes], length: int) -> bytes | None:
    """Return the secret of so many bytes from `threshold` shares; None where they are not of one secret.

    Args:
        shares: by the numbers of the parties. Wrong or too few ones give any secret, or None.
    """
    secret = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {x}:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        secret += int.from_bytes(share) * above * pow(below, -1, PRIME)
    secret %= PRIME
    return secret.to_bytes(length) if secret < 256**length else None
