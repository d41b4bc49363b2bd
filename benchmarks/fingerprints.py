"""Whether a change of the code changes what it computes: bytes of the models and figures of short runs.

    python benchmarks/fingerprints.py record before.json     # on the code as it is
    python benchmarks/fingerprints.py check before.json      # after a change; exit code 1 if anything differs
    python benchmarks/fingerprints.py check before.json --only surgical flare-pfl

Every method on sites of several labels, the kinds of batch norm, a warm-up, a site with a rate of its own;
with SUTURE_DATA also images of one label and text; FLARE's simulator; and a run that stops and goes on.
Bytes are those of one kind of CPU: record and check on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from harness import command, suture
from safetensors import safe_open

from suture.core.files import read_json, write_json

SMALL = ("demo", "simulation.images=60", "simulation.held_out=60")
PHANTOMS = (*SMALL, "method.local.epochs=1")
ISIC = ("fedlsm_isic", "model.size=32", "method.local.iterations=3")
TEXTS = ("pmfl_openi", "finetuning.few=20", "finetuning.epochs=1", "finetuning.runs=1")

HERE: dict[str, tuple[str, ...]] = {
    "surgical": PHANTOMS,
    "vanilla": (*PHANTOMS, "method=vanilla"),
    "partial": (*PHANTOMS, "method=partial"),
    "fedavg": (*PHANTOMS, "method=fedavg"),
    "fedavg-owners": (*PHANTOMS, "method=fedavg", "method.rows=owners", "method.keep_local=true"),
    "fedlsm": (*SMALL, "method=fedlsm", "method.local.iterations=3"),
    "fedmas": (*PHANTOMS, "model.projection=128", "method=fedmas"),
    "pfl": (*PHANTOMS, "method=pfl"),
    "pfl-fedbn": (*PHANTOMS, "method=pfl", "method.batch_norm=local"),
    "individual": (*PHANTOMS, "method=individual"),
    "central": (*PHANTOMS, "method=central"),
    "central-full": (*PHANTOMS, "method=central_full"),
    "frozen": (*PHANTOMS, "method.batch_norm=frozen"),
    "warm-up": (*PHANTOMS, "method.local.warmup_epochs=2", "method.local.final_lr=1e-4"),
    "fedavg-warm-up": (*PHANTOMS, "method=fedavg", "method.local.warmup_epochs=2"),
    "site-rate": (*PHANTOMS, 'simulation.learning_rates={"harbor": 0.001}'),
}
WITH_DATA: dict[str, tuple[str, ...]] = {
    "isic-fedlsm": ISIC,
    "isic-fedavg": (*ISIC, "method=fedavg", "method.softmax=balanced"),
    "isic-surgical": (*ISIC, "method=surgical"),
    "isic-fedmas": (*ISIC, "model.projection=128", "method=fedmas"),
    "texts-pmfl": TEXTS,
    "texts-metafl": (*TEXTS, "method=metafl", "method.order=2"),
    "texts-fl": (*TEXTS, "method=fl"),
}
FLARE = {
    "flare-surgical": PHANTOMS,
    "flare-pfl": HERE["pfl-fedbn"],
    "flare-fedlsm": HERE["fedlsm"],
}
CONTINUED = {"continued": PHANTOMS, "continued-fedlsm": HERE["fedlsm"]}

IGNORED = {"seconds", "bytes_down", "bytes_up", "notes", "undefined", "unmeasured"}


def run(settings: tuple[str, ...], out: Path, env: str, rounds: int, *more: str) -> None:
    """One `suture run`."""
    job, *values = settings
    sets = [word for value in values for word in ("--set", value)]
    suture("run", job, "--env", env, "--out", str(out), "--rounds", str(rounds), *sets, *more)


def fingerprint(out: Path) -> dict[str, Any]:
    """Hashes of the models, of every tensor of the newest states, and the figures of a run folder."""
    models = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("model.safetensors"))
    }
    states = hashlib.sha256("".join(sorted(t for p in newest_states(out) for t in tensors(p))).encode())
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return {
        "models": {re.sub(rf"/state/(experiments/)?{out.name}", "", n): d for n, d in models.items()},
        "states": states.hexdigest(),
        "metrics": plain(json.loads((out / "metrics.json").read_text())),
        "history": plain(history),
    }


def newest_states(out: Path) -> list[Path]:
    """The newest state of each party; its kept answers are no state."""
    parties: dict[Path, Path] = {}
    for path in sorted(out.rglob("round-*.safetensors")):
        if "answers" not in path.parts:
            parties[path.parent] = path
    return list(parties.values())


def tensors(path: Path) -> list[str]:
    """A hash of each tensor of a file, whatever it is called."""
    with safe_open(path, framework="np") as file:
        return [hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in file.keys()]  # noqa: SIM118


def plain(value: Any) -> Any:
    """The value without times, sizes, notes, classes that were not measured, and what is not known."""
    if isinstance(value, dict):
        known = {key: inner for key, inner in sorted(value.items()) if inner is not None}
        return {key: plain(inner) for key, inner in known.items() if key not in IGNORED}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def names() -> list[str]:
    """The runs that this machine has the data for."""
    return [*HERE, *(WITH_DATA if "SUTURE_DATA" in os.environ else ()), *CONTINUED, *FLARE]


def of_run(name: str) -> dict[str, Any]:
    """Make a run; return its fingerprint."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        if name in FLARE:
            run(FLARE[name], out, "sim", 2)
        elif name in CONTINUED:
            run(CONTINUED[name], out, "local", 1)
            run(CONTINUED[name], out, "local", 3, "--resume")
        else:
            run((HERE | WITH_DATA)[name], out, "local", 3)
        return fingerprint(out)


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """The places in which two fingerprints differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [d for key in keys for d in differences(before.get(key), after.get(key), f"{where}/{key}")]
    return [] if before == after else [f"{where}: {str(before)[:80]} is now {str(after)[:80]}"]


def main(what: Literal["record", "check"], file: Path, only: tuple[str, ...] = ()) -> None:
    """Record the runs, or check those that the file has, and print each that differs.

    Args:
        only: some runs; by default all.
    """
    before = read_json(file) if what == "check" else {}
    wanted = [name for name in before or names() if not only or name in only]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(2) as pool:
        os.environ.setdefault("SUTURE_CACHE", cache)
        found = dict(zip(wanted, pool.map(of_run, wanted), strict=True))
    if what == "record":
        write_json(file, found)
        return
    before = plain(before)
    changed = [text for name in wanted for text in differences(before[name], found[name], name)]
    print("\n".join(changed) or f"{len(found)} runs: the same bytes and figures")
    sys.exit(bool(changed))


if __name__ == "__main__":
    command(main, only=("surgical", "continued"))
