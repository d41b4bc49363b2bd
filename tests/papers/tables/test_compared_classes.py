"""Single classes of some rows, compared on what a simulation held out: MIDL 2023, Tables 3 and 4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from official import write_nih
from stored_by_hand import SPEC, delete, result, store, table_spec
from suture.core.errors import ConfigError
from suture.data.config import load_site_config
from suture_papers.chest_xrays.nih import LABELS
from suture_papers.tables.conduct import SERVER, Session, compare_classes, conduct
from suture_papers.tables.loading import load_spec
from suture_papers.tables.outcome import collect, compared_classes
from suture_papers.tables.render import comparison_table, write_tables
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import Preset, Table
from suture_results.comparison import compare

SMALL = {
    "simulation.root": "{data}/nih",
    "model.name": "cnn",
    "model.size": 16,
    "method.local.lr": 1e-3,
    "rounds": 1,
}


def small(name: str) -> Table:
    """The three rows that Tables 3 and 4 are of, with a network that trains in a second."""
    spec = load_spec(name)
    assert spec.by_class is not None
    skip = tuple(row for row in spec.rows if row not in spec.by_class.rows)
    preset = Preset("small", (1,), SMALL, skip=skip, columns=("AUROC, all classes",))
    return replace(spec, presets={"small": preset}).preset(None)


@pytest.mark.complete
def test_models_are_compared_once_on_the_images_that_were_held_out(tmp_path: Path) -> None:
    write_nih(tmp_path / "data" / "nih")
    table = small("nih_overlap")
    kept, work, reported = tmp_path / "runs", tmp_path / "work", list[str]()
    conduct(table, Session(store(kept), work, tmp_path / "data", reported.append), 2)
    assert compared_classes(table, store(kept)) is None
    session = Session(store(kept), work, tmp_path / "data", reported.append)
    compare_classes(table, session)
    rows = compared_classes(table, store(kept))
    assert rows is not None
    assert list(rows) == ["central_full", "central", "surgical"]
    runs = {run.row: work / run.name for run in final_runs(table, {})}
    config = load_site_config(runs["central_full"] / SERVER / "suture.toml")
    expected = compare(runs["central_full"] / "model", runs["surgical"] / "model", config, "test")
    for name, one in expected.items():
        found, p = rows["surgical"][name], one.difference.p
        assert found["auroc"] == pytest.approx(one.b.auroc, abs=1e-6, nan_ok=True)
        assert found["p"] == (None if p != p else pytest.approx(p, abs=1e-6))
        assert rows["central_full"][name]["low"] == pytest.approx(one.a.low, abs=1e-6)
    metrics = json.loads((runs["surgical"] / "metrics.json").read_text())
    for name, area in metrics["auroc"].items():
        assert rows["surgical"][name]["auroc"] == pytest.approx(area, abs=1e-5)

    page = write_tables(collect(table, store(kept)), tmp_path, "x")[0].read_text()
    assert "| Pleural Thickening |" in page.split("paired bootstrap")[0].rsplit("| class |", 1)[1]
    assert "0.76 (0.74, 0.78), p .08 |" in page

    before = len(reported)
    compare_classes(table, session)
    assert len(reported) == before
    compared = [json.loads(line)["name"] for line in (kept / "test.jsonl").read_text().splitlines()]
    delete(kept, *(name for name in compared if name.startswith("by-class-")))
    gone = runs["surgical"] / "model" / "model.json"
    gone.unlink()
    compare_classes(table, session)
    assert f"single classes are not compared: there is no {gone}" in reported[-1]
    assert compared_classes(table, store(kept)) is None


def test_the_table_by_hand() -> None:
    spec = small("nih_disjoint").spec
    none = {"auroc": None}
    theirs = {"Edema": {"auroc": 0.9, "low": 0.85, "high": 0.95}, "Hernia": none}
    better = {"Edema": {"auroc": 0.8, "low": 0.7, "high": 0.9, "p": 0.0004}, "Hernia": none}
    table = comparison_table(spec, {"central_full": theirs, "surgical": better})
    whole, ours = "Central, complete labels", "Surgical Aggregation, FedAvg"
    assert table.heads == ["class", whole, ours, "p", f"published: {whole}", f"published: {ours}"]
    assert table.rows[0] == [
        "Edema",
        "0.900 (0.850, 0.950)",
        "0.800 (0.700, 0.900)",
        "< .001",
        "0.89 (0.88, 0.90)",
        "0.88 (0.86, 0.89), p .06",
    ]
    assert table.rows[1][:4] == ["Hernia", "–", "–", "–"]


@pytest.mark.parametrize("name", ["nih_overlap", "nih_disjoint"])
def test_the_papers_tables_are_of_every_finding(name: str) -> None:
    spec = load_spec(name)
    assert spec.by_class is not None
    for row in spec.by_class.rows:
        assert spec.by_class.published[row].keys() == set(LABELS)


def test_rows_that_are_not_there_and_a_series_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps({**SPEC, "by_class": {"rows": ["theirs", "our"]}}))
    with pytest.raises(ConfigError, match=r"row in by_class\.rows.*'our'; did you mean 'ours'"):
        load_spec(str(path))
    series = {"key": "simulation.images", "values": [20], "label": "images"}
    path.write_text(tomli_w.dumps({**SPEC, "by_class": {"rows": ["theirs", "ours"]}, "series": series}))
    with pytest.raises(ConfigError, match="by_class needs one model"):
        load_spec(str(path))


def test_without_rows_the_printed_figures_stand_beside_the_means(tmp_path: Path) -> None:
    by_class = {"source": "Table 1", "published": {"ours": {"A": "0.91"}}}
    table = table_spec(by_class=by_class).preset(None)
    for run in final_runs(table, {}):
        result(run, tmp_path, {"A": 0.8, "B": None})
    page = write_tables(collect(table, store(tmp_path)), tmp_path / "pages", "two")[0].read_text()
    assert "| A | 0.800 | 0.800 (0.91) |" in page
    assert "mean over the runs; in brackets what the paper printed (Table 1)." in page


def test_a_single_row_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match="name a second one, or none"):
        table_spec(by_class={"rows": ["ours"]})
