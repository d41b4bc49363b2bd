"""States on disk: the newest two, and a round that was never committed leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from suture.errors import SutureError
from suture.packing import Packed
from suture.store import Rounds


def state(value: float) -> Packed:
    return Packed({"x": torch.tensor([value])}, {"v": value})


def test_an_uncommitted_round_can_be_taken_back(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    for number in range(1, 5):
        rounds.save(number, state(number), committed=number - 1)
    assert rounds.rounds() == [3, 4]
    found = rounds.newest(not_later_than=3)
    assert found is not None
    assert found[1].header == {"v": 3}
    rounds.save(4, state(44), committed=3)  # round 4 once more
    assert rounds.rounds() == [3, 4]


def test_a_state_of_long_ago_outlives_rounds_that_never_were(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    rounds.save(1, state(1), committed=0)
    for _ in range(3):
        rounds.save(5, state(5), committed=4)
    assert rounds.rounds() == [1, 5]


def test_nothing_there_is_none_and_broken_is_an_error(tmp_path: Path) -> None:
    assert Rounds(tmp_path / "none").newest() is None
    Rounds(tmp_path).save(1, state(1), committed=0)
    Rounds(tmp_path).path(1).write_bytes(b"x")
    with pytest.raises(SutureError, match="corrupt"):
        Rounds(tmp_path).newest()
