"""A row that the series does not change, what a paper printed of a whole series, and the test images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from stored_by_hand import SPEC, result, store, table_spec
from suture.core.errors import ConfigError
from suture_papers.tables.cells import over_series
from suture_papers.tables.conduct import Outcome, collect
from suture_papers.tables.loading import load_spec
from suture_papers.tables.render import main_table, preamble, series_table
from suture_papers.tables.results import Result
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Plan, Table

SERIES = {"key": "simulation.images", "values": [20, 40], "label": "images"}
ALL = [{"name": "all"}]
ROWS: dict[str, Any] = {
    "theirs": {"name": "Central", "set": {"method": "vanilla"}, "steady": True, "published": {"all": "0.82"}},
    "ours": {"name": "Surgical Aggregation", "set": {"method": "surgical"}},
}
ONE = {"tiny": {"note": "", "seeds": [1]}}


def test_a_steady_row_has_one_run_that_stands_at_every_value(tmp_path: Path) -> None:
    spec = table_spec(series=SERIES, columns=ALL, rows=ROWS, presets=ONE)
    sized = spec.preset(None)
    runs = list(final_runs(sized, {}))
    assert [(run.row, run.x) for run in runs] == [(row, x) for x in (20, 40) for row in ("theirs", "ours")]
    theirs = {run.name for run in runs if run.row == "theirs"}
    assert len(theirs) == 1
    assert len({run.name for run in runs}) == 3
    for run, b in zip((runs[0], runs[1], runs[3]), (0.9, 0.7, 0.5), strict=True):
        result(run, tmp_path, {"A": 0.5, "B": b})
    outcome = collect(sized, store(tmp_path))
    found = over_series(outcome, spec.columns[0])
    assert found["theirs"].values == pytest.approx((0.7, 0.7))
    assert found["ours"].values == pytest.approx((0.6, 0.5))
    assert dict(preamble(outcome, "x"))["cost"].startswith("3 runs")
    table = series_table(outcome)
    assert (table.heads[-1], table.rows[0][-1], table.rows[1][-1]) == ("published", "0.82", "–")
    assert table.caption.endswith("Central: the run at the first value stands at all of them.")
    assert "published" not in main_table(outcome).heads


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": ALL}, "'theirs' is steady, but there is no series"),
        ({"series": SERIES}, "changes which classes column 'AUROC, classes of several sites' is about"),
    ],
)
def test_a_row_that_cannot_be_steady_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    rows = {**ROWS, "theirs": {key: value for key, value in ROWS["theirs"].items() if key != "published"}}
    path.write_text(tomli_w.dumps({**SPEC, "rows": rows, **changes}))
    with pytest.raises(ConfigError, match=says):
        load_spec(str(path))


def measured(n: int, seed: int, **tests: int) -> Result:
    return Result(
        {"settings": {"seed": seed}, "sites": {}},
        {"source": "server test set", "n": n, "auroc": {}},
        None,
        None,
        36.0,
        {name: {"global": {"n": images}} for name, images in tests.items()},
    )


def test_a_page_says_what_it_is_tested_on_and_where_runs_differ_in_it() -> None:
    spec = table_spec(columns=ALL)
    table = spec.preset(None)

    def reported(*results: Result, table: Table = table) -> str:
        cells = {("ours", "None"): dict(enumerate(results)), ("theirs", "None"): {}}
        return dict(preamble(Outcome(table, cells, {}), "x")).get("tested on", "")

    same = reported(measured(2496, 1), measured(2496, 2))
    assert same == "2,496 images"
    differ = reported(measured(40, 1, away=9), measured(30, 2, away=9))
    assert differ.startswith("30 or 40 images (NOT the same for all runs: delete")
    assert differ.endswith("; away: 9 images")
    plan = Plan("?", "auroc", {"auroc": 0.01}, "never", "b")
    study = replace(table, spec=replace(spec, plan=plan))  # each of its seeds has test images of its own
    of_seeds = [measured(n, seed) for seed, n in enumerate((40, 30, 35))]
    assert reported(*of_seeds, table=study) == "30 to 40 images"
    at_sites = Result({"settings": {}}, {"source": "sites' test data", "n": 80}, None, None, 1.0)
    assert not reported(at_sites)
