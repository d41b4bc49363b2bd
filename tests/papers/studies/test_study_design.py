"""Studies as files, their tuning, their records and their pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError
from suture_papers.studies import page
from suture_papers.studies.conduct import Tuned, final_run, final_runs, tuned
from suture_papers.studies.design import Design, Run, known_studies, load_study
from suture_papers.studies.outcome import collect
from suture_papers.studies.plan import register
from suture_papers.tables.results import ResultStore
from world import refused

STUDY = """
title = "Synthetic images"
data = "images"
job = "surgical_nih"
control = "vanilla"
primary = "surgical"

[tuning]
start = 0.001
rounds = 4
most_rounds = 8
seeds = [1]

[rows.vanilla]
name = "FedAvg"
set = { method = "vanilla" }

[rows.surgical]
name = "Surgical"
set = { method = "surgical" }

[rows.partial]
name = "Partial"
set = { method = "partial" }
like = "surgical"
single = true

[settings.three]
title = "three sites"
"""


@pytest.fixture
def design(tmp_path: Path) -> Design:
    path = tmp_path / "synthetic.toml"
    path.write_text(STUDY)
    return load_study(str(path))["three"]


@pytest.mark.parametrize("name", known_studies())
def test_each_study_names_rows_that_it_has_and_a_job_that_exists(name: str) -> None:
    for one in load_study(name).values():
        plan = one.plan()
        assert {plan["control"], plan["primary"]} <= plan["rows"].keys()
        assert plan["job"]["simulation"]
        assert all(one.run(row, 1, 1, {}).settings["simulation.fold"] == 1 for row in one.rows)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('control = "vanilla"', 'control = "vanila"', "vanila"),
        ('like = "surgical"', 'like = "partial"', "partial"),
        ("start = 0.001", "begin = 0.001", "begin"),
        ('primary = "surgical"', 'primary = "vanilla"', "primary"),
        ("[settings.three]", '[settings."../three"]', "settings"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, before: str, after: str, named: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(STUDY.replace(before, after))

    with refused(named, by=ConfigError):
        load_study(str(path))


def test_runs_have_one_name_for_the_same_settings(design: Design) -> None:
    one, same, other = (design.run("vanilla", fold, 1, {"rounds": 3}) for fold in (1, 1, 2))

    assert one.name == same.name != other.name
    assert one.name.startswith("vanilla-")


def curves(design: Design, areas: Callable[[float, int], float]) -> Callable[[Run], dict[str, Any]]:
    """Return what finds a record for each run: the validation metric by rate and round."""

    def find(run: Run) -> dict[str, Any]:
        rate, rounds = float(run.settings["method.local.lr"]), int(run.settings["rounds"])  # type: ignore[arg-type]
        return {"validation": [areas(rate, at) for at in range(1, rounds + 1)]}

    return find


def test_the_best_rate_inside_of_the_first_ladder(design: Design) -> None:
    found = tuned(
        design, "vanilla", curves(design, lambda rate, at: 0.7 - abs(rate - 0.001) - 0.01 * abs(at - 2))
    )

    assert found == Tuned(0.001, 2, True, 0.7)


def test_the_ladder_grows_until_the_best_is_inside(design: Design) -> None:
    tried = []

    def areas(rate: float, at: int) -> float:
        tried.append(rate)
        return 0.7 - 0.1 * abs(np.log10(rate / 0.03162)) - 0.01 * abs(at - 3)

    found = tuned(design, "vanilla", curves(design, areas))

    assert found is not None
    assert (found.value, found.rounds, found.inside) == (0.0316, 3, True)
    assert max(tried) == 0.1


def test_rounds_are_doubled_up_to_the_most(design: Design) -> None:
    found = tuned(design, "vanilla", curves(design, lambda rate, at: 0.5 + 0.01 * at - abs(rate - 0.001)))

    assert found is not None
    assert (found.rounds, found.inside) == (8, False)


def test_a_row_like_another_takes_its_values_and_a_single_one_has_one_fold(design: Design) -> None:
    def areas(rate: float, at: int) -> float:
        return 0.7 - abs(rate - 0.001) - 0.01 * abs(at - 2)

    find = curves(design, areas)
    runs = [run for run in final_runs(design, find) if run.row == "partial"]

    assert tuned(design, "partial", find) == tuned(design, "surgical", find)
    assert [(run.settings["simulation.fold"], run.settings["seed"]) for run in runs] == [(1, 1), (1, 2)]


def test_validation_data_without_an_auroc_are_refused(design: Design) -> None:
    with refused("vanilla", by=ConfigError):
        tuned(design, "vanilla", lambda run: {"validation": [None] * int(run.settings["rounds"])})  # type: ignore[call-overload]


def test_runs_without_their_plan_are_refused(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "one")
    store.put("a", {"seconds": 1.0})

    with refused("no plan", "one.jsonl", by=ConfigError):
        register(load_study("nih")["two"], store)


def test_a_changed_plan_needs_a_reason(design: Design, tmp_path: Path) -> None:
    records = ResultStore(tmp_path, "plan")
    register(design, records)
    register(design, records)
    changed = load_study(str(_edited(tmp_path, "seeds = [1]", "seeds = [1, 2]")))["three"]

    with refused("tuning.seeds", by=ConfigError):
        register(changed, records)
    register(changed, records, "one seed is too few")

    stored = records.find("plan")
    assert stored is not None
    assert [one["why"] for one in stored["amendments"]] == ["one seed is too few"]
    assert stored["amendments"][0]["changed"] == {"tuning.seeds": [[1], [1, 2]]}


def _edited(folder: Path, before: str, after: str) -> Path:
    path = folder / "synthetic.toml"
    path.write_text(STUDY.replace(before, after))
    return path


def study_records(design: Design, results: Path, gain: float) -> ResultStore:
    """Store runs of all rows: the primary one is above the control by `gain` in each fold."""
    records, rng = ResultStore(results / "runs", design.stem), np.random.default_rng(0)
    records.folder.mkdir()
    register(design, records)

    def find(run: Run) -> dict[str, Any]:
        rounds = int(run.settings["rounds"])  # type: ignore[call-overload]
        rate = float(run.settings["method.local.lr"])  # type: ignore[arg-type]
        areas = [0.7 - abs(rate - 0.001) - 0.01 * abs(at - 2) for at in range(1, rounds + 1)]
        record = {"validation": areas, "seconds": 1.0}
        records.put(run.name, record)
        return record

    shared = {fold: rng.integers(-40, 40, 60) for fold in range(1, 6)}
    for run in list(final_runs(design, find)):
        fold = int(run.settings["simulation.fold"])  # type: ignore[call-overload]
        area = 0.65 + 0.01 * fold + (gain if run.row == "surgical" else 0.0) + rng.normal(0, 0.001)
        moved = (shared[fold] + rng.integers(-5, 5, 60)).tolist()
        record = {"mean": area, "influence": moved, "hidden": 0.4, "images": 100, "validation": [0.7]}
        records.put(run.name, {**record, "seconds": 1.0, "classes": {}, "test": str(fold)})
    return records


@pytest.mark.parametrize(("gain", "better"), [(0.05, "better"), (-0.05, "worse"), (0.0, "")])
def test_the_primary_row_is_judged_by_its_folds(
    design: Design, tmp_path: Path, gain: float, better: str
) -> None:
    outcome = collect(design, study_records(design, tmp_path, gain))

    assert outcome is not None
    assert outcome.primary.verdict == better
    assert outcome.primary.difference is not None
    assert outcome.primary.difference.value == pytest.approx(gain, abs=0.003)
    assert outcome.lines["partial"].folds == 1
    assert outcome.lines["partial"].first is not None
    assert outcome.lines["partial"].verdict == ""  # of one fold: described, not tested


def test_a_study_without_its_primary_row_has_no_outcome(design: Design, tmp_path: Path) -> None:
    assert collect(design, ResultStore(tmp_path, "none")) is None


def test_pages_are_of_the_stored_runs(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_records(design, tmp_path, 0.05)
    monkeypatch.setattr(page, "known_studies", lambda: {"synthetic": tmp_path / "synthetic.toml"})
    monkeypatch.setattr(page, "load_study", lambda _: {"three": design})

    written = {path.name: path.read_text() for path in page.write_pages(tmp_path)}

    board = json.loads(written["leaderboard.json"])["studies"]["synthetic-three"]
    assert board["rows"]["surgical"]["difference"] == pytest.approx(0.05, abs=0.003)
    assert len(board["rows"]["surgical"]["by_fold"]) == 5
    assert "| Surgical | " in written["synthetic-three.md"]
    assert '<td class="better"' in written["leaderboard.md"]
    assert written["synthetic-three.svg"].startswith("<svg")


def test_final_runs_take_the_last_round(design: Design) -> None:
    run = final_run(design, "surgical", 3, 2, Tuned(0.003, 5, True, 0.7))

    assert {key: run.settings[key] for key in ("rounds", "selection", "simulation.fold", "seed")} == {
        "rounds": 5, "selection": "last", "simulation.fold": 3, "seed": 2,
    }  # fmt: skip
