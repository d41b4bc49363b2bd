"""Rounds that go wrong, servers that die, and sites that come and go: nothing committed is lost."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import METHOD, complaint, exported, history, record, run

from between import Between
from noted import noted
from suture.core.errors import FederationError
from suture.federation.loop import Loop, federate
from suture.federation.server import server as module
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.server import Server, Stage
from suture.federation.state_files import Rounds
from suture.learning.evaluation import NOTHING
from suture.learning.training import LocalTraining
from suture.methods.individual import Individual
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.protocol.messages import Abstain, Evaluation, SiteInfo, TaskData
from suture.protocol.packing import Packed, load, pack, unpack
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused


def state(server: Server) -> dict[str, torch.Tensor]:
    return dict(load(server.states.path(server.round)).tensors)


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[k]) for k, t in one.items())


FROZEN = replace(METHOD, batch_norm="frozen")
TWO = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
OWN = {"alpha": ("Mass", "Nodule"), "server": ("Fibrosis", "Hernia", "Mass", "Nodule")}


@pytest.mark.complete
def test_too_few_updates_leave_the_model_as_it_was_and_say_why(tiny: Any) -> None:
    def abstain(site: str, task: TaskData, answer: Packed) -> Packed:
        wants = (site, task.task, task.round) == ("beta", "train", 2)
        return pack(Abstain("out_of_memory", "MemoryError")) if wants else answer

    federation = tiny(METHOD)
    server = federation.server()
    with refused("round 2", "2 usable updates of 3", "beta: out_of_memory", by=FederationError):
        federate(server, Between(federation.sites(), abstain))
    assert server.round == 1
    assert [line["status"] for line in history(server)] == ["unchanged", "unchanged"]
    assert server.states.newest() is not None


@pytest.mark.complete
def test_a_passing_failure_costs_one_round_and_no_difference(tiny: Any) -> None:
    lost: list[int] = []

    def once(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if site == "gamma" and task.task == "train" and not lost:
            lost.append(task.round)
            return None
        return answer

    federation = tiny(METHOD)
    assert same(state(run(federation, change=once)), state(federation.run("plain")))


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
    commit = Server._commit

    def die_at(number: int, *_: Any) -> None:
        if server.round == number:
            raise Died

    def die(self: Server, number: int, *rest: Any) -> None:
        if number == 3:
            raise Died
        commit(self, number, *rest)

    if moment == "after the answers":
        monkeypatch.setattr(Server, "_commit", die)
    elif moment == "after the commit":
        monkeypatch.setattr(UpdateCollector, "empty", lambda _: die_at(3))
    else:
        monkeypatch.setattr(Server, "close_validation", lambda *_: die_at(4))
    with pytest.raises(Died):
        federate(server, Loop(federation.sites("cut")))
    monkeypatch.undo()
    again = run(federation, "cut")
    assert same(state(again), state(whole))
    assert exported(again) == exported(whole)
    assert again.selected_round == whole.selected_round
    assert [line["round"] for line in history(again)] == [1, 2, 3, 4]
    assert [a["validation"] for a in history(again)] == [b["validation"] for b in history(whole)]


@pytest.mark.complete
def test_more_rounds_continue_a_finished_run(tiny: Any) -> None:
    tiny(METHOD, rounds=2).run("grown")
    longer = tiny(METHOD, rounds=4)
    assert same(state(longer.run("grown")), state(longer.run("whole")))


@pytest.mark.complete
def test_a_new_site_adds_rows_and_a_removed_class_keeps_its_own(tiny: Any) -> None:
    hernia = tiny(METHOD, TWO, rounds=1).run().model.rows(("Hernia",))
    second = tiny(METHOD, {"alpha": TWO["alpha"], "gamma": ("Fibrosis", "Nodule")}, rounds=2).run()
    assert second.registry.labels == ("Fibrosis", "Hernia", "Mass", "Nodule")
    assert all(torch.equal(t, hernia[k]) for k, t in second.model.rows(("Hernia",)).items())
    assert second.record.run["new_labels"] == ["Fibrosis"]


@pytest.mark.complete
def test_a_typo_stops_the_job_and_the_label_map_settles_it(tiny: Any) -> None:
    table = tiny(METHOD, TWO, rounds=1).configs["beta"].data.table
    table.write_text(table.read_text().replace("Nodule", "Nodul", 1))
    with refused("'Nodul' (beta)", "'Nodule' (alpha)", by=FederationError):
        tiny(METHOD, TWO, rounds=1).run()
    seen: set[str] = set()

    def listen(site: str, task: TaskData, answer: Packed) -> Packed:
        seen.update(task.labels if site == "beta" else ())
        return answer

    label_map = {"Nodul": "Nodule", "Fibroses": "Mass"}
    server = run(tiny(METHOD, TWO, rounds=1, label_map=label_map), "mapped", listen)
    assert server.registry.labels == ("Hernia", "Mass", "Nodule")
    assert seen == {"Nodul", "Hernia"}, "its own spelling, and nobody else's"
    assert ["Fibroses" in note for note in noted(server) if "label_map" in note] == [True], "no site has it"
    assert len(tiny(METHOD, TWO, rounds=1, accept_labels=("Nodul",)).run("accepted").registry.labels) == 4


@pytest.mark.complete
def test_a_full_disk_at_the_server_commits_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = tiny(METHOD, rounds=3)
    server, save = federation.server(), Rounds.save

    def full(self: Rounds, number: int, *args: Any, **kwargs: Any) -> None:
        if number == 2 and self.folder == server.states.folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, number, *args, **kwargs)

    monkeypatch.setattr(Rounds, "save", full)
    with pytest.raises(OSError, match="No space left"):
        federate(server, Loop(federation.sites()))
    monkeypatch.undo()
    assert same(state(federation.run()), state(federation.run("whole")))


@pytest.mark.complete
def test_a_full_disk_at_a_site_is_an_abstention_without_a_path(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tiny(METHOD, min_sites=2, rounds=1)
    server, sites, save = federation.server(), federation.sites(), Rounds.save

    def full(self: Rounds, *args: Any, **kwargs: Any) -> None:
        if self is sites["beta"].states.files:
            raise OSError(errno.ENOSPC, "No space left on device", "/secret/path/p0001.png")
        save(self, *args, **kwargs)

    monkeypatch.setattr(Rounds, "save", full)
    federate(server, Loop(sites))
    line = history(server)[0]["sites"]["beta"]
    assert (line["status"], line["reason"]) == ("abstained", "disk_full (OSError)")
    assert "/secret" not in "".join(p.read_text() for p in server.record.folder.glob("*.json*"))
    assert "/secret" in complaint(sites["beta"])


@pytest.mark.complete
def test_frozen_batch_norm_is_sent_once_and_again_to_a_site_that_lost_it(tiny: Any) -> None:
    federation = tiny(FROZEN, rounds=3)
    server, sites = federation.server(), federation.sites()

    def wipe(site: str, task: TaskData, answer: Packed) -> Packed:
        if (site, task.task, task.round) == ("beta", "train", 1):
            for path in sites["beta"].folder.glob("round-*"):
                path.unlink()
        return answer

    federate(server, Between(sites, wipe))
    assert [line["sites"]["beta"]["reason"] for line in history(server)].count(
        "missing_state (MissingState)"
    ) == 1
    assert server.round == 3
    plain = federation.run("plain")
    down = [line["bytes_down"] for line in history(plain)]
    assert down[0] > down[1]
    assert abs(down[1] - down[2]) < 10
    stored, fixed = load(plain.states.path(plain.round)).tensors, plain.model.fixed
    assert fixed
    assert all(torch.equal(stored[f"fixed/{k}"], t) for k, t in fixed.items())
    assert not any("norm" in name for name in plain.model.shared)


@pytest.mark.complete
def test_selection_keeps_the_best_round(tiny: Any) -> None:
    server = tiny(METHOD, rounds=4).run()
    losses = [line["validation"]["loss"] for line in history(server)]
    assert server.selected_round == 1 + losses.index(min(losses))
    assert record(server, "metrics.json")["selected_round"] == server.selected_round
    described = record(server, "model/model.json")
    assert described["labels"] == list(server.registry.labels)
    assert (described["model"]["name"], described["preprocessing"]["size"]) == ("cnn", 16)
    assert tiny(METHOD, rounds=4, selection="last").run("last").selected_round == 4


@pytest.mark.complete
@pytest.mark.parametrize("kind", [SurgicalAggregation, Individual])
def test_selection_by_the_aurocs_of_enough_images(kind: Any, tiny: Any) -> None:
    slow = kind(local=LocalTraining(lr=2e-4, batch_size=64))
    server = tiny(
        slow, {"alpha": ("Mass",), "beta": ("Nodule",)}, rounds=4, n=150, selection="site_auroc"
    ).run()
    lines = history(server)
    found = [(line["validation"]["selecting_auroc"], -line["validation"]["loss"]) for line in lines]
    assert server.selected_round == 1 + found.index(max(found))
    assert len(set(found)) > 1
    assert record(server, "run.json")["selection"] == "site_auroc"
    if kind is Individual:
        for site in server.registry.members:
            at = [line["sites"][site] for line in lines]
            own = [(one["validation_auroc"], -one["validation_loss"]) for one in at]
            assert server.state.standings.of(site) == 1 + own.index(max(own))


def test_without_an_auroc_of_enough_images_losses_decide_and_a_note_says_so(tiny: Any) -> None:
    """25 images at a site, of which a few are for validation."""
    server = tiny(METHOD, rounds=2, selection="site_auroc").run()
    found = [line["validation"] for line in history(server)]
    assert [one["selecting_auroc"] for one in found] == [None, None]
    run = record(server, "run.json")
    assert run["selection"] == "site_loss"
    assert run["selected_round"] == (1 if found[0]["loss"] < found[1]["loss"] else 2)
    assert [note["values"]["by"] for note in run["notes"] if note["code"] == "selected_by"] == ["site_loss"]


def test_without_any_figure_the_last_round_is_kept_and_a_note_says_so(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=1, selection="site_auroc")

    def silent(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if isinstance(reply, Evaluation) and task.split == "validation":
            empty = replace(reply.metrics, loss=None, classes=dict.fromkeys(reply.metrics.classes, NOTHING))
            return pack(replace(reply, metrics=empty))
        return answer

    described = record(run(federation, change=silent), "run.json")
    assert (described["selected_round"], described["selection"]) == (1, "last")


def test_a_selection_by_the_server_needs_its_labelled_data(tiny: Any) -> None:
    with refused("server's suture.toml", by=FederationError):
        tiny(METHOD, selection="server_metric").server()
    with refused("server_balanced_accuracy", by=FederationError):  # these images have several labels each
        tiny(METHOD, OWN, selection="server_balanced_accuracy").server()
    server = tiny(METHOD, OWN, selection="server_metric", rounds=3).run("own")
    scores = [line["validation"]["server_auroc"] for line in history(server)]
    assert server.selected_round == 1 + scores.index(max(scores))
    assert record(server, "metrics.json")["source"] == "server test set"


def test_a_label_view_that_a_site_forbids_is_refused_before_round_one(tiny: Any) -> None:
    federation = tiny(VanillaFL(), view="own")
    with refused("alpha: label_view", by=FederationError):
        federation.run()
    assert not federation.server().states.rounds()


def test_class_without_positives_is_null_never_zero(tiny: Any) -> None:
    table: Path = tiny(METHOD, TWO).configs["beta"].data.table
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.rsplit(",", 1)[0] + ",0" for row in rows)]) + "\n")
    metrics = record(tiny(METHOD, TWO, rounds=1).run(), "metrics.json")
    assert (metrics["auroc"]["Hernia"], metrics["counts"]["Hernia"][0]) == (None, 0)
    assert "Hernia" in metrics["undefined"]


@pytest.mark.parametrize(
    ("selection", "validation", "measures", "runs"),
    [
        ("site_loss", 0, True, False),
        ("site_loss", 5, False, False),
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
    if runs:
        assert run(federation, change=change).round == 1
        return
    with refused("alpha: ", "beta: ", "'last'", by=FederationError):
        run(federation, change=change)
    server = federation.server()
    assert not (server.record.folder / "history.jsonl").exists()
    assert server.states.newest() is None


PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_the_page_has_each_stage_and_what_follows_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    words = {stage.value: {one.value for one in following} for stage, following in module._NEXT.items()}
    assert {name: {*re.findall(r"\w+", of)} for name, of in rows if name in words} == words
    assert words.keys() == {stage.value for stage in Stage}


def test_an_exchange_that_is_not_open_cannot_be_closed() -> None:
    with Trial(SurgicalAggregation(), SMALL, "multilabel") as trial:
        trial.run()
        assert trial.server.stage is Stage.FINISHED
        with pytest.raises(RuntimeError, match="finished cannot be idle"):
            trial.server.close_test({})
