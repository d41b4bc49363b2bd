"""The pages that tests look at: reports of small, large, failed and deciding runs; atlases."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np

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
from suture.core.labels import LabelSet
from suture.core.ontology import Atlas, Decision
from suture.core.vocabulary import read_word_list
from suture.data.table import Table
from suture_prepare.atlas_page import write_atlas_page
from suture_prepare.study_labels import study_lists
from suture_results.report import write_report

PAGES = ("small", "large", "failed", "decided", "atlas", "large atlas")


def write_page(name: str, folder: Path) -> Path:
    """Write one of `PAGES` and return its path."""
    if name.endswith("atlas"):
        return _atlas(folder, 24 if name.startswith("large") else 4)
    if name == "decided":
        return write_report(write_decided_run(folder))
    if name == "large":
        return write_report(write_large_run(folder))
    command = {"command": "suture run demo --env local --set 'title=\"a b\"' --set " + "local.lr=0.1" * 9}
    if name == "failed":
        run = (
            run_record()
            | command
            | {"status": "failed", "error": "no site answered", "notes": [{"code": "a note"}]}
        )
        return write_report(write_run(folder, run))
    history = with_pseudo_labels(history_records(14))
    run = run_record() | command
    return write_report(write_run(folder, run, history, metrics_record(OVERALL), diagnostic_records(history)))


def _atlas(folder: Path, sites: int) -> Path:
    names = [
        (*read_word_list("chexpert"), "Cardiomegali"),
        read_word_list("nih14"),
        (*read_word_list("vindr"), "Small Mass"),
    ]
    tables = {f"site-{i}": atlas_table(list(names[i % 3]), 1000 + i) for i in range(sites)}
    decided = Decision(name="Scar", relation="same", of="Fibrosis", by="M. Ruiz", on=date(2026, 11, 25))
    atlas = Atlas(decisions=(decided,))
    write_atlas_page(folder / "atlas.html", "A study", tables, study_lists(tables, atlas), atlas)
    return folder / "atlas.html"


def atlas_table(names: list[str], rows: int) -> Table:
    """A table with labels of a fixed pattern, a third of them unknown."""
    y = np.resize(np.array([0, 1, np.nan, 0, 0, np.nan, 1], np.float32), (rows, len(names)))
    every = tuple(map(str, range(rows)))
    return Table(LabelSet.of(names), every, every, y, ("train",) * rows, Path())
