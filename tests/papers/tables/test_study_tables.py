"""Studies: a plan that is kept, verdicts, the page, the leaderboard; and the claims of papers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from stored_by_hand import SPEC, change, filled, result, store, table_spec
from suture.core.errors import ConfigError, DataError
from suture_papers.tables.claims import decide, load_claims, page_of
from suture_papers.tables.conduct import Session, compare_classes, conduct, do_runs
from suture_papers.tables.leaderboard import leaderboard, write_leaderboard
from suture_papers.tables.loading import load_spec
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.plan import changes, digest, plan_table, register
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import TableSpec
from suture_papers.tables.statistics import Difference
from suture_papers.tables.study import compared, same_rows, sentences, verdict_of
from suture_papers.tables.verdict import number
from world import refused

PLAN: dict[str, Any] = {
    "question": "Is it better?",
    "primary": "auroc",
    "effects": {"auroc": 0.01},
    "stopping": "Five seeds.",
    "block": "made up",
}
PRESET = {"tiny": {"note": "", "seeds": [1, 2, 3, 4, 5], "set": {"rounds": 1}}}
GAINS = [0.02, 0.03, 0.01, 0.025, 0.02]


def study(**changes: Any) -> TableSpec:
    return table_spec(**{"plan": PLAN, "presets": PRESET, **changes})


def stored(spec: TableSpec, folder: Path, value: Any, overlap: bool = True) -> Outcome:
    """Store runs with these values, by row and seed; draws are the value ± .001."""
    table = spec.preset(None)
    filled(table, folder, lambda run: dict.fromkeys("AB", value(run)))
    for run in final_runs(table, {}):
        found = {"train": 40, "n": 10, "patients": 10, "overlap": overlap, "test": f"seed {run.seed}"}
        draws = [value(run) - 0.001, value(run) + 0.001]
        change(folder, run, resampled={**found, "auroc": {"value": value(run), "draws": draws}})
    return collect(table, store(folder))


def ours(gains: list[float]) -> Any:
    """Theirs have .7, ours that much more, by seed."""
    return lambda run: 0.7 + (gains[run.seed - 1] if run.row == "ours" else 0.0)


def page(outcome: Outcome, folder: Path) -> str:
    return write_tables(outcome, folder, "test")[0].read_text()


# Verdicts


def test_the_seed_divides_the_patients() -> None:
    seeds = {run.settings["simulation.seed"] for run in final_runs(study().preset(None), {})}
    assert seeds == {1, 2, 3, 4, 5}
    assert all("simulation.seed" not in run.settings for run in final_runs(table_spec().preset(None), {}))


@pytest.mark.parametrize(
    ("overlap", "low", "high"), [(True, -0.03481, -0.00719), (False, -0.03021, -0.01179)]
)
def test_differences_by_hand(overlap: bool, low: float, high: float, tmp_path: Path) -> None:
    """Mean .021, s .0074162, J = 5, test / train = 1/4: .021 ± .01381; without overlap ± .00921."""
    rows = compared(stored(study(), tmp_path, ours(GAINS), overlap), "auroc")
    theirs = rows["theirs"].difference  # the control is SPEC's reference, ours
    assert rows["ours"].difference is None
    assert theirs is not None
    assert (theirs.mean, theirs.low, theirs.high) == pytest.approx((-0.021, low, high), abs=5e-6)
    assert theirs.holm == theirs.p
    assert all(math.isnan(bound) for bound in rows["theirs"].bootstrap)  # of five seeds


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


def test_equal_rows_are_tested_once(tmp_path: Path) -> None:
    """Of three rows besides the control two have the same runs: Holm multiplies p by 2 and 1, not by 3."""
    rows = {key: {"name": key.upper(), "set": {"method": key}} for key in ("fedavg", "fedprox", "moon")}
    slopes = {"ours": 0.0, "theirs": 0.0, "fedavg": 0.001, "fedprox": 0.001, "moon": 0.003}
    gains = {"ours": 0.0, "theirs": 0.0, "fedavg": 0.02, "fedprox": 0.02, "moon": 0.03}
    outcome = stored(
        study(rows={**SPEC["rows"], **rows}),
        tmp_path / "runs",
        lambda run: 0.7 + gains[run.row] + slopes[run.row] * run.seed,
    )
    assert same_rows(outcome) == {"theirs": "ours", "fedprox": "fedavg"}
    found = compared(outcome, "auroc")
    fedavg, moon = found["fedavg"].difference, found["moon"].difference
    assert fedavg is not None
    assert moon is not None
    assert sorted([fedavg.holm / fedavg.p, moon.holm / moon.p]) == pytest.approx([1, 2])
    assert (found["fedprox"].same_as, found["fedprox"].difference) == ("fedavg", fedavg)
    assert page(outcome, tmp_path).count("FEDPROX") == 1
    board = leaderboard({"study": outcome})["rows"]
    assert board["fedprox"]["cells"]["study"]["same_as"] == "fedavg"
    assert board["fedprox"]["over_studies"] == board["fedavg"]["over_studies"]


def test_rows_on_other_test_images_are_not_compared(tmp_path: Path) -> None:
    table = study().preset(None)
    stored(study(), tmp_path, ours([0.01] * 5))
    run = next(run for run in final_runs(table, {}) if run.row == "theirs" and run.seed == 2)
    record = store(tmp_path).find(run.name)
    assert record is not None
    change(tmp_path, run, resampled={**record["resampled"], "test": "another"})
    with refused("seed 2", "'theirs'", by=DataError):
        compared(collect(table, store(tmp_path)), "auroc")


# The page


@pytest.mark.parametrize(
    ("gains", "overlap", "said"),
    [
        # s .0074162: with test/train 1/4 never below 2.8016 s / 2 = .0104. A set of patients of its own has
        # the variance 5/4 s²: 5.4 sets by the normal distribution, 8 by t.
        (GAINS, True, (r"less than \.010", "about 4 times as", "8 such sets of patients")),
        (GAINS, False, ("takes 7 seeds",)),  # 4.3 by the normal distribution
        ([0.03, -0.03, 0.01, 0.02, -0.02], True, (r"Vanilla FL \(−\.002, 95 % −\.0\d\d to \.0\d\d\)",)),
        ([0.02, 0.021, 0.019, 0.02, 0.02], True, ("(?s)^(?!.*would take)",)),
    ],
)
def test_the_page_says_the_effect_and_what_could_have_been_found(
    gains: list[float], overlap: bool, said: tuple[str, ...], tmp_path: Path
) -> None:
    table = study().preset(None)
    stored(study(), tmp_path / "runs", ours(gains), overlap)
    register(table, store(tmp_path / "runs"))
    outcome = collect(table, store(tmp_path / "runs"))
    assert [words for words in said if not re.search(words, sentences(outcome))] == []
    text = page(outcome, tmp_path)
    assert text.startswith("# two methods\n")  # without the preset's name: there is one
    assert sentences(outcome) in text
    assert "results before the plan: 0" not in text
    assert digest(plan_table(table)) in text


def test_of_many_rows_that_say_nothing_the_range_is_told_and_none_without_a_run(tmp_path: Path) -> None:
    rows = {f"r{k}": {"name": f"Row {k}", "set": {"method": "vanilla", "rounds": k + 1}} for k in range(6)}
    spec = study(rows={**SPEC["rows"], **rows})

    def value(run: Run) -> float:
        number_of_row = int(run.row[1]) if run.row in rows else 0  # theirs is row 0, told once
        return 0.7 + number_of_row / 1000 + (0.01 if run.seed % 2 else -0.01) * (run.row != "ours")

    assert re.search(r"6 rows, .* \.002 to \.007\.", sentences(stored(spec, tmp_path, value)))
    nothing = sentences(collect(study().preset(None), store(tmp_path / "none")))
    assert "Vanilla FL (0 seeds)" in nothing
    assert "four times in five" not in nothing


@pytest.mark.parametrize(("gain", "tone"), [(-0.05, "t0"), (0.05, "t2"), (0.001, "t7")])
def test_the_figure_shows_differences_and_only_verdicts_in_colour(
    tmp_path: Path, gain: float, tone: str
) -> None:
    """The control is ours: theirs is that much worse. No marks of a test that the study does not make."""
    wobbles = (-0.002, 0.002, 0.0, -0.001, 0.001)
    page(stored(study(), tmp_path / "runs", ours([gain + wobble for wobble in wobbles])), tmp_path)
    svg = (tmp_path / "test.svg").read_text()
    assert re.findall(r'class="line (t\d)"', svg) == [tone]  # the interval; the line at 0 is thin
    assert len(re.findall(r"<circle", svg)) == 1
    assert ".700" in svg
    assert number(0.7 + gain) in svg
    assert not re.search(r">(ns|\*+)<", svg)


# The plan


def test_a_plan_is_stored_once_and_a_change_needs_a_reason(tmp_path: Path) -> None:
    kept = store(tmp_path)
    register(study().preset(None), kept)
    record = kept.find("plan-test-tiny")
    assert record is not None
    assert (record["digest"], record["results_before"]) == (digest(record["plan"]), 0)
    register(study(title="another title", note="a note").preset(None), kept)
    assert kept.find("plan-test-tiny") == record
    wider = study(plan={**PLAN, "effects": {"auroc": 0.02}})
    outcome = stored(wider, tmp_path, ours([0.01] * 5))
    edit = "plan.effects.auroc: 0.01 is now 0.02"
    assert f"not registered: {edit}" in page(outcome, tmp_path / "edited")
    for reason in (None, "", " "):
        with refused(edit, "--amend", by=ConfigError):
            register(wider.preset(None), kept, reason)
    register(wider.preset(None), kept, "the smallest useful gain was set too low")
    amended = kept.find("plan-test-tiny")
    assert amended is not None
    assert amended["digest"] == record["digest"]
    assert amended["amendments"][0]["changed"] == {"plan.effects.auroc": [0.01, 0.02]}
    outcome = collect(wider.preset(None), kept)
    assert f"set too low; {edit}" in page(outcome, tmp_path / "amended")


def test_every_setting_that_decides_a_run_is_in_the_plan() -> None:
    before = plan_table(study().preset(None))
    for edit in (
        {"set": {"rounds": 2}},
        {"rows": {**SPEC["rows"], "more": {"name": "x", "set": {"method": "fedavg"}}}},
        {"presets": {"tiny": {**PRESET["tiny"], "seeds": [1, 2]}}},
        {"reference": "theirs"},
    ):
        assert changes(before, plan_table(study(**edit).preset(None)))


@pytest.mark.parametrize("tune", [None, {"key": "method.local.lr", "values": [1e-3, 1e-2]}])
def test_results_that_are_older_than_the_plan_are_counted(tmp_path: Path, tune: Any) -> None:
    table = study(presets={"tiny": {**PRESET["tiny"], **({"tune": tune} if tune else {})}}).preset(None)
    for run in list(final_runs(table, {(row, str(x)): 1e-2 for row, x in table.cells}))[:3]:
        result(run, tmp_path, {"A": 0.5, "B": 0.5})
    register(table, store(tmp_path))
    record = store(tmp_path).find("plan-test-tiny")
    assert record is not None
    assert record["results_before"] == 3


def test_a_run_of_another_table_gets_its_draws_from_the_kept_scores_or_is_named(tmp_path: Path) -> None:
    table, reported = study().preset(None), list[str]()
    filled(table, tmp_path, lambda _: {"A": 0.5, "B": 0.5})
    runs = list(final_runs(table, {}))
    out = tmp_path / "work" / runs[0].name
    out.mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"sites": {"x": {"n": {"train": 9}}}}))
    y = np.array([[1.0], [0.0], [1.0], [0.0]])
    scores = np.array([[[0.9], [0.1], [0.4], [0.5]]])
    kept = {"y": y, "labels": ("A",), "label_type": "multilabel", "patients": tuple("abcd"), "scores": scores}
    np.savez_compressed(out / "test_scores.npz", **kept)
    do_runs(runs, Session(store(tmp_path), tmp_path / "work", None, reported.append), 1)
    record = store(tmp_path).find(runs[0].name)
    assert record is not None
    assert (record["resampled"]["auroc"]["value"], record["resampled"]["train"]) == (0.75, 9)
    assert [run.name for run in runs[1:] if any(run.name in line for line in reported)] == [
        run.name for run in runs[1:]
    ]


# The leaderboard


def test_the_leaderboard_has_a_cell_for_each_row_and_study(tmp_path: Path) -> None:
    outcomes = {}
    wobbles = (0.001, -0.001, 0.002, -0.002, 0.0)
    for name, block, gain in (("one", "x", 0.02), ("two", "x", 0.04), ("three", "y", 0.01)):
        spec = study(plan={**PLAN, "block": block}, reference="theirs")
        outcomes[name] = stored(spec, tmp_path / name, ours([gain + d for d in wobbles]))
    board = leaderboard(outcomes)
    assert board["control"] == "theirs"
    assert board["rows"]["theirs"]["cells"]["one"]["verdict"] == "control"
    cells, over = (board["rows"]["ours"][key] for key in ("cells", "over_studies"))
    verdicts = ["better by more than δ", "better by more than δ", "better"]
    assert [cells[study]["verdict"] for study in ("one", "two", "three")] == verdicts
    assert (over["blocks"], over["median"]) == (2, pytest.approx(0.02))  # x counts once: (.03 + .01) / 2
    json.dumps(board, allow_nan=False)
    with refused("ours, theirs", by=ConfigError):
        leaderboard({**outcomes, "four": collect(study().preset(None), store(tmp_path / "one"))})


def test_the_page_shows_no_p_over_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = study(reference="theirs")
    stored(spec, tmp_path / "runs", ours([0.021, 0.019, 0.022, 0.018, 0.02]))
    monkeypatch.setattr("suture_papers.tables.leaderboard.known_tables", lambda: ["test"])
    monkeypatch.setattr("suture_papers.tables.leaderboard.load_spec", lambda _: spec)
    page = next(path for path in write_leaderboard(tmp_path) if path.suffix == ".html").read_text()
    assert "1 block: no test" in page
    assert "p (Holm) < .001" in page.replace("&lt;", "<")  # of the study
    monkeypatch.setattr("suture_papers.tables.leaderboard.known_tables", list)
    assert write_leaderboard(tmp_path) == []


@pytest.mark.complete
def test_a_study_runs_from_its_plan_to_its_page(tmp_path: Path) -> None:
    """At toy size: two rows, two seeds, on phantoms, each seed with images of its own."""
    small = {"simulation.images": 20, "simulation.held_out": 40, "model.size": 32, "rounds": 1}
    spec = study(
        presets={"tiny": {"note": "", "seeds": [1, 2], "set": small}},
        plan={**PLAN, "effects": {"auroc": 0.01, "ap": 0.01}},
        by_class={"rows": ["theirs", "ours"]},
        reference="theirs",
    )
    kept = store(tmp_path / "runs")
    session = Session(kept, tmp_path / "work", None, lambda _: None)
    outcome = conduct(spec.preset(None), session, 2)
    assert outcome.plan is not None
    assert outcome.plan["results_before"] == 0
    for one in (one for cell in outcome.results.values() for one in cell.values()):
        assert one.resampled["auroc"]["value"] == pytest.approx(one.metrics["mean_auroc"], abs=1e-6)
        assert not one.resampled["overlap"]
        assert np.std(one.resampled["ap"]["draws"]) > 0
    compare_classes(spec.preset(None), session)
    found = collect(spec.preset(None), kept)
    assert found.by_class is not None
    assert all(0 <= (cell["p"] or 0) <= 1 for cell in found.by_class["ours"].values())
    text = page(found, tmp_path)
    assert "average precision" in text
    assert "DeLong's test, clustered by patient" in text
    board = leaderboard({"toy": found})
    assert board["studies"]["toy"]["digest"] == outcome.plan["digest"]


# Claims of papers

ONE_SITE = "AUROC, classes of one site"
CLAIM = {
    "paper": "a paper",
    "place": "Table 1",
    "says": "Ours is better.",
    "printed": "0.8 against 0.7",
    "row": "ours",
    "over": "theirs",
}


def claims_file(folder: Path, spec: dict[str, Any], column: str = ONE_SITE, **changes: Any) -> Path:
    """A claim on a table of two rows, in files."""
    (folder / "two.toml").write_text(tomli_w.dumps(spec))
    source = {"table": str(folder / "two.toml"), "preset": "tiny", "column": column}
    claim = {**CLAIM, "studies": [source], **changes}
    content = {"fixed": "2026-01-02T00:00:00Z", "margins": {"auroc": 0.01}, "claims": {"one": claim}}
    path = folder / "claims.toml"
    path.write_text(tomli_w.dumps(content))
    return path


@pytest.mark.parametrize(
    ("finished", "mark"), [("2026-01-03T00:00:00+00:00", ""), ("2026-01-01T00:00:00+00:00", " †")]
)
def test_a_claim_is_decided_by_the_stored_runs(finished: str, mark: str, tmp_path: Path) -> None:
    """Ours - theirs on the classes of one site: .02, .03, .04, mean .03 ± .0248."""
    path = claims_file(tmp_path, SPEC)
    claims, digest_ = load_claims(path)
    assert decide(claims.claims["one"], claims, tmp_path / "runs")[0].pairs == 0
    for run in final_runs(load_spec(str(tmp_path / "two.toml")).preset("tiny"), {}):
        b = 0.5 + (0.01 * (run.seed + 1) if run.row == "ours" else 0)
        result(run, tmp_path / "runs", {"A": 0.8, "B": b}, finished=finished)
    text = page_of(path, tmp_path / "runs")
    assert f"+.030 (+.005 to +.055){mark} | 3 | 0.033 | 10 | 0.01 | open" in text
    assert "0 of 1 claims" in text
    assert digest_[:16] in text


def test_a_mistake_in_the_list_says_where(tmp_path: Path) -> None:
    rows = {key: {"name": row["name"], "set": row["set"]} for key, row in SPEC["rows"].items()}
    losses = {**SPEC, "rows": rows, "columns": [{"name": "loss", "metric": "loss"}]}
    for spec, edit, named in (
        (SPEC, {"row": "our"}, ("'one'", "'ours'")),
        (SPEC, {"column": "AUROC, all clases"}, ("'AUROC, all classes'",)),
        (SPEC, {"studies": []}, ("studies",)),
        (SPEC, {"expects": "less"}, ("expects",)),
        (losses, {"column": "loss"}, ("margins", "'one'", "'loss'")),
    ):
        with refused(*named, by=ConfigError):
            load_claims(claims_file(tmp_path, spec, **edit))
