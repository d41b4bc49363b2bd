"""suture.core.errors.nearest: the hint for a word that is not known."""

from __future__ import annotations

from suture.core.errors import nearest


def test_of_many_names_the_nearest_are_shown() -> None:
    """1,000 names of six letters are more than fit; the first in the alphabet would help nobody."""
    many = [f"net{i:03}" for i in range(1000)]
    assert nearest("net123x", many) == "did you mean 'net123'?"
    said = nearest("zz9-zz99-zz999", many)
    assert said.startswith("the nearest of 1,000: ")
    assert said.count(",") == 1 + 19
    assert "net000" not in said


def test_of_few_all_are_shown() -> None:
    assert nearest("q", ["b", "a"]) == "known: a, b"
