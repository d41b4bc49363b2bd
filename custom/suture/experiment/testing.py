"""Measuring the models of a run on test sets of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suture.analysis.evaluate import as_metrics, evaluate
from suture.config import DataConfig, SiteConfig, StorageConfig
from suture.errors import FederationError
from suture.experiment.runs import GLOBAL
from suture.experiment.spec import ExternalTest
from suture.simulation.machine import this_machine
from suture.validation import parse


def absent_tests(tests: Mapping[str, ExternalTest], data_root: Path | None) -> dict[str, str]:
    """Of tests whose table or images are not there, the path that was looked for, with ``{data}``.

    Raises:
        ConfigError: the data of a test are described wrongly.
    """
    found = {}
    for name, test in tests.items():
        data = site_config(name, test, Path(), data_root).data
        for key, path in (("root", data.root), ("table", data.table)):
            if not path.exists():
                found[name] = str(test.data.get(key, path))
    return found


def test_models(
    tests: Mapping[str, ExternalTest], out: Path, work: Path, data_root: Path | None
) -> dict[str, dict[str, Any]]:
    """The models of a finished run on test sets, as in `Result.tests`.

    Args:
        tests: those whose data are there.
        out: folder of the run.
        work: decoded test images are kept there, for all runs.

    Raises:
        SutureError: a test set cannot be read, or the run left no model.
    """
    if not tests:
        return {}
    models, device = models_of(out), this_machine().device
    found: dict[str, dict[str, Any]] = {}
    for name, test in tests.items():
        config = site_config(name, test, work, data_root)
        done = {model: as_metrics(evaluate(path, config, "test", device)) for model, path in models.items()}
        found[name] = {m: {key: d[key] for key in ("auroc", "unlearned", "loss")} for m, d in done.items()}
    return found


def models_of(out: Path) -> dict[str, Path]:
    """The models that a run left: the global one, or one at each site."""
    if (out / "model" / "model.json").exists():
        return {GLOBAL: out / "model"}
    experiment = json.loads((out / "run.json").read_text())["experiment"]
    sites = sorted((out / "sites").glob(f"*/state/{experiment}/model/model.json"))
    if not sites:
        raise FederationError(f"{out} has no model; delete the folder, and the run is done again")
    return {path.relative_to(out / "sites").parts[0]: path.parent for path in sites}


def site_config(name: str, test: ExternalTest, work: Path, data_root: Path | None) -> SiteConfig:
    """The configuration of a test set.

    Raises:
        ConfigError: its data are described wrongly.
    """
    filled = {key: _filled(value, data_root) for key, value in test.data.items()}
    data = parse(DataConfig, filled, f"tests.{name}.data")
    return SiteConfig(data=data, storage=StorageConfig(state=work, cache=work / "tests"))


def _filled(value: Any, data_root: Path | None) -> Any:
    if isinstance(value, str) and data_root is not None:
        return value.replace("{data}", str(data_root))
    return value
