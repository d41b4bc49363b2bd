"""Studies: a plan that is kept, verdicts, the page, and the leaderboard."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stored_by_hand import SPEC, change, result, store, table_spec
from suture.core.errors import ConfigError, DataError
from suture_papers.tables.conduct import Session, compare_classes, conduct, do_runs
from suture_papers.tables.leaderboard import leaderboard, write_leaderboard
from suture_papers.tables.loading import load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.plan import changes, digest, plan_table, register
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs, tuning_runs
from suture_papers.tables.spec import TableSpec
from suture_papers.tables.statistics import Difference
from suture_papers.tables.study import compared, same_rows, sentences, verdict_of
from suture_papers.tables.verdict import number

PLAN: dict[str, Any] = {
    "question": "Is it better?",
    "primary": "auroc",
    "effects": {"auroc": 0.01},
    "stopping": "Five seeds.",
    "block": "made up",
}
PRESET = {"tiny": {"note": "", "seeds": [1, 2, 3, 4, 5], "set": {"rounds": 1}}}


def study(**changes: Any) -> TableSpec:
    return table_spec(**{"plan": PLAN, "presets": PRESET, **changes})


def stored(spec: TableSpec, folder: Path, ours: list[float], overlap: bool = True) -> None:
    """Store runs of these seeds: theirs have .7, ours that much more; draws are the value ± .001."""
    for run in final_runs(spec.preset(None), {}):
        value = 0.7 + (ours[run.seed - 1] if run.row == "ours" else 0.0)
        result(run, folder, {"A": value, "B": value})
        draws = [value - 0.001, value + 0.001]
        found = {"train": 40, "n": 10, "patients": 10, "overlap": overlap, "test": f"seed {run.seed}"}
        change(folder, run, resampled={**found, "auroc": {"value": value, "draws": draws}})


def test_the_seed_divides_the_patients() -> None:
    seeds = {run.settings["simulation.seed"] for run in final_runs(study().preset(None), {})}
    assert seeds == {1, 2, 3, 4, 5}
    assert all("simulation.seed" not in run.settings for run in final_runs(table_spec().preset(None), {}))


def test_differences_by_hand(tmp_path: Path) -> None:
    """Mean .021, s .0074162, J = 5, test / train = 1/4: .021 ± .01381; without overlap ± .00921."""
    spec, gains = study(), [0.02, 0.03, 0.01, 0.025, 0.02]
    stored(spec, tmp_path, gains)
    rows = compared(collect(spec.preset(None), store(tmp_path)), "auroc")
    ours = rows["theirs"].difference  # the control is SPEC's reference, ours
    assert rows["ours"].difference is None
    assert ours is not None
    assert (ours.mean, ours.low, ours.high) == pytest.approx((-0.021, -0.03481, -0.00719), abs=5e-6)
    assert ours.holm == ours.p
    assert all(math.isnan(bound) for bound in rows["theirs"].bootstrap)  # of five seeds
    stored(spec, tmp_path / "fresh", gains, overlap=False)
    fresh = compared(collect(spec.preset(None), store(tmp_path / "fresh")), "auroc")["theirs"].difference
    assert fresh is not None
    assert (fresh.low, fresh.high) == pytest.approx((-0.03021, -0.01179), abs=5e-6)


@pytest.mark.parametrize(
    ("low", "high", "holm", "verdict"),
    [
        (0.011, 0.03, 0.01, "better by more than δ"),
        (0.002, 0.03, 0.01, "better"),
        (0.002, 0.03, 0.06, "nothing can be told"),
        (0.002, 0.009, 0.06, "equivalent within ±δ"),
        (-0.03, -0.002, 0.01, "worse"),
        (-0.009, 0.009, 1.0, "equivalent within ±δ"),
        (-0.03, 0.009, 0.5, "nothing can be told"),
        (math.nan, math.nan, math.nan, "no result"),
    ],
)
def test_verdicts(low: float, high: float, holm: float, verdict: str) -> None:
    assert verdict_of(Difference(5, (low + high) / 2, low, high, holm, 0.01, holm), 0.01) == verdict


def test_the_page_says_the_effect_first_and_what_could_have_been_found(tmp_path: Path) -> None:
    spec = study()
    stored(spec, tmp_path / "runs", [0.03, -0.03, 0.01, 0.02, -0.02])
    register(spec.preset(None), store(tmp_path / "runs"))
    outcome = collect(spec.preset(None), store(tmp_path / "runs"))
    page = write_tables(outcome, tmp_path, "test")[0].read_text()
    assert sentences(outcome) in page
    assert re.search(r"Nothing can be told: Vanilla FL \(−\.002, 95 % −\.0\d\d to \.0\d\d\)", page)
    assert "would be found four times in five" in page
    assert "results before the plan: 0" not in page
    assert f"SHA-256 {digest(plan_table(spec.preset(None)))}" in page
    assert "beats" not in page


def test_equal_rows_are_tested_once(tmp_path: Path) -> None:
    """Of three rows besides the control two have the same runs: Holm multiplies p by 2 and 1, not by 3."""
    rows = {key: {"name": key.upper(), "set": {"method": key}} for key in ("fedavg", "fedprox", "moon")}
    spec = study(rows={**SPEC["rows"], **rows}, reference="ours")
    gains = {"ours": 0.0, "theirs": 0.0, "fedavg": 0.02, "fedprox": 0.02, "moon": 0.03}
    for run in final_runs(spec.preset(None), {}):
        gain = 0.0 if run.row in ("ours", "theirs") else run.seed * (0.003 if run.row == "moon" else 0.001)
        value = 0.7 + gains[run.row] + gain
        result(run, tmp_path / "runs", {"A": value, "B": value})
        found = {"train": 40, "n": 10, "patients": 10, "overlap": True, "test": f"seed {run.seed}"}
        change(
            tmp_path / "runs", run, resampled={**found, "auroc": {"value": value, "draws": [value, value]}}
        )
    outcome = collect(spec.preset(None), store(tmp_path / "runs"))
    assert same_rows(outcome) == {"theirs": "ours", "fedprox": "fedavg"}
    found = compared(outcome, "auroc")
    fedavg, moon = found["fedavg"].difference, found["moon"].difference
    assert fedavg is not None
    assert moon is not None
    assert sorted([fedavg.holm / fedavg.p, moon.holm / moon.p]) == pytest.approx([1, 2])
    assert (found["fedprox"].same_as, found["fedprox"].difference) == ("fedavg", fedavg)
    page = write_tables(outcome, tmp_path, "test")[0].read_text()
    assert (
        "Vanilla FL is Surgical Aggregation in every figure; FEDPROX is FEDAVG in every figure: tested once."
        in page
    )
    assert page.count("FEDPROX") == 1
    board = leaderboard({"study": outcome})["rows"]
    assert board["fedprox"]["cells"]["study"]["same_as"] == "fedavg"
    assert board["fedprox"]["over_studies"] == board["fedavg"]["over_studies"]


def test_what_a_study_would_need(tmp_path: Path) -> None:
    """s .0074162: with test/train 1/4 never below 2.8016 s / 2 = .0104; fresh images: 7 seeds, normal 4.3.

    A set of patients of its own has the variance 5/4 s²: 5.4 sets by the normal distribution, 8 by t.
    """
    spec, gains = study(), [0.02, 0.03, 0.01, 0.025, 0.02]
    stored(spec, tmp_path, gains)
    said = sentences(collect(spec.preset(None), store(tmp_path)))
    assert "cannot find less than .010 for the median row: δ would take about 4 times as" in said
    assert "or 8 such sets of patients with one seed each." in said
    stored(spec, tmp_path / "fresh", gains, overlap=False)
    assert "To find δ for the median row takes 7 seeds." in sentences(
        collect(spec.preset(None), store(tmp_path / "fresh"))
    )
    stored(spec, tmp_path / "sure", [0.02, 0.021, 0.019, 0.02, 0.02])
    assert "δ would take" not in sentences(collect(spec.preset(None), store(tmp_path / "sure")))


@pytest.mark.parametrize(("gain", "tone"), [(-0.05, "t0"), (0.05, "t2"), (0.001, "t7")])
def test_the_figure_shows_differences_and_only_verdicts_in_colour(
    tmp_path: Path, gain: float, tone: str
) -> None:
    """The control is ours: theirs is that much worse. No marks of a test that the study does not make."""
    spec = study()
    stored(spec, tmp_path / "runs", [gain + wobble for wobble in (-0.002, 0.002, 0.0, -0.001, 0.001)])
    write_tables(collect(spec.preset(None), store(tmp_path / "runs")), tmp_path, "test")
    svg = (tmp_path / "test.svg").read_text()
    assert re.findall(r'class="line (t\d)"', svg) == [tone]  # the interval; the line at 0 is thin
    assert len(re.findall(r"<circle", svg)) == 1
    assert ".700" in svg
    assert number(0.7 + gain) in svg
    assert not re.search(r">(ns|\*+)<", svg)


def test_of_many_rows_that_say_nothing_the_range_is_told(tmp_path: Path) -> None:
    rows = {f"r{k}": {"name": f"Row {k}", "set": {"method": "vanilla", "rounds": k + 1}} for k in range(6)}
    spec = study(rows={**SPEC["rows"], **rows})
    for run in final_runs(spec.preset(None), {}):
        number_of_row = int(run.row[1]) if run.row in rows else 0  # theirs is row 0, told once
        value = 0.7 + number_of_row / 1000 + (0.01 if run.seed % 2 else -0.01) * (run.row != "ours")
        result(run, tmp_path, {"A": value, "B": value})
        found = {"train": 40, "n": 10, "patients": 10, "overlap": True, "test": f"seed {run.seed}"}
        change(tmp_path, run, resampled={**found, "auroc": {"value": value, "draws": [value, value]}})
    said = sentences(collect(spec.preset(None), store(tmp_path)))
    assert re.search(r"Nothing can be told: 6 rows, whose differences are \.002 to \.007\.", said)


def test_rows_on_other_test_images_are_not_compared(tmp_path: Path) -> None:
    spec = study()
    stored(spec, tmp_path, [0.01] * 5)
    run = next(run for run in final_runs(spec.preset(None), {}) if run.row == "theirs" and run.seed == 2)
    record = store(tmp_path).find(run.name)
    assert record is not None
    change(tmp_path, run, resampled={**record["resampled"], "test": "another"})
    with pytest.raises(DataError, match="seed 2: row 'theirs' and the control were tested on other images"):
        compared(collect(spec.preset(None), store(tmp_path)), "auroc")


def test_what_was_not_run_has_no_verdict(tmp_path: Path) -> None:
    outcome = collect(study().preset(None), store(tmp_path))
    assert "No result: Vanilla FL (0 seeds)" in sentences(outcome)
    assert "four times in five" not in sentences(outcome)


def test_a_plan_is_stored_once_and_a_change_needs_a_reason(tmp_path: Path) -> None:
    spec = study()
    register(spec.preset(None), store(tmp_path))
    record = store(tmp_path).find("plan-test-tiny")
    assert record is not None
    assert record["digest"] == digest(record["plan"])
    assert record["results_before"] == 0
    register(study(title="another title", note="a note").preset(None), store(tmp_path))
    assert store(tmp_path).find("plan-test-tiny") == record
    wider = study(plan={**PLAN, "effects": {"auroc": 0.02}})
    for reason in (None, "", " "):
        with pytest.raises(ConfigError, match=r"plan\.effects\.auroc: 0\.01 is now 0\.02.*--amend"):
            register(wider.preset(None), store(tmp_path), reason)
    register(wider.preset(None), store(tmp_path), "the smallest useful gain was set too low")
    amended = store(tmp_path).find("plan-test-tiny")
    assert amended is not None
    assert amended["digest"] == record["digest"]
    assert amended["amendments"][0]["changed"] == {"plan.effects.auroc": [0.01, 0.02]}
    stored(wider, tmp_path, [0.01] * 5)
    page = write_tables(collect(wider.preset(None), store(tmp_path)), tmp_path / "out", "test")[0].read_text()
    assert "set too low; plan.effects.auroc: 0.01 is now 0.02" in page


@pytest.mark.parametrize("tuned", [False, True])
def test_results_that_are_older_than_the_plan_are_counted(tmp_path: Path, tuned: bool) -> None:
    spec = study(**grid()) if tuned else study()
    values = dict.fromkeys(spec.preset(None).cells, 1e-2)
    runs = list(final_runs(spec.preset(None), {(row, str(x)): v for (row, x), v in values.items()}))
    for run in runs[:3]:
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
    register(spec.preset(None), store(tmp_path))
    record = store(tmp_path).find("plan-test-tiny")
    assert record is not None
    assert record["results_before"] == 3


def test_a_run_of_another_table_gets_its_draws_from_the_kept_scores_or_is_named(tmp_path: Path) -> None:
    spec = study()
    reported: list[str] = []
    session = Session(store(tmp_path), tmp_path / "work", None, reported.append)
    runs = list(final_runs(spec.preset(None), {}))
    for run in runs:
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
        change(tmp_path, run, resampled={})
    out = tmp_path / "work" / runs[0].name
    out.mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"sites": {"x": {"n": {"train": 9}}}}))
    y = np.array([[1.0], [0.0], [1.0], [0.0]])
    scores = np.array([[[0.9], [0.1], [0.4], [0.5]]])
    kept = {"y": y, "labels": ("A",), "label_type": "multilabel", "patients": tuple("abcd"), "scores": scores}
    np.savez_compressed(out / "test_scores.npz", **kept)
    do_runs(runs, session, 1)
    record = store(tmp_path).find(runs[0].name)
    assert record is not None
    assert record["resampled"]["auroc"]["value"] == 0.75
    assert record["resampled"]["train"] == 9
    assert sum("lacks auroc and its models are gone" in line for line in reported) == len(runs) - 1


def test_a_table_without_a_plan_has_nothing_to_amend(tmp_path: Path) -> None:
    session = Session(store(tmp_path), tmp_path / "work", None, lambda _: None, "because")
    with pytest.raises(ConfigError, match="test has no plan to amend"):
        conduct(table_spec().preset(None), session, 1)


def test_an_edited_plan_shows_on_the_page_even_if_nothing_was_run_since(tmp_path: Path) -> None:
    spec = study()
    register(spec.preset(None), store(tmp_path))
    stored(spec, tmp_path, [0.01] * 5)
    wider = study(plan={**PLAN, "question": "Is it as good?"})
    page = write_tables(collect(wider.preset(None), store(tmp_path)), tmp_path / "out", "test")[0].read_text()
    assert "plan changed and not registered: plan.question: Is it better? is now Is it as good?" in page


def test_every_setting_that_decides_a_run_is_in_the_plan() -> None:
    before = plan_table(study().preset(None))
    for edit in (
        {"set": {"rounds": 2}},
        {"rows": {**SPEC["rows"], "more": {"name": "x", "set": {"method": "fedavg"}}}},
        {"presets": {"tiny": {**PRESET["tiny"], "seeds": [1, 2]}}},
        {"reference": "theirs"},
    ):
        assert changes(before, plan_table(study(**edit).preset(None)))


def grid(**row: Any) -> dict[str, Any]:
    tune = {"key": "method.local.lr", "values": [1e-3, 1e-2]}
    presets = {"tiny": {**PRESET["tiny"], "tune": tune}}
    return {"presets": presets, "rows": {**SPEC["rows"], "ours": {**SPEC["rows"]["ours"], **row}}}


def test_a_row_may_tune_another_setting_over_equally_many_values() -> None:
    own = {"key": "method.batch_norm", "values": ["average", "frozen"]}
    runs = list(tuning_runs(study(**grid(tune=own)).preset(None)))
    assert [run.settings.get("method.batch_norm") for run in runs if run.row == "ours"] == [
        "average",
        "frozen",
    ]
    assert [run.settings.get("method.local.lr") for run in runs if run.row == "theirs"] == [1e-3, 1e-2]
    assert all("method.local.lr" not in run.settings for run in runs if run.row == "ours")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rows.a.tune]\nkey = 'rounds'\nvalues = [1, 2, 3]", "tries 3 values.*the same budget"),
        ("pairs = 'classes'", "a study compares runs of the same seed"),
        ("[plan]\nprimary = 'ap'", "effects lacks the primary metric"),
        ("one seed", "needs two seeds or more"),
        ("skip = ['a']", "skips the control 'a'"),
    ],
)
def test_a_study_that_cannot_be_judged_is_refused(tmp_path: Path, text: str, message: str) -> None:
    plan = {**PLAN, **({"primary": "ap"} if "'ap'" in text else {})}
    lines = ['title = "t"', 'source = "s"', 'job = "demo"', 'reference = "a"']
    lines += ["pairs = 'classes'"] if "pairs" in text else []
    lines += ["[plan]", *(f"{k} = {json.dumps(v)}" for k, v in plan.items() if k != "effects")]
    lines += ["effects = { auroc = 0.01 }", "[rows.a]", 'name = "A"', "[rows.b]", 'name = "B"']
    lines += [text] if text.startswith("[rows") else []
    seeds = "[1]" if text == "one seed" else "[1, 2]"
    lines += ["[presets.p]", 'note = ""', f"seeds = {seeds}", 'tune = { key = "rounds", values = [1, 2] }']
    lines += [text] if text.startswith("skip") else []
    path = tmp_path / "t.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=message):
        load_spec(str(path))


def test_the_leaderboard_has_a_cell_for_each_row_and_study(tmp_path: Path) -> None:
    outcomes = {}
    for name, block, gain in (("one", "x", 0.02), ("two", "x", 0.04), ("three", "y", 0.01)):
        spec = study(plan={**PLAN, "block": block}, reference="theirs")
        stored(spec, tmp_path / name, [gain + d for d in (0.001, -0.001, 0.002, -0.002, 0.0)])
        outcomes[name] = collect(spec.preset(None), store(tmp_path / name))
    board = leaderboard(outcomes)
    assert board["control"] == "theirs"
    assert board["rows"]["theirs"]["cells"]["one"]["verdict"] == "control"
    ours = board["rows"]["ours"]
    assert {study: cell["verdict"] for study, cell in ours["cells"].items()} == {
        "one": "better by more than δ",
        "two": "better by more than δ",
        "three": "better",
    }
    assert ours["over_studies"]["blocks"] == 2  # x counts once: (.03 + .01) / 2
    assert ours["over_studies"]["median"] == pytest.approx(0.02)
    json.dumps(board, allow_nan=False)
    others = {**outcomes, "four": collect(study().preset(None), store(tmp_path / "one"))}
    with pytest.raises(ConfigError, match="controls ours, theirs"):
        leaderboard(others)


def test_the_page_shows_no_p_over_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = study(reference="theirs")
    stored(spec, tmp_path / "runs", [0.021, 0.019, 0.022, 0.018, 0.02])
    monkeypatch.setattr("suture_papers.tables.leaderboard.known_tables", lambda: ["test"])
    monkeypatch.setattr("suture_papers.tables.leaderboard.load_spec", lambda _: spec)
    page = next(path for path in write_leaderboard(tmp_path) if path.suffix == ".html").read_text()
    assert "1 block: no test" in page
    assert "p (Holm) < .001" in page.replace("&lt;", "<")  # of the study


@pytest.mark.complete
def test_without_a_study_there_is_no_leaderboard(tmp_path: Path) -> None:
    assert write_leaderboard(tmp_path) == []


@pytest.mark.complete
def test_a_study_runs_from_its_plan_to_its_page(tmp_path: Path) -> None:
    """At toy size: two rows, two seeds, on phantoms, each seed with images of its own."""
    small = {"simulation.images": 20, "simulation.held_out": 40, "model.size": 32, "rounds": 1}
    effects = {"auroc": 0.01, "ap": 0.01}
    by_class = {"rows": ["theirs", "ours"]}
    presets = {"tiny": {"note": "", "seeds": [1, 2], "set": small}}
    spec = study(presets=presets, plan={**PLAN, "effects": effects}, by_class=by_class, reference="theirs")
    kept = store(tmp_path / "runs")
    session = Session(kept, tmp_path / "work", None, lambda _: None)
    outcome = conduct(spec.preset(None), session, 2)
    assert outcome.plan is not None
    assert outcome.plan["results_before"] == 0
    for cell in outcome.results.values():
        for one in cell.values():
            assert one.resampled["auroc"]["value"] == pytest.approx(one.metrics["mean_auroc"], abs=1e-6)
            assert not one.resampled["overlap"]
            assert np.std(one.resampled["ap"]["draws"]) > 0
    compare_classes(spec.preset(None), session)
    found = collect(spec.preset(None), kept).by_class
    assert found is not None
    assert all(0 <= (cell["p"] or 0) <= 1 for cell in found["ours"].values())
    page = write_tables(collect(spec.preset(None), kept), tmp_path, "test")[0].read_text()
    assert "average precision" in page
    assert "DeLong's test, clustered by patient" in page
    board = leaderboard({"toy": collect(spec.preset(None), kept)})
    assert board["studies"]["toy"]["digest"] == outcome.plan["digest"]
