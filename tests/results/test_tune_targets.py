"""tuned.json and `suture finetune`: a saved model on a hospital's documents."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from suture.cli import app
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.data.config import load_site_config
from suture.learning.samples import TARGET
from suture.learning.training import LocalRound, SiteContext, fit
from suture.models import ModelSpec, build
from suture.models.saved import load_model, save_model
from suture_results.finetuning import FineTuning, initial_tensors, task_name, tune_targets
from suture_results.trained_images import remark

SPEC = ModelSpec("lstm", vocabulary=("sick", "well", "today"))
HOW = FineTuning(runs=2, epochs=1, batch_size=16, test=0.25)


def write_documents(folder: Path, labels: tuple[str, ...] = ("Edema", "Mass"), n: int = 24) -> Path:
    """A hospital of short documents; `n` is divisible by 4, so that either kind of each class is half."""
    folder.mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "patient", "split", "text", *labels])
        for i in range(n):
            y = (i % 2, i // 2 % 2)[: len(labels)]
            rows.writerow(
                [
                    f"d{i}",
                    f"p{i}",
                    ("train", "validation", "test")[i % 3],
                    f"{'sick' if y[0] else 'well'} today",
                    *y,
                ]
            )
    path = folder / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\ntable = "labels.csv"\ntext_column = "text"\n')
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(build(SPEC, LabelSet((TARGET,)), 1, pretrained=False), SPEC, tmp_path / "model", {})
    return tmp_path / "model"


def suture_finetune(model: Path, data: Path, out: Path, *words: str) -> Result:
    small = ["--runs", "2", "--epochs", "1"]
    return CliRunner().invoke(
        app, ["finetune", str(model), str(data), "-o", str(out), *small, *words], catch_exceptions=False
    )


@pytest.mark.parametrize(
    ("labels", "row"), [((TARGET,), 0), (("Mass", "Edema"), 1), (("Mass", "Hernia"), None)]
)
def test_a_task_begins_with_its_row_where_the_model_has_one(labels: tuple[str, ...], row: int | None) -> None:
    tensors = {"backbone.w": torch.ones(2), "head.weight": torch.arange(2.0 * len(labels)).view(-1, 2)}
    found = initial_tensors(tensors, labels, "oedema")  # a spelling of Edema
    assert torch.equal(found["backbone.w"], tensors["backbone.w"])
    if row is None:
        assert "head.weight" not in found
    else:
        assert torch.equal(found["head.weight"], tensors["head.weight"][row : row + 1])


def test_a_model_is_put_to_a_class_of_ones_own_data(model: Path, tmp_path: Path) -> None:
    data, out = write_documents(tmp_path / "data"), tmp_path / "out"
    shown = suture_finetune(model, data, out, "--target", "oedema")
    assert shown.exit_code == 0
    assert "Edema" in shown.output
    content = json.loads((out / "tuned.json").read_text())
    assert list(content["targets"]) == ["Edema"]
    assert [len(run["auroc"]) for run in content["targets"]["Edema"]["runs"]] == [1, 1]
    assert content["how"]["start"] == "model"
    # Without the 8 rows of the test split: 16 rows, 90/10 of 8 patients of either kind.
    runs = content["targets"]["Edema"]["runs"]
    assert {(run["train"], run["test"], run["positives"]) for run in runs} == {(14, 2, 1)}
    assert not {f"d{i}" for i in range(2, 24, 3)} & {case for run in runs for case in run["cases"]}
    assert load_model(out / "model")[0].labels.names == ("Edema",)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    with pytest.raises(ConfigError, match="already holds a fine-tuned model; choose another --out"):
        suture_finetune(model, data, out, "--target", "Mass")
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


@pytest.mark.complete
def test_what_a_tuned_model_was_trained_on_is_told_of_it_and_of_those_tuned_from_it(
    model: Path, tmp_path: Path
) -> None:
    first, second = (
        write_documents(tmp_path / name, ("Edema",), n) for name, n in (("one", 24), ("two", 48))
    )
    table = second.parent / "labels.csv"
    table.write_text(table.read_text().replace("\nd", "\nother d"))
    suture_finetune(model, first, tmp_path / "tuned")
    suture_finetune(tmp_path / "tuned", second, tmp_path / "again")
    for folder, data, seen in (("tuned", first, 14), ("again", first, 14), ("again", second, 28)):
        trained, known = tmp_path / folder / "model", load_site_config(data)
        assert remark(trained, known, "test", divided=True) == ""
        assert f"trained on {seen} of these" in (told := remark(trained, known, "all", divided=True))
        assert told.endswith(f"evaluate {trained} {data} --split test")
    assert "trained on" not in remark(
        tmp_path / "tuned" / "model", load_site_config(second), "all", divided=True
    )


@pytest.mark.complete
def test_a_mistake_is_told_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    data, out = write_documents(tmp_path / "data"), tmp_path / "out"
    with pytest.raises(ConfigError, match="2 classes; name one with --target"):
        suture_finetune(model, data, out)
    with pytest.raises(ConfigError, match=r"unknown target of data 'Edemma'; did you mean 'Edema'\?"):
        suture_finetune(model, data, out, "--target", "edemma")
    with pytest.raises(ConfigError, match=r"does not contain model\.json; name the model/ folder"):
        suture_finetune(tmp_path / "data", data, out, "--target", "Mass")
    table = data.parent / "labels.csv"
    table.write_text(re.sub("train|validation", "test", table.read_text()))
    with pytest.raises(DataError, match=r"labels\.csv has nothing in the splits train, validation"):
        suture_finetune(model, data, out, "--target", "Mass")
    assert not out.exists()


def test_the_one_class_of_a_table_or_its_target_is_the_task(tmp_path: Path) -> None:
    one = load_site_config(write_documents(tmp_path / "one", ("Mass",)))
    assert task_name(one) == "Mass"
    path = write_documents(tmp_path / "two")
    path.write_text(path.read_text() + 'target = "wet"\n[data.synonyms]\nwet = "Edema"\n')
    assert task_name(load_site_config(path)) == "Edema"


def test_every_target_of_a_run_is_in_tuned_json(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task to fine-tune on"):
        tune_targets(tmp_path, HOW, 1)
    files = [write_documents(tmp_path / "sites" / "targets" / name, (name,)) for name in ("Edema", "Mass")]
    tune_targets(tmp_path, HOW, 1)
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert list(content["targets"]) == ["Edema", "Mass"]
    tune_targets(tmp_path, replace(HOW, few=6), 1)
    both = json.loads((tmp_path / "tuned.json").read_text())["targets"]
    assert list(both) == ["Edema", "Edema, 6 examples", "Mass", "Mass, 6 examples"]
    assert both["Mass"] == content["targets"]["Mass"]
    assert [[run["train"] for run in both[name]["runs"]] for name in both][2:] == [[18, 18], [6, 6]]
    tune_targets(tmp_path, HOW, 1)
    assert (content["seed"], content["how"]["test"]) == (1, 0.25)
    whole = (tmp_path / "tuned.json").read_bytes()
    files[1].parent.joinpath("labels.csv").write_text("image,patient,split,text,Mass\nd,p,train,sick,2\n")
    with pytest.raises(Exception, match="Mass"):
        tune_targets(tmp_path, HOW, 1)
    assert (tmp_path / "tuned.json").read_bytes() == whole


@pytest.mark.complete
def test_what_the_site_says_of_its_machine_is_heeded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_documents(tmp_path / "data")
    own = '[training]\nthreads = 2\ndevice = "cpu:0"\namp = true\nlr = 0.02\nbatch_size = 4\n'
    data.write_text(data.read_text() + own)
    seen: list[tuple[object, ...]] = []

    def noted(context: SiteContext, objective: object, round_: LocalRound, **more: Any) -> Any:
        threads = torch.get_num_threads()
        seen.append(
            (threads, str(context.device), context.model.amp_dtype, round_.local.lr, round_.local.batch_size)
        )
        return fit(context, objective, round_, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("suture_results.finetuning.fit", noted)
    command = ["finetune", str(model), str(data), "--target", "Mass", "--runs", "1", "--epochs", "1"]
    CliRunner().invoke(app, [*command, "-o", str(tmp_path / "own")], catch_exceptions=False)
    assert seen == [(2, "cpu:0", None, 0.02, 4)]
    how = json.loads((tmp_path / "own" / "tuned.json").read_text())["how"]
    assert (how["lr"], how["batch_size"]) == (0.02, 4)
