"""The attribute of each image stays with its image, and is no more than an attribute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from suture.core.errors import DataError
from suture.core.privacy import PrivacyConfig
from suture.core.validation import MOST_ATTRIBUTES
from suture.data.config import SiteConfig, StorageConfig
from suture.data.readers import load_table
from suture.data.readers.hospital import HospitalConfig
from suture.learning.samples import load_samples
from suture.models import ModelSpec


def config(folder: Path, rows: str, column: str | None = "tone") -> HospitalConfig:
    (folder / "labels.csv").write_text("image,patient,split,Mass,tone\n" + rows)
    return HospitalConfig(root=folder, table=folder / "labels.csv", attribute_column=column, labels=("Mass",))


def site(data: HospitalConfig) -> SiteConfig:
    storage = StorageConfig(state=data.root / "state", cache=data.root / "cache")
    return SiteConfig(data=data, storage=storage, privacy=PrivacyConfig(max_faults=0.5))


def test_an_attribute_stays_with_its_image(tmp_path: Path) -> None:
    """Loading puts the images into another order, and leaves out the one that cannot be read."""
    for name in "abce":
        Image.fromarray(np.full((16, 16), ord(name), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "d.png").write_bytes(b"no image")
    rows = (
        "d.png,s,test,1,dark\nb.png,q,test,0, dark \na.png,p,train,1,light\nc.png,r,test,0,\n"
        "e.png,t,train,0,dark\n"
    )
    _, found = load_samples(site(config(tmp_path, rows)), ModelSpec("cnn", size=16), "alpha")
    assert [found["train"].names, found["test"].names] == [("a.png", "e.png"), ("b.png", "c.png")]
    assert found["train"].attributes == ("light", "dark")
    assert found["test"].attributes == ("dark", "")
    without = site(config(tmp_path, rows, None))
    _, none = load_samples(without, ModelSpec("cnn", size=16), "alpha")
    assert none["train"].attributes == none["test"].attributes == ()


def test_a_column_of_many_values_is_no_attribute(tmp_path: Path) -> None:
    rows = [f"{i}.png,p{i},train,1,patient {i}" for i in range(MOST_ATTRIBUTES + 1)]
    with pytest.raises(DataError, match=r"column 'tone' has 21 values; .*20"):
        load_table(config(tmp_path, "\n".join(rows)))
    assert (load_table(config(tmp_path, "\n".join(rows[:-1]))).attributes or ())[1] == "patient 1"
