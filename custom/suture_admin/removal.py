"""The exact removal of a site: the model that the server would have had without it.

It is for methods whose model is a function of the sites' newest updates alone (`About.removable`). The server
keeps these updates with the state of their round; without a site's, the others are aggregated again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import hold, read_json
from suture.federation.plan import Plan, round_context
from suture.federation.server.global_model import classifier, pack_model, read_model, with_labels
from suture.federation.server.record import SERVER_LOCK
from suture.federation.server.selection import Best, ModelSelection
from suture.federation.server.state import RunState
from suture.federation.state_files import UPDATES, Rounds, drop_updates, experiment_folder
from suture.methods import method_class
from suture.models.classifier import ENCODER
from suture.models.saved import save_model
from suture.protocol.messages import Update
from suture.protocol.packing import load, unpack

_PLAN = ("model", "augmentation", "seed", "experiment", "code", "transport")


def forget(folder: Path, site: str) -> list[Path]:
    """Remove a site from an experiment that has ended: its model, states and the site's kept update.

    Nothing is deleted before the new state is written, and the site's update last, so that a removal that was
    broken off can be repeated.

    Args:
        folder: of the experiment at the server, or of a run on one machine.

    Returns:
        what was deleted.

    Raises:
        ConfigError: the method has no exact removal, the site has no update or is the only one, another site
            has none of the newest round, or the run has not ended.
        SutureError: a file is damaged, or a process works in the folder.
    """
    if not (folder / "run.json").is_file():
        raise ConfigError(f"{folder} is not a run folder: run.json is missing; give the folder of a run")
    with hold(folder / SERVER_LOCK, 0):  # before anything is read: a job may just have begun
        return _remove(folder, site)


def _remove(folder: Path, site: str) -> list[Path]:
    run = read_json(folder / "run.json")
    about = method_class(run["method"]["name"]).about
    if not about.removable:
        raise ConfigError(
            f"{about.title} has no exact removal: what {site} sent is part of every later model; begin a new "
            "experiment without it"
        )
    if run["status"] != "finished":
        raise ConfigError(f"{folder}: the run is {run['status']}; let it end first, or continue it")
    settings = {key: run[key] for key in _PLAN} | {"method": run["method"]["name"]}
    settings |= {"secure_aggregation": None}  # with it the server has no site's update to remove
    plan = Plan.from_dict({**settings, "hyperparameters": run["method"]["hyperparameters"]})
    plan.check_code("the server")
    states = Rounds(folder / "state", f"fixed/{ENCODER}")
    found = states.newest()
    if found is None:
        raise ConfigError(f"{folder} has no state, and so no update of {site!r}")
    number, packed = found
    where = f"the state of round {number} in {states.folder}"
    model, state = read_model(packed, plan, where), RunState.from_dict(packed.header, where)
    if earlier := sorted(name for name, round_ in state.sent.items() if round_ < number):
        raise ConfigError(
            f"{folder}: {', '.join(earlier)} sent no update in round {number}, so the model may hold weights "
            "of an earlier round. Continue the experiment until every site takes part in a round, or "
            f"begin a new experiment without {site}"
        )
    kept = states.folder / UPDATES / f"{number:06d}"
    files = {path.stem: path for path in sorted(kept.glob("*.safetensors"))}
    if site not in files:
        raise ConfigError(
            f"{folder} has no update of {site!r}; it has those of {', '.join(files) or 'no site'}"
        )
    if len(files) == 1:
        raise ConfigError(f"{site} is the only site of {folder}; delete the folder instead")
    own = files.pop(site)
    updates = [update for path in files.values() if isinstance(update := unpack(load(path)), Update)]
    held = {name for update in updates for name in update.labels}
    labels = tuple(name for name in model.labels if name in held)
    # Rows as they began: a class that nobody sends keeps its own.
    empty = replace(model, labels=(), head={name: rows[:0] for name, rows in model.head.items()})
    context = round_context(plan.method, plan.seed, number, number)
    new = plan.method.aggregate(with_labels(empty, labels, plan), updates, context)
    registry = packed.header["registry"]
    registry = registry | {
        "labels": list(labels),
        "codes": {name: codes for name, codes in registry["codes"].items() if name in held},
        "members": {name: member for name, member in registry["members"].items() if name != site},
    }
    header = {"plan": packed.header["plan"], "registry": registry, **_without(state, site, number).to_dict()}
    deleted = [path for path in states.folder.glob("*.safetensors") if path != states.constant_path]
    states.save(number, pack_model(new, header), number)
    states.keep(number)
    for path in deleted:
        if path not in (states.path(number), states.best_path(number)):
            path.unlink(missing_ok=True)
    drop_updates(states.folder, number)
    facts = {"round": number, "job": run.get("job"), "forgotten": 1}
    save_model(classifier(new, plan), plan.model, folder / "model", facts)
    here = experiment_folder(folder / "sites" / site / "state", plan.experiment)
    if here.exists():  # of a run on one machine
        shutil.rmtree(here)
        deleted.append(here)
    own.unlink()
    return [*deleted, own]


def _without(state: RunState, site: str, number: int) -> RunState:
    """The state of a run that the site had no part in."""

    def others(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in part.items() if name != site}

    bound = replace(state.bound, largest=others(state.bound.largest))
    by_site: dict[str, Any] = {key: others(getattr(state, key)) for key in ("norms", "excluded", "sent")}
    selected = ModelSelection(Best(number, 0.0), by=state.standings.by)
    left = replace(state, standings=selected, pending=None, holders=state.holders - {site}, bound=bound)
    return replace(left, **by_site)
