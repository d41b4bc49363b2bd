"""Examination of one party of a federation before it takes part: machine, startup kit, policy and data."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote

import torch

from suture.core import VERSION
from suture.core.errors import ConfigError, SutureError
from suture.core.escaping import number_of
from suture.core.runtime import device_name, unusable
from suture.data.config import (
    SiteConfig,
    find_server_config,
    find_site_config,
    load_server_config,
    load_site_config,
)
from suture.data.images import ImageSource
from suture.data.readers import load_table
from suture.data.table import SPLITS, Table
from suture.federation.plan import code_hash
from suture.federation.site.ledger import LEDGER_FILE, Ledger
from suture.flare.compat.deployed import DATA_MOUNT_ROOT, mounted_at
from suture.flare.kit import Kit, read_kit
from suture_admin.cleaning import experiments, size_of
from suture_admin.kit_checks import (
    Finding,
    check_certificates,
    check_connection,
    check_policy,
    error,
    independent,
    ok,
    warning,
)
from suture_admin.kits import components_of, policy_file

_FLARE = "2.9."
_PYTHON = (3, 11)
_LOW, _LITTLE = 1, 5  # GiB of disk
_FEW = 10  # experiments for which it has room


def examine(folder: Path) -> list[Finding]:
    """Return every finding of the checks that this machine can make, in the order in which to correct them.

    Args:
        folder: the party's FLARE workspace, which is its startup kit.
    """
    findings = list(independent(_check_versions, check_clock))
    try:
        kit = read_kit(folder)
    except ConfigError as problem:
        return [*findings, error("workspace", str(problem), "give the folder that holds startup/ and local/")]
    findings.append(ok("workspace", f"{kit.folder}: {kit.role} {kit.name} of project {kit.project}"))
    findings += independent(partial(check_certificates, kit), partial(check_connection, kit))
    if kit.role == "admin":
        return findings
    config, found = _find_config(kit)
    findings += [*check_policy(kit), *found]
    own = [partial(check_data, config), partial(check_device, config)] if config else []
    if config or kit.role == "server":
        own.append(partial(_check_containers, kit, config))
    if config and kit.role != "server":
        own.append(partial(_check_ledger, config))
    return [*findings, *independent(*own, partial(_check_disk, kit, config), partial(_check_states, kit))]


def _check_versions() -> Iterator[Finding]:
    """Check Python, torch, FLARE and this package; all parties need the same code of this package."""
    python = platform.python_version()
    if sys.version_info[:2] < _PYTHON:
        yield error("python", python, "install Python 3.11 or newer")
    else:
        yield ok("python", python)
    yield ok("torch", torch.__version__)
    remedy = 'pip install "nvflare>=2.9,<2.10"'
    try:
        flare = version("nvflare")
    except PackageNotFoundError:
        yield error("nvflare", "is not installed", remedy)
        return
    if flare.startswith(_FLARE):
        yield ok("nvflare", flare)
    else:
        yield error("nvflare", f"{flare}, and this version of suture needs 2.9", remedy)
    yield ok("suture", f"{VERSION}, code {code_hash()} (the same at every party, or jobs are refused)")


def check_clock() -> Iterator[Finding]:
    """Check the clock, since certificates are valid from and to a certain time."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    synchronised = ""
    if tool := shutil.which("timedatectl"):
        command = [tool, "show", "--property=NTPSynchronized", "--value"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        synchronised = done.stdout.strip()
    if synchronised == "no":
        yield warning("clock", f"{now}, not synchronised", "switch on NTP: timedatectl set-ntp true")
    else:
        yield ok("clock", f"{now}" + (", synchronised" if synchronised == "yes" else ""))


def _find_config(kit: Kit) -> tuple[SiteConfig | None, list[Finding]]:
    """Return the party's configuration, if any, and the findings; a site needs one, a server does not."""
    about, at_server = "suture.toml", kit.role == "server"
    try:
        path = find_site_config(kit.name, kit.folder)
    except ConfigError as problem:
        if at_server:
            return None, [ok(about, "none: the server holds no labelled data of its own")]
        remedy = f"write {kit.folder / 'local' / 'suture.toml'}; see docs/data.md"
        return None, [error(about, str(problem), remedy)]
    try:
        config = load_server_config(path).held_out if at_server else load_site_config(path)
    except ConfigError as problem:
        return None, [error(about, str(problem), "correct the file; see docs/data.md")]
    return config, [ok(about, str(path) if config else f"{path}: no labelled data of its own")]


def check_data(config: SiteConfig) -> Iterator[Finding]:
    """Check the table of the data; `suture data check` also reads the images."""
    try:
        table = load_table(config.data)
    except SutureError as problem:
        remedy = "correct the table; `suture data check suture.toml` lists every problem"
        yield error("data", str(problem), remedy)
        return
    counts = ", ".join(f"{len(table.of(split))} {split}" for split in SPLITS)
    text = f"{len(table.labels)} classes ({table.labels.label_type}); images: {counts}"
    if any(len(table.of(split)) for split in SPLITS):
        yield ok("data", text)
    else:
        yield error("data", text, "no row is in use; see docs/data.md on splits")
    yield from _images(config, table)


def _images(config: SiteConfig, table: Table) -> Iterator[Finding]:
    """Check that the folder of the images holds those of the table; archives are not read for it."""
    root, remedy = config.data.root, "correct the table, or [data] root in suture.toml"
    if not root.exists():
        yield error("images", f"{root} does not exist", remedy)
        return
    if table.texts is not None:
        return
    with ImageSource(root) as source:
        if source.archives:
            yield ok("images", f"{len(source.archives)} archives in {root}")
            return
        missing = [name for name in table.images if name not in source]
    if not missing:
        yield ok("images", f"{len(table)} in {root}")
        return
    text = f"{len(missing):,} of {len(table):,} are not in {root}, the first is {missing[0]!r}"
    tolerated = len(missing) < len(table) and len(missing) <= config.privacy.max_faults * len(table)
    yield (warning if tolerated else error)("images", text, remedy)


def check_device(config: SiteConfig) -> Iterator[Finding]:
    """Check the device that suture.toml names."""
    wanted, count = config.training.device, torch.cuda.device_count()
    if reason := unusable(wanted):
        text = f'[training] device = "{wanted}" cannot be used: {reason}; torch sees {count} GPUs'
        yield error("device", text, 'repair the driver or CUDA_VISIBLE_DEVICES, or write device = "cpu"')
    elif wanted.startswith("cuda"):
        device = torch.device(wanted)
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info(device))
        yield ok("device", f"{wanted}: {device_name(device)}, {free:.0f} of {total:.0f} GiB free")
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        if config.training.precision == "bf16" and not native:
            text = f"{wanted} only emulates bf16, which is slower than float32"
            yield warning("precision", text, 'write half = "fp16" under [training]')
    else:
        unused = f'; {count} GPU unused: [training] device = "cuda"' if count else ""
        yield ok("device", f"{wanted}, {config.training.threads} threads{unused}")


def _check_containers(kit: Kit, config: SiteConfig | None) -> Iterator[Finding]:
    """Check that the state outlives a job that has a container of its own, whose workspace FLARE discards."""
    if not mounted_at(components_of(policy_file(kit, "resources"))):
        return
    state = (config or find_server_config(kit.folder)).storage.state
    if state.is_relative_to(DATA_MOUNT_ROOT):
        yield ok("containers", f"{state} outlives the container of a job")
    else:
        text = f"{state} is lost with the container of each job: rounds, owners, and the ledger of releases"
        remedy = (
            "mount a data set with mode rw in local/study_runtime.yaml, and name a folder of it: "
            f'[storage] state = "{DATA_MOUNT_ROOT}/STUDY/NAME" in local/suture.toml'
        )
        yield error("containers", text, remedy)


def _check_ledger(config: SiteConfig) -> Iterator[Finding]:
    """Check that the ledger of the site's releases is whole: otherwise it releases nothing."""
    state = config.storage.ledger or config.storage.state
    ledger = Ledger(state / LEDGER_FILE, config.privacy)
    if why := ledger.breaks()[0]:
        accept = f"suture ledger {quote(str(state))} --accept"
        remedy = f"restore the newest copy, or accept what is missing: {accept}"
        yield error("ledger", f"{state / LEDGER_FILE} is not whole: {'; '.join(why)}", remedy)
    else:
        yield ok("ledger", f"{len(ledger.releases())} releases")
    if config.privacy.max_epsilon is None and (config.privacy.noise or config.privacy.epsilon):
        text = "noise is set and max_epsilon is not: ε grows with every experiment, without a bound"
        yield warning("budget", text, "set max_epsilon under [privacy] in suture.toml")


def _check_disk(kit: Kit, config: SiteConfig | None) -> Iterator[Finding]:
    """Check the free disk space for the workspace, the state of the rounds and the decoded images."""
    folders = {"disk of the workspace": kit.folder}
    if config:
        folders |= {"disk of the state": config.storage.state, "disk of the cache": config.storage.cache}
    for about, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if reason := _unwritable(there):
            remedy = "correct its rights, or name another folder under [storage]"
            yield error(about, f"{there} cannot be written: {reason}", remedy)
            continue
        free = shutil.disk_usage(there).free / 2**30
        text = f"{free:.1f} GiB free at {there}"
        remedy = "free some space, or name another folder under [storage]"
        if free < _LOW:
            yield error(about, text, remedy)
        elif free < _LITTLE:
            yield warning(about, text, remedy)
        else:
            yield ok(about, text)


def _check_states(kit: Kit) -> Iterator[Finding]:
    """Forecast for how many more experiments the disk has room: each leaves its states when it ends."""
    with suppress(ConfigError):  # of a suture.toml, which has a finding of its own
        if folders := experiments(kit.folder):
            used = size_of(folders)
            room = int(shutil.disk_usage(folders[0]).free / (used / len(folders)))
            text = f"{number_of(len(folders), 'experiment')}, {used / 1e9:.1f} GB; room for {room} more"
            remedy = f"list what can be deleted: suture clean {quote(str(kit.folder))}"
            yield warning("states", text, remedy) if room < _FEW else ok("states", text)


def _unwritable(folder: Path) -> str:
    """Return why no file can be created in a folder; empty where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as problem:
        return problem.strerror or str(problem)
