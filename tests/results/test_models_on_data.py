"""Comparing and relating saved models, and plots of data and models, through the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from suture.cli import app
from suture.cli.common import load_sources
from suture.core.errors import ConfigError, DataError, LabelError
from suture.data.config import load_site_config, write_site_config
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture_results.comparison import compare
from suture_results.cooccurrence import predicted_together
from suture_results.plots import plot_features


@pytest.fixture
def models(tiny: Any) -> dict[str, Path]:
    """A model that has learned all four classes, one that knows Mass alone, and one that learned nothing."""
    made = {}
    for name, labels, lr in (("all", None, 1e-2), ("mass", {"delta": ("Mass",)}, 1e-2), ("raw", None, 1e-9)):
        method = SurgicalAggregation(local=LocalTraining(lr=lr, batch_size=8))
        federation = tiny(method, labels, rounds=4) if labels else tiny(method, rounds=4)
        federation.folder = federation.folder / name
        made[name] = federation.run().record.folder / "model"
    return made


@pytest.fixture
def data(hospital: Any, tmp_path: Path) -> dict[str, Path]:
    """Two data sets of 60 images: one labels Mass and Nodule, the other Hernia alone."""
    return {
        "north": hospital(tmp_path / "north", ("Mass", "Nodule"), 300, 5),
        "south": hospital(tmp_path / "south", ("Hernia",), 300, 6),
    }


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.complete
def test_two_models_are_compared_on_the_classes_that_both_know(
    models: dict[str, Path], data: dict[str, Path]
) -> None:
    north = load_site_config(data["north"])
    found = compare(models["all"], models["raw"], north, "test", draws=200)
    assert set(found) == {"Mass", "Nodule"}
    for one in found.values():
        assert one.a.auroc is not None
        assert one.b.auroc is not None
        assert one.difference.difference == pytest.approx(one.a.auroc - one.b.auroc, abs=1e-6)
    same = compare(models["all"], models["all"], north, "test", draws=50)
    assert all(one.difference.p == 1 for one in same.values())
    assert set(compare(models["all"], models["mass"], north, "test", draws=10)) == {"Mass"}
    with pytest.raises(DataError):
        compare(models["all"], models["mass"], load_site_config(data["south"]), "test")
    shown = command("compare", models["all"], models["raw"], data["north"])
    assert "near AUROC 1" in shown.output
    assert shown.exit_code == 0
    assert "Nodule" in shown.output


@pytest.mark.complete
def test_a_threshold_comes_from_the_data_set_that_can_give_it(
    models: dict[str, Path], data: dict[str, Path], tmp_path: Path
) -> None:
    configs = [load_site_config(data[name]) for name in ("north", "south")]
    (one,) = predicted_together(models["all"], configs, "test", [("Mass", "Hernia")])
    assert sum(map(sum, one.counts)) == 60
    (alone,) = predicted_together(models["all"], configs[:1], "test", [("Mass", "Hernia")])
    assert "Hernia" in alone.why
    with pytest.raises(LabelError):
        predicted_together(models["mass"], configs[:1], "test", [("Mass", "Hernia")])
    out = tmp_path / "pairs.svg"
    shown = command("plot", "predictions", models["all"], *data.values(), "-o", out, "--pair", "Mass:Hernia")
    assert shown.exit_code == 0
    assert "P(Hernia | Mass)" in shown.output
    assert out.read_text().startswith("<svg")


@pytest.mark.complete
def test_features_of_several_sources(models: dict[str, Path], data: dict[str, Path], tmp_path: Path) -> None:
    configs = {name: load_site_config(path) for name, path in data.items()}
    one, two = (plot_features(models["all"], configs, "test", images=20) for _ in range(2))
    assert one == two
    assert b"north" in one
    assert b"south" in one
    out = tmp_path / "features.svg"
    assert (
        command("plot", "features", models["all"], *data.values(), "-o", out, "--images", 10).exit_code == 0
    )
    assert out.exists()


@pytest.mark.complete
def test_data_sets_in_one_folder_are_distinguished_by_their_files(
    models: dict[str, Path], data: dict[str, Path], tmp_path: Path
) -> None:
    for name, path in data.items():  # absolute paths, so that the two can lie beside each other
        write_site_config(tmp_path / f"{name}.toml", load_site_config(path))
    both = [tmp_path / "north.toml", tmp_path / "south.toml"]
    out = tmp_path / "features.svg"
    assert command("plot", "features", models["all"], *both, "-o", out, "--images", 10).exit_code == 0
    assert "north" in out.read_text()
    assert "south" in out.read_text()
    assert command("plot", "labels", *both, "-o", tmp_path / "plots").exit_code == 0
    assert (tmp_path / "plots" / "cooccurrence-south.svg").exists()


def test_two_data_sets_of_one_name_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "north.toml").write_bytes(data["south"].read_bytes())
    with pytest.raises(ConfigError, match=r"north/suture\.toml and .*north\.toml .*'north'"):
        load_sources([data["north"], tmp_path / "north.toml"])


def test_data_are_drawn(data: dict[str, Path], tmp_path: Path) -> None:
    shown = command("plot", "labels", *data.values(), "-o", tmp_path / "plots")
    assert shown.exit_code == 0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"frequencies.svg", "cooccurrence-north.svg", "cooccurrence-south.svg"}


@pytest.mark.parametrize(("options", "unit"), [((), "patients"), (("--per", "image"), "images")])
def test_classes_occur_together_in_patients_by_default(
    options: tuple[str, ...], unit: str, data: dict[str, Path], tmp_path: Path
) -> None:
    """North's images are two of each patient; each of south's is a patient of its own."""
    table = data["north"].parent / "labels.csv"
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    paired = [[image, f"p{i - i % 10 + i % 5}", *rest] for i, (image, _, *rest) in enumerate(rows)]
    table.write_text("\n".join(map(",".join, [header, *paired])) + "\n")
    shown = command("plot", "labels", *data.values(), "-o", tmp_path / "plots", *options)
    assert shown.exit_code == 0
    north, south = ((tmp_path / "plots" / f"cooccurrence-{name}.svg").read_text() for name in data)
    assert f"of the {unit} with the class" in north
    assert "of the images with the class" in south


def test_saved_models_compute_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUTURE_DEVICE", "gpu7")
    for words in (("evaluate", "m", "d"), ("compare", "m", "m", "d"), ("predict", "m", "d", "-o", "o")):
        with pytest.raises(ConfigError, match=r"'gpu7'.*SUTURE_DEVICE"):
            command(*words)
