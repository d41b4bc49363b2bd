"""A round and its memory by number of clients, as processes with TLS: FLARE's POC on this machine.

Each site has four images of 16 px, so that nearly all time is the exchange's. A sample is a round after the
first two, from its payloads to its merged model, divided by the clients. Memory is the proportional set size
at its peak: of the server with its job, and the mean of a site with its job. A client needs about 0.55 GB.
The last federation has two of FLARE's relays between sites and server, to which the sites connect in turn.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from figures import Figure, Options
from harness import every, suture, tree_memory

from parts.sites import write_site
from suture.core.files import read_records
from suture.flare.compat.provisioning import provision
from suture.flare.kit import Kit, kits_in, project_admin
from suture_admin.poc import free_port, parties, project_of, project_template
from suture_admin.policy import make_strict, survive
from suture_admin.processes import Party, check_alive, start, stop
from suture_admin.session import wait_for_sites

CASES = ((4, 0), (8, 0), (12, 0), (4, 2))
"""Clients and relays; the first is the anchor of the others."""

SETTINGS = ("model.size=16", "selection=last")


def project(sites: list[str], relays: Sequence[str]) -> dict[str, Any]:
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


@contextmanager
def federation(sites: list[str], relays: Sequence[str] = ()) -> Iterator[tuple[Kit, list[Party]]]:
    """A POC that runs within the block: its administrator's kit, and its processes."""
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
            config = write_site(root / "data" / name)
            (kit.folder / "local" / "suture.toml").write_text(config.read_text())
        between = {name: replace(server, folder=server.folder.parent / name, name=name) for name in relays}
        try:
            begun = start(root, (server, *between.values(), *clients.values()))
            admin = project_admin(root)
            alive = partial(check_alive, begun, {**kits, **between})
            if missing := wait_for_sites(admin, set(clients), 600, alive):
                raise RuntimeError(f"{', '.join(sorted(missing))} did not connect in 600 s")
            yield admin, begun
        finally:
            stop(root)


def measured(sites: list[str], relays: list[str], rounds: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of the rounds of a federation, and the peak of the memory of each party with its children."""
    peak: dict[str, float] = {}
    settings = [word for one in (*SETTINGS, f"rounds={rounds}") for word in ("--set", one)]
    with federation(sites, relays) as (admin, begun), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        kit = ("--env", "poc", "--startup-kit", str(admin.folder), "--sites", ",".join(sites))

        def weigh() -> None:
            for party in begun:
                peak[party.name] = max(peak.get(party.name, 0.0), tree_memory(party.pid))

        with every(0.5, weigh):
            suture("run", "demo", *kit, "--out", str(out), *settings)
        return [one["seconds"] for one in read_records(out / "history.jsonl")], peak


def figures(options: Options) -> list[Figure]:
    """A round and the peaks of server and sites of each federation, beside those of the smallest."""
    rows: list[Figure] = []
    anchor: dict[str, tuple[float, ...]] = {}
    for count, between in CASES[:1] if options.quick else CASES:
        sites = [f"site-{i + 1:02d}" for i in range(count)]
        relays = [f"relay-{i + 1}" for i in range(between)]
        seconds, peak = measured(sites, relays, 4 if options.quick else 12)
        name = f"{count} clients" + (f", {between} relays" if relays else "")
        found: dict[str, tuple[str, tuple[float, ...]]] = {
            "a round": ("ms a client", tuple(s / count * 1e3 for s in seconds[2:])),
            "the server": ("MB", (peak["server"],)),
            "a site": ("MB", (statistics.mean(peak[site] for site in sites),)),
        }
        if relays:
            found["a relay"] = ("MB", (statistics.mean(peak[relay] for relay in relays),))
        for what, (unit, samples) in found.items():
            beside = anchor.get(what, ())
            row = (f"{what}, {name}", unit, samples, f"{CASES[0][0]} clients" if beside else "", beside)
            rows.append(Figure("poc", *row))
        anchor = anchor or {what: samples for what, (_, samples) in found.items()}
    return rows
