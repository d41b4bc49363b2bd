"""A saved model as a MONAI bundle: a folder that MONAI runs without Suture.

Source: the MONAI Bundle specification, https://docs.monai.io/en/stable/mb_specification.html.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError
from suture.core.files import atomic_write, make_folder, read_json, temporary_beside, write_json, writing
from suture.core.targets import markdown, monai
from suture.export.torch_program import write_torch
from suture.learning.decided_predictions import ALL, decisions_of
from suture.learning.prediction import Model, open_model
from suture.models.saved import weights_digest

if TYPE_CHECKING:
    from suture.protocol.decisions import Decisions

NO_LICENCE = "No licence is stated for this model. Ask its makers before you use, change or pass it on."
NOT_CLINICAL = "Research only: not for clinical use without local validation."

_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)


def write_bundle(source: Path, folder: Path, licence: str = NO_LICENCE) -> Path:
    """Write a saved model as a MONAI bundle in directory form; return its folder.

    Args:
        source: the folder of the saved model.
        folder: a new or empty folder.
        licence: the text of LICENSE.

    Raises:
        ConfigError: the model reads no images, `folder` holds other files, or `source` no model.
        DiskError: a file cannot be written; `folder` is as it was.
    """
    model = open_model(source)
    if model.network.reads != ("image",):
        raise ConfigError(
            f"{source} does not read images, and a MONAI bundle is for images; use suture predict"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; name a new one")
    facts, decisions = read_json(source / "model.json"), decisions_of(source)
    digest = weights_digest(source)
    # In a folder that is there, as it may be a link, or of another file system.
    apart = temporary_beside(folder / "bundle" if folder.exists() else folder.absolute())
    try:
        with writing(folder):
            _fill(apart, model, facts, decisions, licence, digest)
            if folder.exists():
                for part in apart.iterdir():
                    os.replace(part, folder / part.name)
            else:
                os.replace(apart, folder)
    finally:
        shutil.rmtree(apart, ignore_errors=True)
    return folder


def _fill(
    folder: Path,
    model: Model,
    facts: dict[str, Any],
    decisions: Decisions | None,
    licence: str,
    digest: str,
) -> None:
    """Write all files of the bundle."""
    for name in ("configs", "docs", "scripts"):
        make_folder(folder / name)
    write_torch(model, folder / "models")
    write_json(folder / "configs" / "metadata.json", monai(_metadata(model, facts, licence, digest)))
    write_json(folder / "configs" / "inference.json", _inference(model, decisions))
    if decisions is not None:
        write_json(folder / "configs" / "operating_points.json", operating_points(model.labels, decisions))
    _write(folder / "scripts" / "__init__.py", "")
    _write(folder / "scripts" / "inference.py", _file("inference.py"))
    _write(folder / "docs" / "README.md", _readme(model, facts, decisions, digest))
    _write(folder / "LICENSE", licence + "\n")


def operating_points(labels: tuple[str, ...], decisions: Decisions) -> dict[str, Any]:
    """Return, for each site and for `ALL`, by what each class is decided and calibrated there."""
    sites = {site: {label: _point(decisions, site, label) for label in labels} for site in decisions.sites}
    pooled = {label: _point(decisions, ALL, label) for label in labels}
    return {"settings": asdict(decisions.settings), "sites": {ALL: pooled} | sites}


def _point(decisions: Decisions, site: str, label: str) -> dict[str, Any]:
    found, rule = decisions.of(site, label), decisions.settings.rule
    line = found.fitted.calibration if found.fitted else None
    point: dict[str, Any] = {"calibration": asdict(line) if line else None}
    for whose, fitted in ((site, found.own), ("all sites", found.pooled)):
        if fitted and rule in fitted.thresholds:
            return point | {"threshold": fitted.thresholds[rule], "of": whose}
    return point | {"threshold": None, "of": ""}


def _metadata(model: Model, facts: dict[str, Any], licence: str, digest: str) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"job {facts.get('job')}, round {facts.get('round')}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {name: version(name) for name in ("pillow", "pydicom")},
        "name": f"Suture {facts.get('job')}",
        "task": "Image classification",
        "description": f"{len(model.labels)} classes; trained by Suture {facts.get('suture')}.",
        "authors": "not stated",
        "copyright": "not stated",
        "license": licence,
        "intended_use": NOT_CLINICAL,
        "references": [],
        "weights_sha256": digest,
        "network_data_format": _data_format(model),
    }


def _data_format(model: Model) -> dict[str, Any]:
    classes = {str(row): label for row, label in enumerate(model.labels)}
    size, channels = model.prepare.size, 3 if model.prepare.color else 1
    colours = ("red", "green", "blue") if model.prepare.color else ("gray",)
    return {
        "inputs": {
            "image": {
                "type": "image",
                "format": "RGB" if model.prepare.color else "magnitude",
                **({"modality": ", ".join(model.spec.modalities)} if model.spec.modalities else {}),
                "num_channels": channels,
                "spatial_shape": [size, size],
                "dtype": "float32",
                "value_range": [0, 255],
                "is_patch_data": False,
                "channel_def": {str(row): colour for row, colour in enumerate(colours)},
            }
        },
        "outputs": {
            "pred": {
                "type": "probabilities",
                "format": "classes",
                "num_channels": len(classes),
                "spatial_shape": [],
                "dtype": "float32",
                "value_range": [0, 1],
                "is_patch_data": False,
                "channel_def": classes,
            }
        },
    }


def _inference(model: Model, decisions: Decisions | None) -> dict[str, Any]:
    script = "scripts.inference"
    return {
        "imports": [f"$import {script} as inference"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_file": "$@bundle_root + '/predictions.csv'",
        "site": None if decisions is None else ALL,
        "bits": 16,
        "device": "cpu",
        "labels": monai(model.labels),
        "files": "$inference.find_images(@dataset_dir)",
        "network_def": {
            "_target_": f"{script}.Network",
            "path": "$@bundle_root + '/models/model.pt2'",
        },
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": f"{script}.ReadImage",
            "size": model.prepare.size,
            "color": model.prepare.color,
            "bits": "@bits",
            **({"modalities": monai(model.spec.modalities)} if model.spec.modalities else {}),
        },
        "dataset": {"_target_": "Dataset", "data": "@files", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 32},
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": f"{script}.Decide",
            "labels": "@labels",
            "path": "$@bundle_root + '/configs/operating_points.json'",
            "site": "@site",
        },
        "run": ["$inference.predict(@files, @dataloader, @network, @inferer, @postprocessing, @output_file)"],
    }


def _readme(model: Model, facts: dict[str, Any], decisions: Decisions | None, digest: str) -> str:
    return Template(_file("README.md")).substitute(
        title=markdown(f"Suture {facts.get('job')}"),
        kind="colour" if model.prepare.color else "gray",
        count=len(model.labels),
        suture=markdown(facts.get("suture")),
        job=markdown(facts.get("job")),
        round=markdown(facts.get("round")),
        digest=digest,
        size=model.prepare.size,
        decides=_decides(decisions),
        kinds=_kinds(model.spec.modalities),
        classes="\n".join(f"- {markdown(label)}: {_validated(decisions, label)}" for label in model.labels),
    )


def _kinds(modalities: tuple[str, ...]) -> str:
    if not modalities:
        return "it does not detect\n  images of the wrong part of the body or of the wrong modality."
    return (
        "it does not detect\n  images of the wrong part of the body. A DICOM image of another modality "
        f"than {', '.join(map(markdown, modalities))}\n  ends the run with an error; files of other "
        "formats do not state theirs."
    )


def _decides(decisions: Decisions | None) -> str:
    if decisions is None:
        return "It has no operating points: it outputs probabilities only, no decisions."
    sites = ", ".join(map(markdown, (ALL, *decisions.sites)))
    return (
        f"It decides by the thresholds of the rule {decisions.settings.rule!r} in "
        f"configs/operating_points.json. Choose the site with `--site`: {sites}."
    )


def _validated(decisions: Decisions | None, label: str) -> str:
    if decisions is None:
        return "not validated"
    rule = decisions.settings.rule
    own = [
        site for site, found in decisions.sites.items() if label in found and rule in found[label].thresholds
    ]
    pooled = label in decisions.pooled and rule in decisions.pooled[label].thresholds
    return ", ".join([*map(markdown, own), *(["all sites together"] if pooled else [])]) or "not validated"


def _file(name: str) -> str:
    return (files("suture.export") / "bundle_files" / name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    atomic_write(path, text.encode())
