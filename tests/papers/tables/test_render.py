"""Pages of papers: what stands in a section, a row and a footnote, and which figure is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tomli_w

from stored_by_hand import SPEC, filled, result, store, table_spec, tuned_outcome, tuned_spec
from suture_papers.tables.cells import lines, over_series
from suture_papers.tables.figures import _series, draw
from suture_papers.tables.loading import Paper, load_spec
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.render import main_table, preamble, section, series_table, write_page
from suture_papers.tables.results import Result
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import TableSpec
from suture_papers.tables.verdict import verdict

ALL = [{"name": "all"}]
SERIES = {"key": "simulation.images", "values": [20, 40], "label": "images"}
TINY = SPEC["presets"]["tiny"]


def page(outcome: Outcome) -> str:
    return "\n\n".join(section(outcome, "x"))


# Pages


def test_the_page_of_a_paper_has_a_section_for_each_preset_that_is_done(tmp_path: Path) -> None:
    """What is asked for is shown with its gaps; a page comes out the same twice."""
    presets = {
        size: {"note": "", "seeds": seeds} for size, seeds in (("one", [1]), ("two", [1, 2]), ("three", [3]))
    }
    for name in ("first", "second"):
        (tmp_path / f"{name}.toml").write_text(
            tomli_w.dumps({**SPEC, "title": f"of {name}", "presets": presets})
        )
    paper = Paper("mine", "A paper", {name: tmp_path / f"{name}.toml" for name in ("first", "second")})
    assert write_page(paper, tmp_path) == []
    assert [path.name for path in write_page(paper, tmp_path, "second")] == ["mine.md", "second.svg"]
    for run in final_runs(load_spec(str(paper.tables["first"])).preset("two"), {}):
        result(run, tmp_path / "runs", {"A": 0.8, "B": 0.5 + 0.1 * run.seed})
    written = write_page(paper, tmp_path)
    stems = ["first", "first-two", "second", "second-two"]  # which share their runs
    assert [path.name for path in written] == ["mine.md", *(f"{stem}.svg" for stem in stems)]
    text = written[0].read_text()
    assert text.startswith("# A paper\n")
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == stems
    assert all(f"]({stem}.svg)" in text for stem in stems)
    assert text.count("of second (nowhere).") == 2
    assert text.count("<details") == text.count("</details>") == 2 * len(stems)
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_page(paper, tmp_path)] == before


def test_a_section_has_the_figures(tmp_path: Path) -> None:
    table = table_spec().preset(None)
    gain = {"theirs": 0.0, "ours": 0.1}
    outcome = filled(table, tmp_path, lambda run: {"A": 0.8, "B": 0.5 + gain[run.row] * run.seed})
    text = page(outcome)
    assert "| Vanilla FL | 0.650 ± 0.000 ns | .074 |" in text
    assert "0.79 |" in text  # published
    assert "6 runs in the table, 0.1 hours" in text
    ElementTree.fromstring(draw(outcome))


def test_a_section_of_fine_tuned_models_has_every_figure_of_each_task(tmp_path: Path) -> None:
    outcome = tuned_outcome(tuned_spec(), tmp_path)
    text = page(outcome)
    assert "| FL | 0.600 ± 0.000 ns | .074 | 2.0 ± 0.0 ns | 1.000 [1] |" in text
    figures = "| 0.500 ± 0.000 | 0.500 ± 0.000 |"
    assert f"| A | PMFL | 0.800 ± 0.100 {figures} 0.400 ± 0.050 | 2.0 ± 0.0 | 90 / 10 |" in text
    # B ends at .8, .9 and 1, .9 on average: one run of three does not reach that.
    assert f"| B | PMFL | 0.900 ± 0.100 {figures} 0.450 ± 0.050 | 2.0 ± 0.0 (2 of 3) |" in text
    ElementTree.fromstring(draw(outcome))
    assert b"AUROC after each epoch, B" in draw(outcome)


@pytest.mark.parametrize(
    "spec", [table_spec(), tuned_spec(), table_spec(series=SERIES)], ids=["", "tuned", "series"]
)
def test_nothing_done_yet_is_an_empty_table(spec: TableSpec, tmp_path: Path) -> None:
    outcome = collect(spec.preset(None), store(tmp_path))
    text = page(outcome)
    assert f"| {spec.rows['ours'].name} | – [1] | – |" in text
    assert "\n[1] not run yet\n" in text
    assert verdict(outcome).startswith("No result yet")


def test_an_undefined_comparison_has_its_reason_below_the_table(tmp_path: Path) -> None:
    """One seed: no pairs of runs; over classes, the differences are .1 and .2: t = 3, p = .205."""
    one = {"note": "", "seeds": [1]}
    spec = table_spec(presets={"one": one, "by-class": {**one, "pairs": "classes"}})
    gain = {"theirs": 0.0, "ours": 0.1}
    pages = {}
    for size in spec.presets:
        outcome = filled(
            spec.preset(size), tmp_path, lambda run: {"A": 0.5 + gain[run.row], "B": 0.5 + 2 * gain[run.row]}
        )
        pages[size] = page(outcome)
    assert "| Vanilla FL | 0.500 | – [1] | 0.500 | – [1] | 0.500 | – [1] |" in pages["one"]
    assert "| Vanilla FL | 0.500 ± 0.000 ns | .205 [1] |" in pages["by-class"]
    assert all("\n[1] " in text for text in pages.values())


@pytest.mark.parametrize("series", [None, SERIES])
def test_what_a_preset_leaves_out_is_not_rendered(series: dict[str, Any] | None, tmp_path: Path) -> None:
    rows = {**SPEC["rows"], "theirs": {**SPEC["rows"]["theirs"], "published": {"away": "0.79"}}}
    columns = [{"name": "here"}, {"name": "away", "test": "away"}]
    presets = {"few": {**TINY, "columns": ["here"]}}
    tests = {"away": {"data": {"dataset": "nih"}}}
    table = table_spec(columns=columns, tests=tests, rows=rows, series=series, presets=presets).preset("few")
    outcome = filled(table, tmp_path, lambda _: {"A": 0.5, "B": 0.5})
    text = page(outcome)
    assert not [shown for shown in (text, draw(outcome).decode()) if "away" in shown or "0.79" in shown]
    assert "| here | p |" in text


def test_a_series_has_a_table_over_all_its_values_with_what_was_published(tmp_path: Path) -> None:
    theirs = {**SPEC["rows"]["theirs"], "published": {"all": "0.82"}, "steady": True}
    spec = table_spec(series=SERIES, columns=ALL, rows={**SPEC["rows"], "theirs": theirs})
    more = {"theirs": 0.0, "ours": 0.02}
    outcome = filled(
        spec.preset(None), tmp_path / "runs", lambda run: dict.fromkeys("AB", 0.6 + more[run.row] * run.seed)
    )
    table = series_table(outcome)
    assert (table.heads[-1], table.rows[0][-1], table.rows[1][-1]) == ("published", "0.82", "–")
    assert "Vanilla FL" in table.caption
    assert "published" not in main_table(outcome).heads
    assert page(outcome).count("| 20 |") == 2
    marks = [over_series(outcome, column) for column in spec.columns]
    (panel,) = _series(spec, lines(outcome), marks)
    against = marks[0]["theirs"].against
    assert against is not None
    assert [text.text for text in panel.texts if text.tone is not None] == [against.mark] == ["**"]


def measured(n: int, seed: int, **tests: int) -> Result:
    metrics = {"source": "server test set", "n": n, "auroc": {}}
    found = {name: {"global": {"n": images}} for name, images in tests.items()}
    return Result({"settings": {"seed": seed}, "sites": {}}, metrics, None, None, 36.0, found)


def test_a_page_says_what_it_is_tested_on_and_where_runs_differ_in_it() -> None:
    table = table_spec(columns=ALL).preset(None)

    def tested(*results: Result) -> str:
        cells = {("ours", "None"): dict(enumerate(results)), ("theirs", "None"): {}}
        return dict(preamble(Outcome(table, cells, {}), "x")).get("tested on", "")

    assert tested(measured(2496, 1), measured(2496, 2)) == "2,496 images"
    differ = tested(measured(40, 1, away=9), measured(30, 2, away=9))
    assert differ.startswith("30 or 40 images (NOT")
    assert differ.endswith("; away: 9 images")
    at_sites = Result({"settings": {}}, {"source": "sites' test data", "n": 80}, None, None, 1.0)
    assert not tested(at_sites)


def test_single_classes_stand_beside_what_the_paper_printed(tmp_path: Path) -> None:
    """A column of recall has a table of its own."""
    by_class = {"source": "Table 1", "published": {"ours": {"A": "0.91"}}}
    columns = [*ALL, {"name": "r", "metric": "recall"}]
    table = table_spec(by_class=by_class, columns=columns, rows=rows_without_figures()).preset(None)
    text = page(filled(table, tmp_path, lambda _: {"A": 0.8, "B": None}))
    assert "| A | 0.800 | 0.800 · 0.91 |" in text
    assert "Table 1" in text
    assert "Recall of each class" in text


def rows_without_figures() -> dict[str, Any]:
    return {key: {"name": row["name"], "set": row["set"]} for key, row in SPEC["rows"].items()}


# The sentence at the head

THEIRS = [0.70, 0.72, 0.71, 0.69, 0.73]
BETTER = [a + d for a, d in zip(THEIRS, (0.02, 0.03, 0.01, 0.025, 0.02), strict=True)]
NEAR = [a + d for a, d in zip(THEIRS, (0.02, -0.03, 0.01, 0.005, -0.015), strict=True)]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        # Differences .02, .03, .01, .025, .02: mean .021, SD .0074, t(.975, 4) 2.776, so .021 ± .0092.
        (BETTER, THEIRS, ("5 seeds", "beats Vanilla FL by .021 (95 % .012 to .030, p = .003)")),
        (THEIRS, BETTER, ("is worse than Vanilla FL by .021 (95 % .012 to .030, p = .003)",)),
        (NEAR, THEIRS, ("does not differ", "\u2212.002, 95 % \u2212.027 to .023")),
        (THEIRS, THEIRS, ("does not differ", "(.000, p = 1.000)")),
        ([0.9], [0.5], ("1 seed:", "has .900; Vanilla FL .500", "too few")),
        ([0.9, 0.91], [0.5, 0.51001], ("better than Vanilla FL by .400, but two pairs",)),
        ([0.75] * 3, [0.5] * 3, ("the same for all pairs",)),
        ([], THEIRS, ("No result yet",)),
        (THEIRS, [], ("cannot be compared with Vanilla FL (not run yet)",)),
    ],
)
def test_the_sentence_says_who_won_by_how_much(
    ours: list[float], theirs: list[float], said: tuple[str, ...], tmp_path: Path
) -> None:
    table = table_spec(presets={"tiny": {"note": "", "seeds": [1, 2, 3, 4, 5]}}).preset(None)
    values = {"ours": dict(enumerate(ours, 1)), "theirs": dict(enumerate(theirs, 1))}

    def areas(run: Run) -> dict[str, float | None] | None:
        area = values[run.row].get(run.seed)
        return None if area is None else {"A": area, "B": area}

    outcome = filled(table, tmp_path, areas)
    sentence = verdict(outcome)
    assert [words for words in said if words not in sentence] == []
    assert ("beats" in sentence) == ("beats" in said[-1])
    assert f"\n\n{sentence}\n\n" in page(outcome)


def test_of_several_rows_of_one_run_the_caution_is_said_once(tmp_path: Path) -> None:
    rows = {**SPEC["rows"], "others": {"name": "FedAvg", "set": {"method": "fedavg"}}}
    table = table_spec(rows=rows, presets={"tiny": {"note": "", "seeds": [1]}}).preset(None)
    areas = {"ours": 0.9, "theirs": 0.5, "others": 0.6}
    sentence = verdict(filled(table, tmp_path, lambda run: dict.fromkeys("AB", areas[run.row])))
    assert "has .900; Vanilla FL .500; FedAvg .600: too few" in sentence
