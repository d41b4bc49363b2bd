"""The published tables are what the stored results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import stem_of, write_tables
from suture_papers.tables.results import ResultStore

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RUNS = RESULTS / "runs"
PRESETS = [(name, preset) for name in known_tables() for preset in load_spec(name).presets]


def published() -> list[tuple[str, str]]:
    """The tables and presets whose table is committed."""
    found = []
    for name, preset in PRESETS:
        spec = load_spec(name)
        if (RESULTS / f"{stem_of(spec.preset(preset), name)}.md").exists():
            found.append((name, preset))
    return found


@pytest.mark.complete
def test_every_complete_table_is_published_and_no_other() -> None:
    complete = []
    for name, preset in PRESETS:
        spec = load_spec(name)
        outcome = collect(spec.preset(preset), ResultStore(RUNS, name))
        if all(outcome.results.values()):
            complete.append((name, preset))
    assert complete == published()
    others = {"attacks", "claims", "decisions", "fedlsm_counts", "hierarchy"}
    assert len({path.stem for path in RESULTS.glob("*.md")} - {"README", *others}) == len(complete)


@pytest.mark.complete
@pytest.mark.parametrize(("name", "preset"), published())
def test_a_table_is_rendered_from_its_runs(name: str, preset: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    size = spec.preset(preset)
    outcome = collect(size, ResultStore(RUNS, name))
    page = write_tables(outcome, tmp_path, name)[0]
    assert page.read_text() == (RESULTS / page.name).read_text()


@pytest.mark.complete
def test_each_run_is_stored_once_on_a_line_in_the_order_of_names() -> None:
    everywhere: list[str] = []
    for path in RUNS.iterdir():
        if path.name in (".lock", "phantom_maps.jsonl", "recommendations.jsonl"):  # of benchmarks
            continue
        assert path.suffix == ".jsonl"
        assert path.stem in known_tables()
        lines = path.read_text().splitlines()
        names = [json.loads(line)["name"] for line in lines]
        assert names == sorted(names)
        assert all(
            line == json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":")) for line in lines
        )
        everywhere += names
    assert len(everywhere) == len(set(everywhere))


def test_the_pictures_that_pages_show_are_committed_and_no_others() -> None:
    pages = (path.read_text() for path in RESULTS.parent.rglob("*.md"))
    text = "\n".join(pages)
    listed = (RESULTS.parents[1] / ".gitignore").read_text().splitlines()
    pictures = {line.removeprefix("!/docs/results/") for line in listed if line.startswith("!/docs/results/")}
    assert pictures
    for picture in pictures:
        assert (RESULTS / picture).is_file()
        assert f"{picture})" in text
