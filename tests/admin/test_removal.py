"""The exact removal of a site: the model is that of a federation that it never took part in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rounds import conformant
from suture.core.errors import ConfigError, DataError, InUse
from suture.core.files import atomic_write, hold, read_json, read_records
from suture.federation.loop import Loop, federate
from suture.federation.server.global_model import read_model
from suture.federation.server.record import SERVER_LOCK, describe
from suture.federation.server.server import Server
from suture.federation.server.state import read_newest
from suture.federation.state_files import UPDATES
from suture.models.saved import load_model
from suture.protocol.messages import TaskData
from suture.protocol.packing import load
from suture_admin import removal
from suture_admin.removal import forget
from suture_papers.closed_form.afl import AFL
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused, suture


def run_of(trial: Trial, without: str = "") -> Server:
    """The run of a trial to its end, by all sites but one."""
    describe(trial.server.record, trial.plan, trial.server.schedule)
    sites = {name: site for name, site in trial.sites.items() if name != without}
    federate(trial.server, Loop(sites))
    for site in sites.values():
        site.close()
    return trial.server


@pytest.mark.complete
@pytest.mark.parametrize("site", ["alpha", "gamma"])
def test_the_model_is_that_of_a_federation_without_the_site(site: str) -> None:
    """Gamma alone has Fibrosis, which the model then lacks."""
    with Trial(AFL(), SMALL, "multilabel") as one, Trial(AFL(), SMALL, "multilabel") as never:
        expected = run_of(never, without=site).select_model()
        folder = Path(run_of(one).record.folder)
        plan, kept = one.plan, folder / "state" / UPDATES / "000001"
        before, _ = load_model(folder / "model")
        assert sorted(path.stem for path in kept.iterdir()) == ["alpha", "beta", "gamma"]
        deleted = forget(folder, site)
        assert kept / f"{site}.safetensors" in deleted
        assert sorted(path.stem for path in kept.iterdir()) == sorted({"alpha", "beta", "gamma"} - {site})
        model, _ = load_model(folder / "model")
        assert model.labels.names == expected.labels
        assert ("Fibrosis" in expected.labels) == (site != "gamma")
        state = model.state_dict()
        for name, rows in expected.head.items():
            assert (state[name] - rows).abs().max() <= 1e-8
        assert any(not torch.equal(t, before.state_dict()[n][: len(t)]) for n, t in expected.head.items())
        files = sorted(path.name for path in (folder / "state").glob("*.safetensors"))
        assert [name for name in files if name[0] in "br"] == [
            "best-000001.safetensors",
            "round-000001.safetensors",
        ]
        for path in (folder / "state").rglob("*.safetensors"):
            content = load(path)
            assert site not in repr(content.header), path
            assert "Fibrosis" not in repr(content.header) or site != "gamma"
        constant = load(folder / "state" / "constant.safetensors").tensors
        packed = load(folder / "state" / "best-000001.safetensors")
        read = read_model(type(packed)({**constant, **packed.tensors}, packed.header), plan, "it")
        assert all(torch.equal(read.head[name], state[name]) for name in read.head)


def finished(trial: Trial) -> Path:
    return Path(run_of(trial).record.folder)


def test_what_cannot_be_removed_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with refused(tmp_path, by=ConfigError):
        forget(tmp_path, "alpha")
    with Trial(AFL(), SMALL, "multilabel") as trial:
        folder = finished(trial)
        run = folder / "run.json"
        before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
        for site in ("delta", "../beta"):
            with refused(f"'{site}'", "alpha, beta, gamma", by=ConfigError):
                forget(folder, site)
        with hold(folder / SERVER_LOCK, 0), pytest.raises(InUse):
            forget(folder, "alpha")
        whole = run.read_bytes()
        atomic_write(run, json.dumps(read_json(run) | {"status": "running"}).encode())
        with refused("running", by=ConfigError):
            forget(folder, "alpha")
        atomic_write(run, whole)
        assert before == {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
        forget(folder, "alpha")
        with refused("'alpha'", "beta, gamma", by=ConfigError):
            forget(folder, "alpha")
        forget(folder, "gamma")
        with refused("beta", by=ConfigError):  # the last
            forget(folder, "beta")


def test_another_method_has_no_exact_removal() -> None:
    with Trial(conformant("surgical"), SMALL, "multilabel") as trial:
        folder = finished(trial)
        assert not (folder / "state" / UPDATES).exists()
        with refused("Surgical Aggregation", "alpha", by=ConfigError):
            forget(folder, "alpha")


@pytest.mark.complete
@pytest.mark.parametrize("step", ["save", "keep", "save_model"])
def test_a_removal_that_was_broken_off_is_repeated(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the new state is there, nothing has changed; after it, a job could continue from it."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with Trial(AFL(), SMALL, "multilabel") as one, Trial(AFL(), SMALL, "multilabel") as other:
        folder = finished(one)
        before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
        with monkeypatch.context() as patch:
            patch.setattr(removal if step == "save_model" else removal.Rounds, step, killed)
            with pytest.raises(KeyboardInterrupt):
                forget(folder, "gamma")
        if step == "save":
            assert before == {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
        found = read_newest(one.server.states, one.plan)
        assert found is not None
        assert ("Fibrosis" in found.model.labels) == (step == "save")
        forget(folder, "gamma")
        whole = finished(other)
        forget(whole, "gamma")
        same = "state/round-000001.safetensors", "state/best-000001.safetensors", "model/model.safetensors"
        assert [(folder / name).read_bytes() for name in same] == [
            (whole / name).read_bytes() for name in same
        ]


def test_only_the_updates_of_the_last_round_are_kept_and_none_of_an_earlier_one_stays() -> None:
    """A server that was killed when it had committed a round has not deleted those of the one before."""
    with Trial(AFL(), SMALL, "multilabel", rounds=2) as trial:
        folder = finished(trial)
        kept = folder / "state" / UPDATES
        assert [path.name for path in kept.iterdir()] == ["000002"]
        shutil.copytree(kept / "000002", kept / "000001")
        forget(folder, "alpha")
        assert not list(kept.rglob("alpha.safetensors"))


@pytest.mark.parametrize("site", ["alpha", "gamma"])
def test_rows_of_a_site_that_missed_the_last_round_are_not_taken_for_exact(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gamma alone has Fibrosis; without it in round 2 the model keeps the row of round 1."""
    with Trial(AFL(), SMALL, "multilabel", rounds=2) as trial:
        trial.server.schedule = replace(trial.server.schedule, min_sites=2)
        trainer = trial.sites["gamma"].trainer
        context = trainer.context

        def absent(task: TaskData, *more: Any) -> Any:
            if task.round == 2:
                raise DataError("gone")
            return context(task, *more)

        monkeypatch.setattr(trainer, "context", absent)
        folder = finished(trial)
        assert read_records(folder / "history.jsonl")[1]["sites"]["gamma"]["status"] == "abstained"
        with refused("gamma", "round 2", by=ConfigError):
            forget(folder, site)


@pytest.mark.complete
def test_the_command_forgets_a_site_of_a_run_on_one_machine(tmp_path: Path) -> None:
    run, settings = tmp_path / "r", ("method=afl", "model.weights=random", "rounds=1", "images=30")
    words = [word for setting in (*settings, "held_out=30") for word in ("--set", setting)]
    suture("run", "demo", "--env", "local", "--out", run, *words)
    kept = run / "state" / UPDATES / "000001"
    first, *others = sorted(path.stem for path in kept.iterdir())
    said = suture("forget", first, run)
    assert f"{first}.safetensors" in "".join(said.split())
    assert sorted(path.stem for path in kept.iterdir()) == others
    assert not list((run / "sites" / first / "state" / "experiments").glob("*"))
    assert read_json(run / "run.json")["status"] == "finished"
