"""Every whole number of a job has an upper bound, and no word or number counts as true or false."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from annotated_types import Le, Lt
from nvflare.apis.workspace import Workspace
from pydantic import AfterValidator, PlainValidator, Strict

from job_app import place_app
from suture.core.errors import ConfigError
from suture.core.validation import LIMIT, Section
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import DATASETS
from suture.execution.job import Job, with_settings
from suture.execution.sites import Simulation
from suture.federation.plan import Plan, Schedule
from suture.flare import PLAN
from suture.flare.executor import SiteExecutor
from suture.methods import METHODS
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import Abstain, TaskData
from suture.protocol.packing import unpack
from suture_papers.fedmas.pretraining import Pretraining
from suture_synthetic.phantom_hospitals import PhantomSites

JOB = Job(
    name="small", title="a small job", method=SurgicalAggregation(), model=ModelSpec("cnn", size=16), rounds=2
)


def settings(kind: Any, wanted: type, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a dataclass or section, and of those in it, that may be of the wanted type."""
    if kind in seen:
        return
    seen.add(kind)
    own = getattr(kind, "model_fields", None) or {field.name for field in dataclasses.fields(kind)}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if not name.isupper() and name in own:
            yield from _within(f"{kind.__name__}.{name}", hint, wanted, seen)


def _within(
    name: str, hint: Any, wanted: type, seen: set[Any], notes: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    if hint is wanted:
        yield name, notes
    elif isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Section)):
        yield from settings(hint, wanted, seen)
    elif found := getattr(hint, "__metadata__", ()):
        yield from _within(name, get_args(hint)[0], wanted, seen, found)
    else:
        for part in get_args(hint):
            yield from _within(name, part, wanted, seen, notes)


def bounded(notes: tuple[Any, ...]) -> bool:
    bounds = [bound for note in notes for bound in getattr(note, "metadata", [note])]
    return any(isinstance(bound, (Le, Lt, AfterValidator, PlainValidator)) for bound in bounds)


@pytest.mark.parametrize("kind", [Job, Schedule, *METHODS.values(), *get_args(Simulation)])
def test_every_whole_number_of_a_job_has_an_upper_bound(kind: type) -> None:
    found = dict(settings(kind, int, set()))
    assert found or kind not in (Job, Schedule)
    assert [name for name, notes in found.items() if not bounded(notes)] == []


DATA = [DATASETS.find(name).config for name in sorted(DATASETS.names())]
FILES = [SiteConfig, *DATA, Pretraining]


@pytest.mark.parametrize("kind", [Job, Schedule, *METHODS.values(), *get_args(Simulation), *FILES])
def test_every_true_or_false_is_strict(kind: type) -> None:
    found = dict(settings(kind, bool, set()))
    assert found or kind not in (Job, Schedule, SiteConfig)
    assert [name for name, notes in found.items() if not any(isinstance(one, Strict) for one in notes)] == []


@pytest.mark.parametrize("value", ['"yes"', '"true"', "1", "0.0"])
@pytest.mark.parametrize("key", ["ancestors", "color", "partial", "follow_links"])
def test_a_site_writes_true_or_false(tmp_path: Path, hospital: Any, key: str, value: str) -> None:
    path = hospital(tmp_path, ("Mass",), 3, 0)
    path.write_text(path.read_text().replace("[data]", f"[data]\n{key} = {value}", 1))
    with pytest.raises(ConfigError, match=rf"\[data\] {key} = .*: must be true or false"):
        load_site_config(path)


@pytest.mark.parametrize("setting", ["color=yes", "padding=1", "accept_labels=on", "model.second_head=0"])
def test_so_does_a_job(setting: str) -> None:
    with pytest.raises(ConfigError, match="must be true or false"):
        with_settings(JOB, [setting])


@pytest.mark.parametrize(
    "setting",
    [
        "rounds=1000000000",
        "round_timeout=1e9",
        "min_sites=1000000000",
        "patience=1000001",
        "seed=1e19",
        "method=fedlsm uncertain=10000000",
        "grace=1000000000",
        "method.local.epochs=1000000000",
        "method.local.batch_size=10000000",
    ],
)
def test_a_number_beyond_reason_is_refused_with_the_bound(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"at most|from 1 |exceeded maximum|up to a million"):
        with_settings(JOB, setting.split())


def test_a_server_refuses_such_rounds_too() -> None:
    with pytest.raises(ConfigError, match=f"schedule: rounds: .* {LIMIT} "):
        Schedule.from_dict({"name": "a", "title": "a", "rounds": 10**9})


TOO_LARGE = "(hidden|projection): must be at most 4096"


@pytest.mark.parametrize("settings", [["hidden=100000000000"], ["projection=100000000000"]])
def test_a_layer_that_is_far_too_wide_is_no_setting(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"at most 4096 \(got 100000000000\)"):
        with_settings(JOB, settings)


def plan_of_another_tool() -> dict[str, Any]:
    """A plan that no job of this package would have made."""
    plan = JOB.plan("x").to_dict()
    return plan | {"model": plan["model"] | {"hidden": 10**11}}


def test_server_and_site_refuse_it_too(
    tmp_path: Path, hospital: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=TOO_LARGE):
        Plan.from_dict(plan_of_another_tool())
    for function, value in (("workspace_root", tmp_path), ("check_allowed", None)):
        monkeypatch.setattr(f"suture.flare.executor.{function}", lambda *_, value=value: value)

    class Context:
        def get_identity_name(self) -> str:
            return "harbor"

        def get_prop(self, _: str, default: object = None) -> object:
            return default

        def get_engine(self) -> Any:
            return SimpleNamespace(get_workspace=lambda: Workspace(str(tmp_path), "harbor"))

        def get_job_id(self) -> str:
            return "job"

    config = hospital(tmp_path / "local", ("Mass",), 10, 0)
    (tmp_path / "startup").mkdir()
    place_app(Context(), plan_of_another_tool())  # type: ignore[arg-type]
    assert load_site_config(config)
    executor = SiteExecutor(PLAN, 2)
    reply = unpack(executor._answer(TaskData("handshake"), Context()).packed)  # type: ignore[arg-type]
    assert isinstance(reply, Abstain)
    assert (reply.reason, reply.error) == ("configuration", "ConfigError")
    (line,) = (tmp_path / "suture" / "errors.jsonl").read_text().splitlines()
    assert "hidden: must be at most 4096" in json.loads(line)["message"]


def test_a_job_whose_name_is_a_path_is_none() -> None:
    for name in ("../../../x", "[/bold]", "a\x1b[2J", ""):
        with pytest.raises(ConfigError, match="name of a job"):
            dataclasses.replace(JOB, name=name, simulation=PhantomSites())
