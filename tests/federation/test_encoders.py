"""An encoder of a folder, in a whole federation: only the server has the folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from suture.core.errors import ConfigError
from suture.execution.job import load_job
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture_results.model_export.explanation import explain
from suture_results.prediction import open_model

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=8))

JOB = """
rounds = 2
[model]
name = "hf:encoder"
size = 16
[method]
name = "surgical"
[simulation]
kind = "PhantomSites"
"""


def encoder(folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes, patch_size=8)).save_pretrained(folder)
    found = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3, "size": {"shortest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(found))
    return folder


@pytest.mark.complete
def test_a_federation_starts_from_the_folder_of_the_server_and_its_model_needs_none(
    tiny: Any, tmp_path: Path
) -> None:
    folder = encoder(tmp_path / "encoder")
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    plan = load_job(job).plan("run")
    assert (plan.model.name, plan.model.weights) == ("hf:dinov2", str(folder))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    federation = tiny(METHOD, model=plan.model, rounds=1)
    sites = replace(federation, plan=replace(federation.plan, model=replace(plan.model, weights="/nowhere")))
    server = federation.server()
    federate(server, Loop(sites.sites()))
    record = json.loads((server.record.folder / "run.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    assert record["pretrained"] == {"file": "encoder", "sha256": hashlib.sha256(weights).hexdigest()}
    values = {"model": "hf:dinov2", "pretrained": 32, "size": 16}
    assert record["notes"] == [{"code": "pretrained_size", "values": values}]
    folder.rename(tmp_path / "gone")
    model = open_model(server.record.folder / "model")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    frame = model.predict(tmp_path / "a.png")
    expected = model(torch.from_numpy(pixels)[None, None])
    assert np.abs(frame.to_numpy() - expected.numpy()).max() <= 1e-6
    with pytest.raises(ConfigError, match=r"Grad-CAM needs the feature maps .* hf:dinov2 is a transformer"):
        explain(model, pixels)
    assert explain(model, pixels, kind="occlusion").maps


def test_a_job_from_elsewhere_that_names_a_folder_of_a_site_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    encoder(tmp_path / "encoder")
    job.write_text(JOB)
    values = load_job(job).plan("run").to_dict()
    values["model"] |= {"name": f"hf:{tmp_path / 'encoder'}", "encoder_config": None}
    with pytest.raises(ConfigError, match=r"a job needs the encoder's configuration"):
        Plan.from_dict(values)
