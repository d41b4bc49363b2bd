"""A method of another package under FLARE: what travels with a job, and what a party allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_context import FLContext
from one_site import OneSite, process_of, workspace

import outside_method
from job_app import place_app
from outside_method import CLASS, DISTRIBUTION, METADATA, MODULE, NAME, install, on_path
from suture.core.entry_points import PACKAGES
from suture.core.errors import CodeMismatch, ConfigError
from suture.execution.job import Job, check_federated, load_job, with_settings
from suture.federation.plan import Plan
from suture.flare import PLAN, SCHEDULE
from suture.flare.codec import from_shareable_
from suture.flare.compat.tensors import register
from suture.flare.controller import FederationController
from suture.flare.recipe import FederationRecipe, export_job, recipe_of
from suture.flare.workspace import check_allowed
from suture.methods import method_class, outside
from suture.methods.source import code_hash
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import unpack
from suture_admin.policy import CLASSES
from world import refused

SMALL = ["rounds=1", "simulation.images=60", "simulation.held_out=60", "model.size=16", "epochs=1"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The method, installed in a folder of the path; returns the file of its module."""
    folder = tmp_path / "installed"
    module = install(folder)
    with on_path(monkeypatch, folder):
        yield module


def job() -> Job:
    return with_settings(load_job("demo"), [f"method={NAME}", *SMALL])


# What travels with a job


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["module", "package", "editable"])
def test_its_package_travels_and_is_found_where_it_arrives(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, code = tmp_path / "site-packages", tmp_path / ("src" if kind == "editable" else "site-packages")
    install(site, code, package=kind != "module")
    with on_path(monkeypatch, site, code):
        made = code_hash(method_class(NAME))
        folder = export_job(job(), tmp_path / "exported", "trial", ("a", "b"), bundle=True)
    names = [f"{MODULE}.py"] if kind == "module" else [f"{MODULE}/__init__.py", f"{MODULE}/method.py"]
    for app in ("app_server", "app_sites"):
        custom = folder / app / "custom"
        assert (custom / "suture" / "methods" / "surgical.py").is_file()
        theirs = [
            p
            for p in custom.rglob("*")
            if p.is_file() and p.relative_to(custom).parts[0].partition("-")[0] not in PACKAGES
        ]
        expected = [*names, f"{METADATA}/METADATA", f"{METADATA}/entry_points.txt"]
        assert sorted(p.relative_to(custom).as_posix() for p in theirs) == sorted(expected)
    assert NAME not in outside()  # discovery has looked at the path before the job arrives
    with on_path(monkeypatch, folder / "app_sites" / "custom"):
        assert outside()[NAME].dist.name == DISTRIBUTION  # type: ignore[union-attr]
        assert Path(sys.modules[method_class(NAME).__module__].__file__ or "").is_relative_to(folder)
        assert code_hash(method_class(NAME)) == made
        plan = Plan.from_dict(json.loads((folder / "app_sites" / "config" / PLAN).read_text()))
        plan.check_code("a")
        assert plan.method.about.name == NAME


def test_staged_files_are_removed_with_the_recipe(installed: Path, tmp_path: Path) -> None:
    recipe = recipe_of(job(), "trial", ("a",), bundle=True)
    app = recipe._job._deploy_map["a"].get_app_config()
    plan, staged = sorted((Path(source) for source, *_ in app.file_sources), key=Path.is_dir)
    assert plan.name == PLAN
    assert (staged / f"{MODULE}.py").is_file()
    del app, recipe
    assert not plan.exists()
    assert not staged.exists()


def test_an_installed_package_does_not_travel_and_runs_in_a_federation(
    installed: Path, tmp_path: Path
) -> None:
    recipe: FederationRecipe = recipe_of(job(), "trial", ("a",))
    assert recipe._job.job.app_packages == [*PACKAGES, MODULE]
    assert not list(export_job(job(), tmp_path, "trial", ("a",), bundle=False).rglob("custom"))
    check_federated(job().method)


# What a party allows


def party(folder: Path, entries: list[str], *, byoc: bool = False, name: str = "alpha") -> FLContext:
    """A process at a party with a list of classes, of a job that brings its code or does not."""
    at = workspace(folder, name, resources=json.dumps({"class_allow_list": entries}))
    return process_of(at, name, **{AppValidationKey.BYOC: byoc})


@pytest.mark.parametrize(
    ("method", "entries", "byoc"),
    [
        (NAME, [f"{MODULE}."], False),
        (NAME, [CLASS], False),
        (NAME, ["*"], False),
        (NAME, [], True),
        ("surgical", [], False),
        ("unknown", [], False),
    ],
)
def test_what_a_party_allows(
    method: str, entries: list[str], byoc: bool, tmp_path: Path, installed: Path
) -> None:
    check_allowed({"method": method}, party(tmp_path / "alpha", entries, byoc=byoc))


@pytest.mark.parametrize("entries", [[], [f"{MODULE}.Other"], [*CLASSES["site"], "nvflare."]])
def test_a_refusal_says_who_refuses_what_and_the_command_that_allows_it(
    entries: list[str], tmp_path: Path, installed: Path
) -> None:
    allows = f"`suture policy {tmp_path / 'alpha'} --allow {MODULE}.`"
    with refused("alpha", f"'{NAME}'", CLASS, DISTRIBUTION, allows, by=ConfigError):
        check_allowed({"method": NAME}, party(tmp_path / "alpha", entries))
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    ("group", "plan", "of_suture"),
    [
        (
            "priors",
            lambda name: {"hyperparameters": {"prior": {"name": name}}},
            ("phantoms", "efficientnet_lite0", "unknown"),
        ),
        ("encoders", lambda name: {"model": {"name": name}}, ("cnn", "timm:resnet18", "unknown")),
    ],
)
def test_a_prior_or_an_encoder_of_another_package_is_listed_too(
    group: str, plan: Any, of_suture: tuple[str, ...], tmp_path: Path, installed: Path
) -> None:
    points = tmp_path / "installed" / METADATA / "entry_points.txt"
    points.write_text(points.read_text() + f"[suture.{group}]\nown = {MODULE}:OWN\n")
    for name in of_suture:
        check_allowed(plan(name), party(tmp_path / "alpha", []))
    check_allowed(plan("own"), party(tmp_path / "alpha", [f"{MODULE}."]))
    with refused("alpha", "'own'", f"{MODULE}.OWN", by=ConfigError):
        check_allowed(plan("own"), party(tmp_path / "alpha", []))
    assert MODULE not in sys.modules


def test_a_site_that_has_not_listed_it_abstains_and_does_not_import_it(
    installed: Path, tmp_path: Path
) -> None:
    plan = job().plan("trial")
    outside_method.forget()
    register()
    site = OneSite(tmp_path / "alpha", plan, tmp_path / "none.toml")
    workspace(tmp_path / "alpha", resources='{"class_allow_list": ["suture."]}')
    reply = unpack(from_shareable_(site.answer(TaskData("handshake", 0))))
    assert reply == Abstain("configuration", "ConfigError")
    line = json.loads((tmp_path / "alpha" / "suture" / "errors.jsonl").read_text())
    assert f"--allow {MODULE}." in line["message"]
    assert MODULE not in sys.modules


def test_a_server_that_has_not_listed_it_ends_the_job(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, controller, panics = job(), FederationController(PLAN, SCHEDULE), list[str]()
    fl_ctx = place_app(
        party(tmp_path / "server", ["suture."], name="server"), made.plan("trial"), made.schedule()
    )
    monkeypatch.setattr(controller, "system_panic", lambda reason, _: panics.append(reason))
    controller.control_flow(None, fl_ctx)  # type: ignore[arg-type]
    assert [f"--allow {MODULE}." in reason for reason in panics] == [True]


def test_a_party_without_the_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        plan = job().plan("trial").to_dict()
    check_allowed({"method": NAME}, party(tmp_path / "alpha", []))
    with refused(f"'{NAME}'", by=CodeMismatch):
        Plan.from_dict(plan)
