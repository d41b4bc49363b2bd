"""Whole federations of Fed-MAS: what stops one, what it writes down, and sites that cannot be weighted."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from one_step import equal
from suture.core.errors import FederationError, RescueFactorError
from suture.core.files import read_json, read_records
from suture.core.labels import LabelSet
from suture.federation.loop import federate
from suture.federation.server.registry import Agreement, agree
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.models import ModelSpec, build
from suture.models.classifier import Layout
from suture.models.priors import PriorSpec, freeze, save_prior
from suture.protocol.messages import SiteInfo, TaskData
from suture.protocol.packing import Packed, load
from suture_papers.fedmas.fedmas import LEAST, Divergence, FedMAS, check_rescue
from world import refused

# Priors

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


def test_a_checkpoint_of_another_width_ends_it_before_the_first_round(tiny: Any, tmp_path: Path) -> None:
    spec = PriorSpec("checkpoint", str(checkpoint(tmp_path / "prior", 1)))
    federation = tiny(replace(METHOD, prior=spec), model=replace(CNN, projection=64))
    with refused("PriorWidth", "alpha", "beta", "gamma", by=FederationError):
        federation.run()
    assert not list(federation.folder.rglob("history.jsonl"))
    assert not list(federation.folder.rglob("round-*.safetensors"))
    errors = (federation.folder / "run" / "sites" / "alpha" / "errors.jsonl").read_text()
    assert "model.projection=128" in errors


def test_sites_with_different_priors_do_not_begin() -> None:
    infos = {
        site: SiteInfo(("A",), {"train": 9}, 1, "code", prior=digest)
        for site, digest in (("a", "f" * 64), ("b", "f" * 64), ("c", "0" * 64))
    }
    with refused("a, b: ffff", "c: 0000", by=FederationError):
        agree(infos, Agreement())


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
    digest = read_json(federation.folder / "run" / "run.json")["prior"]["digest"]
    assert digest == federation.sites()["alpha"].trainer.prior.digest
    checkpoint(tmp_path / "other", 2)
    for site in sites:
        with_prior(federation, site, tmp_path / "other")
    with refused(digest[:12], ", ".join(sites), by=FederationError):
        federation.run()
    assert len(read_records(federation.folder / "run" / "history.jsonl")) == 1
    for site in sites:
        with_prior(federation, site, checkpoint(tmp_path / f"same-{site}", 1))
    assert federation.run().round == 2


@pytest.mark.complete
def test_weights_and_shares_of_each_round_are_in_metrics(tiny: Any) -> None:
    server = tiny(METHOD, model=WIDE).run()
    told = read_json(server.record.folder / "metrics.json")["weighting"]
    lines = [line["sites"] for line in history(server)]
    assert told["rounds"] == [1, 2]
    for site, weights in told["weights"].items():
        assert weights == [sites[site]["weight"] for sites in lines]
        shares = [sites[site]["weight"] / sum(other["weight"] for other in sites.values()) for sites in lines]
        assert told["shares"][site] == pytest.approx(shares)
        assert told["mean_share"][site] == pytest.approx(sum(shares) / 2)


# Rescue factors that cannot weight a mean: the site is left out of the round
ABSTAINED = "rescue_factor (RescueFactorError)"


def history(server: Server) -> list[dict[str, Any]]:
    return read_records(server.record.folder / "history.jsonl")


def tensors(server: Server) -> dict[str, Tensor]:
    return dict(load(server.states.path(server.round)).tensors)


def without(federation: Any, lost: str, out: str) -> dict[str, Tensor]:
    """The model of a federation that gets no update of one site."""

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == lost and task.task == "train" else answer

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lose))
    return tensors(server)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 0.0, -1.0, LEAST / 2])
def test_what_is_no_weight_is_refused_by_the_sites_name(factor: float) -> None:
    with refused("beta", "round 3", factor, by=RescueFactorError):
        check_rescue(factor, "beta", 3)
    check_rescue(LEAST, "beta", 3)


def test_the_server_takes_no_factor_that_distances_cannot_give() -> None:
    """Distances are 4 at most: 4 x 4 of each class in the one pass over the data, or 1 of all shares."""
    for rescue, most, of_each_class in (("paper", 16.0, True), ("normalised", 1.0, False)):
        method: Any = replace(METHOD, rescue=rescue)
        egress = method.egress(Layout({}, {}))
        assert (egress.weight, egress.over_classes) == ((LEAST, most), of_each_class)


@pytest.mark.complete
@pytest.mark.parametrize("factor", [math.nan, 0.0])
def test_the_others_are_merged_without_that_site(
    factor: float, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(METHOD, model=WIDE, rounds=1, min_sites=2)
    expected = without(federation, "beta", "lost")
    honest = Divergence.while_training

    def bad(watch: Divergence) -> Tensor:
        v = honest(watch)
        return torch.full_like(v, factor) if watch._site.name == "beta" else v

    monkeypatch.setattr(Divergence, "while_training", bad)
    server = federation.run()
    (line,) = history(server)
    assert line["status"] == "committed"
    assert (line["sites"]["beta"]["status"], line["sites"]["beta"]["reason"]) == ("abstained", ABSTAINED)
    assert {s for s, at in line["sites"].items() if at["status"] == "accepted"} == {"alpha", "gamma"}
    assert equal(tensors(server), expected)
    folder = federation.folder / "run"
    assert "beta" in (folder / "sites" / "beta" / "errors.jsonl").read_text()
    assert ABSTAINED in (folder / "report.html").read_text()


@pytest.mark.complete
def test_a_site_whose_images_have_no_class_takes_part_and_decides_nothing(tiny: Any) -> None:
    federation = tiny(METHOD, model=WIDE, rounds=1)
    table: Path = federation.configs["beta"].data.table
    rows = list(csv.reader(table.open(newline="")))
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *([*row[:3], *("0" for _ in row[3:])] for row in rows[1:])])
    server = federation.run()
    (line,) = history(server)
    assert {at["status"] for at in line["sites"].values()} == {"accepted"}
    federation.schedule = replace(federation.schedule, min_sites=2)
    expected = without(federation, "beta", "lost")
    for name, tensor in tensors(server).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)
