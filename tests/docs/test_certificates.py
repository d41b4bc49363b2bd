"""The page's commands for certificates, run as they stand; no process of FLARE is started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from suture.flare.admin.kit import CERTIFICATES, certificate, read_kit

pytestmark = pytest.mark.complete


ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs" / "deployment.md").read_text().partition("## Certificates")[2].partition("\n## ")[0]
RENEW = re.findall(r"^ {4}(.+?)(?: {2,}#.*)?$", SECTION, re.MULTILINE)

Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a folder with the repository's project."""
    shutil.copytree(ROOT / "poc_workspace", tmp_path / "poc_workspace")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def run(*commands: str) -> None:
        for command in commands:
            done = subprocess.run(
                shlex.split(command), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
            )
            assert done.returncode == 0, done.stdout + done.stderr

    return run


def serials(folder: Path, generation: int) -> dict[str, int]:
    """The serial number of each party's certificate."""
    kits = map(read_kit, (folder / "suture" / f"prod_{generation:02d}").iterdir())
    return {k.name: certificate(k.folder / "startup" / CERTIFICATES[k.role]).serial_number for k in kits}


def root_of(folder: Path, generation: int) -> bytes:
    return (folder / "suture" / f"prod_{generation:02d}" / "harbor" / "startup" / "rootCA.pem").read_bytes()


def test_a_renewed_party_has_another_certificate_of_the_same_root(run: Run, tmp_path: Path) -> None:
    federation = tmp_path / "federation"
    assert len(RENEW) == 2
    remove, provision = RENEW
    run(provision.replace(" --force", ""), provision)
    assert serials(federation, 0) == serials(federation, 1), "the state repeats every certificate"
    run(remove, provision)
    old, new = serials(federation, 1), serials(federation, 2)
    assert old.keys() == new.keys()
    assert {name for name in old if old[name] != new[name]} == {"harbor"}
    assert root_of(federation, 0) == root_of(federation, 2)
    before = (federation / "suture" / "state" / "cert.json").read_bytes()
    with pytest.raises(AssertionError, match="KeyError: 'harbour'"):
        run(remove.replace(" harbor", " harbor harbour"))
    assert (federation / "suture" / "state" / "cert.json").read_bytes() == before


def test_a_new_folder_has_a_new_root(run: Run, tmp_path: Path) -> None:
    provision = RENEW[1]
    assert "`-w federation2`" in SECTION
    run(provision, provision.replace("-w federation", "-w federation2"))
    assert root_of(tmp_path / "federation", 0) != root_of(tmp_path / "federation2", 0)
