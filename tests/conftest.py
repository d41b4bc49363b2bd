"""What tests share: a tiny federation on disk, and a clean machine for each test."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

import hypothesis_profiles  # noqa: F401 - chooses one, before any test asks for it
import suture
from cpu_limit import pytest_runtest_protocol  # noqa: F401  a hook
from example_run import history_records, metrics_record, run_record, write_run
from small_hospitals import LABELS, small_study, write_hospital
from suture.data.batch import Augmentation
from suture.data.config import SiteConfig, load_site_config
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan, Schedule, code_hash
from suture.federation.server.server import Server, open_server
from suture.federation.site.site import Site
from suture.methods.base import Method
from suture.models import ModelSpec
from suture_results.report import write_report
from world import Trained

CNN = ModelSpec("cnn", size=16, weights="random")

COMPLETE = re.compile(r"^pytestmark = .*\bmark\.(complete|faults)\b", re.MULTILINE)
"""In a file none of whose tests is fast."""

MEMORY = Path("/dev/shm")
"""A file system in memory, where one replaces thousands of files without waiting for a disk."""

ROOM = 6 * 2**30
"""Bytes that four workers never fill: what a test wrote is deleted when it has passed."""


def pytest_configure() -> None:
    """Let Ctrl-C interrupt tests and what they start: under nohup or in the background SIGINT is ignored.

    Temporary files are in memory where there is room, unless TMPDIR names a place.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "TMPDIR" not in os.environ and _has_room(MEMORY):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def _has_room(folder: Path) -> bool:
    """Whether it is there with room to spare, and may hold programs, which many containers forbid."""
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available) > ROOM


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage once, and later not among what stays: a million objects, a third of the collection."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the fast tier, do not even import a file none of whose tests is fast, nor its libraries."""
    if collection_path.suffix == ".py" and "not complete" in config.option.markexpr:
        return COMPLETE.search(collection_path.read_text()) is not None or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start FLARE come first: they take longest, and whoever begins one last ends alone."""
    items.sort(key=lambda item: "flare" not in item.path.parts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as there are cores, and memory for: a worker takes up to 2 GB."""
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // 2**31))


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders, one after the other; `mktemp` would list all that there are to find the next number."""
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def clean_machine(homes: Iterator[Path]) -> Iterator[None]:
    """A HOME of its own, one thread on the CPU, no simulation's sites, and no cache from elsewhere.

    Nothing is synchronised to the disk: no test cuts the power, and some machines take 10 ms each time.

    What a test, or a command that it calls, sets in the environment is gone after it: `suture` sets
    PYTHONSAFEPATH, with which a later test's `python -c` would not find the modules of tests.
    """
    home = next(homes)
    home.mkdir()
    with patch.dict(os.environ, {"HOME": str(home)}), patch("os.fsync"):
        for name in ("SITES", "CACHE", "DEVICE", "THREADS", "AMP", "MESSAGES"):
            os.environ.pop(f"SUTURE_{name}", None)
        os.environ.pop("XDG_CACHE_HOME", None)
        torch.set_num_threads(1)
        yield


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder with hand-written records."""
    return write_run(tmp_path, run_record(), history_records(), metrics_record())


@pytest.fixture
def data_root() -> Path:
    """The folder of the real data; the test is skipped where there is none."""
    root = os.environ.get("SUTURE_DATA")
    if not root:
        pytest.skip("SUTURE_DATA is not set")
    return Path(root).resolve()


@pytest.fixture
def hospital() -> Callable[..., Path]:
    """Writes a hospital: see `write_hospital`."""
    return write_hospital


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A study of three hospitals and its run of one round, trained once: see `Trained`."""
    study = small_study(tmp_path_factory.mktemp("trained") / "study", images=60)
    return Trained(study, suture.run(study, out=study.parent / "run", rounds=1).folder)


@dataclass
class Tiny:
    """A federation small enough to run many of."""

    folder: Path
    plan: Plan
    schedule: Schedule
    configs: dict[str, SiteConfig]

    def server(self, out: str = "run") -> Server:
        """The server, new or continuing."""
        return open_server(
            replace(self.plan, experiment=out),
            self.schedule,
            self.configs.get("server"),
            self.folder,
        )

    def sites(self, out: str = "run") -> dict[str, Site]:
        """The sites, new or continuing."""
        plan = replace(self.plan, experiment=out)
        return {
            name: Site(name, config, plan, self.schedule.rounds, self.folder / out / "sites" / name)
            for name, config in self.configs.items()
            if name != "server"
        }

    def run(self, out: str = "run") -> Server:
        """A whole federation in this process."""
        server = self.server(out)
        federate(server, Loop(self.sites(out)))
        write_report(server.record.folder)
        return server


MakeTiny = Callable[..., Tiny]


@pytest.fixture
def tiny(tmp_path: Path) -> MakeTiny:
    """Makes tiny federations in the test's own folder."""

    def make(
        method: Method,
        labels: Mapping[str, tuple[str, ...]] = LABELS,
        *,
        n: int = 25,
        seed: int = 1,
        view: str = "all",
        model: ModelSpec = CNN,
        **schedule: object,
    ) -> Tiny:
        configs = {}
        for i, (name, own) in enumerate(labels.items()):
            folder = tmp_path / "data" / name
            path = folder / "suture.toml"
            configs[name] = load_site_config(
                path if path.exists() else write_hospital(folder, own, n, i, view)
            )
        plan = Plan(method, model, Augmentation(), seed, "run", code_hash(type(method)))
        # Its validation images are too few for `site_auroc`, the default.
        usual = {"name": "tiny", "title": "Tiny", "rounds": 2, "selection": "site_loss"}
        chosen = Schedule.from_dict({**usual, **schedule})
        return Tiny(tmp_path / "runs", plan, chosen, configs)

    return make
