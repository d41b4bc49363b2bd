"""suture.learning.samples: what a site trains on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dicom_files import dicom
from suture.core.errors import ConfigError, DataError
from suture.data.config import load_site_config
from suture.learning.samples import load_samples, pool
from suture.models import MODELS, ModelSpec

PIXELS = ModelSpec("cnn", size=16)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Eight images, of which image i is all i; rows 6 and 7 are unused, and the splits alternate."""
    (tmp_path / "images").mkdir()
    rows = ["image,patient,split,Mass,Nodule"]
    for i, split in enumerate(["test", "train", "validation", "train", "test", "train", "", ""]):
        Image.new("L", (16, 16), i).save(tmp_path / f"images/{i}.png")
        rows.append(f"{i}.png,p{i},{split},{i % 2},")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    path = tmp_path / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n')
    return path


def test_each_split_has_its_images_labels_and_patients(config_file: Path) -> None:
    labels, samples = load_samples(load_site_config(config_file), PIXELS, "alpha")
    assert labels.names == ("Mass", "Nodule")
    for split, rows in {"train": [1, 3, 5], "validation": [2], "test": [0, 4]}.items():
        part = samples[split]  # type: ignore[index]
        assert part.inputs["image"].shape == (len(rows), 1, 16, 16)
        assert part.inputs["image"].dtype == torch.uint8
        assert part.inputs["image"][:, 0, 0, 0].tolist() == rows
        assert part.y[:, 0].tolist() == [i % 2 for i in rows]
        assert part.y[:, 1].isnan().all()
        assert part.patients == tuple(f"p{i}" for i in rows)
    assert (config_file.parent / "cache").is_dir()


def test_an_unreadable_image_takes_its_labels_with_it(config_file: Path) -> None:
    (config_file.parent / "images/3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"site 'alpha': 1 of 6 images.*'3\.png'"):
        load_samples(load_site_config(config_file), PIXELS, "alpha")
    config_file.write_text(config_file.read_text() + "[privacy]\nmax_faults = 0.2\n")
    _, samples = load_samples(load_site_config(config_file), PIXELS, "alpha")
    assert samples["train"].inputs["image"][:, 0, 0, 0].tolist() == [1, 5]
    assert samples["train"].patients == ("p1", "p5")


def test_a_split_without_rows_is_empty(config_file: Path) -> None:
    table = config_file.parent / "labels.csv"
    table.write_text(table.read_text().replace("train", ""))
    _, samples = load_samples(load_site_config(config_file), PIXELS, "server")
    assert len(samples["train"]) == 0
    assert len(samples["test"]) == 2


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A model that reads text, as far as the data need to know it."""
    monkeypatch.setitem(MODELS, "reader", replace(MODELS["cnn"], reads="text"))
    return ModelSpec("reader", vocabulary=("no", "edema", "."))


def write_reports(folder: Path, *reports: str) -> Path:
    """A hospital whose data are text."""
    folder.mkdir(exist_ok=True)
    lines = [f'r{i},p{i},{"test" if i else "train"},"{text}",{i % 2}' for i, text in enumerate(reports)]
    (folder / "reports.csv").write_text("\n".join(["study,patient,split,report,Edema", *lines]))
    path = folder / "suture.toml"
    path.write_text(
        '[data]\ndataset = "hospital"\ntable = "reports.csv"\n'
        'image_column = "study"\ntext_column = "report"\n'
    )
    return path


def test_documents_become_tokens_and_lengths(reader: ModelSpec, tmp_path: Path) -> None:
    path = write_reports(tmp_path, "no\nedema.", "edema", "mild edema. no\nmass")
    labels, samples = load_samples(load_site_config(path), reader, "alpha")
    assert labels.names == ("Edema",)
    train, test = samples["train"], samples["test"]
    assert train.inputs["tokens"].tolist() == [[1, 2, 3, 0, 0]]
    assert train.inputs["length"].tolist() == [3]
    assert test.inputs["tokens"].tolist() == [[2, 0, 0, 0, 0], [0, 2, 3, 1, 0]]
    assert test.inputs["length"].tolist() == [1, 5]
    assert test.names == ("r1", "r2")
    assert len(samples["validation"]) == 0
    _, cut = load_samples(load_site_config(path), replace(reader, longest=2), "alpha", only="test")
    assert cut["test"].inputs["tokens"].tolist() == [[2, 0], [0, 2]]
    assert len(cut["train"]) == 0


def test_documents_of_sites_are_pooled(reader: ModelSpec, tmp_path: Path) -> None:
    written = {
        name: write_reports(tmp_path / name, *texts) for name, texts in (("a", ["no"]), ("b", ["no edema"]))
    }
    sites = {name: load_samples(load_site_config(path), reader, name) for name, path in written.items()}
    train = pool(sites)[1]["train"]
    assert train.inputs["tokens"].tolist() == [[1, 0], [1, 2]]
    assert train.inputs["length"].tolist() == [1, 2]


def test_a_model_that_reads_something_else_is_refused(
    reader: ModelSpec, config_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"site 'alpha': .*labels\.csv holds images.* 'reader' reads texts"):
        load_samples(load_site_config(config_file), reader, "alpha")
    path = write_reports(tmp_path / "b", "no")
    with pytest.raises(ConfigError, match=r"site 'b': .*reports\.csv holds texts.* 'cnn' reads images"):
        load_samples(load_site_config(path), PIXELS, "b")


@pytest.mark.complete
@pytest.mark.data
def test_real_images_become_samples(data_root: Path, tmp_path: Path) -> None:
    folder = data_root / "nih_cxr14_64px"
    rows = (folder / "Data_Entry_2017_v2020.csv").read_text().splitlines()[:201]
    (tmp_path / "Data_Entry_2017.csv").write_text("\n".join(rows))
    path = tmp_path / "suture.toml"
    path.write_text(
        f'[data]\ndataset = "nih"\nsplit = "patients"\nroot = "{folder}/images.tar"\n'
        'table = "Data_Entry_2017.csv"\n'
    )
    labels, samples = load_samples(load_site_config(path), ModelSpec("cnn", size=64), "nih")
    assert len(labels) == 14
    assert sum(map(len, samples.values())) == 200
    pixels = samples["train"].inputs["image"].numpy()
    assert 80 < np.mean(pixels) < 180


def test_a_dicom_of_another_modality_counts_as_unreadable(config_file: Path) -> None:
    for i in range(8):
        modality = "CT" if i == 3 else "DX"
        content = dicom(np.full((16, 16), i, np.uint8) + np.eye(16, dtype=np.uint8), Modality=modality)
        (config_file.parent / f"images/{i}.png").write_bytes(content)
    config = load_site_config(config_file)
    chest = replace(PIXELS, modalities=("CR", "DX"))
    assert len(load_samples(config, PIXELS, "alpha")[1]["train"]) == 3
    # The line names the image and both modalities, and asks for no partial data set; nothing is cached.
    with pytest.raises(DataError) as caught:
        load_samples(config, chest, "alpha")
    assert str(caught.value) == (
        "site 'alpha': 1 of 6 images cannot be used, more than the 5% tolerated ([privacy] max_faults); the "
        "first is '3.png': image '3.png' is of the modality 'CT' (0008,0060), and the model is for CR, DX"
    )
    config_file.write_text(config_file.read_text() + "[privacy]\nmax_faults = 0.2\n")
    said: list[str] = []
    for _ in range(2):  # the second time from the cache
        _, samples = load_samples(load_site_config(config_file), chest, "alpha", left_out=said.extend)
        assert samples["train"].patients == ("p1", "p5")
    assert said[0].startswith("left out 1 of 6 images that cannot be read or are of another modality")
    assert len(load_samples(config, PIXELS, "alpha")[1]["train"]) == 3
