"""MOON: the contrast by hand, where it is FedAvg, Eq. 1 written out, and the model that a site keeps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from federated import LOCAL, ROUND, at_site, federated, moved, objective_of, random_batch, same
from official import Report, write_openi
from rounds import conformant, reply_of
from suture.core.labels import LabelType
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.federation.loop import Loop, federate
from suture.learning.training import SiteContext
from suture.methods.fedavg import FedAvg
from suture.models.classifier import split_state
from suture.protocol.messages import TaskData
from suture.protocol.packing import load, unpack
from suture_papers.chest_xrays.openi import FINDINGS
from suture_papers.drift.moon import MOON, Contrastive, contrast
from suture_synthetic.method_checks import SMALL

WITH_NECK = replace(SMALL, neck=256)


def sent_last_time(site: SiteContext) -> dict[str, Tensor]:
    """The site's model as it keeps it."""
    return {name: t.clone() for name, t in Contrastive().kept(site.model).items()}


@pytest.mark.parametrize(
    ("z", "received", "previous", "expected"),
    [
        ((3.0, 4.0), (4.0, 3.0), (-4.0, 3.0), 0.136807),  # cosines .96 and 0: ln(1 + e^(-1.92))
        ((1.0, 0.0), (0.8, 0.6), (0.6, 0.8), 0.513015),  # cosines .8 and .6: ln(1 + e^(-.4))
        ((3.0, 4.0), (4.0, 3.0), (4.0, 3.0), 0.693147),  # ln 2
    ],
)
def test_the_contrast_by_hand(
    z: tuple[float, ...], received: tuple[float, ...], previous: tuple[float, ...], expected: float
) -> None:
    one, two, three = (torch.tensor([v], dtype=torch.float64) for v in (z, received, previous))
    assert contrast(one, two, three, 0.5).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("label_type", "settings"),
    [
        ("multilabel", {"rows": "owners"}),
        ("multilabel", {"label_view": "own"}),
        ("multiclass", {"softmax": "balanced"}),
    ],
)
def test_without_the_term_it_is_fedavg_with_the_neck(label_type: LabelType, settings: dict[str, Any]) -> None:
    plain = federated(FedAvg(local=LOCAL, **settings), label_type, model=WITH_NECK)
    assert same(federated(MOON(local=LOCAL, contrastive=Contrastive(mu=0), **settings), label_type), plain)
    assert not same(federated(MOON(local=LOCAL, **settings), label_type), plain)


@pytest.mark.complete
def test_its_first_round_is_one_of_fedavg() -> None:
    plain = federated(FedAvg(local=LOCAL), model=WITH_NECK, rounds=1)
    assert same(federated(MOON(local=LOCAL, contrastive=Contrastive(mu=10)), rounds=1), plain)


def test_a_previous_model_that_is_the_received_one_changes_no_gradient() -> None:
    """As in the program of Fed-MAS, in the first round: the loss is larger by mu ln 2, the gradient equal."""
    gradients, losses = [], []
    for kept in (False, True):
        site, task = at_site(MOON(local=LOCAL))
        round_ = replace(ROUND, kept=sent_last_time(site) if kept else {})
        objective = objective_of(MOON(contrastive=Contrastive(mu=3)), site, task, round_)
        moved(site.model)
        loss = objective(random_batch(8, len(task.labels), "multilabel"))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append([p.grad for p in site.model.parameters() if p.grad is not None])
    assert losses[1] - losses[0] == pytest.approx(3 * math.log(2), abs=1e-12)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_loss_is_that_of_equations_1_and_3(label_type: LabelType) -> None:
    """Image by image, with the cosine and the exponentials written out."""
    site, task = at_site(MOON(local=LOCAL), label_type)
    batch = random_batch(7, len(task.labels), label_type)
    supervised = objective_of(FedAvg(class_weights="none"), site, task)
    moved(site.model, seed=1)
    kept, previous = sent_last_time(site), site.model.eval().features(batch.inputs).tolist()
    moved(site.model, seed=2)
    received = site.model.eval().features(batch.inputs).tolist()
    method = MOON(class_weights="none", contrastive=Contrastive(mu=0.7, tau=0.3))
    objective = objective_of(method, site, task, replace(ROUND, kept=kept))
    moved(site.model, seed=3)
    z = site.model.eval().features(batch.inputs).tolist()

    def sim(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    total = 0.0
    for i in range(len(batch)):
        near, far = math.exp(sim(z[i], received[i]) / 0.3), math.exp(sim(z[i], previous[i]) / 0.3)
        total += -math.log(near / (near + far))
    expected = supervised(batch).item() + 0.7 * total / len(batch)
    assert objective(batch).item() == pytest.approx(expected, abs=1e-10)


def test_the_neck_is_added_where_there_is_none() -> None:
    assert MOON().adapted(SMALL).neck == 256
    assert MOON().adapted(replace(SMALL, neck=32)).neck == 32


def test_a_site_keeps_what_it_sent_and_not_the_merge(tiny: Any) -> None:
    """The model in the state of round 1 is that of alpha's update, tensor by tensor; no row is in it."""
    federation = tiny(MOON(local=LOCAL), rounds=1)
    server, sites = federation.server(), federation.sites()
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    update: Any = reply_of(sites["alpha"], task)
    (path,) = sites["alpha"].folder.glob("round-000001*")
    prefix = "kept/previous/"
    kept = {k.removeprefix(prefix): t for k, t in load(path).tensors.items() if k.startswith(prefix)}
    assert all(torch.equal(kept[name], tensor) for name, tensor in update.shared.items())
    assert kept.keys() == update.shared.keys()


def test_received_and_previous_model_are_in_eval_mode_and_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batch norm would move with every batch that they see."""
    seen = []
    plain = Contrastive._of

    def watched(self: Contrastive, step: Any, previous: Any) -> Tensor:
        seen.append((step.received, previous))
        return plain(self, step, previous)

    monkeypatch.setattr(Contrastive, "_of", watched)
    method = MOON(local=LOCAL)
    site, task = at_site(method)
    site.model.float()
    before = {name: t.clone() for name, t in split_state(site.model.state_dict())[0].items()}
    method.train(site, task, replace(ROUND, kept=sent_last_time(site)))
    assert len(seen) == 3
    for models in seen:
        for model in models:
            assert not model.training
            assert not any(p.requires_grad for p in model.parameters())
            assert all(torch.equal(t, before[k]) for k, t in split_state(model.state_dict())[0].items())
    trained = split_state(site.model.state_dict())[0]
    assert all(not torch.equal(t, before[name]) for name, t in trained.items() if "running_mean" in name)


@pytest.mark.complete
@pytest.mark.parametrize("stopped_in", ["between", "within"])
def test_continued_it_ends_as_without_interruption(stopped_in: str, tiny: Any) -> None:
    """Stopped after round 2, or in round 3 with every site trained and nothing committed."""
    method = conformant("moon")
    whole = tiny(method, rounds=4).run("whole")
    federation = tiny(method, rounds=4)
    server, loop = federation.server("cut"), Loop(federation.sites("cut"))
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    for _ in range(2):
        server.close_round(loop.exchange("train", server.assign(), server.receiver()))
    if stopped_in == "within":
        loop.exchange("train", server.assign(), server.receiver())
    del server, loop
    again = federation.server("cut")
    federate(again, Loop(federation.sites("cut")))
    assert (again.round, same(again.model, whole.model)) == (4, True)


@pytest.mark.complete
def test_resumed_on_the_command_line_it_ends_as_without_interruption(tmp_path: Path) -> None:
    small = ["method=moon", "simulation.images=60", "simulation.held_out=40", "method.local.lr=0.01"]
    job = with_settings(load_job("demo"), [*small, "rounds=3"])
    run_job(job, "local", tmp_path / "whole")
    run_job(with_settings(job, ["rounds=2"]), "local", tmp_path / "cut")
    run_job(job, "local", tmp_path / "cut", resume=True)
    one, two = (load_file(tmp_path / out / "model" / "model.safetensors") for out in ("whole", "cut"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.complete
def test_it_trains_on_documents(tmp_path: Path) -> None:
    reports: list[Report] = [
        (f"It shows {FINDINGS[i % 8].lower()}.", "", (FINDINGS[i % 8], FINDINGS[i % 5])) for i in range(240)
    ]
    root = write_openi(tmp_path / "openi", reports).parent
    words = ["rounds=3", "method.local.lr=0.01", "simulation.clients=2", "model.vocabulary=corpus"]
    models = []
    for mu in (0.0, 5.0):
        chosen = [*words, f"simulation.root={root}", "method=moon", f"method.contrastive.mu={mu}"]
        job = with_settings(load_job("surgical_openi"), chosen)
        folder = run_job(job, "local", tmp_path / f"r{mu}")
        models.append(load_file(folder / "model" / "model.safetensors"))
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert all(site["train_loss"] > 0 for line in lines for site in line["sites"].values())
    assert models[0]["neck.2.weight"].shape[0] == 256
    assert not torch.equal(models[0]["neck.2.weight"], models[1]["neck.2.weight"])


@pytest.mark.parametrize("mu", [0.01, 0.1, 1.0])
def test_tables_6_and_8_of_fedmas_are_settings(mu: float) -> None:
    words = ["method=moon", f"method.contrastive.mu={mu}", "method.softmax=balanced"]
    method = with_settings(load_job("fedmas_tones"), words).method
    assert isinstance(method, MOON)
    assert (method.contrastive, method.softmax) == (Contrastive(mu), "balanced")


def test_a_temperature_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        Contrastive(tau=0.0)
