"""Files of tables: what is refused of them, and the runs that they describe."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from stored_by_hand import SPEC, table_spec
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture.data.batch import SURGICAL
from suture.execution.job import Job, load_job, with_settings
from suture.learning.training import LocalTraining
from suture.models import encoder_of
from suture_papers.metafl.single_target import SingleTargetSites
from suture_papers.tables.external_tests import site_config
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import ExternalTest, TableSpec
from world import refused

TINY = SPEC["presets"]["tiny"]
TESTS = {
    name: {"data": {"dataset": "nih", "root": "{data}/a", "table": "{data}/a.csv"}} for name in ("nih", "far")
}
SERIES = {"key": "simulation.images", "values": [20, 40], "label": "images"}
ROWS = {"theirs": {"name": "FL", "set": {"method": "fl"}}, "ours": {"name": "PMFL"}}

PLAIN = {**SPEC, "rows": ROWS, "tests": TESTS}
TUNED: dict[str, Any] = {
    **PLAIN,
    "job": "pmfl_openi",
    "pairs": "tuned",
    "goal": "theirs",
    "columns": [{"name": "A", "task": "A"}, {"name": "epochs", "task": "A", "metric": "epochs"}],
}


def of_row(name: str, **keys: Any) -> dict[str, Any]:
    return {"rows": {**ROWS, name: {**ROWS[name], **keys}}}


def of_preset(**keys: Any) -> dict[str, Any]:
    return {"presets": {"tiny": {**TINY, **keys}}}


def column(**keys: Any) -> dict[str, Any]:
    return {"columns": [{"name": "x", **keys}]}


def written(path: Path, base: dict[str, Any], changes: dict[str, Any]) -> str:
    path.write_text(tomli_w.dumps({k: v for k, v in {**base, **changes}.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (PLAIN, {"titel": "x"}, ("titel", "title")),
        (PLAIN, {"reference": "our"}, ("reference", "'ours'")),
        (PLAIN, of_preset(skip=["thiers"]), ("presets.tiny.skip", "'theirs'")),
        (PLAIN, of_preset(rows={"our": {}}), ("presets.tiny.rows", "'ours'")),
        (PLAIN, of_preset(seeds=[]), ("presets.tiny.seeds",)),
        (PLAIN, of_preset(columns=["AUROC, all clases"]), ("presets.tiny.columns", "'AUROC, all classes'")),
        (PLAIN, of_row("ours", published={"x": "1"}), ("'PMFL'", "'x'")),
        (PLAIN, column(test="nhi"), ("'x'", "'nih'")),
        (PLAIN, {"by_class": {"source": "", "published": {"our": {}}}}, ("by_class.published", "'ours'")),
        (PLAIN, {"by_class": {"source": "", "published": {}}, "series": SERIES}, ("by_class", "series")),
        (PLAIN, of_row("theirs", steady=True) | column(), ("'theirs'", "steady")),
        (PLAIN, of_row("theirs", steady=True) | {"series": SERIES}, ("'theirs'", "of several sites")),
        # A column is of one part alone, and not every part has every figure.
        (PLAIN, column(attribute="dark", models="local"), ("test, task, frequency, attribute and models",)),
        (PLAIN, column(test="nih", attribute="dark"), ("test, task, frequency, attribute and models",)),
        (PLAIN, column(frequency="tail"), ("frequency", "accuracy")),
        (PLAIN, column(metric="loss", group="shared"), ("loss",)),
        (PLAIN, column(metric="loss", attribute="dark"), ("loss",)),
        (PLAIN, column(metric="f1", classes=["A"]), ("classes", "auroc and recall")),
        (PLAIN, column(attribute="dark", group="unique"), ("group", "auroc and recall")),
        (PLAIN, column(test="nih", metric="recall"), ("recall", "auroc or loss")),
        (PLAIN, column(spread="interval", metric="loss", test="nih"), ("interval",)),
        (PLAIN, column(spread="interval", group="shared"), ("interval",)),
        (PLAIN, column(spread="interval", test="nih", classes=["A"]), ("interval",)),
        (PLAIN, column(spread="interval", models="local"), ("interval",)),
        (PLAIN, column(metric="epochs"), ("'x'", "epochs")),
        # Fine-tuned models
        (TUNED, {"pairs": "runs"}, ("'A'", "task")),
        (TUNED, {"columns": [{"name": "all"}]}, ("'all'", "task")),
        (TUNED, {"columns": [{"name": "A", "task": "A", "metric": "accuracy"}]}, ("'A'", "accuracy")),
        (TUNED, {"goal": None}, ("goal",)),
        (TUNED, {"goal": "their"}, ("goal", "'theirs'")),
        (TUNED, of_preset(skip=["theirs"]), ("'tiny'", "'theirs'")),
        (TUNED, of_preset(pairs="classes"), ("'tiny'", "pairs")),
        (TUNED, {"series": {"key": "seed", "values": [1], "label": "x"}}, ("series",)),
    ],
)  # fmt: skip
def test_a_file_with_a_mistake_says_where(
    base: dict[str, Any], changes: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    load_spec(written(tmp_path / "sound.toml", base, {}))
    with refused("wrong.toml", *named, by=ConfigError):
        load_spec(written(tmp_path / "wrong.toml", base, changes))


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    with refused("'qqqqq'", "\ndrift: private_labels", "\nfedlsm: fedlsm_isic", by=ConfigError):
        load_spec("qqqqq")
    with refused("nih_overlapp", "nih_overlap'", by=ConfigError):
        load_spec("nih_overlapp")
    with refused("'tin'", "'tiny'", by=ConfigError):
        table_spec().preset("tin")


@pytest.mark.parametrize("table", ["rows", "presets", "tests"])
def test_a_key_becomes_no_path(table: str) -> None:
    one = {"data": {}} if table == "tests" else next(iter(SPEC[table].values()))
    assert table_spec(**{table: {**SPEC.get(table, {}), "a-B_1": one}})
    for key in ("x/../../outside/README", "..", "a b", "é", "a\n", "", "a" * 81):
        with refused(f"{table}.", by=ConfigError):
            table_spec(**{table: {**SPEC.get(table, {}), key: one}})


# Runs


def names(spec: TableSpec, preset: str | None = None) -> set[str]:
    return {run.name for run in final_runs(spec.preset(preset), {})}


def test_a_run_is_named_by_its_settings_and_its_test_sets_alone() -> None:
    spec = table_spec()
    runs = list(final_runs(spec.preset(None), {}))
    expected = [(row, seed) for seed in (1, 2, 3) for row in ("theirs", "ours")]
    assert [(run.row, run.settings["seed"]) for run in runs] == expected
    assert len(names(spec)) == 6
    assert names(table_spec(title="another title", source="elsewhere")) == names(spec)
    assert not names(table_spec(set={"augmentation.flip": 0.5})) & names(spec)
    assert Run("a", None, "demo", {"seed": 1}).name == Run("b", None, "demo", {"seed": 1}).name
    columns = [{"name": "here"}, {"name": "away", "test": "nih"}]
    presets = {"few": {**TINY, "columns": ["here"]}, "all": TINY}
    tested = table_spec(columns=columns, tests=TESTS, presets=presets)
    assert names(tested, "few") == names(spec)
    assert not names(tested, "all") & names(spec)
    assert (tested.preset("few").tests, set(tested.preset("all").tests)) == ({}, {"nih", "far"})


def test_what_a_row_sets_holds_over_what_all_rows_and_the_preset_set() -> None:
    rows = {**SPEC["rows"], "ours": {"name": "AFL", "set": {"method": "afl", "rounds": 1, "model.hidden": 0}}}
    tiny = {"tiny": {"note": "", "seeds": [1], "set": {"rounds": 5}}}
    spec = table_spec(rows=rows, set={"model.hidden": 256}, presets=tiny)
    found = {run.row: run.settings for run in final_runs(spec.preset(None), {})}
    assert (found["ours"]["rounds"], found["ours"]["model.hidden"]) == (1, 0)
    assert (found["theirs"]["rounds"], found["theirs"]["model.hidden"]) == (5, 256)
    assert next(iter(found["ours"])) == "method"


def test_the_data_root_is_put_in_when_a_run_or_a_test_begins() -> None:
    run = Run("a", None, "surgical_nih", {"simulation.root": "{data}/nih", "seed": 1})
    assert run.arguments(Path("/mnt")) == ["--set", "simulation.root=/mnt/nih", "--set", "seed=1"]
    test = parse(ExternalTest, {"data": {"dataset": "nih", "root": "{data}/a", "table": "{data}/a.csv"}}, "t")
    assert site_config("home", test, Path("/work"), Path("/mnt")).data.root == Path("/mnt/a")


# The papers' tables


@functools.cache
def made(job: str, *settings: str) -> Job:
    """The job with settings, of which many runs share the first ones."""
    return with_settings(made(job, *settings[:-1]), settings[-1:]) if settings else load_job(job)


@pytest.mark.complete
def test_every_table_of_the_repository_can_be_run() -> None:
    """Each row of each preset is a job whose settings exist; nothing is trained. One seed stands for all."""
    tried: set[str] = set()
    for table in (spec.preset(size) for spec in map(load_spec, known_tables()) for size in spec.presets):
        tune, cells = table.preset.tune, [(row, str(x)) for row, x in table.cells]
        found = dict.fromkeys(cells, tune.values[0]) if tune else {}
        for run in (*final_runs(table, found), *tuning_runs(table)):
            options = run.arguments(Path("/data"))
            others = f"{run.job}: {[option for option in options if 'seed=' not in option]}"
            if others in tried:
                continue
            tried.add(others)
            job = made(run.job, *options[1::2])
            assert job.method.about.name == run.settings.get("method", job.method.about.name)
            assert "{data}" not in str(options)
            # A simulation puts the words of its documents here before it plans, and reads the folder.
            words = ["model.vocabulary=clinical", "model.embedding=tfidf"]
            with_settings(job, words if encoder_of(job.model).reads == "text" else []).plan("x")
            job.schedule()  # which refuses what its settings contradict
    assert tried


PAPER = LocalTraining(lr=5e-5, epochs=1, batch_size=64, optimiser="adam", warmup_epochs=15, warmup_lr=5e-3)


@pytest.mark.parametrize("name", [n for n in known_tables() if n.startswith(("chest_", "midl_", "nih_"))])
def test_the_presets_of_surgical_aggregation_are_the_papers_settings(name: str) -> None:
    """Kulkarni et al. 2024, Sec. 3.4, and MIDL 2023, Sec. 3: 150 epochs after a warm-up of the head.

    Adam, the range of the augmentations and the hidden block are the program's.
    """
    for run in final_runs(load_spec(name).preset("paper"), {}):
        job = with_settings(load_job(run.job), run.arguments(Path("/data"))[1::2])
        model = job.model
        assert (model.name, model.size, model.weights) == ("densenet121", 224, "download")
        assert (model.hidden, model.dropout) == (256, 0.3)
        assert (job.augmentation, job.rounds) == (SURGICAL, 1 + 150)
        decays = {"final_lr": 1e-5} if run.row.endswith("decay") else {}
        assert job.method.local == replace(PAPER, **decays)
        pooled = job.method.about.pooled or job.method.sharing.personal == "model"
        assert not pooled or job.method.batch_norm == "average", "the paper's references train batch norm"


@pytest.mark.parametrize("name", [name for name in known_tables() if name.startswith("pmfl_")])
def test_columns_are_about_the_targets_of_their_runs(name: str) -> None:
    spec = load_spec(name)
    for run in (run for size in spec.presets for run in final_runs(spec.preset(size), {})):
        job = with_settings(load_job(run.job), run.arguments(Path("/data"))[1::2])
        assert isinstance(job.simulation, SingleTargetSites)
        assert job.finetuning is not None
        few = f", {job.finetuning.few} examples" if "_low" in name else ""
        assert {column.task for column in spec.columns} == {t + few for t in job.simulation.targets}
        assert not set(job.simulation.targets) & set(job.simulation.training)
        fresh = job.finetuning.start == "fresh"
        assert (job.rounds == 1) == fresh == (run.row == "fresh")
