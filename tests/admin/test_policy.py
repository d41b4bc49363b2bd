"""What a party's policy permits, and how it is changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from startup_kits import CLASSES as FLARES
from startup_kits import LAUNCHER, MakeKit
from typer.testing import CliRunner

from suture.cli import app
from suture.core.errors import ConfigError
from suture.flare.kit import read_kit, read_kit_json
from suture_admin.policy import (
    CLASSES,
    COMPONENTS,
    VALIDATOR,
    allow_classes,
    allow_packages,
    bypasses,
    code_rights,
    is_allowed,
    keep_logs,
    missing_classes,
    refuse_code,
    survive,
    survives,
)


@pytest.mark.parametrize("role", ["server", "site"])
def test_exactly_the_classes_of_a_job_are_added(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role))
    assert missing_classes(kit) == CLASSES[kit.role]
    path = allow_classes(kit)
    assert path.name == "resources.json"
    content = json.loads(path.read_text())
    assert content["class_allow_list"] == [*CLASSES[kit.role], *FLARES]
    assert content["allow_log_streaming"] is True
    assert missing_classes(kit) == ()
    before = path.read_bytes()
    allow_classes(kit)
    assert path.read_bytes() == before


def test_the_list_names_what_a_job_names(make_kit: MakeKit) -> None:
    """A renamed class would make every policy in use wrong."""
    import importlib

    components = [component["path"] for component in (*COMPONENTS.values(), VALIDATOR)]
    for name in (*CLASSES["server"], *CLASSES["site"], *components):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("entries", "yes"),
    [
        (["*"], True),
        (["suture."], True),
        (["suture.flare.executor"], True),
        (["suture.flare.executor.SiteExecutor"], True),
        (["suture.flare.exec"], False),
        (["nvflare."], False),
        ([], False),
    ],
)
def test_entries_are_paths_or_prefixes_at_a_dot(entries: list[str], yes: bool) -> None:
    assert is_allowed("suture.flare.executor.SiteExecutor", entries) is yes


@pytest.mark.parametrize("role", ["server", "site"])
def test_packages_are_added_once_and_to_what_is_listed(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role))
    allow_classes(kit)
    own = [*CLASSES[kit.role], *FLARES]
    path = allow_packages(kit, ["near.", "other.method.Far", "near."])
    content = json.loads(path.read_text())
    assert content["class_allow_list"] == ["near.", "other.method.Far", *own]
    assert content["allow_log_streaming"] is True
    before = path.read_bytes()
    assert allow_packages(kit, ["near.", "near.method.Near"]) == path
    assert path.read_bytes() == before


@pytest.mark.parametrize("entry", ["near", "*", "", ".", "near..", " near.", "near.\n", "a-b.", "1.c"])
def test_what_flare_would_not_take_is_refused_before_anything_is_written(
    entry: str, make_kit: MakeKit
) -> None:
    folder = make_kit()
    done = CliRunner().invoke(app, ["policy", str(folder), "--allow", "good.", "--allow", entry])
    assert isinstance(done.exception, ConfigError)
    assert f"{entry!r} cannot be allowed; write PACKAGE. with a dot at its end" in str(done.exception)
    assert not list((folder / "local").glob("*.json"))


@pytest.mark.parametrize("options", [[], ["--loose"]])
def test_the_command_allows_packages_beside_the_classes_of_suture(
    options: list[str], make_kit: MakeKit
) -> None:
    kit = read_kit(make_kit())
    words = ["policy", str(kit.folder), *options, "--allow", "near.", "--allow", "far.method.Far"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    listed = json.loads((kit.folder / "local" / "resources.json").read_text())["class_allow_list"]
    assert listed == ["near.", "far.method.Far", *CLASSES["site"], *(FLARES if options else [])]


@given(st.text(alphabet="aZ_1.- *", max_size=8))
def test_an_entry_that_can_be_added_is_one_that_flare_takes(entry: str) -> None:
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer as Flare

    from suture_admin.policy import check_entries

    try:
        check_entries([entry])
    except ConfigError:
        return
    assert Flare._normalize_allow_list([entry]) == [entry]


@given(st.lists(st.sampled_from(["suture.", "suture.flare.", "nvflare.", "a.b", "*", "suture.flare.codec"])))
def test_our_rule_is_flares(entries: list[str]) -> None:
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer as Flare

    name = "suture.flare.executor.EgressFilter"
    listed = Flare._normalize_allow_list(entries)
    theirs = "*" in listed or any(Flare._path_matches_prefix(name, entry) for entry in listed)
    assert is_allowed(name, entries) == theirs


def test_refusing_code_leaves_every_other_right(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit())
    assert code_rights(kit) == {"project_admin": "any", "lead": "any", "member": "none"}
    path = refuse_code(kit)
    assert set(code_rights(kit).values()) == {"none"}
    roles = json.loads(path.read_text())["permissions"]
    assert roles["lead"] == {"submit_job": "any", "view": "any", "byoc": "none"}
    assert roles["project_admin"]["submit_job"] == "any"
    assert roles["project_admin"]["get_job_log"] == "any"


def test_flare_refuses_code_under_the_written_policy(make_kit: MakeKit) -> None:
    from nvflare.fuel.sec.authz import AuthzContext, Person
    from nvflare.security.security import FLAuthorizer

    path = refuse_code(read_kit(make_kit()))
    person = Person("boss", "trial", "project_admin")
    authorizer = FLAuthorizer("trial", {"format_version": "1.0", **json.loads(path.read_text())})
    assert not authorizer.authorize(AuthzContext(user=person, submitter=person, right="byoc"))[0]
    assert authorizer.authorize(AuthzContext(user=person, submitter=person, right="submit_job"))[0]


def test_logs_are_kept(make_kit: MakeKit) -> None:
    """FLARE asks this of a site before it streams a log, and before a job's own streamer does."""
    kit = read_kit(make_kit())
    allow_classes(kit)
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_ROOT, str(kit.folder))
    fl_ctx.put(ReservedKey.IDENTITY_NAME, kit.name, private=False, sticky=False)
    assert is_log_streaming_allowed(fl_ctx)
    content = json.loads(keep_logs(kit).read_text())
    assert content["allow_log_streaming"] is False
    assert not is_log_streaming_allowed(fl_ctx)


@pytest.mark.parametrize("role", ["server", "site"])
def test_the_command_is_strict_without_options(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "server"))
    done = CliRunner().invoke(app, ["policy", str(kit.folder)])
    assert done.exit_code == 0, done.output
    assert not list(bypasses(kit))
    assert survives(kit)
    if role == "site":
        assert read_kit_json(kit.folder / "local" / "resources.json")["allow_log_streaming"] is False


@pytest.mark.parametrize("role", ["server", "site"])
def test_the_loose_policy_is_the_one_with_an_option(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "server"))
    done = CliRunner().invoke(app, ["policy", str(kit.folder), "--loose"])
    assert done.exit_code == 0, done.output
    assert "jobs may bring code" in list(bypasses(kit))
    assert not any("fetch addresses" in way for way in bypasses(kit))
    assert missing_classes(kit) == ()
    assert survives(kit)


def test_a_broken_policy_names_its_file(make_kit: MakeKit) -> None:
    folder = make_kit()
    kit = read_kit(folder)
    (folder / "local" / "authorization.json").write_text('{"permissions": 3}')
    with pytest.raises(ConfigError, match=r"authorization\.json"):
        refuse_code(kit)
    (folder / "local" / "resources.json.default").unlink()
    with pytest.raises(ConfigError, match=r"resources\.json"):
        allow_classes(kit)
    assert not (folder / "local" / "resources.json").exists()


@pytest.mark.parametrize("role", ["server", "site"])
def test_a_party_survives_by_one_component_and_keeps_the_others(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role))
    assert not survives(kit)
    path = survive(kit)
    components = {c["id"]: c["path"] for c in json.loads(path.read_text())["components"]}
    assert components["job_scheduler"] == "nvflare.DefaultJobScheduler"
    own = COMPONENTS["site"] if role == "site" else LAUNCHER
    assert components["process_launcher"] == own["path"]
    assert ("stale_jobs" in components) == (role == "server")
    assert survives(kit)
    before = path.read_bytes()
    survive(kit)
    assert path.read_bytes() == before


def test_a_site_asks_again_after_a_minute_unless_its_file_says_when(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    path = survive(kit)
    content = json.loads(path.read_text())
    assert content["client"]["communication_timeout"] == 60
    content["client"]["communication_timeout"] = 900
    path.write_text(json.dumps(content))
    survive(kit)
    assert json.loads(path.read_text())["client"]["communication_timeout"] == 900
    del content["client"]["communication_timeout"]
    path.write_text(json.dumps(content))
    assert not survives(kit)


def test_resources_without_components_are_named(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    path = kit.folder / "local" / "resources.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="lists no components"):
        survive(kit)
    assert path.read_text() == "{}"
