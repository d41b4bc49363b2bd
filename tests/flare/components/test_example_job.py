"""The job of examples/flare-fedavg: what it exports, what it refuses, and that it learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flare_example import EXAMPLE, job_py
from suture.models.checkpoints import read_checkpoint

SITES = {"site-1": {"Mass", "Nodule"}, "site-2": {"Hernia", "Nodule"}, "site-3": {"Edema", "Mass", "Nodule"}}


def test_each_site_is_told_its_own_classes_only(tmp_path: Path) -> None:
    job_py("export", "--to", tmp_path)
    assert not list(tmp_path.rglob("suture")), "the job carries a copy of the installed package"
    for site, own in SITES.items():
        files = [path for path in (tmp_path / "by-class" / f"app_{site}").rglob("*") if path.is_file()]
        assert {"client.py", "data.py", "net.py"} <= {path.name for path in files}
        text = "".join(path.read_text() for path in files)
        assert set(re.findall("Edema|Hernia|Mass|Nodule|Pneumonia", text)) == own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--client", "nope"], "--client nope: .* has no net.py or client.py; try with_monai"),
        (["prod"], "prod needs --kit: the folder of an administrator's kit"),
        (["prod", "--kit", "nope"], "prod needs --kit"),
        (["--rounds", "1"], "--rounds: give 2 or more"),
        (["--method", "nope"], "unknown method 'nope'"),
        (["--method", "individual"], "choose a federated method"),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        job_py(*words)
    assert caught.value.code == 2
    assert re.search(f"\njob.py: error: .*{says}", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.complete
def test_it_learns_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "job.py", "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    for site, own in SITES.items():
        assert f"{site} takes part with {len(own)} classes" in said
    best = [float(value) for value in re.findall(r"new best validation metric at round \d: (\S+)", said)]
    assert len(best) >= 2
    assert best[-1] > 0.8 > best[0]
    (path,) = tmp_path.rglob("FL_global_model.pt")
    model: Any = read_checkpoint(path)["model"]
    assert model["head.weight"].shape == (5, 16)
