"""Whole federations of Fed-MAS: what stops one before its first round, and what it writes down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import FederationError
from suture.core.labels import LabelSet
from suture.federation.server.registry import Agreement, agree
from suture.learning.training import LocalTraining
from suture.models import ModelSpec, build
from suture.models.priors import PriorSpec, freeze, save_prior
from suture.protocol.messages import SiteInfo
from suture.protocol.packing import load
from suture_papers.fedmas.fedmas import FedMAS

CNN = ModelSpec("cnn", size=16)
METHOD = FedMAS(local=LocalTraining(lr=1e-2, batch_size=8))
WIDE = replace(CNN, projection=128)


def checkpoint(folder: Path, seed: int) -> Path:
    """A small CNN as `suture pretrain` writes it: 128 features."""
    network = build(CNN, LabelSet(("A",)), seed, pretrained=False).backbone
    prior = freeze("cnn", network, 128, CNN.preprocessing, f"of seed {seed}")
    save_prior(folder, "cnn", prior, None, {})
    return folder


def with_prior(federation: Any, site: str, path: Path) -> None:
    """Sets `[training] prior` of a site."""
    config = federation.configs[site]
    training = config.training.model_copy(update={"prior": path})
    federation.configs[site] = config.model_copy(update={"training": training})


def refused(federation: Any, says: str) -> None:
    """It ends before anything is trained, and says so."""
    with pytest.raises(FederationError, match=says):
        federation.run()
    assert not list(federation.folder.rglob("history.jsonl"))
    assert not list(federation.folder.rglob("round-*.safetensors"))


def test_a_checkpoint_of_another_width_ends_it_before_the_first_round(tiny: Any, tmp_path: Path) -> None:
    spec = PriorSpec("checkpoint", str(checkpoint(tmp_path / "prior", 1)))
    federation = tiny(replace(METHOD, prior=spec), model=replace(CNN, projection=64))
    told = r"configuration \(PriorWidth\)"
    refused(federation, f"cannot start; alpha: {told}; beta: {told}; gamma: {told}")
    errors = (federation.folder / "run" / "sites" / "alpha" / "errors.jsonl").read_text()
    assert (
        "alpha: the prior 'of seed 1' has 128 features, but the model has 64; set model.projection=128"
        in errors
    )


def test_sites_with_different_priors_do_not_begin() -> None:
    infos = {
        site: SiteInfo(("A",), {"train": 9}, 1, "code", prior=digest)
        for site, digest in (("a", "f" * 64), ("b", "f" * 64), ("c", "0" * 64))
    }
    with pytest.raises(FederationError, match=r"different priors \(a, b: f{12}; c: 0{12}\)"):
        agree(infos, Agreement())


@pytest.mark.complete
def test_a_site_with_another_checkpoint_ends_it_before_the_first_round(tiny: Any, tmp_path: Path) -> None:
    spec = PriorSpec("checkpoint", str(checkpoint(tmp_path / "prior", 1)))
    federation = tiny(replace(METHOD, prior=spec), model=WIDE, rounds=1)
    with_prior(federation, "beta", checkpoint(tmp_path / "other", 2))
    refused(federation, r"different priors \(alpha, gamma: [0-9a-f]{12}; beta: [0-9a-f]{12}\); give all")
    with_prior(federation, "beta", checkpoint(tmp_path / "same", 1))
    assert federation.run("again").round == 1


def with_checkpoint(tiny: Any, tmp_path: Path) -> Any:
    """A federation of a checkpoint that has done one round of two."""
    spec = PriorSpec("checkpoint", str(checkpoint(tmp_path / "prior", 1)))
    federation = tiny(replace(METHOD, prior=spec), model=WIDE, rounds=1)
    federation.run()
    federation.schedule = replace(federation.schedule, rounds=2)
    return federation


@pytest.mark.complete
@pytest.mark.parametrize("sites", [("beta",), ("alpha", "beta", "gamma")])
def test_a_run_is_not_continued_with_another_prior(sites: tuple[str, ...], tiny: Any, tmp_path: Path) -> None:
    """Also where all sites have changed it together, which leaves nothing to compare among them."""
    federation = with_checkpoint(tiny, tmp_path)
    digest = json.loads((federation.folder / "run" / "run.json").read_text())["prior"]["digest"]
    checkpoint(tmp_path / "other", 2)
    for site in sites:
        with_prior(federation, site, tmp_path / "other")
    others = rf"\({', '.join(sites)}: [0-9a-f]{{12}}\)"
    says = f"begun with the prior {digest[:12]}, which some sites lack {others}"
    with pytest.raises(FederationError, match=says):
        federation.run()
    lines = (federation.folder / "run" / "history.jsonl").read_text().splitlines()
    assert len(lines) == 1
    for site in sites:
        with_prior(federation, site, checkpoint(tmp_path / f"same-{site}", 1))
    assert federation.run().round == 2


@pytest.mark.complete
def test_the_prior_is_in_the_states_the_record_and_the_report(tiny: Any, tmp_path: Path) -> None:
    federation = with_checkpoint(tiny, tmp_path)
    folder = federation.folder / "run"
    held = json.loads((folder / "run.json").read_text())["prior"]
    site = federation.sites()["alpha"]
    assert held == {"name": "checkpoint", "digest": site.trainer.prior.digest}
    header = load(federation.server().states.path(1)).header
    assert header["registry"]["prior"] == held["digest"]
    assert header["plan"]["hyperparameters"]["prior"]["name"] == "checkpoint"
    assert f"checkpoint, digest {held['digest'][:12]}<" in (folder / "report.html").read_text()


@pytest.mark.complete
def test_weights_and_shares_of_each_round_are_in_metrics(tiny: Any) -> None:
    federation = tiny(METHOD, model=WIDE)
    federation.run()
    folder = federation.folder / "run"
    told = json.loads((folder / "metrics.json").read_text())["weighting"]
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert told["rounds"] == [1, 2]
    for site, weights in told["weights"].items():
        assert weights == [line["sites"][site]["weight"] for line in history]
        sums = [sum(other["weight"] for other in line["sites"].values()) for line in history]
        shares = [weight / total for weight, total in zip(weights, sums, strict=True)]
        assert told["shares"][site] == pytest.approx(shares)
        assert told["mean_share"][site] == pytest.approx(sum(shares) / 2)
