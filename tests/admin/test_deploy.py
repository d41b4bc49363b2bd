"""A party's policy and `nvflare deploy prepare`, in either order, by FLARE's own code."""

from __future__ import annotations

import io
import json
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import get_job_launcher
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer
from nvflare.tool.deploy.deploy_commands import prepare_deployment
from startup_kits import MakeKit

from suture.flare.compat.deployed import launchers, mounted_at
from suture.flare.kit import Kit, read_kit, read_kit_json
from suture_admin.doctor import examine
from suture_admin.kit_checks import Finding, check_policy
from suture_admin.kits import components_of, policy_file
from suture_admin.policy import CLASSES, VALIDATOR, bypasses, storages, survives
from world import suture

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "registry.example.org/suture:1"
RUNTIMES: dict[str, Any] = {
    "docker": {"runtime": "docker", "parent": {"docker_image": IMAGE}},
    "k8s": {"runtime": "k8s", "parent": {"docker_image": IMAGE, "workspace_mount_path": "/kit"}},
    "slurm": {
        **yaml.safe_load((ROOT / "examples" / "deploy" / "slurm.yaml").read_text()),
        "parent": None,  # which a server may not have
    },
}
STUDIES: dict[str, Any] = {"default": {"container": {"image": IMAGE}}}


def deploy(folder: Path, runtime: str) -> Path:
    """The kit as `nvflare deploy prepare` makes it."""
    config = folder.parent / f"{runtime}.yaml"
    config.write_text(json.dumps(RUNTIMES[runtime]))  # JSON is YAML
    out = folder.parent / f"{folder.name}-{runtime}"
    own = {"format_version": 2, "studies": STUDIES}
    (folder / "local" / "study_runtime.yaml").write_text(json.dumps(own))
    prepare_deployment(Namespace(kit=str(folder), output=str(out), config=str(config)))
    return out


def policy(folder: Path, *options: str) -> Path:
    """The kit after `suture policy`."""
    suture("policy", folder, *options)
    return folder


def prepared(folder: Path, runtime: str, first: str) -> Path:
    """The kit after both, in one order or the other."""
    return deploy(policy(folder), runtime) if first == "policy" else policy(deploy(folder, runtime))


class Engine:
    """As much of FLARE's engine as its check of the launchers uses."""

    def __init__(self, components: list[Any]) -> None:
        self._components = components

    @contextmanager
    def new_context(self) -> Iterator[FLContext]:
        yield FLContext()

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        assert event == EventType.BEFORE_JOB_LAUNCH
        for component in self._components:
            component.handle_event(event, fl_ctx)


def flares_launcher(kit: Kit) -> str:
    """The class that FLARE's own check chooses; it fails unless there is exactly one."""
    made = []
    for entry in components_of(policy_file(kit, "resources")):
        kind = locate(entry["path"])
        if callable(kind) and "launcher" in entry["path"]:
            made.append(kind(**entry["args"]))
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, Engine(made), private=True, sticky=False)
    return type(get_job_launcher({}, fl_ctx)).__name__


NAMES = {
    "docker": "ClientDockerJobLauncher",
    "k8s": "ClientK8sJobLauncher",
    "slurm": "ClientSlurmJobLauncher",
}


BOTH_ORDERS = pytest.mark.parametrize("first", ["policy", "deploy"])
EACH_RUNTIME = pytest.mark.parametrize("runtime", RUNTIMES)


def problems(kit: Kit) -> list[Finding]:
    return [found for found in check_policy(kit) if found.status != "ok"]


@EACH_RUNTIME
@BOTH_ORDERS
def test_a_site_has_one_launcher_and_the_strict_policy_in_either_order(
    first: str, runtime: str, make_kit: MakeKit
) -> None:
    done = prepared(make_kit(), runtime, first)
    kit = read_kit(done)
    assert flares_launcher(kit) == NAMES[runtime]
    resources = read_kit_json(policy_file(kit, "resources"))
    assert resources["class_allow_list"] == list(CLASSES["site"])
    assert resources["app_validator"] == VALIDATOR
    assert resources["allow_log_streaming"] is False
    assert not list(bypasses(kit))
    assert survives(kit)
    assert not problems(kit)
    found = {f.about: f for f in check_policy(kit)}
    assert NAMES[runtime] in found["launcher"].text
    assert "suture resume" in found["killed processes"].text
    assert read_kit_json(policy_file(read_kit(policy(done)), "resources")) == resources


@EACH_RUNTIME
@BOTH_ORDERS
def test_a_server_keeps_its_policy_and_stores_in_its_own_kit(
    first: str, runtime: str, make_kit: MakeKit
) -> None:
    folder = make_kit("server", "server")
    path = folder / "local" / "resources.json.default"
    content = read_kit_json(path)
    manager = {"id": "job_manager", "path": "nvflare.SimpleJobDefManager", "args": {"uri_root": "/tmp/jobs"}}
    path.write_text(json.dumps({**content, "components": [*content["components"], manager]}))
    done = prepared(folder, runtime, first)
    done.chmod(0o700)
    kit = read_kit(done)
    components = components_of(policy_file(kit, "resources"))
    assert [c["id"] for c in components].count("stale_jobs") == 1
    assert not list(bypasses(kit))
    # Where the server runs, its kit lies at `mounted_at`; a folder of this machine would be lost there.
    inside = mounted_at(components) or done
    (manager,) = (c for c in components if c["id"] == "job_manager")
    assert Path(manager["args"]["uri_root"]).is_relative_to(inside)
    assert storages(kit)["jobs"].is_relative_to(done)
    assert not problems(kit)


CHOSEN = {
    "docker": {"image": "theirs", "python_path": "/theirs", "entrypoint": "theirs"},
    "k8s": {"image": "theirs", "python_path": "/theirs"},
    "slurm": {"image": "/theirs", "additional_node_command": ["theirs"]},
}


@EACH_RUNTIME
@pytest.mark.parametrize("role", ["server", "site"])
def test_no_job_chooses_what_a_strict_party_runs(
    role: str, runtime: str, make_kit: MakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its container gets the private key and the data. FLARE asks for the right to bring code for each."""
    name = "server" if role == "server" else "harbor"
    kit = read_kit(prepared(make_kit(role, name), runtime, "policy"))
    rights = {"format_version": "1.0", **read_kit_json(policy_file(kit, "authorization"))}
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("trial_org", rights))
    monkeypatch.setattr(AppAuthzService, "app_validator", None)
    monkeypatch.setattr(PrivacyService, "is_scope_allowed", lambda _: True)
    workspace, content = Workspace(str(kit.folder), name), io.BytesIO()
    zipfile.ZipFile(content, "w").close()
    submitter = {"submitter_name": "lead", "submitter_org": "trial_org", "submitter_role": "lead"}

    def refusal(key: str, site: str, spec: dict[str, Any]) -> str:
        meta = {**submitter, key: {site: {runtime: spec}}}
        return str(AppDeployer().deploy(workspace, "job", meta, "app", content.getvalue(), FLContext()) or "")

    assert refusal("launcher_spec", name, {"num_of_gpus": 1}) == ""
    for setting, value in CHOSEN[runtime].items():
        for key, site in (("launcher_spec", "default"), ("launcher_spec", name), ("resource_spec", name)):
            assert refusal(key, site, {setting: value}) == "BYOC not permitted"


@pytest.mark.parametrize("runtime", ["docker", "k8s"])
@pytest.mark.parametrize(
    ("studies", "status", "named"),
    [
        (STUDIES, "ok", IMAGE),
        ({}, "error", "default"),
        ({**STUDIES, "heart": {}}, "error", "heart"),
        ({"default": {"image": IMAGE}}, "error", "unknown key"),
    ],
)
def test_the_image_of_a_party_is_examined(
    studies: dict[str, Any], status: str, named: str, runtime: str, make_kit: MakeKit
) -> None:
    kit = read_kit(policy(deploy(make_kit(), runtime)))
    path = kit.folder / "local" / "study_runtime.yaml"
    path.write_text(json.dumps({"format_version": 2, "studies": studies}))
    (found,) = (f for f in check_policy(kit) if f.about == "image" or "study_runtime" in f.text)
    assert (found.status, named in found.text) == (status, True)


def test_loose_policies_merge_too(make_kit: MakeKit) -> None:
    kit = read_kit(deploy(policy(make_kit(), "--loose"), "docker"))
    assert set(CLASSES["site"]) < set(read_kit_json(policy_file(kit, "resources"))["class_allow_list"])
    assert flares_launcher(kit) == NAMES["docker"]
    assert [f.status for f in check_policy(kit) if f.about == "image"] == ["warning"]


def test_two_launchers_or_none_are_an_error_and_the_policy_leaves_one(make_kit: MakeKit) -> None:
    """With two, FLARE starts no job."""
    folder = deploy(make_kit(), "docker")
    content = read_kit_json(folder / "local" / "resources.json.default")
    own = {"id": "process_launcher", "path": "suture.flare.compat.launcher.TolerantLauncher", "args": {}}
    for launchers_of, named in (([*content["components"], own], NAMES["docker"]), ([], "no job starts")):
        components = {**content, "components": launchers_of}
        (folder / "local" / "resources.json").write_text(json.dumps(components))
        with pytest.raises(RuntimeError):
            flares_launcher(read_kit(folder))
        (found,) = (f for f in check_policy(read_kit(folder)) if f.about == "launcher")
        assert (found.status, named in found.text) == ("error", True)
        if launchers_of:
            policy(folder)
            assert flares_launcher(read_kit(folder)) == NAMES["docker"]


def test_classes_count_as_flare_counts_them_and_ids_where_a_class_is_not_here() -> None:
    own = {"id": "mine", "path": "suture.flare.compat.launcher.TolerantLauncher"}
    scheduler = "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler"
    absent = {"id": "k8s_launcher", "path": "only.in.the.image.Launcher"}
    others = [{"id": "process_launcher", "path": scheduler}, {"id": "x", "path": "nowhere.Class"}, {}]
    assert launchers([own, *others, absent]) == [own["path"], absent["path"]]


@EACH_RUNTIME
@pytest.mark.parametrize(
    ("state", "status"), [("/data/default/suture", "ok"), ("state", "error"), (None, "error")]
)
def test_a_state_that_ends_with_a_jobs_container_is_an_error(
    state: str | None, status: str, runtime: str, make_kit: MakeKit
) -> None:
    """FLARE gives a job's container an empty workspace, and read-only data sets below /data."""
    folder = policy(deploy(make_kit("server", "server"), runtime))
    if state:
        (folder / "local" / "suture.toml").write_text(f'[storage]\nstate = "{state}"\n')
    found = [f.status for f in examine(folder) if f.about == "containers"]
    assert found == ([] if runtime == "slurm" else [status])
