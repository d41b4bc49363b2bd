"""The page's commands for certificates, run as they stand; no process of FLARE is started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256

from suture.flare.kit import CERTIFICATES, certificate, read_kit
from suture_admin.kit_checks import check_certificates

pytestmark = pytest.mark.complete


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
HOSTS, SECTION = (
    PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    for title in ("Set up real hosts", "Administer a network")
)
PROVISIONED = SECTION.partition("**Renew after")[2]
RENEW = re.findall(r"^ {4}(.+?)(?: {2,}#.*)?$", PROVISIONED, re.MULTILINE)

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


def test_a_kit_is_made_of_a_key_that_stays(run: Run, tmp_path: Path) -> None:
    profile, harbor = re.findall(r"^ +({name: .+})$", HOSTS, re.MULTILINE)
    Path("profile.yml").write_text(profile)
    Path("harbor.yml").write_text(harbor)
    commands = re.findall(r"^ +(nvflare (?:cert|package) .+?)(?: {2,}#.*)?$", HOSTS, re.MULTILINE)
    init, request, approve, package = commands
    run(init, request)
    Path("harbor", "harbor.request.zip").rename("harbor.request.zip")
    run(approve)
    with pytest.raises(AssertionError, match=r"(?i)fingerprint"):
        run(package.replace("SHA256:...", "SHA256:" + "0" * 64))
    run(package.replace("SHA256:...", certificate(Path("ca", "rootCA.pem")).fingerprint(SHA256()).hex()))
    kit = read_kit(tmp_path / "workspace" / "suture" / "prod_00" / "harbor")
    assert [f.status for f in check_certificates(kit)] == ["ok"] * 3
    assert (kit.folder / "startup" / "client.key").read_bytes() == Path("harbor", "harbor.key").read_bytes()
    for sent in ("harbor.request.zip", "harbor.signed.zip"):
        assert b"PRIVATE KEY" not in b"".join(
            map(zipfile.ZipFile(sent).read, zipfile.ZipFile(sent).namelist())
        )


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
    assert "`provision -w federation2`" in SECTION
    run(provision, provision.replace("-w federation", "-w federation2"))
    assert root_of(tmp_path / "federation", 0) != root_of(tmp_path / "federation2", 0)
