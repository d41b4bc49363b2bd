"""Where a server keeps jobs with their results, and who can read it."""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from startup_kits import MakeKit
from typer.testing import CliRunner

from suture.cli import app
from suture.flare.kit import Kit, policy_file, read_kit, read_kit_json
from suture_admin.kit_checks import check_policy
from suture_admin.policy import readable_by_others, storages, survive


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user of the machine can read, as FLARE's default."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def server(make_kit: MakeKit, public: Path) -> Kit:
    """A server's kit with the storage that FLARE's provisioning writes."""
    kit = read_kit(make_kit("server", "server"))
    path = policy_file(kit, "resources")
    content = read_kit_json(path)
    jobs = {"id": "job_manager", "path": "nvflare.Jobs", "args": {"uri_root": str(public / "jobs-storage")}}
    storage = {"path": "nvflare.Storage", "args": {"root_dir": str(public / "snapshots"), "uri_root": "/"}}
    content["components"].append(jobs)
    content["snapshot_persistor"] = {"path": "nvflare.Persistor", "args": {"storage": storage}}
    path.write_text(json.dumps(content))
    return kit


def warned(kit: Kit) -> set[str]:
    return {f.about for f in check_policy(kit) if f.about.startswith("storage") and f.status == "warning"}


@pytest.mark.parametrize("words", [[], ["--loose"]])
def test_a_storage_that_everybody_can_read_is_found_and_moved(
    words: list[str], server: Kit, public: Path
) -> None:
    assert warned(server) == {"storage of jobs", "storage of snapshots"}
    (public / "jobs-storage").mkdir(mode=0o755)
    assert "storage of jobs" in warned(server)
    assert CliRunner().invoke(app, ["policy", str(server.folder), *words]).exit_code == 0
    own = server.folder / "storage"
    assert storages(server) == {"jobs": own / "jobs", "snapshots": own / "snapshots"}
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert not warned(server)
    arguments = read_kit_json(policy_file(server, "resources"))["snapshot_persistor"]["args"]["storage"][
        "args"
    ]
    assert arguments == {"root_dir": str(own / "snapshots"), "uri_root": "/"}


@pytest.mark.parametrize("shared", [False, True])
def test_a_private_storage_stays_unless_it_is_that_of_all_servers(
    shared: bool, server: Kit, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public.chmod(0o700)
    if shared:
        monkeypatch.setattr("suture_admin.policy.SHARED", public)
    before = storages(server)
    assert bool(warned(server)) == shared
    survive(server)
    assert (storages(server) != before) == shared
    assert not warned(server)
    assert (server.folder / "storage").exists() == shared


@pytest.mark.parametrize(("mode", "readable"), [(0o755, True), (0o711, True), (0o750, False), (0o700, False)])
def test_who_can_enter_a_folder(mode: int, readable: bool, public: Path) -> None:
    folder = public / "inner"
    folder.mkdir()
    folder.chmod(mode)
    assert readable_by_others(folder) is readable
    assert readable_by_others(folder / "later") is readable


def test_a_site_stores_no_jobs(make_kit: MakeKit) -> None:
    assert storages(read_kit(make_kit("site"))) == {}
