"""The exact removal of a site: the model is that of a federation that it never took part in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rounds import conformant
from suture.core.errors import ConfigError
from suture.core.files import atomic_write, read_json
from suture.federation.loop import Loop, federate
from suture.federation.server.global_model import read_model
from suture.federation.server.record import describe
from suture.federation.server.removal import UPDATES, forget
from suture.federation.server.server import Server
from suture.models.saved import load_model
from suture.protocol.packing import load
from suture.simulation.method_checks import SMALL
from suture.simulation.trial import Trial
from suture_papers.closed_form.afl import AFL


def run_of(trial: Trial, without: str = "") -> Server:
    """The run of a trial to its end, by all sites but one."""
    describe(trial.server.record, trial.plan, trial.server.schedule)
    sites = {name: site for name, site in trial.sites.items() if name != without}
    federate(trial.server, Loop(sites))
    for site in sites.values():
        site.close()
    return trial.server


@pytest.mark.parametrize("site", ["alpha", "gamma"])
def test_the_model_is_that_of_a_federation_without_the_site(site: str) -> None:
    """Gamma alone has Fibrosis, which the model then lacks."""
    with Trial(AFL(), SMALL, "multilabel") as one, Trial(AFL(), SMALL, "multilabel") as never:
        expected = run_of(never, without=site).selected()
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


def test_only_the_updates_of_the_last_round_are_kept() -> None:
    with Trial(AFL(), SMALL, "multilabel", rounds=3) as trial:
        folder = finished(trial)
        assert [path.name for path in (folder / "state" / UPDATES).iterdir()] == ["000003"]
        assert forget(folder, "alpha")
