"""Shamir's secret sharing."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.privacy import masking as secret_sharing
from suture.privacy.masking import PRIME, SHARE, combine, split


def test_shares_are_values_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line 7 + 5 x at 1, 2 and 3; two points give 7: (2 * 12 - 1 * 17) / (2 - 1)."""
    monkeypatch.setattr(secret_sharing.secrets, "randbelow", lambda _: 5)
    shares = dict(enumerate(split(b"\x07", 3, 2), 1))
    assert [int.from_bytes(share) for share in shares.values()] == [12, 17, 22]
    assert {len(share) for share in shares.values()} == {SHARE}
    for two in ((1, 2), (3, 2)):
        assert combine({x: shares[x] for x in two}, 1) == b"\x07"


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 3))
def test_any_shares_of_the_threshold_give_the_secret(secret: bytes, threshold: int, more: int) -> None:
    shares = dict(enumerate(split(secret, threshold + more, threshold), 1))
    for some in combinations(shares, threshold):
        assert combine({x: shares[x] for x in some}, 32) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """For one share of a line, and any secret, there is a line through both."""
    (first, _) = split(b"a" * 32, 2, 2)
    other = int.from_bytes(b"z" * 32)
    slope = (int.from_bytes(first) - other) % PRIME
    assert combine({1: first, 2: ((other + 2 * slope) % PRIME).to_bytes(SHARE)}, 32) == b"z" * 32


def test_shares_of_two_secrets_give_none() -> None:
    one, two = split(b"a" * 32, 3, 3), split(b"z" * 32, 3, 3)
    assert combine({1: one[0], 2: two[1], 3: one[2]}, 32) is None  # but for one in 2^265
