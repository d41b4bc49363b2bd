"""suture.data.site: what a site trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from suture.config import load_site_config
from suture.data.site import load_samples
from suture.errors import DataError


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Eight images, of which image i is all i; rows 6 and 7 are unused, and the splits alternate."""
    (tmp_path / "images").mkdir()
    rows = ["image,patient,split,Mass,Nodule"]
    for i, split in enumerate(["test", "train", "validation", "train", "test", "train", "", ""]):
        Image.new("L", (8, 8), i).save(tmp_path / f"images/{i}.png")
        rows.append(f"{i}.png,p{i},{split},{i % 2},")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    path = tmp_path / "suture.toml"
    path.write_text('[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n')
    return path


def test_each_split_has_its_images_labels_and_patients(config_file: Path) -> None:
    labels, samples = load_samples(load_site_config(config_file), 8, "alpha")
    assert labels.names == ("Mass", "Nodule")
    for split, rows in {"train": [1, 3, 5], "validation": [2], "test": [0, 4]}.items():
        part = samples[split]  # type: ignore[index]
        assert part.inputs["image"].shape == (len(rows), 1, 8, 8)
        assert part.inputs["image"].dtype == torch.uint8
        assert part.inputs["image"][:, 0, 0, 0].tolist() == rows
        assert part.y[:, 0].tolist() == [i % 2 for i in rows]
        assert part.y[:, 1].isnan().all()
        assert part.patients == tuple(f"p{i}" for i in rows)
    assert (config_file.parent / "cache").is_dir()


def test_an_unreadable_image_takes_its_labels_with_it(config_file: Path) -> None:
    (config_file.parent / "images/3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"site 'alpha': 1 of 6 images.*'3\.png'"):
        load_samples(load_site_config(config_file), 8, "alpha")
    config_file.write_text(config_file.read_text() + "[privacy]\nmax_faults = 0.2\n")
    _, samples = load_samples(load_site_config(config_file), 8, "alpha")
    assert samples["train"].inputs["image"][:, 0, 0, 0].tolist() == [1, 5]
    assert samples["train"].patients == ("p1", "p5")


def test_a_split_without_rows_is_empty(config_file: Path) -> None:
    table = config_file.parent / "labels.csv"
    table.write_text(table.read_text().replace("train", ""))
    _, samples = load_samples(load_site_config(config_file), 8, "server")
    assert len(samples["train"]) == 0
    assert len(samples["test"]) == 2


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
    labels, samples = load_samples(load_site_config(path), 64, "nih")
    assert len(labels) == 14
    assert sum(map(len, samples.values())) == 200
    pixels = samples["train"].inputs["image"].numpy()
    assert 80 < np.mean(pixels) < 180
