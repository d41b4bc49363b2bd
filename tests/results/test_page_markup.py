"""What every page must have, checked without a browser; test_in_browser.py looks at them in one."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from example_pages import PAGES, write_page


class Outline(HTMLParser):
    """The headings, attributes and drawings of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_by_everyone(name: str, tmp_path: Path) -> None:
    html = write_page(name, tmp_path).read_text(encoding="utf-8")
    found = Outline(html)
    assert ("html", {"lang": "en"}) in found.tags
    assert ("meta", {"name": "color-scheme", "content": "light dark"}) in found.tags
    assert re.search(r"<title>\s*\S", html)
    assert [tag for tag, _ in found.tags].count("main") == found.levels.count(1) == 1
    assert found.levels[0] == 1
    assert all(b <= a + 1 for a, b in zip(found.levels, found.levels[1:], strict=False))
    drawn = [attrs for tag, attrs in found.tags if tag in ("svg", "img")]
    assert all(a.get("aria-hidden") or a.get("aria-label") or a.get("alt") for a in drawn)
    boxes = [attrs for _, attrs in found.tags if attrs.get("class") == "scroll"]
    assert boxes
    assert all(box.get("tabindex") == "0" and box.get("aria-label") for box in boxes)


@pytest.mark.complete
def test_curves_of_many_sites_fold_and_stay_small(tmp_path: Path) -> None:
    """34 sites of two classes: a table that opens on a click, a line of text for those without curves."""
    html = write_page("decided", tmp_path).read_text(encoding="utf-8")
    assert len(html) < 400_000
    assert "<summary>Nodule at 32 sites</summary>" in html
    assert "<summary>Pneumothorax at 34 sites</summary>" in html
    assert "sent no counts: hospital-00, hospital-01." in html
    assert html.count(": ROC of Nodule, area ") == 32
    found = Outline(html)
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_the_figure_of_an_experiment_says_what_its_marks_are(tmp_path: Path) -> None:
    html = write_page("table", tmp_path).read_text(encoding="utf-8")
    said = (
        "A dot is one of the seeds. A bar is the mean over seeds; "
        "marks as in the table, against Surgical Aggregation."
    )
    assert f'aria-label="{said}"' in html
    assert f"{said}</figcaption>" in html
