"""The pages that tests look at: reports of a small, a large, a failed and a deciding run; a table."""

from __future__ import annotations

from pathlib import Path

from example_run import (
    OVERALL,
    diagnostic_records,
    history_records,
    metrics_record,
    run_record,
    with_pseudo_labels,
    write_decided_run,
    write_large_run,
    write_run,
)
from stored_by_hand import result, store, table_spec
from suture.reports.report import write_report
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs

PAGES = ("small", "large", "failed", "decided", "table")


def write_page(name: str, folder: Path) -> Path:
    """Write one of `PAGES` and return its path."""
    if name == "table":
        return _table(folder)
    if name == "decided":
        return write_report(write_decided_run(folder))
    if name == "large":
        return write_report(write_large_run(folder))
    command = {"command": "suture run demo --env local --set 'title=\"a b\"' --set " + "local.lr=0.1" * 9}
    if name == "failed":
        run = run_record() | command | {"status": "failed", "error": "no site answered", "notes": ["a note"]}
        return write_report(write_run(folder, run))
    history = with_pseudo_labels(history_records(14))
    run = run_record() | command
    return write_report(write_run(folder, run, history, metrics_record(OVERALL), diagnostic_records(history)))


def _table(folder: Path) -> Path:
    spec = table_spec()
    table = spec.preset(None)
    for k, run in enumerate(final_runs(table, {})):
        result(run, folder / "runs", {"A": 0.7 + 0.03 * (k % 2) + 0.01 * k, "B": 0.6 + 0.01 * k})
    outcome = collect(table, store(folder / "runs"))
    return next(p for p in write_tables(outcome, folder, "x") if p.suffix == ".html")
