"""README's table of results is what the stored studies say."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COLUMNS = ("vanilla", "surgical", "surgical_weighted", "central_full")


def test_readme_shows_the_means_of_the_leaderboard_and_marks_significant_ones() -> None:
    section = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| \[[^]]+\]\(docs/results/([\w-]+)\.md\)[^|]*\|(.+)\|$", section, flags=re.MULTILINE
    )
    studies = json.loads((ROOT / "docs" / "results" / "leaderboard.json").read_text())["studies"]
    assert len(rows) >= 1
    for stem, cells in rows:
        found = studies[stem]["rows"]
        for column, cell in zip(COLUMNS, cells.split("|"), strict=True):
            mean = f"{found[column]['mean']:.3f}".removeprefix("0")
            p = found[column].get("p")
            assert cell.strip() == (f"**{mean}**" if p is not None and p < 0.05 else mean), (stem, column)
