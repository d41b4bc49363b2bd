"""What a site trains on: images or documents of its splits, with labels, patients and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dicom_files import dicom
from suture.core.errors import ConfigError, DataError
from suture.core.privacy import PrivacyConfig
from suture.core.validation import MOST_ATTRIBUTES
from suture.data.batch import Samples
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.data.table import Split
from suture.learning.samples import load_samples, pool
from suture.models import MODELS, ModelSpec
from world import refused, site_config, write_table

PIXELS = ModelSpec("cnn", size=16)


def hospital(folder: Path, rows: Sequence[Sequence[object]], **data: object) -> SiteConfig:
    """The configuration of a hospital's table; another one replaces it."""
    write_table(folder / "labels.csv", [["image", "patient", "split", "Mass", "Nodule", "tone"], *rows])
    own = {
        "dataset": "hospital",
        "root": "images",
        "table": "labels.csv",
        "labels": ["Mass", "Nodule"],
        **data,
    }
    return site_config(folder, data=own)


def loaded(config: SiteConfig, model: ModelSpec = PIXELS, **more: Any) -> dict[Split, Samples]:
    return load_samples(config, model, "alpha", **more)[1]


def tolerant(config: SiteConfig) -> SiteConfig:
    return config.model_copy(update={"privacy": PrivacyConfig(max_faults=0.5)})


@pytest.fixture
def config(tmp_path: Path) -> SiteConfig:
    """Eight images, of which image i is all i; rows 6 and 7 are unused, and the splits alternate."""
    (tmp_path / "images").mkdir()
    rows = []
    for i, split in enumerate(["test", "train", "validation", "train", "test", "train", "", ""]):
        Image.new("L", (16, 16), i).save(tmp_path / f"images/{i}.png")
        rows.append([f"{i}.png", f"p{i}", split, i % 2, "", ["light", " dark "][i % 3 == 1]])
    return hospital(tmp_path, rows, attribute_column="tone")


def test_each_split_has_its_images_labels_patients_and_attributes(config: SiteConfig, tmp_path: Path) -> None:
    samples = loaded(config)
    for split, rows in {"train": [1, 3, 5], "validation": [2], "test": [0, 4]}.items():
        part = samples[split]  # type: ignore[index]
        assert part.inputs["image"].shape == (len(rows), 1, 16, 16)
        assert part.inputs["image"].dtype == torch.uint8
        assert part.inputs["image"][:, 0, 0, 0].tolist() == rows
        assert part.y[:, 0].tolist() == [i % 2 for i in rows]
        assert part.y[:, 1].isnan().all()
        assert part.patients == tuple(f"p{i}" for i in rows)
        assert part.attributes == tuple(["light", "dark"][i % 3 == 1] for i in rows)
    assert (tmp_path / "cache").is_dir()
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("train", ""))
    assert [len(loaded(config)[split]) for split in ("train", "test")] == [0, 2]


def test_an_unreadable_image_takes_its_labels_with_it(config: SiteConfig, tmp_path: Path) -> None:
    (tmp_path / "images/3.png").write_bytes(b"")
    with refused("'alpha'", "1 of 6 images", "'3.png'", by=DataError):
        loaded(config)
    train = loaded(tolerant(config))["train"]
    assert train.inputs["image"][:, 0, 0, 0].tolist() == [1, 5]
    assert (train.patients, train.attributes) == (("p1", "p5"), ("dark", "light"))


def test_a_dicom_of_another_modality_counts_as_unreadable(config: SiteConfig, tmp_path: Path) -> None:
    for i in range(8):
        modality = "CT" if i == 3 else "DX"
        content = dicom(np.full((16, 16), i, np.uint8) + np.eye(16, dtype=np.uint8), Modality=modality)
        (tmp_path / f"images/{i}.png").write_bytes(content)
    chest = replace(PIXELS, modalities=("CR", "DX"))
    assert len(loaded(config)["train"]) == 3
    with refused("'alpha'", "'3.png'", "'CT'", "CR, DX", by=DataError):
        loaded(config, chest)
    said: list[str] = []
    for _ in range(2):  # the second time from the cache
        assert loaded(tolerant(config), chest, left_out=said.extend)["train"].patients == ("p1", "p5")
    assert len(said) == 2
    assert len(loaded(config)["train"]) == 3


def test_a_column_of_many_values_is_no_attribute(tmp_path: Path) -> None:
    rows = [[f"{i}.png", f"p{i}", "train", 1, "", f"patient {i}"] for i in range(MOST_ATTRIBUTES + 1)]
    with refused("'tone'", "21", by=DataError):
        load_table(hospital(tmp_path, rows, attribute_column="tone").data)
    few = hospital(tmp_path, rows[:-1], attribute_column="tone")
    assert (load_table(few.data).attributes or ())[1] == "patient 1"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A model that reads text, as far as the data need to know it."""
    monkeypatch.setitem(MODELS, "reader", replace(MODELS["cnn"], reads="text"))
    return ModelSpec("reader", vocabulary=("no", "edema", "."))


def reports(folder: Path, *texts: str) -> SiteConfig:
    """A hospital whose data are text."""
    rows = [[f"r{i}", f"p{i}", "test" if i else "train", text, i % 2] for i, text in enumerate(texts)]
    write_table(folder / "reports.csv", [["study", "patient", "split", "report", "Edema"], *rows])
    columns = {"image_column": "study", "text_column": "report"}
    return site_config(folder, data={"dataset": "hospital", "table": "reports.csv", **columns})


def test_documents_become_tokens_and_lengths(reader: ModelSpec, tmp_path: Path) -> None:
    config = reports(tmp_path / "a", "no\nedema.", "edema", "mild edema. no\nmass")
    samples = loaded(config, reader)
    train, test = samples["train"], samples["test"]
    assert train.inputs["tokens"].tolist() == [[1, 2, 3, 0, 0]]
    assert train.inputs["length"].tolist() == [3]
    assert test.inputs["tokens"].tolist() == [[2, 0, 0, 0, 0], [0, 2, 3, 1, 0]]
    assert test.inputs["length"].tolist() == [1, 5]
    assert test.names == ("r1", "r2")
    assert len(samples["validation"]) == 0
    cut = loaded(config, replace(reader, longest=2), only="test")
    assert cut["test"].inputs["tokens"].tolist() == [[2, 0], [0, 2]]
    assert len(cut["train"]) == 0
    sites = {
        name: load_samples(reports(tmp_path / name, text), reader, name)
        for name, text in (("b", "no"), ("c", "no edema"))
    }
    pooled = pool(sites)[1]["train"]
    assert pooled.inputs["tokens"].tolist() == [[1, 0], [1, 2]]
    assert pooled.inputs["length"].tolist() == [1, 2]


def test_a_model_that_reads_something_else_is_refused(
    reader: ModelSpec, config: SiteConfig, tmp_path: Path
) -> None:
    with refused("'alpha'", "labels.csv", "'reader'", by=ConfigError):
        loaded(config, reader)
    with refused("'alpha'", "reports.csv", "'cnn'", by=ConfigError):
        loaded(reports(tmp_path / "b", "no"))


@pytest.mark.complete
@pytest.mark.data
def test_real_images_become_samples(data_root: Path, tmp_path: Path) -> None:
    folder = data_root / "nih_cxr14_64px"
    rows = (folder / "Data_Entry_2017_v2020.csv").read_text().splitlines()[:201]
    (tmp_path / "Data_Entry_2017.csv").write_text("\n".join(rows))
    own = {
        "dataset": "nih",
        "split": "patients",
        "root": f"{folder}/images.tar",
        "table": "Data_Entry_2017.csv",
    }
    labels, samples = load_samples(site_config(tmp_path, data=own), ModelSpec("cnn", size=64), "nih")
    assert len(labels) == 14
    assert sum(map(len, samples.values())) == 200
    assert 80 < np.mean(samples["train"].inputs["image"].numpy()) < 180
