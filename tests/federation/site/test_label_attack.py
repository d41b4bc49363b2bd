"""What a malicious server reads out of the figures of a site: a small run of benchmarks/attacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def attacks() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks" / "attacks"))
    try:
        import site_labels
    finally:
        sys.path.pop(0)
    return site_labels


def test_five_answers_were_all_labels_and_are_few(attacks: Any) -> None:
    """With six digits a loss is 16 labels; on its grid the same questions, or better ones, tell little."""
    former = attacks.FORMER
    assert attacks.right(attacks.bits, former, 5, 1) == 72
    assert attacks.right(attacks.bits, attacks.STRICT, 5, 1) < 54
    assert attacks.right(attacks.dense, attacks.STRICT, 5, 1) < 58


def test_what_a_server_still_learns_is_in_the_threat_model(attacks: Any) -> None:
    """Many answers are still many labels: no grid replaces a limit of answers."""
    after_fifteen = [attacks.right(attacks.dense, attacks.STRICT, 15, seed) for seed in (1, 2)]
    assert 44 < np.mean(after_fifteen) < 66
    assert attacks.right(attacks.single, attacks.STRICT, 72, 1) == 72
