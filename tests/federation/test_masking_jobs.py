"""What a site with secure aggregation demands of tasks and jobs, and remembers over experiments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from masked import FOUR, SAME, furthest, plain, secured
from parties import METHOD, abstains, complaint, honest, limited, lines, run, says

from between import Between
from suture.core.errors import FederationError, InUse
from suture.core.files import hold, read_records
from suture.federation.loop import federate
from suture.federation.site import masks
from suture.federation.site.masks import MASKED, MASKS_FILE
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed
from world import refused

ONE_ROUND = {"rounds": 1, "selection": "last", "max_failed_rounds": 1}


def tasks_of(federation: Any, out: str = "out") -> dict[str, TaskData]:
    """What alpha is sent in a run, by the steps of an attempt."""
    tasks: dict[str, TaskData] = {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "alpha":
            tasks[task.mask.step if task.mask else task.task] = replace(task, ledger=None)
        return answer

    run(federation, out, look)
    return tasks


@pytest.mark.complete
def test_an_experiment_goes_on_as_it_began(tiny: Any) -> None:
    """Without secure aggregation, or with it and no fewer colluders.

    The server could have given some sites another state or encoder, which no site has noted; a second job
    would get the kept update as it is; and another list of survivors of a round would have votes enough.
    """
    federation = tiny(METHOD, SAME, **ONE_ROUND)
    run(federation, "plain")
    abstains(secured(federation).sites("plain")["alpha"], TaskData("handshake"), "masking")
    tasks = tasks_of(secured(federation, 1))
    abstains(federation.sites("out")["alpha"], replace(tasks["update"], mask=None), "masking")
    fewer = secured(federation, 0).sites("out")["alpha"]
    abstains(fewer, tasks["keys"], "masking", "colluders=1", "0")


@pytest.mark.complete
def test_a_frozen_encoder_is_that_of_all_sites(tiny: Any) -> None:
    """Else one that is dead at all sites but one would make their sum the update of that one."""
    model = ModelSpec("cnn", size=16, train="head", weights="random", hidden=8, views=0)
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND, model=model, min_sites=3))
    tasks: dict[str, TaskData] = {}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        tasks[site] = task if task.task == "train" else tasks.get(site, task)
        return None if site == "delta" and task.task == "train" else answer

    masked = run(federation, "out", lose)
    dead = {name: torch.zeros_like(tensor) for name, tensor in tasks["alpha"].fixed.items()}
    wrong = replace(tasks["alpha"], fixed=dead, ledger=None)
    abstains(federation.sites("out")["alpha"], wrong, "masking", "fixed tensors")
    # What a lost mask depends on is the same at server and sites.
    assert furthest(run(plain(federation), "plain", lose), masked) < 1e-6


@pytest.mark.complete
def test_classes_keep_their_numbers(tiny: Any) -> None:
    """A server that exchanged two classes of a site would add a row to those of another class."""
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND))
    run(federation, "out")
    path = federation.sites("out")["alpha"].folder / MASKS_FILE
    said = json.loads(path.read_text())
    one, two = said["numbers"]["Mass"], said["numbers"]["Nodule"]
    path.write_text(json.dumps(said | {"numbers": {"Mass": two, "Nodule": one}}))
    with refused("alpha: masking", by=FederationError):
        run(replace(federation, schedule=replace(federation.schedule, rounds=2)), "out")


def test_an_update_outside_of_an_attempt_is_refused(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND))
    train, site = tasks_of(federation)["update"], federation.sites("out")["alpha"]
    assert train.mask is not None
    for wrong in (
        replace(train, mask=None),
        replace(train, mask=replace(train.mask, attempt="0" * 64)),
        replace(train, round=2),
        replace(train, mask=replace(train.mask, step="shares")),
    ):
        abstains(site, wrong, "masking")


@pytest.mark.complete
def test_a_site_can_demand_it(tiny: Any) -> None:
    federation = limited(tiny(METHOD, FOUR, **ONE_ROUND, min_sites=1), "alpha", secure_aggregation=True)
    assert "alpha" not in run(federation, "plain").registry.members
    for task in ("handshake", "train", "calibrate", "evaluate", "mask"):
        site = federation.sites("plain")["alpha"]
        abstains(site, TaskData(task, 1, labels=("Mass", "Nodule")), "masking", "secure_aggregation")
    assert "alpha" in run(secured(federation), "masked").registry.members


def test_the_site_checks_what_the_server_cannot(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of 200 times the model's norm, and one with a number beyond the fixed point."""
    federation, train = secured(tiny(METHOD, FOUR, **ONE_ROUND)), SurgicalAggregation.weigh
    for factor, error, named in (
        (1e4, "UpdateTooLarge", "method.local.lr"),
        (float("nan"), "MaskingRefused", "not finite"),
    ):

        def far(*args: Any, factor: float = factor) -> Update:
            update = train(*args)
            return replace(update, shared={n: t * factor for n, t in update.shared.items()})

        monkeypatch.setattr(SurgicalAggregation, "weigh", far)
        with refused(f"masking ({error})", by=FederationError):
            run(federation, error)
        assert named in complaint(federation.sites(error)["alpha"])


@pytest.mark.complete
def test_a_round_is_not_added_up_over_two_lists_of_sites(tiny: Any) -> None:
    """The server has the sum of four and asks for that of three: the difference would be delta's update."""
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND, min_sites=3))
    run(federation, "out")
    for path in (federation.server("out").states.folder).glob("*-000001*"):
        path.unlink()  # the server is set back to before round 1
    with refused("alpha: masking (MaskingRefused)", by=FederationError):
        run(federation, "out", says("delta", Update, None))
    assert "round 1" in complaint(federation.sites("out")["alpha"])


# Two experiments


def at_home(
    federation: Any, experiment: str, names: Collection[str] = FOUR, seed: int = 1
) -> dict[str, Site]:
    """Run an experiment in which each site, as with kits, keeps its experiments side by side."""
    plan = replace(federation.plan, experiment=experiment, seed=seed)
    sites = {
        name: Site(
            name, federation.configs[name], plan, 1, federation.folder / name / EXPERIMENTS / experiment
        )
        for name in names
    }
    federate(replace(federation, plan=plan).server(experiment), Between(sites, honest))
    return sites


THREE = ("alpha", "beta", "gamma")


@pytest.mark.complete
def test_an_update_is_not_masked_in_two_experiments(tiny: Any) -> None:
    """The same job among three of the four sites: the difference of the sums would be delta's update.

    Nor in one whose folder was deleted: with it the site has lost of which sums it has revealed shares.
    """
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND))
    at_home(federation, "first")
    with refused("alpha: masking (ReusedSeed)", by=FederationError):
        at_home(federation, "second", THREE)
    at_home(federation, "third", THREE, seed=2)
    for party in THREE:
        shutil.rmtree(federation.folder / party / EXPERIMENTS / "first")
    shutil.rmtree(federation.server("first").record.folder)
    with refused("alpha: masking (ReusedSeed)", by=FederationError):
        at_home(federation, "first", THREE)


@pytest.mark.complete
def test_a_row_alone_is_not_masked_in_two_experiments(tiny: Any) -> None:
    """Where the server has changed another tensor a little, so that no update is whole the same."""
    federation = secured(tiny(METHOD, FOUR, **ONE_ROUND))
    at_home(federation, "first")
    path = federation.folder / "alpha" / MASKED
    (line,) = lines(path)
    assert len(line["parts"]) == 3  # the shared tensors, Mass and Nodule
    path.write_text(json.dumps({**line, "parts": line["parts"][2:]}) + "\n")
    with refused("alpha: masking", by=FederationError):
        at_home(federation, "second")


@pytest.mark.complete
def test_experiments_at_the_same_time_note_their_updates_in_turn(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both could look before either has written."""
    looked = []

    def look(path: Path) -> list[dict[str, Any]]:
        with refused(by=InUse):
            hold(path.with_name(f".{MASKED}.lock"), 0.0)
        looked.append(path)
        return read_records(path)

    monkeypatch.setattr(masks, "read_records", look)
    at_home(secured(tiny(METHOD, FOUR, **ONE_ROUND)), "first")
    assert len(looked) == len(FOUR)
