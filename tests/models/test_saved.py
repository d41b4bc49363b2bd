"""A model on disk, weights that somebody else made, and its classes in data that call them otherwise."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from small_hospitals import small_study
from small_models import CNN_32, EDEMA_MASS, built_model, saved_model
from suture import compare, decide, evaluate
from suture.core.errors import ConfigError, LabelError, SutureError
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.models.saved import load_model, load_spec, save_model, stated_digest, weights_digest
from suture.models.weights import read_checkpoint, read_weights
from suture_papers.fedmas.priors import _read_part
from suture_results.class_names import class_names
from suture_results.method_comparison import compare_methods
from suture_results.model_export.signature import check_digest
from suture_results.prediction import predict_to_csv
from world import refused, write_image


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": 8},
        {"neck": 8, "head": "anchors", "row_init": "named"},
        {"head": "cosine", "modalities": ("CR", "DX")},
    ],
)
def test_round_trip(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = replace(CNN_32, **settings)
    model = built_model(spec).eval()
    save_model(model, spec, tmp_path, {"round": 3})
    again, prepare = load_model(tmp_path)
    assert again.labels.names == EDEMA_MASS
    assert prepare == spec.preprocessing
    assert load_spec(tmp_path) == spec
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model({"image": x}), again({"image": x}))
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert len(modes) == 1  # whoever may read the description may read the weights


def test_a_folder_that_holds_no_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"a graph")
    with refused("model.onnx", by=ConfigError):
        load_model(tmp_path / "model.onnx")
    with refused("model.json", by=ConfigError):
        load_model(tmp_path)
    run = tmp_path / "run"
    site = run / "sites" / "alpha" / "state" / "experiments" / "run" / "model"
    site.mkdir(parents=True)
    demo = {"env": "local", "command": "suture run demo"}
    for about, remedy in (
        (demo | {"status": "failed", "error": "no GPU"}, f"suture run demo --out {run} --resume"),
        ({"env": "local", "status": "interrupted"}, f"suture run JOB --out {run} --resume"),
        (demo | {"status": "finished"}, ": suture run demo"),
        ({"status": "running", "env": "poc", "flare_job": "7"}, "suture results"),
    ):
        (run / "run.json").write_text(json.dumps(about))
        with refused(remedy, about.get("error", ""), by=ConfigError):
            load_model(run)
    (site / "model.json").touch()
    with refused("run/model", by=ConfigError):
        load_model(run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "m", CNN_32, ("Edema",))


def change_weights(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace weights, and state their digest."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: change(name, t) for name, t in tensors.items()}, folder / "model.safetensors")
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "digest": weights_digest(folder)}))


def test_weights_of_another_digest_cut_off_or_of_any_size_are_refused(folder: Path) -> None:
    """A byte of a weight is changed: the file is as readable and as finite as before."""
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    assert stated_digest(folder) == hashlib.sha256(data).hexdigest()
    for content in (data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], b"cut off"):
        weights.write_bytes(content)
        with refused(folder, by=ConfigError):
            load_model(folder)
    os.truncate(weights, 1 << 42)
    for read in (load_model, weights_digest, check_digest):  # it is not hashed
        with refused("model.safetensors", "4,398,046,511,104", by=SutureError):
            read(folder)
    weights.unlink()
    with refused("model.safetensors", by=ConfigError):
        load_model(folder)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("preprocessing", {"std": [0]}, "preprocessing.std.0"),
        ("preprocessing", {"std": [1e-30]}, "preprocessing.std.0"),
        ("preprocessing", {"mean": [1e30]}, "preprocessing.mean.0"),
        ("preprocessing", {"std": []}, "preprocessing.std"),
        ("preprocessing", {"size": 16}, "preprocessing.size"),
        ("preprocessing", {"channels": 10**30}, ""),
        ("model", {"size": 30_000}, "model.size"),
        ("model", {"hidden": 10**9}, "model.hidden"),
        ("model", {"hidden": 8}, "hidden."),
        ("model", {"hidden": 4096, "projection": 4096}, "model.safetensors"),
        ("", {"coherent": "max", "below": {"Edema": ["Edema"] * 2}}, "'Edema'"),
        ("model", {"name": "lstm", "vocabulary": "/dev/zero"}, ""),
        ("", {"labels": "abc"}, "labels"),
        ("", {"labels": []}, "labels"),
        pytest.param("", {"labels": ["a"] * 10_001}, "labels", id="too many labels"),
        ("", {"labels": ["Edema", "Edema"]}, "'Edema'"),
        ("", {"label_type": 3}, "label_type"),
        ("", {"digest": None}, "digest"),
        ("", {"preprocessing": [1]}, "preprocessing"),
    ],
    ids=str,
)
def test_a_damaged_description_is_refused(
    part: str, change: dict[str, Any], named: str, folder: Path
) -> None:
    description = json.loads((folder / "model.json").read_text())
    (description[part] if part else description).update(change)
    (folder / "model.json").write_text(json.dumps(description))
    with refused(folder, named, by=ConfigError):
        load_model(folder)


def test_a_description_that_is_none_is_refused(folder: Path) -> None:
    for text in ("[]", "3", "{}", "[" * 100_000, '{"labels": NaN}'):
        (folder / "model.json").write_text(text)
        for read in (load_model, load_spec):
            with refused("model.json", by=ConfigError):
                read(folder)


@pytest.mark.parametrize("change", [lambda t: t * torch.nan, torch.Tensor.half, lambda t: t.repeat(2)])
def test_weights_that_are_not_the_models_are_refused(change: Any, folder: Path) -> None:
    change_weights(folder, lambda name, t: change(t) if name == "head.bias" else t)
    with refused("head.bias", by=ConfigError):
        load_model(folder)


def test_a_model_without_a_finite_prediction_writes_no_table(folder: Path, tmp_path: Path) -> None:
    """Its weights are finite, and their sums are not."""
    change_weights(folder, lambda name, t: t.sign() * 3e38 if "weight" in name else t)
    with refused(by=ConfigError):
        predict_to_csv(folder, write_image(tmp_path / "a.png"), tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unpickled",)


def torch_file(value: object, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def deflated() -> bytes:
    file, content = io.BytesIO(), torch_file({"w": torch.zeros(100_000)})
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def scripted() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), file)
    return file.getvalue()


OLD = {"_use_new_zipfile_serialization": False}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "command.pt": (lambda: torch_file({"w": Command()}), ".system"),
    "legacy.pt": (lambda: torch_file({"w": Command()}, **OLD), ".system"),
    "module.pth": (lambda: torch_file(torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear"),
    "plain.pkl": (lambda: pickle.dumps({"w": [1.0]}), ""),
    "path.pth": (lambda: torch_file({"w": Path("a")}), "pathlib."),
    "scripted.pt": (scripted, "TorchScript"),
    "deflated.pt": (deflated, "TorchScript"),
    "text.pt": (lambda: b"not weights", ""),
    "empty.pt": (lambda: b"", ""),
    "cut.pt": (lambda: torch_file({"w": torch.zeros(9)})[:300], ""),
    "list.pt": (lambda: torch_file([torch.zeros(2)]), "list"),
    "cut.safetensors": (lambda: safetensors.torch.save({"w": torch.zeros(9)})[:-4], "safetensors"),
    "page.safetensors": (lambda: b"<html>not found</html>", "safetensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_holds_no_tensors_is_refused_without_the_advice_of_torch(
    name: str, tmp_path: Path
) -> None:
    make, named = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(make())
    for read in (lambda: read_weights(str(path), None), lambda: _read_part(path, "", "weights")):
        with warnings.catch_warnings(action="error"), pytest.raises(ConfigError) as caught:
            read()
        text = str(caught.value)
        assert name in text
        assert named in text
        assert not re.search("weights_only|add_safe_globals|arbitrary|re-running|safe_globals", text)
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.complete
def test_no_command_runs(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(torch_file({"w": Command()}))
    code = "import sys; from suture.models.weights import read_weights; read_weights(sys.argv[1], None)"
    command = [sys.executable, "-c", code, tmp_path / "a.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unpickled" not in done.stdout
    assert "weights_only" not in done.stderr.rpartition("ConfigError")[2]


def test_tensors_are_read_by_content_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    for data in (torch_file(state), torch_file(state, **OLD), safetensors.torch.save(state)):
        for name in ("w.pth", "w.safetensors", "w"):
            (tmp_path / name).write_bytes(data)
            found = read_weights(str(tmp_path / name), None)
            assert {key: value.tolist() for key, value in found.items()} == {
                "a": [0, 1, 2],
                "b": [[1, 1], [1, 1]],
            }
    os.mkfifo(tmp_path / "w.pt")
    with refused("w.pt", by=ConfigError):
        read_checkpoint(tmp_path / "w.pt")


def described(folder: Path, **facts: Any) -> Path:
    (folder / "model.json").write_text(json.dumps(facts))
    return folder


def code(text: str) -> dict[str, str]:
    system, number = text.split(":")
    return {"system": system, "code": number, "meaning": "x"}


def test_a_class_is_known_by_its_name_then_by_that_of_a_site_then_by_a_code(tmp_path: Path) -> None:
    folder = described(
        tmp_path,
        labels=["Mass", "Nodule", "Pneumothorax"],
        codes={"Pneumothorax": [code("SCT:36118008")], "Mass": [code("SCT:4147007")]},
        site_names={"Wobbet": "Nodule", "Mass": "Nodule", "Gone": "Hernia"},
    )
    stated = {"Ptx": ("SCT:36118008",), "Other": ("SCT:4147007",)}
    found = class_names(folder, ["Mass", "Wobbet", "Ptx", "Other", "Gone"], stated)
    assert found == {
        "Mass": "Mass",
        "Wobbet": "Nodule",
        "Ptx": "Pneumothorax",
        "Other": "Other",  # the code of a mass means a shape in any organ
        "Gone": "Gone",
    }
    described(tmp_path, labels=["Mass"])  # an older one
    assert class_names(tmp_path, ["Mass", "Wobbet"], {}) == {"Mass": "Mass", "Wobbet": "Wobbet"}
    described(tmp_path, labels=["Ptx"], codes={"Ptx": [code("SCT:36118008")]})
    assert class_names(tmp_path, ["Pneumothorax"], {}) == {"Pneumothorax": "Ptx"}  # a built-in code


def test_two_classes_that_are_one_are_refused(tmp_path: Path) -> None:
    described(tmp_path, labels=["Nodule"], site_names={"Wobbet": "Nodule"})
    with refused("'Nodule' and 'Wobbet'", by=LabelError):
        class_names(tmp_path, ["Nodule", "Wobbet"], {})
    codes = {"A": [code("SCT:36118008")], "B": [code("I10:J93.9")]}
    described(tmp_path, labels=["A", "B"], codes=codes)
    with refused("'Ptx'", "'A' and 'B'", by=LabelError):
        class_names(tmp_path, ["Ptx"], {"Ptx": ("SCT:36118008", "I10:J93.9")})
    described(tmp_path, labels=["A"], site_names=[1])
    with refused("site_names", by=ConfigError):
        class_names(tmp_path, ["A"], {})


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Beta calls a nodule Wobbet, by the label map; alpha and gamma have two words for a class, by a code."""
    study = small_study(tmp_path / "study", images=60)

    def rewrite(path: Path, old: str, new: str) -> None:
        path.write_text(path.read_text().replace(old, new, 1))

    for site, name, own in (
        ("alpha", "Mass", "Quorrel"),
        ("beta", "Nodule", "Wobbet"),
        ("gamma", "Fibrosis", "Brimble"),
    ):
        rewrite(study / site / "labels.csv", name, own)
        config = study / site / "suture.toml"
        rewrite(config, f'target = "{name}"', f'target = "{own}"')
        if site != "beta":
            config.write_text(config.read_text() + f'[data.codes]\n{own} = "RADLEX:RID99999"\n')
    rewrite(study / "job.toml", "rounds = 2", 'rounds = 1\nlabel_map = { Wobbet = "Nodule" }')
    return study


@pytest.mark.complete
def test_methods_are_compared_on_classes_that_sites_call_differently(mixed: Path, tmp_path: Path) -> None:
    done = compare_methods(load_job(mixed), ["vanilla", "central", "pfl"], tmp_path / "out")
    assert done.missing == []
    assert {site: set(of) for site, of in done.sites.items()} == {
        "alpha": {"Quorrel", "Nodule"},
        "beta": {"Wobbet", "Hernia"},
        "gamma": {"Brimble", "Nodule", "Mass"},
    }


@pytest.mark.complete
def test_a_model_is_measured_on_data_that_call_its_classes_otherwise(mixed: Path, tmp_path: Path) -> None:
    runs = tmp_path / "one", tmp_path / "two"
    for seed, run in enumerate(runs):
        run_job(with_settings(load_job(mixed), [f"seed={seed}"]), "local", run)
    facts = json.loads((runs[0] / "model" / "model.json").read_text())
    assert facts["site_names"] == {"Quorrel": "Brimble", "Wobbet": "Nodule"}
    for site, names in (("beta", {"Wobbet", "Hernia"}), ("gamma", {"Brimble", "Nodule", "Mass"})):
        config = mixed / site / "suture.toml"
        done = evaluate(runs[0], config)
        assert set(done.columns) == names
        assert done.unlearned == ()
        assert done.mean is not None
        assert set(done.classes) <= {"Brimble", "Hernia", "Mass", "Nodule"}
        assert set(compare(*runs, config).classes) == names
        assert set(decide(runs[0], config, "all", overwrite=True)) == set(done.classes)
