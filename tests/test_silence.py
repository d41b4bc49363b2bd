"""No library that Suture imports, or that one of these brings along, reports to its maker.

Each was read for it; lightning, monai, nvflare, opacus, peft, tensorboard and torch have nothing to report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from suture.core import NO_TELEMETRY

USE = """
import importlib.util, json, socket, sys
from pathlib import Path

asked = []
def refuse(*where, **_):
    asked.append(str(where[-2:]))
    raise OSError("no network")
socket.getaddrinfo = socket.gethostbyname = socket.socket.connect = socket.socket.connect_ex = refuse

from suture.core.labels import LabelSet
from suture_results.model_export.onnx import write_onnx
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from sentence_folder import sentence_folder

home = Path(sys.argv[1])
there = importlib.util.find_spec
labels, used = LabelSet(("Mass",)), {}
def built(name, **more):
    return build(ModelSpec(name, size=64, **more), labels, 1, pretrained=True)
if there("timm"):
    built("timm:resnet10t")
if there("transformers"):
    sentence_folder(home / "encoder")
    built(f"hf:{home / 'encoder'}")
    if there("peft"):
        built(f"hf:{home / 'encoder'}", train="adapters")
if there("monai"):
    built("monai:resnet10")
for name in ("lightning", "opacus", "tensorboard", "nvflare", "highdicom", "model_signing"):
    if there(name):
        __import__(name)
if there("onnxruntime"):
    save_model(built("cnn"), ModelSpec("cnn", size=64), home / "model", {})
    write_onnx(home / "model", home / "onnx")
if there("huggingface_hub"):
    from huggingface_hub import constants
    from huggingface_hub.utils import send_telemetry
    send_telemetry("suture")
    used["HF_HUB_DISABLE_TELEMETRY"] = constants.HF_HUB_DISABLE_TELEMETRY
print(json.dumps([asked, used]))
"""


@pytest.mark.complete
def test_no_library_reports_to_its_maker(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    plain = {name: value for name, value in os.environ.items() if name not in (*NO_TELEMETRY, "DO_NOT_TRACK")}
    own = {**dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home)), "MPLCONFIGDIR": str(work)}
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", USE, work],
        check=True,
        stdout=subprocess.PIPE,
        env={**plain, **own, "PYTHONPATH": path},
    )
    asked, used = json.loads(done.stdout.splitlines()[-1])
    assert not asked
    assert all(used.values())
    assert not [path for path in home.rglob("*") if path.is_file()]
