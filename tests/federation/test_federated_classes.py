"""Classes with two names, codes or parents, that join late or are listed: their rows, and what crosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import METHOD, begun, events, exported, lines, record, task_in
from torch import Tensor

from between import Between
from noted import noted
from rounds import conformant, reply_of
from small_hospitals import write_hospital
from suture.core.errors import ConfigError, FederationError
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.federation.loop import Loop, federate
from suture.federation.server.selection import ModelSelection
from suture.federation.server.server import Server
from suture.federation.site.ledger import LEDGER_FILE
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.decisions import DecisionSettings
from suture.protocol.messages import SiteInfo, TaskData, TaskName
from suture.protocol.packing import Packed, pack, save
from suture_admin.ledger import ledger_totals, read_statement
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
    for name in ("after", "after_sites"):
        before = getattr(ModelSelection, name)

        def once(self: ModelSelection, *candidate: Any, before: Any = before) -> ModelSelection:
            found: ModelSelection = self if self.best else before(self, *candidate)
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


ATLAS = """\
[parents]
"Consolidation" = ["Lung Opacity"]
"Quokka Shadow" = ["Lung Opacity"]
"Zebra Sign" = ["Walrus Sign"]
"""

TREE = {"alpha": ("Lung Opacity", "Zebra Sign"), "beta": ("Consolidation", "Quokka Shadow")}
FOREIGN = {"alpha": ("consolidation", "quokka"), "beta": ("zebra", "walrus")}
"""Names that are neither of the site's classes nor of their ancestors; in lower case."""


def sites_of(federation: Any, folder: Path, **data: object) -> dict[str, Site]:
    """Sites whose tables have the classes of `TREE` (see `hierarchy`) and whose atlas is the study's file."""
    found = {}
    for name, config in federation.configs.items():
        own = {"atlas": str(folder / "labels.toml"), "contradictions": "child wins", "target": None, **data}
        changed = config.model_copy(update={"data": config.data.model_copy(update=own)})
        state = experiment_folder(folder / "states" / name, "run")
        found[name] = Site(name, changed, federation.plan, federation.schedule.rounds, state)
    return found


@pytest.fixture
def hierarchy(tiny: Any, tmp_path: Path) -> Any:
    """Makes federations of a method; alpha has a parent of beta's classes, each a class that is its own."""

    def make(method: Any) -> Any:
        federation = tiny(
            method, {"alpha": ("Mass", "Nodule"), "beta": ("Hernia", "Fibrosis")}, view="own", rounds=3
        )
        (tmp_path / "labels.toml").write_text(ATLAS)
        for site, names in (("alpha", "Mass,Nodule"), ("beta", "Hernia,Fibrosis")):
            table = federation.configs[site].data.table
            table.write_text(table.read_text().replace(names, ",".join(TREE[site])))
        return federation

    return make


class Recorded(Loop):
    """Keeps the bytes of all that goes to each site, and of what it answers."""

    def __init__(self, sites: Mapping[str, Site], folder: Path) -> None:
        super().__init__(sites)
        self._folder = folder
        self.down: dict[str, bytes] = dict.fromkeys(sites, b"")
        self.up: dict[str, bytes] = dict.fromkeys(sites, b"")

    def bytes_of(self, packed: Packed) -> bytes:
        save(self._folder / "message", packed)
        return (self._folder / "message").read_bytes()

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
        def received(site: str, packed: Packed, *more: Any) -> Any:
            self.up[site] += self.bytes_of(packed)
            return receive(site, packed, *more)

        for site, packed in payloads.items():
            self.down[site] += self.bytes_of(packed)
        return super().exchange(task, payloads, received)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "ark"])
def test_with_its_own_view_a_site_receives_no_foreign_name_by_way_of_the_hierarchy(
    name: str, hierarchy: Any, tmp_path: Path
) -> None:
    federation = hierarchy(conformant(name))
    sites = sites_of(federation, tmp_path)
    recorded = Recorded(sites, tmp_path)
    federate(federation.server(), recorded)
    for site, foreign in FOREIGN.items():
        assert len(recorded.down[site]) > 1000
        kept = [p.read_bytes() for p in (tmp_path / "states" / site).rglob("*") if p.is_file()]
        assert len(kept) > 3
        for held in (recorded.down[site], *kept):
            for word in foreign:
                assert word.encode() not in held.lower(), f"{site} learns {word!r}"
    assert b"Consolidation" in recorded.up["beta"], "the search finds a name that is there"


def renamed(federation: Any, site: str, old: str, new: str) -> None:
    """Let a site call a class otherwise in its table."""
    table = federation.configs[site].data.table
    table.write_text(table.read_text().replace(old, new))


def mappings(folder: Path) -> list[dict[str, Any]]:
    """What the ledger of alpha says of its names."""
    read = lines(folder / "states" / "alpha" / LEDGER_FILE)
    return [line for line in read if line.get("mark") == "labels"]


def introduced(federation: Any, folder: Path, **data: object) -> SiteInfo:
    """The site info of alpha, from a new process that is asked twice."""
    site = sites_of(federation, folder, **data)["alpha"]
    info, _ = (reply_of(site, TaskData("handshake")) for _ in range(2))
    site.close()
    assert isinstance(info, SiteInfo), info
    return info


SHADOW = {"labels": ("Schatten", "Zebra Sign"), "synonyms": {"Schatten": "Lung Opacity"}}
NO_ATLAS: dict[str, Any] = {"atlas": None, "contradictions": "refuse"}


def test_the_mapping_that_a_site_accepted_is_in_its_ledger_once_per_change(
    hierarchy: Any, tmp_path: Path
) -> None:
    federation = hierarchy(METHOD)
    introduced(federation, tmp_path)
    introduced(federation, tmp_path)
    (first,) = mappings(tmp_path)
    assert first["parents"] == {"Zebra Sign": ["Walrus Sign"]}, "of its own classes alone"
    assert first["names"] == {}

    renamed(federation, "alpha", "Lung Opacity", "Schatten")
    for _ in range(2):
        assert introduced(federation, tmp_path, **SHADOW).labels == ("Lung Opacity", "Zebra Sign")
    (_, second) = mappings(tmp_path)
    assert second["names"] == {"Schatten": "Lung Opacity"}
    assert second["digest"] != first["digest"]
    found = read_statement(tmp_path / "states" / "alpha")
    (said,) = [text for text in ledger_totals(found) if text.startswith("label mapping")]
    for fact in ("1 name", "1 parent", second["time"][:10], second["digest"][:12]):
        assert fact in said
    assert found.breaks == []

    (tmp_path / "labels.toml").write_text(ATLAS + '"Walrus Sign" = ["Lung Opacity"]\n')
    introduced(federation, tmp_path, **SHADOW)
    assert len(mappings(tmp_path)) == 3
    introduced(federation, tmp_path, **SHADOW, **NO_ATLAS)
    assert mappings(tmp_path)[-1]["parents"] == {}
    assert len(mappings(tmp_path)) == 4


def test_a_site_without_names_and_parents_of_its_own_has_no_such_line(hierarchy: Any, tmp_path: Path) -> None:
    introduced(hierarchy(METHOD), tmp_path, **NO_ATLAS)
    assert mappings(tmp_path) == []


@pytest.mark.complete
def test_a_spelling_of_a_site_stays_there(hierarchy: Any, tmp_path: Path) -> None:
    federation = hierarchy(METHOD)
    renamed(federation, "alpha", "Lung Opacity", "Schatten")
    sites = {**sites_of(federation, tmp_path), "alpha": sites_of(federation, tmp_path, **SHADOW)["alpha"]}
    recorded = Recorded(sites, tmp_path)
    federate(federation.server(), recorded)
    assert b"schatten" not in b"".join([*recorded.up.values(), *recorded.down.values()]).lower()
    assert mappings(tmp_path)[0]["names"] == {"Schatten": "Lung Opacity"}


def continued(federation: Any, rounds: int, sites: Mapping[str, Site]) -> tuple[Server, dict[str, Tensor]]:
    """The server after the experiment went on to so many rounds, and the rows that alpha began with."""
    server = replace(federation, schedule=replace(federation.schedule, rounds=rounds)).server()
    received: list[TaskData] = []

    def note(site: str, task: TaskData, answer: Packed) -> Packed:
        received.extend([task] if (site, task.task) == ("alpha", "train") else [])
        return answer

    loop = Between(sites, note)
    federate(server, loop)
    loop.close()
    return server, dict(zip(received[0].labels, received[0].head["head.weight"], strict=True))


def row(server: Server, name: str) -> Tensor:
    """The row of a class in the newest model."""
    return server.model.head["head.weight"][server.model.labels.index(name)]


@pytest.mark.complete
def test_a_class_that_is_split_stays_as_the_parent_of_its_parts(hierarchy: Any, tmp_path: Path) -> None:
    """Zebra Sign becomes Left and Right Zebra Sign: its column stays, blank, and the atlas fills it."""
    federation = hierarchy(METHOD)
    first, _ = continued(federation, 1, sites_of(federation, tmp_path))
    parts = ("Left Zebra Sign", "Right Zebra Sign")
    split = "".join(f'"{part}" = ["Zebra Sign"]\n' for part in parts)
    whole = f'[exhaustive]\n"Zebra Sign" = [["{parts[0]}", "{parts[1]}"]]\n'
    (tmp_path / "labels.toml").write_text(ATLAS + split + whole)
    table = federation.configs["alpha"].data.table
    head, *rows = table.read_text().splitlines()
    parted = []
    for i, line in enumerate(rows):
        others, _, zebra = line.rpartition(",")
        left, right = (zebra, "0") if i % 2 else ("0", zebra)
        parted.append(f"{others},,{left},{right}")
    table.write_text("\n".join([f"{head},{','.join(parts)}", *parted]) + "\n")
    sites = sites_of(federation, tmp_path)
    _, samples = sites["alpha"].trainer.data
    assert not samples["train"].y.isnan().any(), "the parent is known by its parts"
    parents = {"Consolidation": ("Lung Opacity",), "Edema": ("Lung Opacity",)}
    federation = replace(federation, schedule=replace(federation.schedule, parents=parents))
    server, begun = continued(federation, 2, sites)
    assert {*server.model.labels} == {*TREE["alpha"], *TREE["beta"], *parts}
    assert {*server.record.run["new_labels"]} == {*parts}
    assert server.record.run["parents"] == {"Consolidation": ["Lung Opacity"]}, "of its classes alone"
    assert torch.equal(begun["Zebra Sign"], row(first, "Zebra Sign"))
