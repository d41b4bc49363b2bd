"""examples/flare-fedavg in FLARE's simulator and, by FLARE's own commands, in a POC; means by hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from own_poc import own_port, wait_until_joined
from suture.flare.admin.kit import kits_in
from suture.flare.admin.poc import parties, project_of, project_template, provision
from suture.flare.admin.processes import start, stop
from suture.models.checkpoints import read_checkpoint

pytestmark = pytest.mark.flare

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flare-fedavg"
VALUES = {"site-1": 1.0, "site-2": 2.0, "site-3": 6.0}
SCRIPT = f"""
import nvflare.client as flare
import sys

import torch

from suture.flare.client import receive, send

flare.init()
labels = sys.argv[1:]
value = {VALUES}[flare.get_site_name()]
while (received := receive(labels)) is not None:
    params = {{name: torch.full_like(tensor, value) for name, tensor in received.params.items()}}
    send(flare.FLModel(params=params), received.meta["labels"])
"""


def ran(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    return {name: torch.as_tensor(tensor) for name, tensor in model.items()}


def test_the_example_learns_in_the_simulator(tmp_path: Path) -> None:
    said = ran(sys.executable, EXAMPLE / "job.py", "--to", tmp_path / "workspace")
    for site, classes in (("site-1", 2), ("site-2", 2), ("site-3", 3)):
        assert f"{site} takes part with {classes} classes" in said
    best = [float(value) for value in re.findall(r"new best validation metric at round \d: (\S+)", said)]
    assert len(best) >= 2
    assert best[-1] > 0.8 > best[0]
    assert model_in(tmp_path)["head.weight"].shape == (5, 16)


def test_the_rows_are_the_means_by_hand_in_a_poc_by_flares_own_commands_and_prodenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, root = tmp_path / "script", tmp_path / "poc"
    script.mkdir()
    root.mkdir()
    shutil.copy(EXAMPLE / "net.py", script)
    (script / "client.py").write_text(SCRIPT)
    ran(sys.executable, EXAMPLE / "job.py", "export", "--client", script, "--rounds", "3", "--to", tmp_path)
    job = tmp_path / "by-class"
    assert not list(job.rglob("suture")), "the job carries a copy of the installed package"
    own = "".join(path.read_text() for path in (job / "app_site-1").rglob("*") if path.is_file())
    assert "Nodule" in own
    assert not re.findall("Edema|Hernia|Pneumonia", own), "a site is told the class of another one"

    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(root))
    project = root / "project.yml"
    project.write_text(yaml.safe_dump(project_of(project_template(), list(VALUES), own_port())))
    provision(project, root)
    kits = kits_in(root)
    server, sites = parties(kits)
    nvflare = Path(sys.executable).with_name("nvflare")
    lead = ("--startup-kit", next(kit.folder for kit in kits.values() if kit.role == "admin"))
    try:
        wait_until_joined(root, kits, start(root, (server, *sites.values())))
        said = ran(nvflare, "job", "submit", "-j", job, *lead)
        (number, *_) = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", said)
        ran(nvflare, "job", "wait", number, "--timeout", "300", *lead)
        ran(nvflare, "job", "download", number, "-o", tmp_path / "results", *lead)
        again = ("--client", script, "--rounds", "3", "--kit", lead[1])
        (fetched,) = re.findall(r"Results: (.+)", ran(sys.executable, EXAMPLE / "job.py", "prod", *again))
    finally:
        stop(root)
    for folder in (tmp_path / "results", Path(fetched)):
        model = model_in(folder)
        # Edema 6; Hernia 2; Mass (1 + 6) / 2; Nodule (1 + 2 + 6) / 3; nobody annotates Pneumonia
        assert model["head.weight"][:4, 0].tolist() == [6.0, 2.0, 3.5, 3.0]
        assert not bool((model["head.weight"][4] == model["head.weight"][4, 0]).all())
        assert bool((model["backbone.0.weight"] == 3.0).all())
