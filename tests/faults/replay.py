"""What must have come out: the same job in one process, with the same record of accepted sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from poc import Poc, digest

from suture.data.config import load_site_config
from suture.execution.job import Job
from suture.federation.loop import Loop, federate
from suture.federation.server.collector import Receiver
from suture.federation.server.server import open_server
from suture.federation.site.site import Site
from suture.protocol.messages import TaskData, TaskName
from suture.protocol.packing import Packed, unpack

Absent = frozenset[tuple[str, int]]
"""Sites and rounds in which they did not count."""


class Replay(Loop):
    """A loop in which sites are absent from some rounds.

    Args:
        absent: whose updates do not arrive.
        late: of these, those that trained all the same, and whose updates arrived too late: their state has
            moved on.
    """

    def __init__(self, sites: Mapping[str, Site], absent: Absent, late: Absent) -> None:
        super().__init__(sites)
        self._absent, self._late = absent, late

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name, packed in payloads.items():
            payload = unpack(packed)
            assert isinstance(payload, TaskData)
            here = (name, payload.round)
            if task != "train" or here not in self._absent:
                receive(name, self._sites[name].answer(payload).packed)
            elif here in self._late:
                self._sites[name].answer(payload)
        return {}


def absent(history: Sequence[Mapping[str, Any]]) -> Absent:
    """The sites that did not count in the committed rounds of a run."""
    return frozenset(
        (site, line["round"])
        for line in history
        if line["status"] == "committed"
        for site, facts in line["sites"].items()
        if facts["status"] != "accepted"
    )


def replayed(poc: Poc, job: Job, missing: Absent, folder: Path) -> Iterator[str]:
    """The model's hash for each way in which it may have come about.

    Whether a site without an update had finished its training stands nowhere, and a moment of its optimiser
    depends on it. So there is a hash for each set of those that had.
    """
    sets = chain.from_iterable(combinations(sorted(missing), n) for n in range(len(missing) + 1))
    for number, late in enumerate(sets):
        yield digest(clean(poc, job, folder / str(number), missing, frozenset(late)))


def clean(
    poc: Poc, job: Job, folder: Path, missing: Absent = frozenset(), late: Absent = frozenset()
) -> Path:
    """Runs the job over the POC's data in this process; returns the run's folder."""
    plan = job.plan("clean")
    sites = {
        name: Site(
            name,
            load_site_config(poc.kits[name].folder / "local" / "suture.toml"),
            plan,
            job.rounds,
            folder / "sites" / name,
        )
        for name in poc.sites
    }
    server = open_server(plan, job.schedule(), None, folder)
    federate(server, Replay(sites, missing, late))
    return server.record.folder
