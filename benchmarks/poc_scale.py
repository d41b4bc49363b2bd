"""A round and its memory by number of clients, as processes with TLS: `python benchmarks/poc_scale.py`.

FLARE's POC on this machine, each site with four images of 16 px, so that nearly all time is the exchange's.
Seconds are the median (range) of the rounds after the first two, from a round's payloads to its merged model.
Memory is the proportional set size at its peak: of the server with its job, and the mean of a site with its
job. A client needs about 0.55 GB. `--relays 2` puts two of FLARE's relays between the sites and the
server, to which they connect in turn: federations of two levels. `--sites 4 8` chooses rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from machine import machine
from rich.console import Console
from rich.table import Table
from round_cost import spread, write_site

from suture.flare.admin.kit import Kit, kits_in, project_admin
from suture.flare.admin.poc import free_port, parties, project_of, project_template, provision
from suture.flare.admin.policy import make_strict, survive
from suture.flare.admin.processes import Party, check_alive, start, stop
from suture.flare.admin.session import wait_for_sites

_WAIT = 300.0
_SETTINGS = ("model.size=16", "selection=last")


def project(sites: list[str], relays: list[str]) -> dict[str, Any]:
    """A project of FLARE; with relays, each site connects to one of them, with TLS as to the server."""
    made = project_of(project_template(), sites, free_port(18_100))
    if relays:
        ports = iter(range(18_300, 18_400))
        for participant in made["participants"]:
            if participant["type"] == "server":
                participant |= {"default_host": "localhost", "connection_security": "mtls"}
            elif participant["type"] == "client":
                at = sites.index(participant["name"]) % len(relays)
                participant["connect_to"] = {"name": relays[at]}
        for name in relays:
            port = free_port(next(ports))
            host = {"default_host": "localhost", "port": port, "connection_security": "mtls"}
            made["participants"].append(
                {"name": name, "type": "relay", "org": "region", "listening_host": host}
            )
    return made


@dataclass
class Memory:
    """Peak proportional set size in MiB, of each party with its children."""

    peak: dict[str, float] = field(default_factory=dict)

    def look(self, begun: list[Party]) -> None:
        """Measure each party once."""
        for party in begun:
            total = 0.0
            try:
                top = psutil.Process(party.pid)
                for process in (top, *top.children(recursive=True)):
                    total += process.memory_full_info().pss / 2**20
            except psutil.NoSuchProcess:
                continue
            self.peak[party.name] = max(self.peak.get(party.name, 0.0), total)

    @contextmanager
    def watching(self, begun: list[Party]) -> Iterator[None]:
        """Measure twice a second until the block ends."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                self.look(begun)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def measured(sites: list[str], relays: list[str], rounds: int) -> tuple[list[float], Memory, float]:
    """Seconds of the rounds of a federation, its memory, and the seconds of the whole run."""
    with tempfile.TemporaryDirectory(prefix="suture-poc-") as folder:
        root = Path(folder)
        (root / "project.yml").write_text(yaml.safe_dump(project(sites, relays), sort_keys=False))
        provision(root / "project.yml", root)
        kits = kits_in(root)
        server, clients = parties(kits)
        for kit in (server, *clients.values()):
            make_strict(kit)
            survive(kit)
        for name, kit in clients.items():
            write_site(root / "data" / name, root / "data" / name / "state")
            text = (root / "data" / name / "suture.toml").read_text()
            own = text.replace('"images"', f'"{root}/data/{name}/images"')
            own = own.replace('"labels.csv"', f'"{root}/data/{name}/labels.csv"')
            (kit.folder / "local" / "suture.toml").write_text(own)
        between = {name: replace(server, folder=server.folder.parent / name, name=name) for name in relays}
        memory = Memory()
        try:
            begun = start(root, (server, *between.values(), *clients.values()))
            check = {**kits, **between}
            admin = project_admin(root)
            missing = wait_for_sites(admin, set(clients), _WAIT, lambda: check_alive(begun, check))
            if missing:
                raise SystemExit(f"{', '.join(sorted(missing))} did not connect in {_WAIT:.0f} s")
            began = time.monotonic()
            with memory.watching(begun):
                run(admin, sites, rounds, root / "out")
            whole = time.monotonic() - began
        finally:
            stop(root)
        lines = (root / "out" / "history.jsonl").read_text().splitlines()
        return [json.loads(line)["seconds"] for line in lines], memory, whole


def run(admin: Kit, sites: list[str], rounds: int, out: Path) -> None:
    """Run a job over the federation as `suture run` does."""
    options = ["--env", "poc", "--startup-kit", str(admin.folder), "--sites", ",".join(sites)]
    settings = [word for one in (*_SETTINGS, f"rounds={rounds}") for word in ("--set", one)]
    command = [sys.executable, "-m", "suture", "run", "demo", *options, "--out", str(out), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    """Prints a row for each federation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[4, 8, 12])
    parser.add_argument("--relays", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12, choices=range(4, 1001), metavar="N")
    options = parser.parse_args()
    relays = [f"relay-{i + 1}" for i in range(options.relays)]
    head = (
        "clients",
        "relays",
        "round, s",
        "ms a round and site",
        "server, MiB",
        "a site, MiB",
        "a relay, MiB",
    )
    table = Table(*head, "job, s", box=None)
    for count in options.sites:
        sites = [f"site-{i + 1:02d}" for i in range(count)]
        seconds, memory, whole = measured(sites, relays, options.rounds)
        rest = seconds[2:]
        peaks = [statistics.mean(memory.peak[name] for name in names) for names in (sites, relays) if names]
        table.add_row(
            *(str(count), str(len(relays)), spread(rest), f"{1000 * statistics.median(rest) / count:.0f}"),
            *(f"{memory.peak['server']:.0f}", *(f"{mib:.0f}" for mib in peaks)),
            *(("-",) if not relays else ()),
            f"{whole:.0f}",
        )
    Console(width=140).print(machine(), table)


if __name__ == "__main__":
    main()
