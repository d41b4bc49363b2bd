"""What a preset leaves out or sets of its own: columns with their tests, and settings of single rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from stored_by_hand import SPEC, delete, result, store, table_spec
from suture.core.errors import ConfigError
from suture.data.batch import SURGICAL
from suture.execution.job import load_job, with_settings
from suture.learning.training import LocalTraining
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.tables.conduct import Session, conduct
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.runs import final_runs

TINY = SPEC["presets"]["tiny"]
AWAY = {"away": {"data": {"dataset": "nih", "root": "{data}/a", "table": "{data}/a.csv"}}}
COLUMNS = [{"name": "here"}, {"name": "away", "test": "away"}]


def test_a_preset_of_few_columns_has_the_runs_of_a_table_without_the_others() -> None:
    spec = table_spec(
        columns=COLUMNS, tests=AWAY, presets={"few": {**TINY, "columns": ["here"]}, "all": TINY}
    )
    plain = table_spec()
    few, whole, none = (
        {run.name for run in final_runs(e.preset(name), {})}
        for e, name in ((spec, "few"), (spec, "all"), (plain, "tiny"))
    )
    assert few == none
    assert not few & whole
    assert not spec.preset("few").tests
    assert set(spec.preset("all").tests) == {"away"}


@pytest.mark.parametrize(
    "series", [None, {"key": "simulation.images", "values": [20, 40], "label": "images"}]
)
def test_what_a_preset_leaves_out_is_not_rendered(series: dict[str, object] | None, tmp_path: Path) -> None:
    rows = {**SPEC["rows"], "theirs": {**SPEC["rows"]["theirs"], "published": {"away": "0.79"}}}
    spec = table_spec(
        columns=COLUMNS, tests=AWAY, rows=rows, series=series, presets={"few": {**TINY, "columns": ["here"]}}
    )
    table = spec.preset("few")
    for run in final_runs(table, {}):
        result(run, tmp_path / "runs", {"A": 0.5, "B": 0.5})
    pages = write_tables(collect(table, store(tmp_path / "runs")), tmp_path, "x")
    for page in pages:
        assert "away" not in page.read_text()
        assert "0.79" not in page.read_text()
    assert "| here | p |" in pages[0].read_text()


def test_an_unknown_column_of_a_preset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    presets = {"few": {**TINY, "columns": ["hear"]}}
    path.write_text(
        tomli_w.dumps({**SPEC, "rows": {"ours": {"name": "x"}}, "columns": COLUMNS[:1], "presets": presets})
    )
    with pytest.raises(ConfigError, match=r"column in presets\.few\.columns.*'hear'; did you mean 'here'"):
        load_spec(str(path))


@pytest.mark.parametrize("name", ["nih_clients", "nih_shared"])
def test_the_simulations_of_2024_also_test_on_mimic_lt_and_freeze_batch_norm_of_fl_alone(name: str) -> None:
    spec = load_spec(name)
    cpu, paper = spec.preset("cpu"), spec.preset("paper")
    assert not any(run.tests for run in final_runs(cpu, {}))
    policy = {}
    for run in final_runs(paper, {}):
        assert set(run.tests["mimic"].data["labels"]) == set(NIH)
        policy[run.row] = run.settings.get("method.batch_norm")
    frozen = dict.fromkeys(("vanilla", "partial", "surgical"), "frozen")
    assert policy == {"central": None, "central_full": None, **frozen}


@pytest.mark.parametrize("name", ["midl_all", "midl_shared"])
def test_the_sites_of_midl_have_rates_of_their_own_in_a_federation_alone(name: str) -> None:
    spec = load_spec(name)
    runs = {run.row: run.settings for run in final_runs(spec.preset("paper"), {})}
    key = "simulation.learning_rates"
    own = {row: settings[key] for row, settings in runs.items() if key in settings}
    rates = {"nih": 1e-5, "chexpert": 5e-5}
    assert own == {"partial": rates, "surgical": rates}
    assert {settings["method.local.lr"] for settings in runs.values()} == {5e-5}


def test_data_that_are_not_there_are_named_with_their_rows_before_the_first_run(tmp_path: Path) -> None:
    rows = {
        "theirs": {"name": "a", "set": {"method": "vanilla", "model.weights": "{data}/weights.pt"}},
        "ours": {"name": "b", "set": {"method": "surgical"}},
    }
    tune = {"key": "method.local.lr", "values": [1e-3, 1e-2]}
    preset = {"note": "", "seeds": [1], "set": {"simulation.root": "{data}/nih"}, "tune": tune}
    spec = table_spec(rows=rows, presets={"tiny": preset})
    reported: list[str] = []

    def begin(root: Path | None) -> None:
        conduct(
            spec.preset(None), Session(store(tmp_path / "kept"), tmp_path / "work", root, reported.append), 1
        )

    with pytest.raises(ConfigError) as none:
        begin(tmp_path)
    assert f"{tmp_path}/nih: theirs, ours" in str(none.value)
    assert f"{tmp_path}/weights.pt: theirs" in str(none.value)
    (tmp_path / "nih").mkdir()
    with pytest.raises(ConfigError) as some:
        begin(tmp_path)
    assert str(some.value).endswith(f"\n{tmp_path}/weights.pt: theirs")
    assert str(some.value).count("\n") == 1
    with pytest.raises(ConfigError, match="give --data-root"):
        begin(None)
    assert not reported
    assert not (tmp_path / "work").exists()


def test_stored_results_need_no_data(tmp_path: Path) -> None:
    preset = {"note": "", "seeds": [1], "set": {"simulation.nih": "{data}/nih"}}
    spec = table_spec(job="surgical_chest", presets={"tiny": preset})
    for run in final_runs(spec.preset(None), {}):
        result(run, tmp_path / "kept", {"A": 0.5, "B": 0.5})
    conduct(
        spec.preset(None), Session(store(tmp_path / "kept"), tmp_path / "work", tmp_path, lambda _: None), 1
    )
    gone = next(final_runs(spec.preset(None), {}))
    delete(tmp_path / "kept", gone.name)
    with pytest.raises(ConfigError, match=f"/nih: {gone.row}$"):
        conduct(
            spec.preset(None),
            Session(store(tmp_path / "kept"), tmp_path / "work", tmp_path, lambda _: None),
            1,
        )


PAPER = LocalTraining(lr=5e-5, epochs=1, batch_size=64, optimiser="adam", warmup_epochs=15, warmup_lr=5e-3)
SURGICAL_PAPERS = [n for n in known_tables() if n.startswith(("chest_", "midl_", "nih_"))]


@pytest.mark.parametrize("name", SURGICAL_PAPERS)
def test_the_presets_of_surgical_aggregation_are_the_papers_settings(name: str) -> None:
    """Kulkarni et al. 2024, Sec. 3.4, and MIDL 2023, Sec. 3: 150 epochs after a warm-up of the head.

    Adam, the range of the augmentations and the hidden block are the program's.
    """
    spec = load_spec(name)
    for run in final_runs(spec.preset("paper"), {}):
        job = with_settings(load_job(run.job), run.arguments(Path("/data"))[1::2])
        model = job.model
        assert (model.name, model.size, model.weights) == ("densenet121", 224, "download")
        assert (model.hidden, model.dropout) == (256, 0.3)
        assert (job.augmentation, job.rounds) == (SURGICAL, 1 + 150)
        local = job.method.local
        decays = {"final_lr": 1e-5} if run.row.endswith("decay") else {}
        assert local == replace(PAPER, **decays)
        pooled = job.method.about.pooled or job.method.sharing.personal == "model"
        assert not pooled or job.method.batch_norm == "average", "the paper's references train batch norm"
