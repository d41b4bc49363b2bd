"""Rounds that go wrong: nothing undeclared reaches the model, and nothing committed is lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from between import Between
from noted import noted
from suture.core.errors import FederationError
from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import Abstain, SiteInfo, TaskData, TaskName, Update
from suture.protocol.packing import Packed, load, pack, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


def history(server: Server) -> list[dict[str, Any]]:
    path = server.record.folder / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def state(server: Server) -> dict[str, torch.Tensor]:
    return dict(load(server.states.path(server.round)).tensors)


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[k]) for k, t in one.items())


def broken(update: Update) -> dict[str, Packed]:
    """The answers of a site that lies, one of each kind."""
    good = pack(update)
    poison = {k: torch.full_like(t, float("nan")) for k, t in update.shared.items()}
    return {
        "nan": pack(replace(update, shared=poison)),
        "weight": pack(replace(update, weight=100.0)),
        "foreign label": pack(replace(update, labels=("Hernia", *update.labels[1:]))),
        "another round": pack(replace(update, round=99)),
        "extra field": Packed(good.tensors, {**good.header, "patients": ["p1"]}),
        "extra tensor": Packed({**good.tensors, "shared/extra": torch.ones(1)}, good.header),
        "another shape": pack(replace(update, shared={k: t[..., None] for k, t in update.shared.items()})),
        "no answer at all": Packed({}, {"type": "handshake"}),
    }


KINDS = [
    "nan",
    "weight",
    "foreign label",
    "another round",
    "extra field",
    "extra tensor",
    "another shape",
    "no answer at all",
]


WITHOUT_ALPHA: list[Any] = []
"""The state without the site that lies; every test has the same data."""


@pytest.mark.complete
@pytest.mark.parametrize("kind", KINDS)
def test_a_lying_site_is_rejected_whole_and_the_round_goes_on(kind: str, tiny: Any) -> None:
    """The result is the one without that site, bit by bit."""

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site == "alpha" and task.task == "train" and isinstance(update, Update):
            return broken(update)[kind]
        return answer

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == "alpha" and task.task == "train" else answer

    federation = tiny(METHOD, min_sites=2)
    if not WITHOUT_ALPHA:
        lost = federation.server("lost")
        federate(lost, Between(federation.sites("lost"), lose))
        assert history(lost)[0]["sites"]["alpha"]["status"] == "missing"
        WITHOUT_ALPHA.append(state(lost))
    server = federation.server("lied")
    federate(server, Between(federation.sites("lied"), lie))
    assert same(state(server), WITHOUT_ALPHA[0])
    line = history(server)[0]["sites"]["alpha"]
    assert line["status"] == "rejected"
    assert line["reason"]


@pytest.mark.complete
def test_identity_comes_from_the_transport(tiny: Any) -> None:
    """An answer of a site that was not asked, or a second one, changes nothing."""
    federation = tiny(METHOD)
    server, sites = federation.server(), federation.sites()

    class Twice(Loop):
        def exchange(
            self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver
        ) -> dict[str, str]:
            super().exchange(task, payloads, receive)
            payload = unpack(next(iter(payloads.values())))
            assert isinstance(payload, TaskData)
            receive("stranger", sites["alpha"].answer(payload).packed)
            receive("alpha", Packed({}, {"type": "handshake"}))
            return {}

    federate(server, Twice(sites))
    assert same(state(server), state(federation.run("plain")))


@pytest.mark.complete
def test_too_few_updates_leave_the_model_as_it_was_and_say_why(tiny: Any) -> None:
    federation = tiny(METHOD)
    server = federation.server()

    def abstain(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta" and task.task == "train" and task.round == 2:
            return pack(Abstain("out_of_memory", "MemoryError"))
        return answer

    with pytest.raises(FederationError, match=r"round 2: 2 usable updates of 3 needed; beta: out_of_memory"):
        federate(server, Between(federation.sites(), abstain))
    assert server.round == 1
    assert [line["status"] for line in history(server)] == ["unchanged", "unchanged"]
    assert server.states.newest() is not None


@pytest.mark.complete
def test_a_passing_failure_costs_one_round_and_no_difference(tiny: Any) -> None:
    federation = tiny(METHOD)
    server = federation.server()
    lost: list[int] = []

    def once(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if site == "gamma" and task.task == "train" and not lost:
            lost.append(task.round)
            return None
        return answer

    federate(server, Between(federation.sites(), once))
    assert same(state(server), state(federation.run("plain")))


class Died(Exception):
    """Stands for kill -9 of the server."""


@pytest.mark.complete
@pytest.mark.parametrize("moment", ["after the answers", "after the commit", "in the last validation"])
def test_a_dead_server_continues_to_the_same_bytes(
    moment: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(METHOD, rounds=4)
    whole = federation.run("whole")
    server = federation.server("cut")
    if moment == "after the answers":
        commit = Server._commit

        def die(self: Server, number: int, *rest: Any) -> None:
            if number == 3:
                raise Died
            commit(self, number, *rest)

        monkeypatch.setattr(Server, "_commit", die)
    elif moment == "after the commit":
        monkeypatch.setattr(
            "suture.federation.server.collector.UpdateCollector.empty", lambda _: _die_at(server, 3)
        )
    else:
        monkeypatch.setattr(Server, "close_validation", lambda *_: _die_at(server, 4))
    with pytest.raises(Died):
        federate(server, Loop(federation.sites("cut")))
    monkeypatch.undo()
    again = federation.server("cut")
    federate(again, Loop(federation.sites("cut")))
    assert same(state(again), state(whole))
    assert again.selected_round == whole.selected_round
    assert [line["round"] for line in history(again)] == [1, 2, 3, 4]
    for a, b in zip(history(again), history(whole), strict=True):
        assert a["validation"] == b["validation"]
    files = [server.record.folder / "model" / "model.safetensors" for server in (again, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def _die_at(server: Server, number: int) -> None:
    if server.round == number:
        raise Died


@pytest.mark.complete
def test_more_rounds_continue_a_finished_run(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=2)
    federation.run("grown")
    federation.schedule = replace(federation.schedule, rounds=4)
    grown = federation.run("grown")
    federation.schedule = replace(federation.schedule, rounds=4)
    assert same(state(grown), state(federation.run("whole")))


@pytest.mark.complete
def test_a_new_site_adds_rows_and_a_removed_class_keeps_its_own(tiny: Any) -> None:
    labels = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    federation = tiny(METHOD, labels, rounds=1)
    first = federation.run()
    hernia = first.model.rows(("Hernia",))
    later = tiny(METHOD, {"alpha": ("Mass", "Nodule"), "gamma": ("Fibrosis", "Nodule")}, rounds=2)
    second = later.server()
    federate(second, Loop(later.sites()))
    assert second.registry.labels == ("Fibrosis", "Hernia", "Mass", "Nodule")
    assert all(torch.equal(t, hernia[k]) for k, t in second.model.rows(("Hernia",)).items())
    assert second.record.run["new_labels"] == ["Fibrosis"]


@pytest.mark.complete
def test_a_typo_stops_the_job_and_the_label_map_settles_it(tiny: Any) -> None:
    labels = {"alpha": ("Mass", "Nodule"), "beta": ("Nodul", "Hernia")}
    write = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    federation = tiny(METHOD, write, rounds=1)
    path = federation.configs["beta"].data.table
    path.write_text(path.read_text().replace("Nodule", "Nodul", 1))
    federation = tiny(METHOD, labels, rounds=1)
    with pytest.raises(FederationError, match=r"'Nodul' \(beta\) and 'Nodule' \(alpha\)"):
        federation.run()
    mapped = tiny(METHOD, labels, rounds=1, label_map={"Nodul": "Nodule"})
    server, seen = mapped.server("mapped"), []

    def listen(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta":
            seen.extend(task.labels)
        return answer

    federate(server, Between(mapped.sites("mapped"), listen))
    assert server.registry.labels == ("Hernia", "Mass", "Nodule")
    assert set(seen) == {"Nodul", "Hernia"}  # its own spelling, and nobody else's
    accepted = tiny(METHOD, labels, rounds=1, accept_labels=("Nodul",)).run("accepted")
    assert len(accepted.registry.labels) == 4


def test_a_spelling_of_the_label_map_that_no_site_has_is_told(tiny: Any) -> None:
    labels = {"alpha": ("Mass", "Nodule"), "beta": ("Fibrosis", "Hernia")}
    run = tiny(METHOD, labels, rounds=1, label_map={"Fibroses": "Mass", "Fibrosis": "Mass"}).run("typo")
    (note,) = [note for note in noted(run) if "label_map" in note]
    assert "'Fibroses'" in note
    assert "did you mean" in note


@pytest.mark.complete
def test_a_full_disk_at_the_server_commits_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = tiny(METHOD, rounds=3)
    server = federation.server()
    save = server.states.save.__func__  # type: ignore[attr-defined]

    def full(self: Any, number: int, *args: Any, **kwargs: Any) -> None:
        if number == 2 and self.folder == server.states.folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, number, *args, **kwargs)

    monkeypatch.setattr("suture.federation.state_files.Rounds.save", full)
    with pytest.raises(OSError, match="No space left"):
        federate(server, Loop(federation.sites()))
    monkeypatch.undo()
    again = federation.server()
    federate(again, Loop(federation.sites()))
    assert same(state(again), state(federation.run("whole")))


@pytest.mark.complete
def test_a_full_disk_at_a_site_is_an_abstention_without_a_path(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(METHOD, min_sites=2, rounds=1)
    server, sites = federation.server(), federation.sites()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/path/p0001.png")

    sites["beta"].states.files = _Full(full)  # type: ignore[assignment]
    federate(server, Loop(sites))
    line = history(server)[0]["sites"]["beta"]
    assert line["status"] == "abstained"
    assert line["reason"] == "disk_full (OSError)"
    written = "".join(p.read_text() for p in server.record.folder.glob("*.json*"))
    assert "/secret" not in written
    assert "/secret" in (sites["beta"].folder / "errors.jsonl").read_text()


class _Full:
    def __init__(self, save: Any) -> None:
        self.save = save

    def newest(self, **_: Any) -> None:
        return None


@pytest.mark.complete
def test_frozen_batch_norm_is_sent_once(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8), batch_norm="frozen")
    server = tiny(method, rounds=3).run()
    down = [line["bytes_down"] for line in history(server)]
    assert down[0] > down[1]
    assert abs(down[1] - down[2]) < 10
    start, end = load(server.states.path(server.round)), server.model.fixed
    assert end
    assert all(torch.equal(start.tensors[f"fixed/{k}"], t) for k, t in end.items())
    assert not any("norm" in name for name in server.model.shared)


@pytest.mark.complete
def test_a_site_that_lost_its_state_is_sent_everything_again(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8), batch_norm="frozen")
    federation = tiny(method, rounds=3)
    server, sites = federation.server(), federation.sites()

    def wipe(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta" and task.task == "train" and task.round == 1:
            for path in sites["beta"].folder.glob("round-*"):
                path.unlink()
        return answer

    federate(server, Between(sites, wipe))
    reasons = [line["sites"]["beta"]["reason"] for line in history(server)]
    assert "missing_state (MissingState)" in reasons
    assert server.round == 3


@pytest.mark.complete
def test_selection_keeps_the_best_round(tiny: Any) -> None:
    server = tiny(METHOD, rounds=4).run()
    losses = [line["validation"]["loss"] for line in history(server)]
    assert server.selected_round == 1 + losses.index(min(losses))
    metrics = json.loads((server.record.folder / "metrics.json").read_text())
    assert metrics["selected_round"] == server.selected_round
    assert tiny(METHOD, rounds=4, selection="last").run("last").selected_round == 4


def test_server_metric_needs_labelled_data_at_the_server(tiny: Any) -> None:
    with pytest.raises(FederationError, match=r"server's suture\.toml"):
        tiny(METHOD, selection="server_metric").server()
    labels = {"alpha": ("Mass", "Nodule"), "server": ("Fibrosis", "Hernia", "Mass", "Nodule")}
    server = tiny(METHOD, labels, selection="server_metric", rounds=3).run("own")
    scores = [line["validation"]["server_auroc"] for line in history(server)]
    assert server.selected_round == 1 + scores.index(max(scores))
    assert json.loads((server.record.folder / "metrics.json").read_text())["source"] == "server test set"


def test_balanced_accuracy_needs_one_label_for_each_image(tiny: Any) -> None:
    labels = {"alpha": ("Mass", "Nodule"), "server": ("Fibrosis", "Hernia", "Mass", "Nodule")}
    with pytest.raises(FederationError, match="one label for each image"):
        tiny(METHOD, labels, selection="server_balanced_accuracy").server()


def test_a_label_view_that_a_site_forbids_is_refused_before_round_one(tiny: Any) -> None:
    from suture.methods.vanilla import VanillaFL

    federation = tiny(VanillaFL(), view="own")
    with pytest.raises(FederationError, match=r"cannot start; alpha: label_view"):
        federation.run()
    assert not federation.server().states.rounds()


def test_class_without_positives_is_null_never_zero(tiny: Any) -> None:
    federation = tiny(METHOD, {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}, rounds=1)
    path: Path = federation.configs["beta"].data.table
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line.rsplit(",", 1)[0] + ",0" for line in lines[1:])]) + "\n")
    server = tiny(METHOD, {"alpha": (), "beta": ()}, rounds=1).run()
    metrics = json.loads((server.record.folder / "metrics.json").read_text())
    assert metrics["auroc"]["Hernia"] is None
    assert metrics["counts"]["Hernia"][0] == 0
    assert "Hernia" in metrics["undefined"]


@pytest.mark.complete
def test_models_spec_of_the_run_is_written(tiny: Any) -> None:
    server = tiny(METHOD, rounds=1).run()
    written = json.loads((server.record.folder / "model" / "model.json").read_text())
    assert written["labels"] == list(server.registry.labels)
    assert written["model"]["name"] == ModelSpec("cnn").name
    assert written["preprocessing"]["size"] == 16


@pytest.mark.parametrize(
    ("selection", "validation", "measures", "runs"),
    [
        ("site_loss", 0, True, False),
        ("site_loss", 5, False, False),
        ("last", 0, True, True),
        ("last", 5, False, True),
        ("site_loss", 1, True, True),
    ],
)
def test_a_job_whose_sites_can_measure_nothing_ends_before_its_first_round(
    selection: str, validation: int, measures: bool, runs: bool, tiny: Any
) -> None:
    def change(site: str, task: TaskData, answer: Packed) -> Packed:
        info = unpack(answer)
        if not isinstance(info, SiteInfo):
            return answer
        held = validation if site == "alpha" else 0
        return pack(replace(info, n={**info.n, "validation": held}, measures=measures))

    federation = tiny(METHOD, rounds=1, selection=selection)
    server = federation.server()
    if runs:
        federate(server, Between(federation.sites(), change))
        return
    with pytest.raises(
        FederationError,
        match=r"no site has a validation loss .*alpha: .*; beta: no validation images.*'last'",
    ):
        federate(server, Between(federation.sites(), change))
    assert not (server.record.folder / "history.jsonl").exists()
    assert server.states.newest() is None
