"""The pages that tests look at: reports of small, large, failed and deciding runs, and one of each kind."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import numpy as np

from example_run import (
    LABELS,
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
from hospitals import site
from small_models import CNN_32, saved_model
from suture.core.labels import LabelSet
from suture.core.ontology import Atlas, Decision
from suture.core.vocabulary import read_word_list
from suture.data.table import Table
from suture.execution.study import StudySites
from suture_prepare.atlas_page import write_atlas_page
from suture_prepare.new_study import look, write_study
from suture_prepare.quality import check
from suture_prepare.study_check import compare
from suture_prepare.study_labels import study_lists
from suture_prepare.study_page import write_page as write_check
from suture_results.card import PAGE, write_card
from suture_results.comparison_page import Difference, verdict, write_comparison
from suture_results.report import Live, render_waiting, write_report

ROOT = Path(__file__).parents[1]

PAGES = (
    *("small", "large", "failed", "decided", "atlas", "large atlas", "check", "comparison"),
    *("card", "waiting"),
)


def write_page(name: str, folder: Path) -> Path:
    """Write one of `PAGES` and return its path."""
    if name.endswith("atlas"):
        return _atlas(folder, 24 if name.startswith("large") else 4)
    if name == "check":
        return _check(folder)
    if name == "comparison":
        return _comparison(folder / "comparison.html")
    if name == "card":
        write_run(folder, run_record(), history_records(), metrics_record(OVERALL))
        saved_model(folder / "model", CNN_32, tuple(LABELS))
        return write_card(folder).with_name(PAGE)
    if name == "waiting":
        (folder / "waiting.html").write_text(
            render_waiting(Live("1", "Preparing the sites")), encoding="utf-8"
        )
        return folder / "waiting.html"
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


def _check(folder: Path) -> Path:
    header = ["image", "patient", "split", "Mass", "Pleural Effusion"]
    for name in ("alpha", "beta"):
        rows = [[f"{i}.png", f"p{i}", ("train", "validation", "test")[i % 3], i % 2, 0] for i in range(12)]
        site(folder / name, header, *rows)
    write_study(folder / "study", look({name: folder / name for name in ("alpha", "beta")}))
    configs = StudySites(str(folder / "study")).configs()
    findings = {name: check(config) for name, config in configs.items()}
    return write_check(folder / "study", None, configs, findings, compare(configs, findings))


def _comparison(path: Path) -> Path:
    lines = [
        Difference(
            "Surgical Aggregation", 0.031, 0.012, 0.05, 0.004, ("0.838 (0.810–0.861)", "+0.030 +0.032")
        ),
        Difference("Single values", -0.02, math.nan, math.nan, math.nan, ("0.790", "-0.020 -0.020")),
    ]
    sites = {"alpha": {"Mass": {"individual": 0.8, "surgical": 0.83}}}
    shown = {"sites": sites, "images": {"alpha": 60}, "counts": {"alpha": {"Mass": (20, 40)}}, "missing": ()}
    titles = {"individual": "Alone", "surgical": "Surgical Aggregation"}
    heads = ("Mean AUROC (95 % CI)", "Difference with each seed")
    said = {"verdict": verdict("AUROC", lines), "how": "Two rounds.", "note": "Of the mean AUROC."}
    return write_comparison(
        path, lines, title="A", what="Method", heads=heads, titles=titles, **said, **shown
    )


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
