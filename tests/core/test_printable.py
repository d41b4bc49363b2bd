"""What another party has written cannot move the cursor of a terminal or forge a line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suture.core.errors import RejectedUpdate
from suture.core.escaping import LONGEST_LINE, printable, printable_lines, printable_values

FORGED = "lost\x1b[1A\x1b[2K\r\nround 99/99  1.0 s\x9b2J\u202e\u2028end"


def test_control_characters_become_their_escapes() -> None:
    assert printable(FORGED).isprintable()
    assert printable(FORGED).startswith(r"lost\x1b[1A\x1b[2K\r\nround 99/99")
    assert printable("Vidéo, 5 µm, 胸部") == "Vidéo, 5 µm, 胸部"


def test_a_long_text_is_cut() -> None:
    assert len(printable("x" * 4_000_000)) == LONGEST_LINE
    assert printable("x" * LONGEST_LINE) == "x" * LONGEST_LINE


def test_an_own_text_keeps_its_lines() -> None:
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"
    assert printable_lines("x" * 1000) == "x" * 1000


def test_every_text_of_parsed_json_is_on_one_line() -> None:
    found = printable_values({FORGED: [FORGED, {"a": FORGED}], "n": 1, "none": None})
    assert found == {printable(FORGED): [printable(FORGED), {"a": printable(FORGED)}], "n": 1, "none": None}


def test_the_text_of_a_rejection_is_one_short_line() -> None:
    error = RejectedUpdate(f"unknown message type {FORGED * 10**5}")
    assert len(str(error)) == LONGEST_LINE
    assert str(error).isprintable()


@pytest.mark.complete
def test_a_library_that_sets_up_logging_does_not_change_the_lines_of_ours() -> None:
    """opacus does so where it is imported."""
    program = (
        "import logging; from suture.core.escaping import clean_warnings; clean_warnings()\n"
        "logging.basicConfig(format='%(asctime)s THEIRS %(message)s', datefmt='%m/%d/%Y')\n"
        "logging.getLogger('opacus').info('unseen'); logging.getLogger('suture').warning('a\\x1b line')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "a\\x1b line\n"
