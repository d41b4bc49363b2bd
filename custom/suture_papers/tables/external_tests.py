"""Measuring the models of a run on external test sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from suture.core.errors import DataError, SutureError
from suture.core.files import read_json
from suture.data.config import SiteConfig, StorageConfig, parse_data
from suture.data.readers import load_table
from suture.execution.sites import this_machine
from suture.protocol.messages import ClassScore
from suture_papers.chest_xrays.chest_sites import nih_release
from suture_papers.tables.spec import DATA, ExternalTest
from suture_results.saved_models import Evaluated, evaluate, models_of


def check_tests(tests: Mapping[str, ExternalTest], data_root: Path | None) -> None:
    """Read the table of every test, before anything is trained.

    Raises:
        DataError: one is absent or cannot be read; names the test.
    """
    for name, test in tests.items():
        try:
            load_table(site_config(name, test, Path(), data_root).data)
        except SutureError as error:
            raise DataError(f"test {name!r}: {error}") from error


def test_models(
    tests: Mapping[str, ExternalTest], out: Path, work: Path, data_root: Path | None
) -> dict[str, dict[str, Any]]:
    """Measure the models of a finished run on test sets; returns what `Result.tests` holds.

    Args:
        out: the folder of the run.
        work: the folder where decoded test images are cached, for all runs.

    Raises:
        SutureError: a test set cannot be read, or the run left no model.
    """
    if not tests:
        return {}
    models, device, groups = models_of(out), this_machine().device, _groups_of(out)
    found: dict[str, dict[str, Any]] = {}
    for name, test in tests.items():
        config = site_config(name, test, work, data_root)
        found[name] = {
            model: figures(evaluate(path, config, "test", device, groups)) for model, path in models.items()
        }
    return found


def figures(done: Evaluated) -> dict[str, Any]:
    """Return what is stored of a model on a test set.

    Returns:
        ``auroc`` and ``intervals`` (95 %, over patients) of each class that the model has learned, null where
        undefined; the classes of the data that it has not learned, ``unlearned``; ``n`` images; ``loss`` and
        ``mean_interval`` of all classes, and in ``groups`` those of the classes of several sites and of one.
    """
    return {
        "auroc": {name: score.auroc for name, score in done.classes.items()},
        "intervals": {name: _bounds(score) for name, score in done.classes.items()},
        "unlearned": list(done.unlearned),
        "n": len(done.patients),
        "loss": done.loss,
        "mean_interval": done.interval,
        "groups": {
            name: {"loss": part.loss, "mean_interval": part.bounds} for name, part in done.groups.items()
        },
    }


def _bounds(score: ClassScore) -> tuple[float, float] | None:
    return None if score.low is None or score.high is None else (score.low, score.high)


def _groups_of(out: Path) -> dict[str, Collection[str]]:
    """Return the classes of a finished run that several sites annotate, and those that one site annotates."""
    sites = read_json(out / "run.json", "sites")["sites"].values()
    owners = Counter(name for site in sites for name in set(site["labels"]))
    return {
        "shared": {name for name, n in owners.items() if n > 1},
        "unique": {name for name, n in owners.items() if n == 1},
    }


def site_config(name: str, test: ExternalTest, work: Path, data_root: Path | None) -> SiteConfig:
    """Return the configuration of a test set.

    Raises:
        ConfigError: its data are described wrongly.
    """
    filled = {key: _fill(value, data_root) for key, value in test.data.items()}
    if filled.get("dataset") == "nih" and "root" in filled and "table" not in filled:
        table, images = nih_release(Path(filled["root"]))
        filled |= {"table": table, "root": images}
    if "table" in filled and not Path(filled["table"]).exists():
        zipped = Path(f"{filled['table']}.gz")  # as PhysioNet distributes it
        filled |= {"table": zipped} if zipped.exists() else {}
    data = parse_data(filled, f"tests.{name}.data")
    return SiteConfig(data=data, storage=StorageConfig(state=work, cache=work / "tests"))


def _fill(value: Any, data_root: Path | None) -> Any:
    if isinstance(value, str) and data_root is not None:
        return value.replace(DATA, str(data_root))
    return value
