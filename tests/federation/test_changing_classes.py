"""Classes that have two names and a code, join late, leave, or are listed: what becomes of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    begun,
    events,
    exported,
    record,
    task_in,
)

from noted import noted
from rounds import conformant, reply_of
from small_hospitals import write_hospital
from suture.core.errors import ConfigError, FederationError
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.federation.server.selection import ModelSelection
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.decisions import DecisionSettings
from suture.protocol.packing import pack
from suture_prepare.quality import check
from suture_synthetic.method_checks import subject_of
from world import refused

OWN = {"alpha": ("Hernia", "Fibrosis"), "beta": ("Fibrosis", "Nodule"), "server": ("Fibrosis", "Nodule")}


FIBROSIS = "I10C:J84.10"


def call(folder: Path, name: str, codes: str = "") -> None:
    """Let a site call its class Fibrosis otherwise, and state codes."""
    table, config = folder / "labels.csv", folder / "suture.toml"
    head, rows = table.read_text().split("\n", 1)
    table.write_text(head.replace("Fibrosis", name) + "\n" + rows)
    text = config.read_text().replace('target = "Fibrosis"', f'target = "{name}"')
    config.write_text(text + f"\n[data.codes]\n{codes}\n" if codes else text)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for seed, (name, labels) in enumerate(OWN.items()):
        write_hospital(tmp_path / "data" / name, labels, 25, seed)
    return tmp_path / "data"


TWO = {name: OWN[name] for name in ("alpha", "beta")}


@pytest.mark.complete
@pytest.mark.parametrize("selection", ["site_loss", "server_metric"])
def test_a_class_of_two_names_and_one_code_is_trained_as_one_byte_by_byte(
    tiny: Any, sites: Path, selection: str
) -> None:
    # A name of the same place among the site's own: the order of its rows is that of its names.
    plain = tiny(METHOD, OWN, selection=selection).run("plain")
    call(sites / "alpha", "Faserung", f'Faserung = ["{FIBROSIS}", "RADLEX:RID3874"]')
    call(sites / "server", "Tumor", f'Tumor = "{FIBROSIS}"')
    coded = tiny(METHOD, OWN, selection=selection).run("coded")
    assert exported(coded) == exported(plain)
    assert record(coded, "metrics.json") == record(plain, "metrics.json")
    facts, stated = (record(server, "model/model.json") for server in (plain, coded))
    codes = stated["codes"]["Fibrosis"]
    assert [f"{one['system']}:{one['code']}" for one in codes] == [FIBROSIS, "RADLEX:RID3874"]
    assert stated["site_names"] == {"Faserung": "Fibrosis"}
    assert {**stated, "codes": {**stated["codes"], "Fibrosis": codes[:1]}, "site_names": {}} == facts
    (note,) = (note for note in noted(coded) if "codes" in note)
    assert all(fact in note for fact in ("alpha", "'Faserung'", "'Fibrosis'"))


@pytest.mark.complete
def test_a_run_that_continues_has_the_same_classes_and_bytes(tiny: Any, sites: Path) -> None:
    call(sites / "alpha", "Raumforderung", 'Raumforderung = "RADLEX:RID1"')
    call(sites / "beta", "Geschwulst", 'Geschwulst = "RADLEX:RID1"')
    federation = tiny(METHOD, TWO)
    whole = federation.run("whole")
    replace(federation, schedule=replace(federation.schedule, rounds=1)).run("parts")
    parts = federation.run("parts")
    assert exported(parts) == exported(whole)
    facts = record(parts, "model/model.json")
    assert facts["labels"] == ["Geschwulst", "Hernia", "Nodule"]
    assert facts["codes"]["Geschwulst"][0]["code"] == "RID1"
    assert "new_labels" not in parts.record.run


def test_contradicting_codes_end_a_run_before_its_first_round(tiny: Any, sites: Path) -> None:
    call(sites / "alpha", "Geschwulst", 'Geschwulst = "RADLEX:RID1"')
    call(sites / "beta", "geschwulst", 'Geschwulst = "RADLEX:RID2"')
    federation = tiny(METHOD, TWO)
    with refused("'Geschwulst'", "RADLEX:RID1 at alpha", "RADLEX:RID2 at beta", by=FederationError):
        federation.run()
    assert not list((federation.folder / "run" / "state").glob("round-*"))


def test_a_site_that_states_the_code_of_another_class_is_left_out(tiny: Any, sites: Path) -> None:
    call(sites / "alpha", "Fibrosis", 'Fibrosis = "SCT:36118008"')
    server = tiny(METHOD, TWO, min_sites=1, rounds=1).run()
    assert list(server.registry.members) == ["beta"]
    assert "SCT:36118008" in events(server, "begin")[0]["refused"]["alpha"]


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ('Fibrosis = "SCT:19242007"', ("'Fibrosis'", "SCT:19242007")),
        ('Fibrosis = ["I10:J90", "I10:J93"]', ("'Fibrosis'", "I10:J90", "I10:J93")),
        ('Fibrosis = "I10:J90"\nHernia = "I10:J90"', ("'Fibrosis'", "'Hernia'", "I10:J90")),
        ('Fibrosis = "19242006"', ("'Fibrosis'", "'19242006'")),
        ("Fibrosis = 19242006", ("[data] codes.Fibrosis",)),
    ],
)
def test_a_faulty_code_names_file_class_and_code(sites: Path, codes: str, named: tuple[str, ...]) -> None:
    call(sites / "alpha", "Fibrosis", codes)
    path = sites / "alpha" / "suture.toml"
    with refused(path, *named, by=ConfigError):
        load_site_config(path)


def test_a_code_of_a_class_that_the_site_has_not_is_refused(sites: Path) -> None:
    call(sites / "alpha", "Fibrosis", 'Fibrosi = "RADLEX:RID1"')
    config = load_site_config(sites / "alpha" / "suture.toml")
    with refused("[data.codes]", "'Fibrosi'", "'Fibrosis'", by=ConfigError):
        load_table(config.data)
    assert "[data.codes]" in check(config).problems[0]


# Sites that join, with classes of their own, or leave: the selected round may be older than a class


CLASSES = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "late": ("Mass", "Fibrosis")}


@pytest.fixture
def first_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round that is measured stays the best one."""
    for name in ("after", "after_losses"):
        before = getattr(ModelSelection, name)

        def once(self: ModelSelection, candidate: Any, *_: Any, before: Any = before) -> ModelSelection:
            found: ModelSelection = self if self.best else before(self, candidate)
            return found

        monkeypatch.setattr(ModelSelection, name, once)
    restored = ModelSelection.restore
    monkeypatch.setattr(ModelSelection, "restore", lambda *args, **_: restored(*args))


def in_turn(tiny: Any, method: Any, steps: Sequence[Sequence[str]], **schedule: object) -> Server:
    """Run one experiment with these sites in each step, a round more each; return the last server."""
    whole = tiny(method, CLASSES, **schedule)
    for rounds, sites in enumerate(steps, 1):
        configs = {name: whole.configs[name] for name in sites}
        server: Server = replace(
            whole, configs=configs, schedule=replace(whole.schedule, rounds=rounds)
        ).run()
    return server


UNLIKE = ("afl", "fedavg", "fedlsm", "fedmlp", "individual", "pfl", "surgical")
"""Methods that differ in what a late class changes: sums that it enlarges, rows of all classes
and of a site's own, a teacher, tensors of classes, and models and heads that stay at a site.
"""


@pytest.mark.complete
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.usefixtures("first_is_best")
def test_a_class_that_is_newer_than_the_selected_round_is_not_measured(name: str, tiny: Any) -> None:
    method = subject_of(conformant(name)).method
    steps = (("alpha", "beta"), ("alpha", "beta", "late"), ("beta", "late"), ("alpha", "beta", "late"))
    server = in_turn(tiny, method, steps)
    found = record(server, "metrics.json")
    assert server.record.run["status"] == "finished"
    assert "Fibrosis" in found["auroc"]
    if method.sharing.personal == "model":  # each site selects a round of its own
        return
    assert server.selected_round == 1
    assert found["auroc"]["Fibrosis"] is None
    assert found["undefined"]["Fibrosis"] == {"code": "joined", "values": {"round": 1}}
    assert found["counts"]["Mass"] != [None, None], "what the model has is measured"
    if method.sharing.personal == "nothing":
        assert found["sites"]["late"].keys() == {"Mass"}


QUICK = LocalTraining(lr=1e-3, batch_size=8)
KINDS = [SurgicalAggregation(local=QUICK), FedAvg(local=QUICK)]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("order", "method"),
    [
        (("alpha", "beta", "late"), KINDS[0]),
        (("beta", "late", "alpha"), KINDS[1]),
        (("late", "alpha", "beta"), KINDS[0]),
    ],
)
@pytest.mark.usefixtures("first_is_best")
def test_sites_join_and_leave_in_any_order(order: tuple[str, ...], method: Any, tiny: Any) -> None:
    """The model is that of the first round whoever comes later, in which figures nobody has an error."""
    first, second, third = order
    steps = [(first,), (first, second), (second,), (second, third), (third,)]
    server = in_turn(tiny, method, steps, decision=DecisionSettings())
    found = record(server, "metrics.json")
    labels = set(record(server, "model/model.json")["labels"])
    assert labels == set(CLASSES[first])
    assert set(found["auroc"]) == {"Fibrosis", "Hernia", "Mass", "Nodule"}
    for name in set(found["auroc"]) - labels:
        assert found["undefined"][name] == {"code": "joined", "values": {"round": 1}}
    for site, scores in found["sites"].items():
        assert scores.keys() == set(CLASSES[site]) & labels
    assert not list(server.record.folder.glob("sites/*/errors.jsonl"))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("method", "selection", "comparable"),
    [
        (KINDS[0], "site_loss", True),
        (KINDS[1], "site_loss", False),  # its loss is over all classes, unknown ones as absent
        (KINDS[1], "last", True),
    ],
)
def test_losses_over_other_classes_are_not_compared(
    method: Any, selection: str, comparable: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = ModelSelection.restore, []

    def restored(self: ModelSelection, *args: Any, **how: Any) -> ModelSelection:
        done = before(self, *args, **how)
        found.append(done.best is None or not done.best.unmeasured)
        return done

    monkeypatch.setattr(ModelSelection, "restore", restored)
    server = in_turn(tiny, method, [*[("alpha", "beta")] * 3, tuple(CLASSES)], selection=selection)
    assert found == [True, True, comparable]
    assert server.state.standings.best is not None
    assert not server.state.standings.best.unmeasured
    if selection == "last":
        assert server.selected_round == 4
        assert record(server, "metrics.json")["auroc"]["Fibrosis"] is not None
        assert len(record(server, "model/model.json")["labels"]) == 4


# What a site learns by the list of its classes; the README and the threat model say so


def changed(tiny: Any, other: tuple[str, ...], out: str) -> dict[str, bool]:
    """Whether each row that beta lists comes back otherwise than beta sent it, after one round."""
    server, sites, tasks = begun(
        tiny(METHOD, {f"alpha-{out}": other, "beta": ("Mass", "Nodule")}, view="own"), out
    )
    sent = {site: reply_of(sites[site], task) for site, task in tasks.items()}
    for site, reply in sent.items():
        server.collector.receive(site, pack(reply))
    server.close_round({})
    back = task_in(server.assign()["beta"])
    assert back.labels == sent["beta"].labels == ("Mass", "Nodule"), "no other site's class is named"
    return {
        label: any(not torch.equal(back.head[key][i], rows[i]) for key, rows in sent["beta"].head.items())
        for i, label in enumerate(back.labels)
    }


def test_a_site_learns_whether_others_know_a_class_that_it_lists(tiny: Any) -> None:
    assert changed(tiny, ("Nodule", "Hernia"), "without") == {"Mass": False, "Nodule": True}
    assert changed(tiny, ("Mass", "Hernia"), "with") == {"Mass": True, "Nodule": False}
