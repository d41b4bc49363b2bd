"""A small federation of processes with TLS, whose processes a test may kill."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from proxy import Proxy

from own_poc import own_port
from suture.data.config import load_site_config
from suture.execution.job import Job, load_job, with_settings
from suture.federation.state_files import experiment_folder
from suture.flare.kit import Kit, project_admin
from suture_admin.poc import parties, prepare, project_of, project_template, provision
from suture_admin.processes import parties_of, start, stop
from suture_admin.remote import Submission, submit
from suture_admin.session import connect, wait_for_sites

PROXIED = "northfield"
"""The site that reaches the server through a proxy."""

SMALL = (
    *("images=60", "held_out=30", "model.size=32", "epochs=10", "rounds=6"),
    *("round_timeout=90", "selection=last"),
)
"""A round of a second or two."""

POLL = 0.02

OVERDUE = "NVFLARE_TENSOR_STREAMING_PER_REQUEST_TIMEOUT", "5"
"""The server finds out within the job that a site has died while it sent; FLARE's default is ten minutes."""


def small_job(*settings: str) -> Job:
    """The demo with tiny settings."""
    return with_settings(load_job("demo"), [*SMALL, *settings])


def until(true: Callable[[], Any], seconds: float, what: str) -> float:
    """Waits until something is true; returns how many seconds that took."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(POLL)
    return time.monotonic() - begun


@dataclass
class Poc:
    """A server and the sites of the demo, each a process, on this machine.

    Attributes:
        root: its folder.
        kits: of all parties, by name.
        proxy: between the site `PROXIED` and the server.
    """

    root: Path
    kits: dict[str, Kit] = field(default_factory=dict)
    proxy: Proxy = field(default_factory=Proxy)

    def up(self) -> None:
        """Provisions and starts all parties."""
        self.root.mkdir(parents=True, exist_ok=True)
        template = yaml.safe_load(project_template().read_text())
        sites = [p["name"] for p in template["participants"] if p["type"] == "client"]
        self.proxy.target = own_port()
        project = project_of(project_template(), sites, self.proxy.target)
        for participant in project["participants"]:
            if participant["name"] == PROXIED:
                participant["connect_to"] = {"host": "localhost", "port": self.proxy.port}
        path = self.root / "project.yml"
        path.write_text(yaml.safe_dump(project, sort_keys=False))
        provision(path, self.root)
        self.kits = prepare(small_job(), self.root, path, self.proxy.target)
        for name in ("server", *sites):
            self.start(name)
        self.wait()

    def start(self, name: str) -> None:
        """Starts a party's process, beside those that live."""
        with pytest.MonkeyPatch.context() as patch:
            if name == "server":
                patch.setenv(*OVERDUE)
            start(self.root, [self.kits[name]])

    def heal(self) -> None:
        """Starts what does not live, so that a case finds a whole federation."""
        for name in ("server", *self.sites):
            self.start(name)
        self.wait()

    def wait(self) -> None:
        """Waits until all sites are connected."""
        missing = wait_for_sites(self.admin, set(self.sites), 180, lambda: None)
        assert not missing, f"{missing} did not connect"

    def down(self) -> None:
        """Stops all parties that this started."""
        stop(self.root)
        self.proxy.close()

    @property
    def admin(self) -> Kit:
        return project_admin(self.root)

    @property
    def sites(self) -> list[str]:
        return sorted(parties(self.kits)[1])

    # Jobs

    def submit(self, experiment: str, job: Job) -> str:
        """Hands a job in; its code is installed here, so none travels."""
        out = self.root / "runs" / experiment
        return submit(job, "poc", self.admin, out, experiment, Submission(bundle=False))

    def status(self, job_id: str) -> str:
        """FLARE's status of a job."""
        with connect(self.admin) as federation:
            return str(federation.meta(job_id).get("status"))

    def finished(self, experiment: str, seconds: float = 300) -> None:
        """Waits for the end of a run."""
        until(lambda: self.run(experiment).get("status") in ("finished", "failed"), seconds, "the end")
        run = self.run(experiment)
        assert run["status"] == "finished", run.get("error")

    def folder(self, experiment: str) -> Path:
        """Where the server keeps an experiment."""
        config = load_site_config(self.kits["server"].folder / "local" / "suture.toml")
        return experiment_folder(config.storage.state, experiment)

    def run(self, experiment: str) -> dict[str, Any]:
        path = self.folder(experiment) / "run.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def lines(self, experiment: str, name: str) -> list[dict[str, Any]]:
        """events.jsonl or history.jsonl of an experiment."""
        path = self.folder(experiment) / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]

    def in_round(self, experiment: str, number: int, seconds: float = 240) -> None:
        """Waits until a round has begun."""
        until(lambda: self.begun(experiment, number), seconds, f"round {number}")

    def begun(self, experiment: str, number: int) -> int:
        """How often a round has begun."""
        events = self.lines(experiment, "events.jsonl")
        return sum(e["event"] == "round" and e["round"] == number for e in events)

    def noted(self, experiment: str, event: str) -> list[str]:
        """The sites that an event was noted of."""
        return [e["site"] for e in self.lines(experiment, "events.jsonl") if e["event"] == event]

    def answered(self, experiment: str) -> set[str]:
        """The sites whose answers to the round that works now are in."""
        events = self.lines(experiment, "events.jsonl")
        begun = max(at for at, e in enumerate(events) if e["event"] == "round")
        return {e["site"] for e in events[begun:] if e["event"] == "answer"}

    def committed(self, experiment: str) -> int:
        """How many rounds have been committed, in events: those of a repeated round count twice."""
        return sum(e["event"] == "committed" for e in self.lines(experiment, "events.jsonl"))

    # Processes

    def process(self, name: str) -> psutil.Process:
        """The process of a party itself."""
        (party,) = (p for p in parties_of(self.root) if p.name == name)
        process = party.process()
        assert process is not None, f"{name} does not live"
        return process

    def job_process(self, name: str, job_id: str) -> psutil.Process | None:
        """The process that a party runs a job in."""
        for child in self.process(name).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if job_id in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    def kill(self, process: psutil.Process | None) -> None:
        """kill -9 of one process that this federation started; returns when it is gone.

        A zombie that nobody has waited for counts as alive to its children.
        """
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)


def tree(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    return [process, *process.children(recursive=True)]


def digest(folder: Path) -> str:
    """A hash of the model that a run left."""
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]
