"""A party's policy: what it permits, how it is made strict, what it leaves open, where jobs are stored."""

from __future__ import annotations

import importlib
import json
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.security.security import FLAuthorizer
from startup_kits import CLASSES as FLARES
from startup_kits import LAUNCHER, MakeKit

from suture.core.errors import ConfigError, RejectedUpdate
from suture.flare.executor import EgressFilter
from suture.flare.kit import Kit, read_kit, read_kit_json
from suture.flare.scopes import check_scope
from suture_admin.kit_checks import check_policy
from suture_admin.kits import policy_file
from suture_admin.policy import (
    CLASSES,
    COMPONENTS,
    FILTER,
    PRIVACY,
    VALIDATOR,
    allow_classes,
    allow_packages,
    bypasses,
    check_entries,
    code_rights,
    is_allowed,
    keep_logs,
    make_strict,
    missing_classes,
    permits,
    plain_json,
    readable_by_others,
    refuse_code,
    storages,
    survive,
    survives,
)
from world import refused, suture

PUBLISHED = Path(__file__).resolve().parents[2] / "poc_workspace" / "policy"
BOTH = pytest.mark.parametrize("role", ["server", "site"])


@pytest.fixture
def site(make_kit: MakeKit) -> Kit:
    return read_kit(make_kit())


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**read_kit_json(path), **values}))


def twice(write: Callable[[], Path | list[Path]]) -> list[Path]:
    """What a change has written, the same when it is made again."""

    def written() -> list[Path]:
        found = write()
        return [found] if isinstance(found, Path) else found

    before = {path: path.read_bytes() for path in written()}
    assert {path: path.read_bytes() for path in written()} == before
    return list(before)


@BOTH
def test_exactly_the_classes_of_a_job_and_packages_are_added_once(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role))
    assert missing_classes(kit) == CLASSES[kit.role]
    (path,) = twice(lambda: allow_classes(kit))
    assert path.name == "resources.json"
    assert json.loads(path.read_text())["class_allow_list"] == [*CLASSES[kit.role], *FLARES]
    assert missing_classes(kit) == ()
    twice(lambda: allow_packages(kit, ["near.", "other.method.Far", "near."]))
    allow_packages(kit, ["near.method.Near"])
    listed = json.loads(path.read_text())
    assert listed["class_allow_list"] == ["near.", "other.method.Far", *CLASSES[kit.role], *FLARES]
    assert listed["allow_log_streaming"] is True


def test_the_list_names_what_a_job_names() -> None:
    """A renamed class would make every policy in use wrong."""
    components = [component["path"] for component in (*COMPONENTS.values(), VALIDATOR)]
    for name in (*CLASSES["server"], *CLASSES["site"], *components):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("entry", ["near", "*", "", ".", "near..", " near.", "near.\n", "a-b.", "1.c"])
def test_what_flare_would_not_take_is_refused_before_anything_is_written(entry: str, site: Kit) -> None:
    with refused(repr(entry), by=ConfigError):
        suture("policy", site.folder, "--allow", "good.", "--allow", entry)
    assert not list((site.folder / "local").glob("*.json"))


@given(st.text(alphabet="aZ_1.- *", max_size=8))
def test_an_entry_that_can_be_added_is_one_that_flare_takes(entry: str) -> None:
    try:
        check_entries([entry])
    except ConfigError:
        return
    assert ComponentPathAuthorizer._normalize_allow_list([entry]) == [entry]


@given(st.lists(st.sampled_from(["suture.", "suture.flare.", "nvflare.", "a.b", "*", "suture.flare.exec"])))
def test_our_rule_is_flares(entries: list[str]) -> None:
    name = "suture.flare.executor.EgressFilter"
    listed = ComponentPathAuthorizer._normalize_allow_list(entries)
    theirs = "*" in listed or any(ComponentPathAuthorizer._path_matches_prefix(name, one) for one in listed)
    assert is_allowed(name, entries) == theirs
    assert not is_allowed(name, ["suture.flare.exec"])


def test_refusing_code_leaves_every_other_right_in_flares_own_judgement(site: Kit) -> None:
    assert code_rights(site) == {"project_admin": "any", "lead": "any", "member": "none"}
    content = json.loads(refuse_code(site).read_text())
    assert set(code_rights(site).values()) == {"none"}
    assert content["permissions"]["lead"] == {"submit_job": "any", "view": "any", "byoc": "none"}
    boss = Person("boss", "trial", "project_admin")
    authorizer = FLAuthorizer("trial", {"format_version": "1.0", **content})
    for right, yes in (("byoc", False), ("submit_job", True), ("get_job_log", True)):
        asked = AuthzContext(user=boss, submitter=boss, right=right)
        assert bool(authorizer.authorize(asked)[0]) is yes


def test_logs_are_kept(site: Kit) -> None:
    """FLARE asks this of a site before it streams a log, and before a job's own streamer does."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_ROOT, str(site.folder))
    fl_ctx.put(ReservedKey.IDENTITY_NAME, site.name, private=False, sticky=False)
    allow_classes(site)
    assert is_log_streaming_allowed(fl_ctx)
    keep_logs(site)
    assert not is_log_streaming_allowed(fl_ctx)


@BOTH
def test_a_party_survives_by_one_component_and_keeps_the_others(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role))
    assert not survives(kit)
    (path,) = twice(lambda: survive(kit))
    components = {c["id"]: c["path"] for c in json.loads(path.read_text())["components"]}
    assert components["job_scheduler"] == "nvflare.DefaultJobScheduler"
    own = COMPONENTS["site"] if role == "site" else LAUNCHER
    assert components["process_launcher"] == own["path"]
    assert ("stale_jobs" in components) == (role == "server")
    assert survives(kit)


def test_a_site_asks_again_after_a_minute_unless_its_file_says_when(site: Kit) -> None:
    path = survive(site)
    assert read_kit_json(path)["client"]["communication_timeout"] == 60
    change(path, client={"communication_timeout": 900})
    survive(site)
    assert read_kit_json(path)["client"]["communication_timeout"] == 900
    change(path, client={})
    assert not survives(site)


def test_a_broken_policy_names_its_file_and_is_not_written(make_kit: MakeKit, site: Kit) -> None:
    local = site.folder / "local"
    for name, text, write in (
        ("authorization.json", '{"permissions": 3}', refuse_code),
        ("resources.json", "{}", survive),
        ("resources.json", None, allow_classes),
    ):
        if text is None:
            (local / name).unlink()
            (local / "resources.json.default").unlink()
        else:
            (local / name).write_text(text)
        with refused(name, by=ConfigError):
            write(site)
        assert (local / name).read_text() == text if text else not (local / name).exists()
    with refused("administrator", by=ConfigError):
        make_strict(read_kit(make_kit("admin", "admin")))


@BOTH
def test_a_strict_party_leaves_no_way_round(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "server"))
    assert len(list(bypasses(kit))) == (4 if role == "site" else 3)
    written = twice(lambda: make_strict(kit))
    names = {"resources.json", "authorization.json"} | ({"privacy.json"} if role == "site" else set())
    assert {path.name for path in written} == names
    assert not list(bypasses(kit))
    resources = read_kit_json(kit.folder / "local" / "resources.json")
    assert resources["class_allow_list"] == list(CLASSES[kit.role])
    assert resources["app_validator"]["path"] == "suture.flare.compat.plain_json.PlainJson"
    assert resources["components"], "FLARE's own settings stay"
    assert set(code_rights(kit).values()) == {"none"}
    if role == "site":
        assert resources["allow_log_streaming"] is False
        rights = read_kit_json(kit.folder / "local" / "authorization.json")["permissions"]["project_admin"]
        assert rights["operate"] == rights["shell_commands"] == "o:site"
        assert read_kit_json(PUBLISHED / "privacy.json") == PRIVACY
        published = read_kit_json(PUBLISHED / "resources.json")
        assert published == {key: resources[key] for key in published}
    change(written[0], app_validator={"path": "own.Validator"})
    before = written[0].read_text()
    assert ["fetch addresses" in way for way in bypasses(kit)] == [True]
    with refused("app_validator", by=ConfigError):
        make_strict(kit)
    assert written[0].read_text() == before


@BOTH
def test_the_command_is_strict_unless_it_is_told_to_be_loose(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "server"))
    for options, listed in (["--loose"], [*CLASSES[kit.role], *FLARES]), ([], [*CLASSES[kit.role]]):
        suture("policy", kit.folder, *options, "--allow", "near.", "--allow", "far.method.Far")
        allowed = read_kit_json(kit.folder / "local" / "resources.json")["class_allow_list"]
        assert allowed == ["near.", "far.method.Far", *listed]
        ways = " ".join(bypasses(kit))
        assert ("may bring code" in ways) is bool(options)
        assert "fetch addresses" not in ways
        assert missing_classes(kit) == ()
        assert survives(kit)


def test_what_an_administrator_has_allowed_stays_so_and_lenient_policies_leave_ways(site: Kit) -> None:
    listed = ["*", "suture.", "nvflare.", "nvflare.app_common.Something", "near.", "near.method.Near"]
    change(policy_file(site, "resources"), class_allow_list=listed)
    for step in (allow_classes, plain_json, refuse_code):
        step(site)
    assert ["more class" in way or "privacy.json" in way for way in bypasses(site)] == [True, True]
    make_strict(site)
    strict = read_kit_json(policy_file(site, "resources"))["class_allow_list"]
    assert strict == ["near.", "near.method.Near", *CLASSES["site"]]


def scopes(*names: str, default: str | None = None, **filtered: Any) -> dict[str, Any]:
    """Scopes, of which the first has the filter where it says how."""
    made: list[dict[str, Any]] = [{"name": name} for name in names]
    if filtered:
        made[0]["task_result_filters"] = [{"path": FILTER, **filtered}]
    return {"scopes": made} | ({"default_scope": default} if default else {})


BESIDE = PRIVACY["scopes"] + [{"name": "own"}]


@pytest.mark.parametrize(
    ("name", "content", "ways"),
    [
        ("resources", {"class_allow_list": [*CLASSES["site"], "nvflare.", "a.b"]}, ["2 more classes"]),
        ("resources", {"class_allow_list": ["*"]}, ["1 more class"]),
        ("resources", {"class_allow_list": None}, ["by default"]),  # FLARE's own list
        ("resources", {"class_list_enforcement_mode": "warn"}, ["not enforced"]),
        ("privacy", {"default_scope": None}, ["no default scope"]),
        ("privacy", {"scopes": BESIDE}, []),  # of other jobs: the executor refuses one of Suture's there
        ("privacy", scopes("a", default="a", direction="out"), []),
        ("privacy", scopes("a", default="a", disabled=True), ["disabled"]),
        ("privacy", scopes("a", default="a", direction="in"), ["filter"]),
    ],
)
def test_what_a_policy_leaves_open(name: str, content: dict[str, Any], ways: list[str], site: Kit) -> None:
    make_strict(site)
    path = site.folder / "local" / f"{name}.json"
    changed = read_kit_json(path) | content
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    found = list(bypasses(site))
    assert [way in text for way, text in zip(ways, found, strict=True)] == [True] * len(ways)


@pytest.mark.parametrize(
    ("before", "default", "names"),
    [
        (scopes("own", default="own"), "own", ["suture", "own"]),
        (scopes("own"), "suture", ["suture", "own"]),
        (scopes("own", default="gone"), "suture", ["suture", "own"]),
        (scopes("suture", default="suture"), "suture", ["suture"]),
        (scopes("a", "b", direction="out"), "a", ["a", "b"]),
    ],
)
def test_scopes_of_the_site_itself_stay_beside_the_filtered_one(
    before: dict[str, Any], default: str, names: list[str], site: Kit
) -> None:
    path = site.folder / "local" / "privacy.json"
    path.write_text(json.dumps(before))
    twice(lambda: make_strict(site))
    privacy = read_kit_json(path)
    assert privacy["default_scope"] == default
    assert [scope["name"] for scope in privacy["scopes"]] == names
    assert not list(bypasses(site))


@pytest.mark.parametrize(
    ("privacy", "scope", "no"),
    [
        (None, "", False),
        (PRIVACY, "", False),
        (PRIVACY, "suture", False),
        ({"scopes": BESIDE, "default_scope": "own"}, "suture", False),
        ({"scopes": BESIDE, "default_scope": "own"}, "", True),
        ({"scopes": BESIDE, "default_scope": "suture"}, "own", True),
        (scopes("own", default="own"), "", False),  # this site never filters
    ],
)
def test_a_job_of_suture_does_not_pass_the_filter_in_another_scope(
    privacy: dict[str, Any] | None, scope: str, no: bool, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    if privacy:
        (tmp_path / "local" / "privacy.json").write_text(json.dumps(privacy))
    with refused("harbor", "flare.scope=", "suture", by=ConfigError) if no else nullcontext():
        check_scope("harbor", tmp_path, scope)


def test_a_strict_site_refuses_a_job_of_flares_own_workflows(site: Kit) -> None:
    """As the README of examples/flare-fedavg says: for its code, for its classes, and for its messages."""
    make_strict(site)
    for name in (
        "suture.flare.components.DeclaredResultFilter",
        "nvflare.app_common.executors.ClientAPIExecutor",
    ):
        assert not permits(site, name)
    result = DXO(DataKind.WEIGHTS, {"head.bias": torch.ones(1)}, {"labels": ["Mass"]}).to_shareable()
    with pytest.raises(RejectedUpdate):
        EgressFilter().process(result, FLContext())


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
    jobs = {"id": "job_manager", "path": "nvflare.Jobs", "args": {"uri_root": str(public / "jobs-storage")}}
    storage = {"path": "nvflare.Storage", "args": {"root_dir": str(public / "snapshots"), "uri_root": "/"}}
    persistor = {"path": "nvflare.Persistor", "args": {"storage": storage}}
    change(path, components=[*read_kit_json(path)["components"], jobs], snapshot_persistor=persistor)
    return kit


def warned(kit: Kit) -> set[str]:
    return {f.about for f in check_policy(kit) if f.about.startswith("storage") and f.status == "warning"}


@pytest.mark.parametrize("words", [[], ["--loose"]])
def test_a_storage_that_everybody_can_read_is_found_and_moved(
    words: list[str], server: Kit, public: Path, site: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warned(server) == {"storage of jobs", "storage of snapshots"}
    (public / "jobs-storage").mkdir(mode=0o755)
    assert "storage of jobs" in warned(server)
    suture("policy", server.folder, *words)
    own = server.folder / "storage"
    assert storages(server) == {"jobs": own / "jobs", "snapshots": own / "snapshots"}
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert not warned(server)
    persistor = read_kit_json(policy_file(server, "resources"))["snapshot_persistor"]
    assert persistor["args"]["storage"]["args"] == {"root_dir": str(own / "snapshots"), "uri_root": "/"}
    assert storages(site) == {}
    monkeypatch.setenv("NVFL_JOB_STORE_ROOT", str(public))
    assert warned(server) == {"storage of jobs"}
    assert not warned(site)


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


def test_who_can_enter_a_folder(public: Path) -> None:
    (folder := public / "inner").mkdir()
    for mode, readable in ((0o755, True), (0o711, True), (0o750, False), (0o700, False)):
        folder.chmod(mode)
        assert readable_by_others(folder) is readable
        assert readable_by_others(folder / "later") is readable
