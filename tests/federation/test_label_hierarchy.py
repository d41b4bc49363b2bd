"""What crosses, and what a site records, where its classes have parents and names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parties import (
    METHOD,
    lines,
)
from torch import Tensor

from between import Between
from rounds import conformant, reply_of
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.federation.site.ledger import FILE
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.protocol.messages import SiteInfo, TaskData, TaskName
from suture.protocol.packing import Packed, save
from suture_admin.ledger import ledger_totals, read_statement

ATLAS = """\
[parents]
"Consolidation" = ["Lung Opacity"]
"Quokka Shadow" = ["Lung Opacity"]
"Zebra Sign" = ["Walrus Sign"]
"""


OWN = {"alpha": ("Lung Opacity", "Zebra Sign"), "beta": ("Consolidation", "Quokka Shadow")}


FOREIGN = {"alpha": ("consolidation", "quokka"), "beta": ("zebra", "walrus")}
"""Names that are neither of the site's classes nor of their ancestors; in lower case."""


def sites_of(federation: Any, folder: Path, **data: object) -> dict[str, Site]:
    """Sites whose tables have the classes of `OWN` (see `hierarchy`) and whose atlas is the study's file."""
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
            table.write_text(table.read_text().replace(names, ",".join(OWN[site])))
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
    read = lines(folder / "states" / "alpha" / FILE)
    return [line for line in read if line.get("mark") == "labels"]


def introduced(federation: Any, folder: Path, **data: object) -> SiteInfo:
    """The site info of alpha, from a new process that is asked twice."""
    site = sites_of(federation, folder, **data)["alpha"]
    info, _ = (reply_of(site, TaskData("handshake")) for _ in range(2))
    site.close()
    assert isinstance(info, SiteInfo), info
    return info


SHADOW = {"labels": ("Schatten", "Zebra Sign"), "synonyms": {"Schatten": "Lung Opacity"}}
PLAIN: dict[str, Any] = {"atlas": None, "contradictions": "refuse"}


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
    introduced(federation, tmp_path, **SHADOW, **PLAIN)
    assert mappings(tmp_path)[-1]["parents"] == {}
    assert len(mappings(tmp_path)) == 4


def test_a_site_without_names_and_parents_of_its_own_has_no_such_line(hierarchy: Any, tmp_path: Path) -> None:
    introduced(hierarchy(METHOD), tmp_path, **PLAIN)
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
    assert {*server.model.labels} == {*OWN["alpha"], *OWN["beta"], *parts}
    assert {*server.record.run["new_labels"]} == {*parts}
    assert server.record.run["parents"] == {"Consolidation": ["Lung Opacity"]}, "of its classes alone"
    assert torch.equal(begun["Zebra Sign"], row(first, "Zebra Sign"))
