"""Fine-tuning on a learning task: splits, runs, `suture finetune`, tuned.json and what a page shows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from example_run import history_records, metrics_record, run_record, write_run
from small_models import built_model, saved_model
from suture.core.errors import ConfigError, DataError
from suture.core.files import write_json
from suture.core.validation import parse
from suture.data.batch import Samples
from suture.data.config import load_site_config
from suture.learning.samples import TARGET
from suture.learning.training import LocalRound, SiteContext, fit
from suture.models import ModelSpec
from suture.models.saved import load_model
from suture.protocol.records import Metrics
from suture_results import finetuning
from suture_results.finetuning import (
    FineTuning,
    Tuned,
    finetune,
    initial_tensors,
    random_split,
    summarise,
    task_name,
    tune_targets,
)
from suture_results.finetuning_results import (
    FinetuningResults,
    TaskRow,
    TunedRun,
    learning_charts,
    nothing_measured,
    read_finetuning_results,
    task_rows,
)
from suture_results.report import render_report
from suture_results.trained_images import remark
from world import refused, site_config, suture, write_table

SPEC = ModelSpec("lstm", vocabulary=("sick", "well", "and", "so", "on"))
HOW = FineTuning(runs=2, epochs=2, batch_size=16, lr=0.02)


def documents(n: int = 60, per_patient: int = 2, positive: float = 0.5) -> Samples:
    """Documents of three words; the middle one gives the label away, which all of a patient share."""
    patients = [i // per_patient for i in range(n)]
    y = torch.tensor([[float(p % round(1 / positive) == 0)] for p in patients])
    tokens = torch.randint(3, 6, (n, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tokens[:, 1] = 2 - y[:, 0].int()  # word 1 is "sick", 2 "well"; 0 pads
    names = tuple(map(str, range(n)))
    return Samples({"tokens": tokens, "length": torch.full((n,), 3)}, y, tuple(map(str, patients)), names)


@pytest.mark.parametrize("positive", [0.5, 0.25])
def test_patients_stay_whole_and_either_kind_is_as_frequent_in_both_parts(positive: float) -> None:
    train, test = random_split(documents(80, positive=positive), FineTuning(test=0.2), 1, "x")
    assert not set(train.patients) & set(test.patients)
    assert sorted([*train.names, *test.names]) == sorted(map(str, range(80)))
    assert (len(train), len(test)) == (64, 16)
    assert train.y.mean().item() == test.y.mean().item() == positive


def test_few_examples_are_as_many_of_either_kind_and_all_others_test() -> None:
    every = documents()
    whole, few = (random_split(every, replace(HOW, examples=n), 3, "x") for n in (None, 8))
    assert not set(few[0].patients) & set(few[1].patients)
    others = [n for n, p in zip(every.names, every.patients, strict=True) if p not in few[0].patients]
    assert sorted(few[1].names) == sorted(others)
    assert set(whole[1].names) < set(few[1].names)
    assert (len(few[0]), few[0].y.sum().item()) == (8, 4)
    assert set(few[0].names) < set(whole[0].names)
    enough, _ = random_split(every, replace(HOW, examples=1000), 3, "x")
    assert enough.names == whole[0].names
    assert random_split(every, HOW, 4, "x")[1].names != whole[1].names
    for rare in (documents(8), documents(6, 1).rows(torch.tensor([1, 3, 5]))):
        with refused("Edema", by=DataError):
            random_split(rare, HOW, 1, "Edema")


def tuned(how: FineTuning, seed: int = 1, begun: int = 5) -> list[Tuned]:
    begin = built_model(SPEC, ("x",), seed=begun).state_dict()
    return [figures for _, figures in finetune("x", SPEC, begin, documents(), how, seed)]


def test_a_seed_gives_the_same_figures_again_and_learns() -> None:
    first = tuned(HOW)
    assert tuned(HOW) == first
    assert [len(run.auroc) for run in first] == [2, 2]
    assert all(run.auroc[-1] == 1 and (run.precision, run.recall, run.f1) == (1, 1, 1) for run in first)


def test_where_a_model_comes_from_changes_its_figures_and_not_the_data() -> None:
    slow = replace(HOW, lr=1e-5, epochs=1, test=0.3)
    assert tuned(slow, seed=2) != tuned(slow)
    runs = [tuned(slow), tuned(slow, begun=6), tuned(replace(slow, start="fresh"))]
    assert len({str([run.auroc for run in found]) for found in runs}) == 3
    assert len({str([(run.train, run.test) for run in found]) for found in runs}) == 1
    assert tuned(replace(slow, start="fresh"), begun=6) == runs[2]  # what is there is not looked at
    before = torch.random.get_rng_state()
    first, second = (model.head.bias[0].item() for model, _ in finetune("x", SPEC, {}, documents(), HOW, 1))
    assert first != second
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("labels", "row"), [((TARGET,), 0), (("Mass", "Edema"), 1), (("Mass", "Hernia"), None)]
)
def test_a_task_begins_with_its_row_where_the_model_has_one(labels: tuple[str, ...], row: int | None) -> None:
    tensors = {"backbone.w": torch.ones(2), "head.weight": torch.arange(2.0 * len(labels)).view(-1, 2)}
    found = initial_tensors(tensors, labels, "oedema")  # a spelling of Edema
    assert torch.equal(found["backbone.w"], tensors["backbone.w"])
    rows = [] if row is None else tensors["head.weight"][row].tolist()
    assert [*found.get("head.weight", ())] == [] if row is None else found["head.weight"][0].tolist() == rows


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"runs": 0}, "runs"),
        ({"test": 1.0}, "test"),
        ({"start": "modle"}, "start"),
        ({"examples": 3}, "examples"),
        ({"rnus": 2}, "rnus"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], key: str) -> None:
    with refused("finetuning: ", key, by=ConfigError):
        parse(FineTuning, wrong, "finetuning")


def hospital(
    folder: Path, labels: Sequence[str] = ("Edema", "Mass"), n: int = 24, name: str = "d", **more: Any
) -> Path:
    """A hospital of short documents; `n` is divisible by 4, so that either kind of each class is half."""
    splits = ("train", "validation", "test")
    rows = [
        [
            f"{name}{i}",
            f"p{i}",
            splits[i % 3],
            f"{'sick' if i % 2 else 'well'} today",
            *(i % 2, i // 2 % 2)[: len(labels)],
        ]
        for i in range(n)
    ]
    write_table(folder / "labels.csv", [["image", "patient", "split", "text", *labels], *rows])
    site_config(folder, data={"dataset": "hospital", "table": "labels.csv", "text_column": "text"}, **more)
    return folder / "suture.toml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "model", SPEC, (TARGET,))


def tune(model: Path, data: Path, out: Path, *words: object) -> str:
    return suture("finetune", model, data, "-o", out, "--runs", 2, "--epochs", 1, *words)


def test_a_model_is_put_to_a_class_of_ones_own_data(model: Path, tmp_path: Path) -> None:
    data, out = hospital(tmp_path / "data"), tmp_path / "out"
    assert "Edema" in tune(model, data, out, "--target", "oedema")
    content = json.loads((out / "tuned.json").read_text())
    assert (list(content["targets"]), content["how"]["start"]) == (["Edema"], "model")
    # Without the 8 rows of the test split: 16 rows, 90/10 of 8 patients of either kind.
    runs = content["targets"]["Edema"]["runs"]
    assert [len(run["auroc"]) for run in runs] == [1, 1]
    assert {(run["train"], run["test"], run["positives"]) for run in runs} == {(14, 2, 1)}
    assert not {f"d{i}" for i in range(2, 24, 3)} & {case for run in runs for case in run["cases"]}
    assert load_model(out / "model")[0].labels.names == ("Edema",)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    with refused("--out", by=ConfigError):
        tune(model, data, out, "--target", "Mass")
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


@pytest.mark.complete
def test_what_a_tuned_model_was_trained_on_is_told_of_it_and_of_those_tuned_from_it(
    model: Path, tmp_path: Path
) -> None:
    first = hospital(tmp_path / "one", ["Edema"])
    second = hospital(tmp_path / "two", ["Edema"], 48, "other d")
    tune(model, first, tmp_path / "tuned")
    tune(tmp_path / "tuned", second, tmp_path / "again")
    for folder, data, seen in (("tuned", first, 14), ("again", first, 14), ("again", second, 28)):
        trained, known = tmp_path / folder / "model", load_site_config(data)
        assert remark(trained, known, "test", divided=True) == ""
        told = remark(trained, known, "all", divided=True)
        assert f" {seen} of " in told
        assert told.endswith(f"evaluate {trained} {data} --split test")
    other = load_site_config(second)
    assert " of these " not in remark(tmp_path / "tuned" / "model", other, "all", divided=True)


@pytest.mark.complete
def test_a_mistake_is_refused_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    data, out = hospital(tmp_path / "data"), tmp_path / "out"
    with refused("--target", by=ConfigError):
        tune(model, data, out)
    with refused("'Edemma'", "'Edema'", by=ConfigError):
        tune(model, data, out, "--target", "edemma")
    with refused("model.json", by=ConfigError):
        tune(tmp_path / "data", data, out, "--target", "Mass")
    table = data.parent / "labels.csv"
    table.write_text(re.sub("train|validation", "test", table.read_text()))
    with refused("labels.csv", "train, validation", by=DataError):
        tune(model, data, out, "--target", "Mass")
    assert not out.exists()


def test_the_one_class_of_a_table_or_its_target_is_the_task(tmp_path: Path) -> None:
    assert task_name(load_site_config(hospital(tmp_path / "one", ["Mass"]))) == "Mass"
    path = hospital(tmp_path / "two")
    path.write_text(path.read_text() + 'target = "wet"\n[data.synonyms]\nwet = "Edema"\n')
    assert task_name(load_site_config(path)) == "Edema"


def test_every_target_of_a_run_is_in_tuned_json(tmp_path: Path) -> None:
    how, file = FineTuning(runs=2, epochs=1, batch_size=16, test=0.25), tmp_path / "tuned.json"
    with refused(by=ConfigError):
        tune_targets(tmp_path, how, 1)
    saved_model(tmp_path / "model", SPEC, (TARGET,))
    for name in ("Edema", "Mass"):
        hospital(tmp_path / "sites" / "targets" / name, [name])
    tune_targets(tmp_path, how, 1)
    content = json.loads(file.read_text())
    assert list(content["targets"]) == ["Edema", "Mass"]
    assert (content["seed"], content["how"]["test"]) == (1, 0.25)
    tune_targets(tmp_path, replace(how, few=6), 1)
    both = json.loads(file.read_text())["targets"]
    assert list(both) == ["Edema", "Edema, 6 examples", "Mass", "Mass, 6 examples"]
    assert both["Mass"] == content["targets"]["Mass"]
    assert [[run["train"] for run in both[name]["runs"]] for name in both][2:] == [[18, 18], [6, 6]]
    whole = file.read_bytes()
    (tmp_path / "sites" / "targets" / "Mass" / "labels.csv").write_text(
        "image,patient,split,text,Mass\nd,p,train,sick,2\n"
    )
    with refused("Mass"):
        tune_targets(tmp_path, how, 1)
    assert file.read_bytes() == whole


@pytest.mark.complete
def test_what_the_site_says_of_its_machine_is_heeded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"threads": 2, "device": "cpu:0", "amp": True, "lr": 0.02, "batch_size": 4}
    data, seen = hospital(tmp_path / "data", training=own), []

    def noted(context: SiteContext, objective: Any, round_: LocalRound, **more: Any) -> Any:
        local = round_.local
        machine = torch.get_num_threads(), str(context.device), context.model.amp_dtype
        seen.append((*machine, local.lr, local.batch_size))
        return fit(context, objective, round_, **more)

    monkeypatch.setattr(finetuning, "fit", noted)
    tune(model, data, tmp_path / "own", "--target", "Mass", "--runs", 1)
    assert seen == [(2, "cpu:0", None, 0.02, 4)]
    how = json.loads((tmp_path / "own" / "tuned.json").read_text())["how"]
    assert (how["lr"], how["batch_size"]) == (0.02, 4)


def test_the_summary_by_hand() -> None:
    runs = [Tuned((0.5, a), 0.5, 1.0, a, 90, 10, 4) for a in (0.7, 0.8, 0.9)]
    found = summarise(runs)
    assert found["mean"] == pytest.approx({"auroc": 0.8, "precision": 0.5, "recall": 1.0, "f1": 0.8})
    assert found["sd"] == pytest.approx({"auroc": 0.1, "precision": 0, "recall": 0, "f1": 0.1})
    assert found["runs"][2]["auroc"] == (0.5, 0.9)
    assert summarise(runs[:1])["sd"]["auroc"] is None


@pytest.mark.parametrize(
    ("areas", "epochs"),
    [((0.5,), 1), ((0.5, 0.9, 0.91), 2), ((0.5, 0.899, 0.91), 3), ((0.91, 0.5, 0.92), 1), ((0.7, 0.6), 1)],
)
def test_the_first_epoch_that_is_as_good_as_the_best(areas: tuple[float, ...], epochs: int) -> None:
    run = TunedRun(areas, 0.5, 0.5, 0.5, 10, 2, 1)
    assert run.epochs == run.figure("epochs") == epochs
    assert run.figure("auroc") == areas[-1]


NAME = "Cardio<megaly"
ROW = ("0.850 ± 0.071", "0.700 ± 0.141", "0.750 ± 0.354", "0.700 ± 0.071", "2.5 ± 0.7")


def record(**how: Any) -> dict[str, Any]:
    """Two runs on a task: AUROC .8 and .9 at the end, within .01 of the best from epochs 3 and 2."""
    keys = ("auroc", "precision", "recall", "f1", "train", "test", "positives")
    runs = [
        dict(zip(keys, values, strict=True))
        for values in (
            ([0.5, 0.7, 0.8], 0.6, 1.0, 0.75, 290, 32, 4),
            ([0.4, 0.89, 0.9], 0.8, 0.5, 0.65, 289, 33, 5),
        )
    ]
    chosen = {"runs": 2, "epochs": 3, "test": 0.1, "start": "model", "examples": None, "lr": 1e-3} | how
    return {"how": chosen, "seed": 1, "targets": {NAME: {"mean": {}, "sd": {}, "runs": runs}}}


def test_the_row_and_the_curve_of_a_task_by_hand() -> None:
    targets = parse(FinetuningResults, record(), "tuned").targets
    assert task_rows(targets) == [TaskRow(NAME, ROW, "289–290", "32–33 (4–5)")]
    (row,) = task_rows({"x": replace(targets[NAME], runs=targets[NAME].runs[:1])})
    assert (row.figures[0], row.train) == ("0.800", "290")
    (chart,) = learning_charts(targets)
    (trace,) = chart.traces
    (line,) = trace.runs
    upper, lower = trace.band[:3], trace.band[:2:-1]
    assert [x for x, _ in line] == [x for x, _ in upper] == [x for x, _ in lower]
    assert all(high <= mean <= low for (_, high), (_, mean), (_, low) in zip(upper, line, lower, strict=True))
    assert upper[0][1] < lower[0][1]  # y grows downwards
    assert all(12 <= y <= 174 for _, y in trace.band)


def unmeasured() -> dict[str, Any]:
    metrics = metrics_record()
    nothing = dict.fromkeys(metrics["auroc"])
    return metrics | {"auroc": nothing, "mean_auroc": None, "n": 0, "groups": {}, "sites": {"harbour": {}}}


@pytest.mark.parametrize("measured", [True, False])
def test_page_and_terminal_show_the_tables_with_something_in_them(measured: bool, tmp_path: Path) -> None:
    metrics = metrics_record() if measured else unmeasured()
    assert nothing_measured(parse(Metrics, metrics, "metrics")) != measured
    assert not nothing_measured(None)
    write_run(tmp_path, run_record(), history_records(), metrics)
    assert 'id="results-by-class"' in render_report(tmp_path)
    content = record(few=100)
    content["targets"][f"{NAME}, 100 examples"] = content["targets"][NAME]
    write_json(tmp_path / "tuned.json", content)
    page, said = render_report(tmp_path), suture("report", tmp_path)
    assert ('id="results-by-class"' in page) == measured
    assert ("Mean (" in said) == measured
    assert page.count("Cardio&lt;megaly, 100 examples") >= 1
    for figure in ROW:
        assert figure in page
    assert ROW[0] in said
    assert "fine-tuned on 1 task" in " ".join(page.split())  # few examples are no further one


ONE = (
    '{"runs": [{"auroc": [1.5], "precision": 1, "recall": 1, "f1": 1, "train": 1, "test": 1, "positives":1}]}'
)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{", "tuned.json"),
        ('{"how": {}, "targets": {}}', "how.runs"),
        (
            '{"how": {"runs": 1, "epochs": 1, "test": 0.1, "start": "model"}, "targets": {"x": ' + ONE + "}}",
            "targets.x.runs.0.auroc.0",
        ),
    ],
)
def test_a_damaged_file_is_named(text: str, key: str, tmp_path: Path) -> None:
    assert read_finetuning_results(tmp_path) is None
    (tmp_path / "tuned.json").write_text(text)
    with refused("tuned.json", key, by=DataError):
        read_finetuning_results(tmp_path)
