"""SCAFFOLD, a method of another package, under FLARE: its channels and settings cross as in the loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from suture.protocol.packing import load

STRANGER = Path(__file__).parents[1] / "strangers" / "scaffold.py"
PLAIN = ["method.local.optimiser=sgd", "method.local.momentum=0"]
SETTINGS = [
    *PLAIN,
    "method=scaffold",
    "method.server_lr=0.9",
    "rounds=2",
    "simulation.images=60",
    "simulation.held_out=60",
    "model.size=16",
]


@pytest.mark.flare
def test_channels_cross_and_are_kept_as_in_the_loop(tmp_path: Path) -> None:
    info = tmp_path / "installed" / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[suture.methods]\nscaffold = stranger_scaffold:Scaffold\n")
    (info.parent / "stranger_scaffold.py").write_text(STRANGER.read_text())
    path = os.pathsep.join([str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    for kind in ("local", "sim"):
        command = [sys.executable, "-m", "suture", "run", "demo", "--env", kind, *options]
        command += ["--out", str(tmp_path / "same")]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        assert done.returncode == 0, done.stderr
        (tmp_path / "same").rename(tmp_path / kind)
    one, two = (load(tmp_path / k / "state" / "round-000002.safetensors").tensors for k in ("local", "sim"))
    assert one.keys() == two.keys()
    control = [tensor for name, tensor in one.items() if name.startswith("channels/control/")]
    assert control
    assert all(bool(tensor.any()) for tensor in control)
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
    model = Path("model", "model.safetensors")
    assert (tmp_path / "sim" / model).read_bytes() == (tmp_path / "local" / model).read_bytes()
    method = json.loads((tmp_path / "sim" / "run.json").read_text())["method"]
    assert (method["name"], method["hyperparameters"]["server_lr"]) == ("scaffold", 0.9)
