"""States on disk: the newest few, and a round that was never committed leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from suture.federation.state_files import Rounds
from suture.protocol.packing import Packed
from world import refused


def state(value: float) -> Packed:
    return Packed({"x": torch.tensor([value])}, {"v": float(value)})


def saved(folder: Path, *numbers: int) -> Rounds:
    rounds = Rounds(folder)
    for number in numbers:
        rounds.save(number, state(number), committed=number - 1)
    return rounds


def test_what_no_round_changes_is_stored_once_and_part_of_every_state(tmp_path: Path) -> None:
    rounds, encoder = Rounds(tmp_path, "fixed/backbone."), torch.arange(1000.0)
    for number in range(5):
        whole = {"fixed/backbone.w": encoder, **state(number).tensors}
        rounds.save(number, Packed(whole, {"v": number}), committed=number)
        rounds.keep(1 if number else 0)
    assert max(path.stat().st_size for path in tmp_path.glob("*-00*")) < 1000 < 4000
    for found in (rounds.newest(), rounds.newest(not_later_than=3), (1, rounds.read_best(1))):
        assert found is not None
        assert found[1].tensors["x"].item() == found[0]
        assert torch.equal(found[1].tensors["fixed/backbone.w"], encoder)


def test_an_experiment_that_begins_anew_has_its_own_constant_tensors(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, "w")
    for value in (1.0, 2.0, 3.0):
        if value > 1:
            rounds.path(0).unlink()
        rounds.save(0, Packed({"w": torch.tensor(value)}, {}), committed=0)
    found = rounds.newest()
    assert found is not None
    assert found[1].tensors["w"].item() == 3.0
    rounds.constant_path.write_bytes(b"x")
    with refused("constant.safetensors"):
        rounds.newest()


def test_an_uncommitted_round_can_be_taken_back(tmp_path: Path) -> None:
    rounds = saved(tmp_path, *range(1, 6))
    assert rounds.rounds() == [2, 3, 4, 5]
    found = rounds.newest(not_later_than=3)
    assert found is not None
    assert found[1].header == {"v": 3}
    rounds.save(5, state(55), committed=4)  # round 5 once more
    assert rounds.rounds() == [2, 3, 4, 5]
    # A state of long ago outlives rounds that never were.
    assert saved(tmp_path / "old", 1, 5, 5, 5).rounds() == [1, 5]
    # A hostile server may count as it likes; the disk of a site must not fill up for it.
    large = range(10**6, 10**6 + 8)
    assert saved(tmp_path / "large", *large).rounds() == list(large[4:])


def test_nothing_there_is_none_and_all_broken_is_an_error(tmp_path: Path) -> None:
    assert Rounds(tmp_path / "none").newest() is None
    saved(tmp_path, 1).path(1).write_bytes(b"x")
    with refused("round-000001.safetensors"):
        Rounds(tmp_path).newest()


def best_rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("best-")) for path in folder.glob("best-*"))


def test_a_former_best_stays_while_a_round_on_disk_may_name_it(tmp_path: Path) -> None:
    """Best 2 until round 6; rounds 4 to 6 were committed when 2 was the best."""
    rounds = Rounds(tmp_path)
    for number in range(1, 11):
        rounds.save(number, state(number), committed=number - 1)
        rounds.keep(min(number, 2) if number < 7 else 6)
        if number == 7:
            assert (rounds.rounds(), best_rounds(tmp_path)) == ([4, 5, 6, 7], [2, 6])
        if number == 9:
            assert (rounds.rounds(), best_rounds(tmp_path)) == ([6, 7, 8, 9], [2, 6])
    assert (rounds.rounds(), best_rounds(tmp_path)) == ([7, 8, 9, 10], [6])
    assert rounds.latest(8) == 8
    assert rounds.latest(6) == 6
    assert rounds.latest(5) is None


def test_a_round_that_is_written_again_is_another_best(tmp_path: Path) -> None:
    rounds = saved(tmp_path, 1)
    rounds.keep(1)
    rounds.save(2, state(2), committed=1)
    rounds.keep(2)
    rounds.save(2, state(22), committed=1)
    assert best_rounds(tmp_path) == [1]
    rounds.keep(2)
    assert rounds.read_best(2).header == {"v": 22}
    rounds.keep(1)
    assert best_rounds(tmp_path) == [1]


@pytest.mark.parametrize("harm", ["cut", "flip in a tensor", "flip in the header"])
def test_a_corrupt_file_is_passed_over_for_the_one_before(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = saved(tmp_path, 1, 2)
    data = bytearray(rounds.path(2).read_bytes())
    if harm == "cut":
        del data[-2:]
    else:
        data[data.index(b"2.0") if "header" in harm else -1] ^= 1
    rounds.path(2).write_bytes(bytes(data))
    found = rounds.newest()
    assert found is not None
    assert (found[0], found[1].header) == (1, {"v": 1})
    assert "round-000002.safetensors" in caplog.text
