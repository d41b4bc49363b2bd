"""The documentation builds, loads nothing from other hosts, leads somewhere, and quotes what is there."""

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

import suture
from suture.protocol.decisions import CELLS, GRID
from suture_synthetic.method_checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "poc_workspace/README.md", "benchmarks/README.md")
"""Pages that are read in the repository and not on the site."""


@pytest.mark.complete
def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason='the documentation needs pip install -e ".[docs]"')
    words = f"-m mkdocs build --strict -f {ROOT / 'mkdocs.yml'} -d {tmp_path}".split()
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", text)
        loaded = [
            tag for tag in tags if 'rel="canonical"' not in tag and re.search(r'(src|href)="[^"]*//', tag)
        ]
        assert not loaded, page
        assert 'class="mermaid"' not in text, f"{page}: another host's script would draw it"
    assert '<script src="iframe-worker.js">' in (tmp_path / "index.html").read_text(), (
        "search without a server"
    )
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    ranks = {entry["location"].split("#")[0]: entry.get("boost", 1) for entry in entries}
    assert ranks["results/fedlsm.html"] < ranks["reference/commands.html"] < ranks["data.html"]


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


def test_the_page_on_adding_a_method_quotes_the_example_and_lists_every_check() -> None:
    page = (ROOT / "docs" / "adding_a_method.md").read_text()
    for name, language in (("suture_fedprox_l1.py", "python"), ("pyproject.toml", "toml")):
        file = ROOT / "examples" / "suture-fedprox-l1" / name
        assert f"```{language}\n{file.read_text()}```\n" in page, f"quote {file} verbatim"
    section = page.split("## Check it")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| ", section, flags=re.MULTILINE)
    assert listed == [check.__name__ for check in CHECKS]


def test_the_page_on_reliability_is_written_from_its_template() -> None:
    """Which `make faults` fills in."""
    template = (ROOT / "tests" / "faults" / "reliability.md").read_text()
    pattern = re.sub(r"\\{[^{}]+\\}", ".*", re.escape(template))
    assert re.fullmatch(pattern, (ROOT / "docs" / "reference" / "reliability.md").read_text())


def test_the_page_on_using_a_model_counts_bins_and_bytes_as_the_code_does() -> None:
    text = " ".join((ROOT / "docs" / "use_a_model.md").read_text().split())
    assert f"in each of {CELLS} bins of log-odds, 1/{1 / (GRID[1] - GRID[0]):g} wide" in text
    counts = np.zeros((2, CELLS), np.int32)  # of positives and of negatives, as a site sends them
    assert f"({counts.nbytes:,} bytes per class and site)" in text


def test_the_recipe_for_a_real_host_is_strict_at_every_party() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    recipe = page.split("## Set up real hosts")[1].split("\n## ")[0]
    assert "suture policy . " in recipe
    assert not re.search(r"suture policy \. +--|--loose|--bundle", recipe)


def test_the_reference_of_python_names_everything() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in suture.__all__ if name not in page] == []
