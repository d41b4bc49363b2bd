"""The conformance check of a data set's reader; `suture.testing` exports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from suture.core.errors import SutureError
from suture.data.dataset import DatasetConfig
from suture.data.readers import DataSet
from suture.data.table import SPLITS, Table


def check_dataset(dataset: DataSet, values: Mapping[str, Any]) -> Table:
    """Check that a reader keeps what training relies on; return the table that it read.

    Args:
        dataset: what the entry point ``suture.datasets`` names.
        values: the keys of ``[data]`` for files to read, such as a few rows that a test writes.

    Raises:
        AssertionError: naming what does not hold.
    """
    config = _config(dataset, values)
    table = _read(dataset, config)
    _check_rows(table)
    again = _read(dataset, config)
    for name in ("images", "patients", "split", "texts"):
        assert getattr(again, name) == getattr(table, name), f"{name}: a second reading has others"
    assert np.array_equal(again.y, table.y, equal_nan=True), "labels: a second reading has others"
    _check_labels(dataset, config, table)
    absent = config.model_copy(update={"table": config.table.with_name("not-there.csv")})
    _expect_refusal(dataset, absent, "not-there.csv", "a table that does not exist")
    return table


def _config(dataset: DataSet, values: Mapping[str, Any]) -> DatasetConfig:
    """The configuration, of which each key is described and no other one is taken."""
    kind = dataset.config
    described = {
        line.strip().partition(":")[0] for base in kind.__mro__ for line in (base.__doc__ or "").splitlines()
    }
    missing = sorted(kind.model_fields.keys() - described - {"dataset"})
    assert not missing, f"{kind.__name__}: its docstring describes no {', '.join(missing)}"
    assert kind.model_fields["dataset"].default, f"{kind.__name__}: `dataset` needs its name as the default"
    strict = kind.model_config.get("extra") == "forbid"
    assert strict, f"{kind.__name__}: takes a key that does not exist; leave `extra` as in DatasetConfig"
    return kind.model_validate(dict(values))


def _read(dataset: DataSet, config: DatasetConfig) -> Table:
    reading = dataset.read(config)
    assert not reading.faults, f"faults: {'; '.join(reading.faults)}"
    return reading.table


def _check_rows(table: Table) -> None:
    """Check images, splits, patients and labels of the rows."""
    assert len(table), "there are no rows"
    outside = [name for name in table.images if name.startswith("/") or ".." in name.split("/")]
    assert not outside, f"images: {outside[0]!r} leads out of `root`"
    assert set(table.split) <= {*SPLITS, ""}, f"split: {sorted(set(table.split) - {*SPLITS, ''})[0]!r}"
    places: dict[str, set[str]] = {}
    for patient, split in zip(table.patients, table.split, strict=True):
        places.setdefault(patient, set()).add(split)
    torn = [splits - {""} for splits in places.values() if len(splits - {""}) > 1]
    assert not torn, f"patients: one is in {' and '.join(sorted(torn[0]))}"
    assert table.y.dtype == np.float32, f"labels: {table.y.dtype}, not float32"
    strange = table.y[~np.isnan(table.y) & ~np.isin(table.y, (0, 1))]
    assert not strange.size, f"labels: {strange[0]:g}; use 1, 0 or NaN for unknown"


def _check_labels(dataset: DataSet, config: DatasetConfig, table: Table) -> None:
    """Check that `labels` chooses classes by name and order, and that an unknown name is refused."""
    names = tuple(reversed(table.labels.names))
    chosen = _read(dataset, config.model_copy(update={"labels": names}))
    assert chosen.labels.names == names, f"labels = {list(names)} gives {list(chosen.labels.names)}"
    rows = {row: i for i, row in enumerate(chosen.images)}
    common = [i for i, row in enumerate(table.images) if row in rows]
    same = chosen.restrict(table.labels).y[[rows[table.images[i]] for i in common]]
    assert np.array_equal(same, table.y[common], equal_nan=True), "labels: another order changes values"
    wrong = config.model_copy(update={"labels": ("no such finding",)})
    _expect_refusal(dataset, wrong, "no such finding", "a class that the table does not have")


def _expect_refusal(dataset: DataSet, config: DatasetConfig, word: str, what: str) -> None:
    try:
        said = "; ".join(dataset.read(config).faults) or "nothing"
    except (SutureError, OSError) as error:
        said = str(error)
    except Exception as error:  # a reader of somebody else may raise anything
        raise AssertionError(
            f"{what}: {type(error).__name__}, which is not a SutureError: {error}"
        ) from error
    assert word in said.casefold(), f"{what}: {word!r} is not in what the reader says: {said}"
