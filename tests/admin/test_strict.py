"""The strict policy of a site, and the ways round one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext

from suture.core.errors import ConfigError, RejectedUpdate
from suture.flare.executor import EgressFilter
from suture.flare.kit import policy_file, read_kit, read_kit_json
from suture.flare.scopes import check_scope
from suture_admin.policy import (
    CLASSES,
    FILTER,
    PRIVACY,
    allow_classes,
    bypasses,
    code_rights,
    make_strict,
    permits,
    plain_json,
    refuse_code,
)

MakeKit = Callable[..., Path]
PUBLISHED = Path(__file__).resolve().parents[2] / "poc_workspace" / "policy"


def test_a_strict_site_leaves_no_way_round(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    assert len(list(bypasses(kit))) == 4
    written = make_strict(kit)
    assert {path.name for path in written} == {"resources.json", "authorization.json", "privacy.json"}
    assert not list(bypasses(kit))
    resources = read_kit_json(kit.folder / "local" / "resources.json")
    assert resources["class_allow_list"] == list(CLASSES["site"])
    assert resources["allow_log_streaming"] is False
    assert resources["components"], "FLARE's own settings stay"
    rights = read_kit_json(kit.folder / "local" / "authorization.json")["permissions"]
    assert rights["project_admin"]["operate"] == rights["project_admin"]["shell_commands"] == "o:site"
    assert set(code_rights(kit).values()) == {"none"}
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in make_strict(kit)] == before


def test_the_published_files_say_the_same(make_kit: MakeKit) -> None:
    assert read_kit_json(PUBLISHED / "privacy.json") == PRIVACY
    resources = read_kit_json(PUBLISHED / "resources.json")
    kit = read_kit(make_kit("site"))
    make_strict(kit)
    own = read_kit_json(kit.folder / "local" / "resources.json")
    assert resources == {key: own[key] for key in resources}


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({"class_allow_list": [*CLASSES["site"], "nvflare.", "a.b"]}, "2 more classes"),
        ({"class_allow_list": ["*"]}, "1 more class"),
        ({"class_list_enforcement_mode": "warn"}, "not enforced"),
    ],
)
def test_what_a_list_leaves_open(change: dict[str, Any], way: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    make_strict(kit)
    path = policy_file(kit, "resources")
    path.write_text(json.dumps({**read_kit_json(path), **change}))
    (found,) = bypasses(kit)
    assert way in found


def test_a_list_that_is_absent_is_flares_own(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    make_strict(kit)
    path = policy_file(kit, "resources")
    path.write_text(json.dumps({k: v for k, v in read_kit_json(path).items() if k != "class_allow_list"}))
    (found,) = bypasses(kit)
    assert "by default" in found


@pytest.mark.parametrize(
    ("privacy", "ways"),
    [
        (PRIVACY, []),
        ({"scopes": PRIVACY["scopes"]}, ["privacy.json has no default scope"]),
        (
            {**PRIVACY, "scopes": [*PRIVACY["scopes"], {"name": "other"}]},
            [],  # of the site's other jobs: the executor refuses one of Suture's there
        ),
        (
            {"scopes": [{"name": "a", "task_result_filters": [{"path": FILTER}]}], "default_scope": "a"},
            [],
        ),
        *(
            (
                {
                    "scopes": [{"name": "a", "task_result_filters": [{"path": FILTER, **more}]}],
                    "default_scope": "a",
                },
                ["no scope of privacy.json has the filter, or it is disabled"],
            )
            for more in ({"disabled": True}, {"direction": "in"})
        ),
    ],
)
def test_a_scope_needs_the_filter(privacy: dict[str, Any], ways: list[str], make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    make_strict(kit)
    (kit.folder / "local" / "privacy.json").write_text(json.dumps(privacy))
    assert list(bypasses(kit)) == ways


@pytest.mark.parametrize(
    ("before", "default", "names"),
    [
        ({"scopes": [{"name": "own"}], "default_scope": "own"}, "own", ["suture", "own"]),
        ({"scopes": [{"name": "own"}]}, "suture", ["suture", "own"]),
        ({"scopes": [{"name": "own"}], "default_scope": "gone"}, "suture", ["suture", "own"]),
        ({"scopes": [{"name": "suture"}], "default_scope": "suture"}, "suture", ["suture"]),
        (
            {"scopes": [{"name": "a", "task_result_filters": [{"path": FILTER}]}, {"name": "b"}]},
            "a",
            ["a", "b"],
        ),
    ],
)
def test_scopes_of_the_site_itself_stay_beside_the_filtered_one(
    before: dict[str, Any], default: str, names: list[str], make_kit: MakeKit
) -> None:
    kit = read_kit(make_kit("site"))
    path = kit.folder / "local" / "privacy.json"
    path.write_text(json.dumps(before))
    make_strict(kit)
    privacy = read_kit_json(path)
    assert privacy["default_scope"] == default
    assert [scope["name"] for scope in privacy["scopes"]] == names
    assert not list(bypasses(kit))
    make_strict(kit)
    assert read_kit_json(path) == privacy


@pytest.mark.parametrize(
    ("privacy", "scope", "refused"),
    [
        (None, "", False),
        (PRIVACY, "", False),
        (PRIVACY, "suture", False),
        ({"scopes": [*PRIVACY["scopes"], {"name": "own"}], "default_scope": "own"}, "suture", False),
        ({"scopes": [*PRIVACY["scopes"], {"name": "own"}], "default_scope": "own"}, "", True),
        ({"scopes": [*PRIVACY["scopes"], {"name": "own"}], "default_scope": "suture"}, "own", True),
        ({"scopes": [{"name": "own"}], "default_scope": "own"}, "", False),  # this site never filters
    ],
)
def test_a_job_of_suture_does_not_pass_the_filter_in_another_scope(
    privacy: dict[str, Any] | None, scope: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    if privacy:
        (tmp_path / "local" / "privacy.json").write_text(json.dumps(privacy))
    if not refused:
        check_scope("harbor", tmp_path, scope)
        return
    with pytest.raises(
        ConfigError, match=r"harbor: the job names .*flare\.scope=NAME \(of this site: suture\)"
    ):
        check_scope("harbor", tmp_path, scope)


def test_a_strict_server_runs_no_code_but_sutures(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("server", "server"))
    assert len(list(bypasses(kit))) == 3
    written = make_strict(kit)
    assert {path.name for path in written} == {"resources.json", "authorization.json"}
    assert not list(bypasses(kit))
    assert read_kit_json(written[0])["class_allow_list"] == list(CLASSES["server"])
    assert set(code_rights(kit).values()) == {"none"}
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in make_strict(kit)] == before


def test_an_administrator_has_no_policy(make_kit: MakeKit) -> None:
    with pytest.raises(ConfigError, match="an administrator's kit"):
        make_strict(read_kit(make_kit("admin", "admin")))


@pytest.mark.parametrize("role", ["server", "site"])
def test_a_strict_party_asks_flare_for_plain_json(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "server"))
    (path, *_) = make_strict(kit)
    assert read_kit_json(path)["app_validator"]["path"] == "suture.flare.compat.plain_json.PlainJson"
    write = {**read_kit_json(path), "app_validator": {"path": "own.Validator"}}
    path.write_text(json.dumps(write))
    assert ["fetch addresses" in way for way in bypasses(kit)] == [True]
    with pytest.raises(ConfigError, match="app_validator of its own"):
        make_strict(kit)
    assert read_kit_json(path) == write


def test_what_an_administrator_has_allowed_stays_so(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    path = policy_file(kit, "resources")
    listed = ["*", "suture.", "nvflare.", "nvflare.app_common.Something", "near.", "near.method.Near"]
    path.write_text(json.dumps({**read_kit_json(path), "class_allow_list": listed}))
    make_strict(kit)
    strict = read_kit_json(policy_file(kit, "resources"))["class_allow_list"]
    assert strict == ["near.", "near.method.Near", *CLASSES["site"]]


def test_the_lenient_policy_leaves_ways(make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("site"))
    allow_classes(kit)
    plain_json(kit)
    refuse_code(kit)
    assert ["more class" in way or "privacy.json" in way for way in bypasses(kit)] == [True, True]


def test_a_strict_site_refuses_a_job_of_flares_own_workflows(make_kit: MakeKit) -> None:
    """As the README of examples/flare-fedavg says: for its code, for its classes, and for its messages."""
    kit = read_kit(make_kit("site"))
    make_strict(kit)
    assert set(code_rights(kit).values()) == {"none"}
    for name in (
        "suture.flare.components.DeclaredResultFilter",
        "nvflare.app_common.executors.ClientAPIExecutor",
    ):
        assert not permits(kit, name)
    result = DXO(DataKind.WEIGHTS, {"head.bias": torch.ones(1)}, {"labels": ["Mass"]}).to_shareable()
    with pytest.raises(RejectedUpdate):
        EgressFilter().process(result, FLContext())
