"""What the server's signal of a ready task saves: seconds and CPU of a round, and requests for tasks.

python benchmarks/task_requests.py [--sites 3 12] [--rounds 12] [--slow 2000] [--turns 2]

FLARE's POC on this machine, processes with TLS, four images of 16 px a site; one site has `--slow` training
images more, so that the others wait. The same job runs with the signal, with FLARE's `task_request_interval`
of 0.01 s alone, and with its default of 2 s, in turns. Requests are those of the whole job, of all sites, by
its number of rounds, as FLARE's statistics count them. Seconds and CPU are of a round after the second, the
CPU of the job's processes: the server's, and the mean of the sites that wait.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from harness import command, show, tree_cpu
from parts.poc import SETTINGS, federation

from suture.core.files import read_json, read_records, write_json
from suture.execution.job import load_job, with_settings
from suture.flare.kit import Kit
from suture.flare.recipe import export_job
from suture_admin.processes import Party
from suture_admin.session import NoAnswer, connect

WAYS = {"signal": (True, 0.01), "0.01 s": (False, 0.01), "2 s": (False, 2)}
"""Whether sites wait for the signal, and FLARE's `task_request_interval`, by the name of a row."""

FIGURES = {
    "seconds": "s a round",
    "requests": "requests",
    "server": "CPU s, server",
    "site": "CPU s, a waiting site",
}


def export(folder: Path, experiment: str, sites: list[str], rounds: int, way: str) -> Path:
    """The job as `suture export` writes it, with another bell and interval."""
    job = export_job(
        with_settings(load_job("demo"), [*SETTINGS, "epochs=1", "batch_size=8", f"rounds={rounds}"]),
        folder,
        experiment,
        sites,
    )
    signal, interval = WAYS[way]
    for path in job.rglob("config_fed_client.json"):
        config = read_json(path)
        config["executors"][0]["executor"]["args"]["bell"] = signal
        write_json(path, config)
    (server,) = job.rglob("config_fed_server.json")
    config = read_json(server)
    config["server"]["task_request_interval"] = interval
    write_json(server, config)
    return job


def cpu_of_jobs(begun: list[Party], job: str) -> dict[str, float]:
    """CPU seconds so far of each party's processes of a job."""
    found = dict.fromkeys((party.name for party in begun), 0.0)
    for party in begun:
        for pid, seconds in tree_cpu(party.pid).items():
            with suppress(psutil.Error):
                if job in " ".join(psutil.Process(pid).cmdline()):
                    found[party.name] += seconds
    return found


def run(
    admin: Kit, begun: list[Party], sites: list[str], rounds: int, way: str, name: str
) -> dict[str, float]:
    """Run a job; return the figures of its rounds after the second."""
    with tempfile.TemporaryDirectory() as folder, connect(admin) as federation:
        job = federation.submit(export(Path(folder) / "job", name, sites, rounds, way))
        first = last = None
        events: list[dict[str, Any]] = []
        while not str(federation.meta(job).get("status")).startswith("FINISHED"):
            with suppress(NoAnswer):  # with many sites on few cores the server is late
                events = federation.recent(job).get("events") or []
            done = max((e["round"] for e in events if e.get("event") == "committed"), default=0)
            cpu = cpu_of_jobs(begun, job)
            if done >= 2:
                first = first or (done, cpu)
                last = (done, cpu) if done > first[0] and all(cpu.values()) else last
            time.sleep(0.5)
        workspace = federation.download(job, Path(folder) / "results")
        seconds = [line["seconds"] for line in read_records(workspace / "history.jsonl")][2:]
        (stats,) = workspace.rglob("*stats_pool_summary.json")
        received = json.loads(stats.read_text())["received_stream_counters"]["pool"]["cat_data"]
        requests = sum(
            counts["received"]
            for name, counts in received.items()
            if name.endswith("server_command:get_task")
        )
    figures = {"seconds": statistics.median(seconds), "requests": requests / rounds}
    if first and last:
        spent = {p: (last[1][p] - first[1][p]) / (last[0] - first[0]) for p in last[1]}
        figures["server"] = spent["server"]
        figures["site"] = statistics.mean(spent[s] for s in sites[1:])
    return figures


def main(sites: tuple[int, ...] = (3, 12), rounds: int = 12, slow: int = 2000, turns: int = 2) -> None:
    """Print a table."""

    def rows() -> Iterator[list[object]]:
        for count in sites:
            names = [f"site-{i + 1:02d}" for i in range(count)]
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            with federation(names, slow=slow) as (admin, begun):
                for turn in range(turns):
                    for way in list(WAYS)[:: 1 if turn else -1]:
                        name = f"{way.replace(' ', '').replace('.', '')}-{turn}"
                        found[way].append(run(admin, begun, names, rounds, way, name))
            for way, runs in found.items():
                cells = (" / ".join(f"{one[key]:.3g}" for one in runs if key in one) for key in FIGURES)
                yield [count, way, *cells]

    show(("sites", "way", *FIGURES.values()), rows())


if __name__ == "__main__":
    command(main, sites=(2,), rounds=4, slow=200, turns=1)
