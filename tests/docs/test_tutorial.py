"""The recording of the tutorial: its commands run again, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.complete


ROOT = Path(__file__).resolve().parents[2]


def sketch(text: str) -> list[str]:
    """The words as they are on every machine: in no order of lines, and without figures of training."""
    text = re.sub(r"~?\d\.\d(–\d\.\d)?", "#", text)
    text = re.sub(r"model of round \d+", "model of round #", text)
    return sorted(re.sub("[─━]+", "─", text).split())


def test_the_recording_is_what_a_newcomer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_ten_minutes as page

    recorded = page.PAGE.read_text().split(page.START)[1].split(page.END)[0]
    assert sketch(page.record()) == sketch(recorded), "record it again: benchmarks/first_ten_minutes.py"
    aurocs = re.findall(r"round 10: validation loss ~0\.\d, AUROC ~(0\.\d)", recorded)
    assert len(aurocs) == 1
    assert float(aurocs[0]) >= 0.7, "the first figure that a newcomer sees is no better than chance"
