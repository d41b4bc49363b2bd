"""The sentence at the head of a table, for every way in which it can come out."""

from __future__ import annotations

import pytest

from stored_by_hand import SPEC, result, store, table_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs
from suture_papers.tables.verdict import verdict
from suture_results.comparison import compare_pairs


def said(tmp_path, ours: list[float], theirs: list[float]) -> str:  # type: ignore[no-untyped-def]
    """The sentence of seeds 1, 2, ... with these AUROCs of class A; B is always .5."""
    seeds = list(range(1, 6))
    spec = table_spec(presets={"tiny": {"note": "", "seeds": seeds, "set": {"rounds": 1}}})
    table = spec.preset(None)
    values = {"ours": dict(zip(seeds, ours, strict=False)), "theirs": dict(zip(seeds, theirs, strict=False))}
    for run in final_runs(table, {}):
        area = values[run.row].get(run.settings["seed"])
        if area is not None:
            result(run, tmp_path, {"A": area, "B": area})
    outcome = collect(table, store(tmp_path))
    write_tables(outcome, tmp_path / "out", "x")
    sentence = verdict(outcome)
    assert (tmp_path / "out" / "x.md").read_text().split("\n\n")[1] == sentence
    assert sentence in (tmp_path / "out" / "x.html").read_text()
    return sentence


THEIRS = [0.70, 0.72, 0.71, 0.69, 0.73]


def test_a_win_and_a_loss_have_size_interval_p_and_number(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Differences .02, .03, .01, .025, .02: mean .021, SD .0074, t(.975, 4) 2.776, so .021 ± .0092."""
    better = [a + d for a, d in zip(THEIRS, (0.02, 0.03, 0.01, 0.025, 0.02), strict=True)]
    assert said(tmp_path / "win", better, THEIRS) == (
        "AUROC, all classes, over 5 seeds: Surgical Aggregation beats Vanilla FL by .021 (95 % .012 to .030, "
        "p = .003)."
    )
    assert "is worse than Vanilla FL by .021 (95 % .012 to .030, p = .003)" in said(
        tmp_path / "loss", THEIRS, better
    )


def test_a_tie_is_no_win(tmp_path) -> None:  # type: ignore[no-untyped-def]
    near = [a + d for a, d in zip(THEIRS, (0.02, -0.03, 0.01, 0.005, -0.015), strict=True)]
    sentence = said(tmp_path, near, THEIRS)
    assert "does not differ significantly from Vanilla FL (\u2212.002, 95 % \u2212.027 to .023" in sentence
    assert "beats" not in sentence
    assert "(.000, p = 1.000)" in said(tmp_path / "same", THEIRS, THEIRS)


def test_too_few_seeds_prove_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert said(tmp_path / "one", [0.9], [0.5]) == (
        "AUROC, all classes, over 1 seed: Surgical Aggregation has .900; Vanilla FL .500: too few runs "
        "to test a difference."
    )
    two = said(tmp_path / "two", [0.9, 0.91], [0.5, 0.51001])
    assert two.endswith("better than Vanilla FL by .400, but two pairs cannot be tested for normality.")
    assert "the same for all pairs" in said(tmp_path / "alike", [0.75] * 3, [0.5] * 3)


def test_of_several_rows_of_one_run_the_caution_is_said_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rows = {**SPEC["rows"], "others": {"name": "FedAvg", "set": {"method": "fedavg"}}}
    spec = table_spec(rows=rows, presets={"tiny": {"note": "", "seeds": [1], "set": {"rounds": 1}}})
    table = spec.preset(None)
    for run in final_runs(table, {}):
        area = {"ours": 0.9, "theirs": 0.5, "others": 0.6}[run.row]
        result(run, tmp_path, {"A": area, "B": area})
    assert verdict(collect(table, store(tmp_path))) == (
        "AUROC, all classes, over 1 seed: Surgical Aggregation has .900; Vanilla FL .500; FedAvg .600: "
        "too few runs to test a difference."
    )


def test_what_has_not_been_run_is_not_judged(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert said(tmp_path / "none", [], THEIRS).startswith("No result yet: Surgical Aggregation has no")
    assert "cannot be compared with Vanilla FL (not run yet)" in said(tmp_path / "half", THEIRS, [])


def test_the_interval_of_a_paired_difference() -> None:
    found = compare_pairs([0.72, 0.75, 0.72, 0.715, 0.75], THEIRS)
    assert (found.difference, found.low, found.high) == pytest.approx((0.021, 0.0117916, 0.0302084), abs=1e-6)
