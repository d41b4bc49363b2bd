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
from suture.federation.server.record import LOCK, describe
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


@pytest.mark.parametrize(
    ("site", "change", "why"),
    [
        ("delta", {}, "has no update of 'delta'; it has those of alpha, beta, gamma"),
        ("alpha", {"status": "running"}, "the run is running; let it end first"),
    ],
)
def test_what_cannot_be_removed_is_refused_and_nothing_changes(
    site: str, change: dict[str, Any], why: str
) -> None:
    with Trial(AFL(), SMALL, "multilabel") as trial:
        folder = finished(trial)
        if change:
            atomic_write(folder / "run.json", json.dumps(read_json(folder / "run.json") | change).encode())
        before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
        with pytest.raises(ConfigError, match=why):
            forget(folder, site)
        assert before == {path: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_the_last_site_is_not_removed() -> None:
    with Trial(AFL(), SMALL, "multilabel") as trial:
        folder = finished(trial)
        forget(folder, "alpha")
        forget(folder, "gamma")
        with pytest.raises(ConfigError, match=r"beta is the only site of .*; delete the folder instead"):
            forget(folder, "beta")


def test_another_method_has_no_exact_removal() -> None:
    with Trial(conformant("surgical"), SMALL, "multilabel") as trial:
        folder = finished(trial)
        assert not (folder / "state" / UPDATES).exists()
        with pytest.raises(ConfigError, match=r"^Surgical Aggregation has no exact removal: what alpha sent"):
            forget(folder, "alpha")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        forget(tmp_path, "alpha")


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


def test_no_update_of_an_earlier_round_stays() -> None:
    """A server that was killed when it had committed a round has not deleted those of the one before."""
    with Trial(AFL(), SMALL, "multilabel") as trial:
        folder = finished(trial)
        kept = folder / "state" / UPDATES
        shutil.copytree(kept / "000001", kept / "000000")
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
        with pytest.raises(ConfigError, match="gamma sent no update in round 2, so rows of an earlier round"):
            forget(folder, site)


def test_a_folder_in_which_a_server_works_is_refused() -> None:
    with Trial(AFL(), SMALL, "multilabel") as trial:
        folder = finished(trial)
        with hold(folder / LOCK, 0), pytest.raises(InUse):
            forget(folder, "alpha")
        assert forget(folder, "alpha")
        with pytest.raises(ConfigError, match="has no update of 'alpha'; it has those of beta, gamma"):
            forget(folder, "alpha")
        with pytest.raises(ConfigError, match=r"has no update of '\.\./beta'"):
            forget(folder, "../beta")


def test_only_the_updates_of_the_last_round_are_kept() -> None:
    with Trial(AFL(), SMALL, "multilabel", rounds=3) as trial:
        folder = finished(trial)
        assert [path.name for path in (folder / "state" / UPDATES).iterdir()] == ["000003"]
        assert forget(folder, "alpha")
