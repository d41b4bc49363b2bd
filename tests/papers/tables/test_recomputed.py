"""The published figures are those of an independent computation from the stored runs."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from recomputed import against, final_runs, mean_area, student

from stored_by_hand import change, result, store, table_spec
from suture_papers.tables.leaderboard import leaderboard
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.results import ResultStore
from suture_papers.tables.runs import final_runs as runs_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RUNS = RESULTS / "runs"


@pytest.mark.parametrize(
    ("name", "control"), [("nih_overlap", "surgical"), ("nih_disjoint", "surgical"), ("fedlsm_nih", "fedlsm")]
)
def test_a_published_table(name: str, control: str) -> None:
    """Mean, SD and p of the first column, of rows with a global model that knows all classes."""
    found = final_runs(RUNS / f"{name}.jsonl", known_tables()[name])
    page = (RESULTS / f"{name}.md").read_text().split("\n\n")
    grid = next(part for part in page if part.startswith("| method"))
    rows = {cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in grid.splitlines()[2:])}
    names: dict[str, Any] = {}
    for row, block in re.findall(
        r'^\[rows\.(\w+)\]\nname = "(.*)"', known_tables()[name].read_text(), re.MULTILINE
    ):
        names[row] = block
    checked = 0
    own = found[control]
    for row, runs in found.items():
        if not runs or row in ("individual", "pfl_fedbn", "pfl_fedavg", "pfl"):
            continue
        areas = [mean_area(runs[seed]) for seed in sorted(runs)]
        text = rows[names[row]][1]
        assert text.startswith(f"{fmean(areas):.3f} ± {stdev(areas):.3f}"), row
        if row != control:
            d = [mean_area(own[seed]) - mean_area(runs[seed]) for seed in sorted(runs)]
            p = student(d)[3]
            printed = rows[names[row]][2].replace("< .001", "0.0005")
            assert float(printed) == pytest.approx(p, abs=6e-4), row
        checked += 1
    assert checked > 2


def test_a_study_by_hand_and_by_both_programs(tmp_path: Path) -> None:
    """Tuned rows, some seeds missing: leaderboard.json's figures are those of the independent formulas."""
    tune = {"key": "method.local.lr", "values": [1e-3, 1e-2]}
    rows = {key: {"name": key, "set": {"method": key}} for key in ("vanilla", "surgical", "partial")}
    plan = {"question": "?", "primary": "auroc", "effects": {"auroc": 0.01}, "stopping": "-", "block": "b"}
    presets = {"tiny": {"note": "", "seeds": [1, 2, 3, 4], "set": {"rounds": 1}, "tune": tune}}
    spec = table_spec(rows=rows, reference="vanilla", presets=presets, plan=plan)
    table = spec.preset(None)
    for lr in (1e-3, 1e-2):
        for run in runs_of(table, {(row, "None"): lr for row in rows}):
            if (run.row, run.seed) == ("partial", 4):
                continue
            k = list(rows).index(run.row) + 1
            value = 0.6 + 0.01 * k + 0.003 * (run.seed * k % 5) + (lr == 1e-2) / 50
            result(run, tmp_path, {"A": value, "B": value}, auroc=value if run.row != "partial" else -value)
            found = {"train": 70, "n": 20, "patients": 20, "overlap": True, "test": str(run.seed)}
            change(tmp_path, run, resampled={**found, "auroc": {"value": value, "draws": [value, value]}})
    board = leaderboard({"study": collect(table, store(tmp_path))})
    file = tmp_path / "study.toml"
    file.write_text(as_toml(rows, presets["tiny"], tune))
    again = against(final_runs(tmp_path / "test.jsonl", file), "vanilla", "auroc")
    assert set(again) == {"surgical", "partial"}
    for row, values in again.items():
        cell = board["rows"][row]["cells"]["study"]
        printed = [cell[key] for key in ("difference", "low", "high", "p", "holm")]
        assert printed == pytest.approx(values, abs=2e-6), row
    assert board["rows"]["partial"]["cells"]["study"]["seeds"] == 3


def as_toml(rows: dict[str, Any], preset: dict[str, Any], tune: dict[str, Any]) -> str:
    """The study of the test as a file."""
    lines = ["[plan]", "[presets.tiny]", f"seeds = {preset['seeds']}", "set = { rounds = 1 }"]
    lines += [f'tune = {{ key = "{tune["key"]}", values = {tune["values"]} }}']
    for key in rows:
        lines += [f"[rows.{key}]", f'set = {{ method = "{key}" }}']
    return "\n".join(lines)


@pytest.mark.complete
def test_published_studies_are_recomputed() -> None:
    """Every study with runs in the repository, preset by preset."""
    for name, path in known_tables().items():
        if not name.startswith("study_") or not (RUNS / f"{name}.jsonl").exists():
            continue
        spec = load_spec(name)
        assert spec.plan is not None
        for size in spec.presets:
            outcome = collect(spec.preset(size), ResultStore(RUNS, name))
            runs = final_runs(RUNS / f"{name}.jsonl", path, size)
            again = against(runs, spec.reference, spec.plan.primary)
            cells = {row: of["cells"]["x"] for row, of in leaderboard({"x": outcome})["rows"].items()}
            for row, values in again.items():
                printed = [cells[row][key] for key in ("difference", "low", "high", "p", "holm")]
                assert printed == pytest.approx(values, abs=2e-6), (name, size, row)
