"""What a table shows where a figure is undefined, and over a series."""

from __future__ import annotations

from pathlib import Path

import pytest

from stored_by_hand import result, store, table_spec
from suture_papers.tables.cells import Estimate, lines, over_series, p_text
from suture_papers.tables.figures import _series
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs
from suture_results.comparison import Comparison


def test_a_series_is_drawn_over_its_values(tmp_path: Path) -> None:
    series = {"key": "simulation.images", "values": [20, 40], "label": "images"}
    spec = table_spec(series=series, columns=[{"name": "all"}])
    table = spec.preset(None)
    runs = list(final_runs(table, {}))
    assert [run.x for run in runs] == [20, 20, 40, 40] * 3
    for run in runs:
        more = 0.02 * int(str(run.settings["seed"])) if run.row == "ours" else 0.0
        result(run, tmp_path / "runs", {"A": 0.6 + more, "B": 0.6 + more})
    outcome = collect(table, store(tmp_path / "runs"))
    found = over_series(outcome, spec.columns[0])
    assert found["theirs"].against is not None
    assert found["theirs"].against.n == 6
    page = write_tables(outcome, tmp_path, "s")[0].read_text()
    assert page.count("| 20 |") == 2
    assert "Over all values of the series" in page
    found = lines(outcome)
    marks = [over_series(outcome, column) for column in spec.columns]
    (panel,) = _series(spec, found, marks)
    drawn = [text.text for text in panel.texts if text.tone is not None]
    assert drawn == [marks[0]["theirs"].against.mark] == ["**"]  # type: ignore[union-attr]


def test_an_undefined_comparison_has_its_reason_below_the_table(tmp_path: Path) -> None:
    """One seed: no pairs of runs; over classes, the differences are .1 and .2: t = 3, p = .205."""
    one = {"note": "", "seeds": [1]}
    spec = table_spec(presets={"one": one, "by-class": {**one, "pairs": "classes"}})
    for run in final_runs(spec.preset(None), {}):
        more = 1 if run.row == "ours" else 0
        result(run, tmp_path / "runs", {"A": 0.5 + 0.1 * more, "B": 0.5 + 0.2 * more})
    pages = {}
    for name in spec.presets:
        table = spec.preset(name)
        outcome = collect(table, store(tmp_path / "runs"))
        paths = write_tables(outcome, tmp_path, "e")
        pages[paths[0].name] = paths[0].read_text()
        assert ("[1] " in paths[1].read_text()) == ("[1] " in pages[paths[0].name])
    assert list(pages) == ["e.md", "e-by-class.md"]
    assert "| Vanilla FL | 0.500 | – [1] | 0.500 | – [1] | 0.500 | – [1] |" in pages["e.md"]
    assert "\n[1] a single pair has no spread\n" in pages["e.md"]
    assert "| Vanilla FL | 0.500 ± 0.000 ns | .205 [1] |" in pages["e-by-class.md"]
    assert "\n[1] two pairs cannot be tested for normality\n" in pages["e-by-class.md"]
    assert "over classes" in pages["e-by-class.md"]


def test_nothing_done_yet_is_an_empty_table(tmp_path: Path) -> None:
    spec = table_spec()
    outcome = collect(spec.preset(None), store(tmp_path))
    page = write_tables(outcome, tmp_path, "empty")[0].read_text()
    assert "| Surgical Aggregation | – [1] | – |" in page
    assert "\n[1] not run yet\n" in page


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (0.0496, ".0496"),
        (0.0504, ".050"),
        (0.04949, ".049"),
        (0.0004, "< .001"),
        (0.2, ".200"),
        (1.0, "1.000"),
    ],
)
def test_a_p_below_the_threshold_does_not_read_as_on_it(p: float, text: str) -> None:
    assert p_text(Estimate(0.5, 0.1, (), Comparison(5, 0.1, p, 0.5))) == text


def test_no_comparison_is_a_dash() -> None:
    assert (
        p_text(Estimate(0.5, 0.1, (), None))
        == p_text(Estimate(0.5, 0.1, (), Comparison(1, 0.1, float("nan"), 1)))
        == "–"
    )
