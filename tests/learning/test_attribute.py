"""The attribute of each image is found by the image's name, and is no more than an attribute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from suture.core.errors import ConfigError, DataError
from suture.data.batch import Samples
from suture.data.config import DataConfig
from suture.learning.attribute import with_attributes
from suture.protocol.messages import MOST_ATTRIBUTES


def config(folder: Path, rows: str, **changes: object) -> DataConfig:
    (folder / "labels.csv").write_text("image,patient,split,Mass,tone\n" + rows)
    values = {
        "dataset": "hospital",
        "root": folder,
        "table": folder / "labels.csv",
        "attribute_column": "tone",
    }
    return DataConfig.model_validate(values | changes)


def samples(*names: str) -> Samples:
    return Samples({}, torch.zeros(len(names), 1), names, names)


def test_an_attribute_is_found_by_the_name_of_the_image(tmp_path: Path) -> None:
    """Decoding has put the images into another order, and left one out."""
    told = config(
        tmp_path, "a.png,p,train,1,light\nb.png,q,test,0, dark \nc.png,r,test,0,\nd.png,s,test,1,dark\n"
    )
    found = with_attributes({"train": samples("a.png"), "test": samples("d.png", "c.png", "b.png")}, told)
    assert found["train"].attributes == ("light",)
    assert found["test"].attributes == ("dark", "", "dark")


def test_without_a_column_there_is_none(tmp_path: Path) -> None:
    told = config(tmp_path, "a.png,p,train,1,light\n", attribute_column=None)
    assert with_attributes({"train": samples("a.png")}, told)["train"].attributes == ()


def test_a_column_of_many_values_is_no_attribute(tmp_path: Path) -> None:
    rows = [f"{i}.png,p{i},train,1,patient {i}" for i in range(MOST_ATTRIBUTES + 1)]
    with pytest.raises(DataError, match=r"column 'tone' has 21 values, and figures are given by at most 20"):
        with_attributes({"train": samples("1.png")}, config(tmp_path, "\n".join(rows)))
    few = with_attributes({"train": samples("1.png")}, config(tmp_path, "\n".join(rows[:-1])))
    assert few["train"].attributes == ("patient 1",)


def test_an_attribute_is_of_a_hospitals_own_table(tmp_path: Path) -> None:
    told = config(tmp_path, "", dataset="nih")
    with pytest.raises(ConfigError, match="attribute_column = 'tone' is for dataset = 'hospital', not 'nih'"):
        with_attributes({}, told)
