"""What every page must have: by its HTML, and in a real browser at the width of a screen and of a phone.

The browser needs the extra `browser` and a Chromium: SUTURE_CHROMIUM, or one on the PATH.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

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
    assert bool(boxes) == (name != "waiting")
    assert all(box.get("tabindex") == "0" and box.get("aria-label") for box in boxes)
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    if name == "decided":  # of 34 sites the curves fold, and two sites have none of Nodule
        assert len(html) < 400_000
        assert "hospital-00, hospital-01." in html
        assert html.count(": ROC of Nodule, area ") == 32


_SMALLEST = 11.0
_SMALL = """least => [...document.querySelectorAll("body *")].filter(e => {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.checkVisibility() || e.closest(".unseen, .drawing svg")) return false;
  const scale = e.getScreenCTM ? e.getScreenCTM().a : 1;
  return parseFloat(getComputedStyle(e).fontSize) * scale < least - 0.01;
}).map(e => e.tagName + ": " + e.textContent.trim())"""
_CUT = "[...document.querySelectorAll('.drawing .scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
_NO_CELLS = """[...document.querySelectorAll("td, th")]
  .filter(e => !["table-cell", "none"].includes(getComputedStyle(e).display)).map(e => e.outerHTML)"""
_FOLDED = """[...document.querySelectorAll("details:not([open]) > :not(summary)")]
  .filter(e => !e.checkVisibility()).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e .[browser]")
    names = ("chromium", "google-chrome", "chromium-browser")
    path = os.environ.get("SUTURE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium: install one, or set SUTURE_CHROMIUM to its path")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, of a package or at SUTURE_AXE."""
    if path := os.environ.get("SUTURE_AXE"):
        return Path(path).read_text(encoding="utf-8")
    package = pytest.importorskip("axe_playwright_python", reason="no axe: pip install -e .[browser]")
    return next(Path(package.__file__).parent.glob("**/axe.min.js")).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_is_legible_and_accessible(name: str, browser: Any, axe: str, tmp_path: Path) -> None:
    url = write_page(name, tmp_path).as_uri()
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(url)
        where = f"{name}, {width} px, {scheme}"
        assert page.evaluate("document.documentElement.scrollWidth") == width, where
        assert page.evaluate(_SMALL, _SMALLEST) == [], where
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width, f"{where}, unfolded"
        if width == 1280:
            assert page.evaluate(_CUT) == 0, f"{where}: a drawing is cut off"
            assert page.evaluate(_NO_CELLS) == [], f"{where}: a cell is out of its row"
        page.evaluate(axe)
        violations = page.evaluate("axe.run()")["violations"]
        assert [(v["id"], v["nodes"][0]["html"]) for v in violations] == [], where
        page.close()


def test_a_printed_page_is_light_and_leaves_out_what_is_folded(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(write_page("small", tmp_path).as_uri())
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(_FOLDED) > 0
    assert page.evaluate(paper) != "rgb(255, 255, 255)"
    page.emulate_media(media="print")
    assert page.evaluate(_FOLDED) > 0
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.close()
