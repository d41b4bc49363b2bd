"""A saved model as a MONAI bundle: a folder that MONAI runs without Suture.

Source: the MONAI Bundle specification, https://docs.monai.io/en/stable/mb_specification.html.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError
from suture.core.escaping import markdown, monai
from suture.core.files import atomic_write, make_folder, read_json, temporary_beside, write_json, writing
from suture.models.saved import weights_digest
from suture_results.decided_predictions import ALL, decisions_of
from suture_results.model_export.program import write_torch
from suture_results.prediction import Model, open_model

if TYPE_CHECKING:
    from suture.protocol.decisions import Decisions

NO_LICENCE = "No licence is stated for this model. Ask its makers before you use, change or pass it on."


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
            for name in ("configs", "docs", "scripts"):
                make_folder(apart / name)
            write_torch(model, apart / "models")
            write_json(apart / "configs" / "metadata.json", monai(_metadata(model, facts, licence, digest)))
            write_json(apart / "configs" / "inference.json", _inference(model, decisions))
            if decisions is not None:
                points = operating_points(model.labels, decisions)
                write_json(apart / "configs" / "operating_points.json", points)
            _write(apart / "scripts" / "__init__.py", "")
            _write(apart / "scripts" / "inference.py", _file("inference.py"))
            _write(apart / "docs" / "README.md", _readme(model, facts, decisions, digest))
            _write(apart / "LICENSE", licence + "\n")
            if folder.exists():
                for part in apart.iterdir():
                    os.replace(part, folder / part.name)
            else:
                os.replace(apart, folder)
    finally:
        shutil.rmtree(apart, ignore_errors=True)
    return folder


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
    """Return bundle_files/metadata.json with what is known of the model."""
    color, size = model.prepare.color, model.prepare.size
    metadata: dict[str, Any] = json.loads(_file("metadata.json"))
    metadata |= {
        "changelog": {metadata["version"]: f"job {facts.get('job')}, round {facts.get('round')}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {name: version(name) for name in ("pillow", "pydicom")},
        "name": f"Suture {facts.get('job')}",
        "description": f"{len(model.labels)} classes; trained by Suture {facts.get('suture')}.",
        "license": licence,
        "weights_sha256": digest,
    }
    shapes = metadata["network_data_format"]
    shapes["inputs"]["image"] |= {
        "format": "RGB" if color else "magnitude",
        "num_channels": 3 if color else 1,
        "spatial_shape": [size, size],
        "channel_def": {"0": "red", "1": "green", "2": "blue"} if color else {"0": "gray"},
        **({"modality": ", ".join(model.spec.modalities)} if model.spec.modalities else {}),
    }
    classes = {str(row): label for row, label in enumerate(model.labels)}
    shapes["outputs"]["pred"] |= {"num_channels": len(classes), "channel_def": classes}
    return metadata


def _inference(model: Model, decisions: Decisions | None) -> dict[str, Any]:
    """Return bundle_files/inference.json with what is known of the model."""
    inference: dict[str, Any] = json.loads(_file("inference.json"))
    inference |= {"site": None if decisions is None else ALL, "labels": monai(model.labels)}
    inference["preprocessing"] |= {"size": model.prepare.size, "color": model.prepare.color}
    if model.spec.modalities:
        inference["preprocessing"]["modalities"] = monai(model.spec.modalities)
    return inference


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
        classes="\n".join(f"- {markdown(label)}: {_validate(decisions, label)}" for label in model.labels),
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


def _validate(decisions: Decisions | None, label: str) -> str:
    if decisions is None:
        return "not validated"
    rule = decisions.settings.rule
    own = [
        site for site, found in decisions.sites.items() if label in found and rule in found[label].thresholds
    ]
    pooled = label in decisions.pooled and rule in decisions.pooled[label].thresholds
    return ", ".join([*map(markdown, own), *(["all sites together"] if pooled else [])]) or "not validated"


def _file(name: str) -> str:
    return (files("suture_results.model_export") / "bundle_files" / name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    atomic_write(path, text.encode())
