"""The documentation builds without a broken link and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from suture.protocol.decisions import CELLS, GRID
from suture_synthetic.method_checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "poc_workspace/README.md", "benchmarks/README.md")
"""Pages that are read in the repository and not on the site."""


def build(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocstrings", reason='the documentation needs pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False
    )


@pytest.mark.complete
def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]*)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|icon|preconnect)"[^>]*href="([^"]*)"', text)
        loaded += re.findall(r'<link[^>]*href="([^"]*)"[^>]*rel="(?:stylesheet|icon|preconnect)"', text)
        assert not [url for url in loaded if "//" in url], page
        assert 'class="mermaid"' not in text, f"{page}: another host's script would draw it"
    assert (tmp_path / "search" / "search_index.js").is_file(), "the search needs a server"
    assert '<script src="iframe-worker.js">' in (tmp_path / "index.html").read_text()
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    ranks = {entry["location"].split("#")[0]: entry.get("boost", 1) for entry in entries}
    assert ranks["results/nih_shared.html"] < ranks["reference/commands.html"] < ranks["data.html"]


def test_pictures_of_the_product_are_there_and_small() -> None:
    assert "](docs/report.png)" in (ROOT / "README.md").read_text()
    home = (ROOT / "docs" / "index.md").read_text()
    for name in ("report.png", "federation.svg"):
        assert f"]({name})" in home
        assert 1000 < (ROOT / "docs" / name).stat().st_size < 200_000


@pytest.mark.complete
@pytest.mark.parametrize("link", ["missing.md", "index.md#missing", "/index.md"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[a link]({link})\n")
    config = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config.split("\nnav:")[0])
    result = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert result.returncode == 1
    assert link in result.stdout + result.stderr


def links(text: str) -> Iterator[str]:
    """The targets of links within the repository."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (url for url in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", url))


def anchors(page: Path) -> set[str]:
    """The identifiers of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_of_pages_outside_the_site_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{name}: {link} has no such heading"


def test_pages_that_messages_of_the_package_name_exist() -> None:
    for module in sorted((ROOT / "custom").rglob("*.py")):
        for name in re.findall(r"docs/[\w/]+\.md", module.read_text()):
            assert (ROOT / name).is_file(), f"{module}: {name} does not exist"


@pytest.mark.parametrize(
    ("name", "language"), [("suture_fedprox_l1.py", "python"), ("pyproject.toml", "toml")]
)
def test_the_page_on_adding_a_method_quotes_the_example(name: str, language: str) -> None:
    page, file = ROOT / "docs" / "adding_a_method.md", ROOT / "examples" / "suture-fedprox-l1" / name
    assert f"```{language}\n{file.read_text()}```\n" in page.read_text(), f"quote {file} verbatim"


def test_the_page_on_adding_a_method_lists_every_conformance_check() -> None:
    page = (ROOT / "docs" / "adding_a_method.md").read_text()
    section = page.split("## Check it")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| ", section, flags=re.MULTILINE)
    assert listed == [check.__name__ for check in CHECKS]


def test_the_page_on_reliability_is_written_from_its_template() -> None:
    page = ROOT / "docs" / "reference" / "reliability.md"
    template = ROOT / "tests" / "faults" / "reliability.md"
    before, after = template.read_text().split("{rows}")
    start, end = before.split("{cores}")
    text = page.read_text()
    assert text.startswith(start), (
        "change tests/faults/reliability.md, from which `make faults` writes the page"
    )
    assert end in text
    assert text.endswith(after)


def test_the_page_on_using_a_model_counts_cells_and_bytes_as_the_code_does() -> None:
    text = " ".join((ROOT / "docs" / "use_a_model.md").read_text().split())
    assert f"in each of {CELLS} cells of log-odds, 1/{1 / (GRID[1] - GRID[0]):g} wide" in text
    counts = np.zeros((2, CELLS), np.int32)  # of positives and of negatives, as a site sends them
    assert f"({counts.nbytes:,} bytes a class and site)" in text


def test_no_page_promises_that_a_site_cannot_learn_which_classes_others_know() -> None:
    """A test of the labels shows how it can."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "does not learn which" not in readme
    assert "a site [can probe for a class](docs/threat_model.md#what-updates-and-the-model-reveal)" in readme


def test_the_recipe_for_a_real_host_is_strict_at_every_party() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    recipe = page.split("## Set up real hosts")[1].split("\n## ")[0]
    assert "suture policy . " in recipe
    assert not re.search(r"suture policy \. +--|--loose|--bundle", recipe)
