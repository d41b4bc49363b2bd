"""Own data from the folder to the model: `python benchmarks/own_hospitals.py`.

Writes four hospitals as they come (`hostile_hospitals`), runs `suture init`, `check` and `run` in the loop
and in FLARE's simulator without an edit, and compares model and figures of both byte by byte. Then plants
each fault of `planted_faults` into a copy of a sound study and asks `suture check`, and reads each form of
table of `hospital_tables`. Ends with 1 where any of it fails; `--tables` does the last part alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hospital_tables import CASES, misread
from hostile_hospitals import write_hospitals
from machine import machine
from planted_faults import FAULTS, Fault, found, sound_study

SAME = ("metrics.json", "model/model.safetensors")
"""Files of a run that do not depend on where it ran."""


def suture(folder: Path, *words: str) -> tuple[str, int]:
    """Run a command in a folder; return what it printed, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "suture", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "500"},
        check=False,
    )
    return done.stdout + done.stderr, done.returncode


def three_commands(folder: Path, images: int) -> bool:
    """Make hospitals and run them in both environments; print the time of each step and the figures."""
    began = time.monotonic()
    sites = write_hospitals(folder / "hospitals", images)
    print(f"{len(sites)} hospitals of {images} images; {machine()}\n\n| step | s |\n|---|---|")
    print(f"| write the hospitals | {time.monotonic() - began:.0f} |")
    named = [f"--site={name}={path}" for name, path in sites.items()]
    steps = [("init", "study", *named, "--yes"), ("check", "study")]
    # An experiment has the name of its folder, which is the same in both.
    steps += [("run", "study", "--env", env, "--out", f"{env}/study") for env in ("local", "sim")]
    for words in steps:
        began = time.monotonic()
        output, code = suture(folder, *words)
        name = " ".join(word for word in words if "=" not in word)
        print(f"| suture {name} | {time.monotonic() - began:.0f} |", flush=True)
        if code:
            print(f"\n{output}")
            return False
    return _same_figures(folder / "local" / "study", folder / "sim" / "study")


def _same_figures(loop: Path, simulator: Path) -> bool:
    figures = [json.loads((run / "metrics.json").read_text()) for run in (loop, simulator)]
    print("\n| AUROC | loop | simulator |\n|---|---|---|")
    for label, value in figures[0]["auroc"].items():
        print(f"| {label} | {value:.3f} | {figures[1]['auroc'].get(label, float('nan')):.3f} |")
    same = {name: (loop / name).read_bytes() == (simulator / name).read_bytes() for name in SAME}
    print("\n" + "\n".join(f"{name}: {'the same bytes' if is_ else 'DIFFERS'}" for name, is_ in same.items()))
    above = min(figures[0]["auroc"].values()) > 0.5
    print(f"every class above chance: {'yes' if above else 'NO'}\nreport: {loop / 'report.html'}")
    return above and all(same.values())


def planted(folder: Path, faults: Sequence[Fault]) -> bool:
    """Plant each fault into a copy of a sound study, and print whether `check` names it."""
    sound = sound_study(folder / "sound")
    output, code = suture(folder, "check", "sound")
    assert code == 0, output
    print("\n| planted | found in `check` | exit code |\n|---|---|---|")
    every = True
    for fault in faults:
        study = shutil.copytree(sound, folder / "faulty")
        fault.plant(study)
        output, code = suture(folder, "check", "faulty")
        shutil.rmtree(study)
        named = found(fault, output, code)
        every &= named
        print(f"| {fault.name} | {'yes' if named else 'NO'} | {code} |", flush=True)
    return every


def tables() -> bool:
    """Read each form of table with `suture init`, and print those that are misread, and how many are not."""
    print("\n| form of table | read as it is meant, or refused with the remedy |\n|---|---|")
    right = 0
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            said = misread(case, Path(folder)).partition("\n")[0]
        right += not said
        print(f"| {name} | {said or 'yes'} |", flush=True)
    print(f"\n{right} of {len(CASES)} forms of tables")
    return right == len(CASES)


def main() -> None:
    """Print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=240, help="of each hospital")
    parser.add_argument("--tables", action="store_true", help="only read the forms of tables")
    parser.add_argument("--keep", type=Path, help="a new folder for the hospitals and the runs")
    asked = parser.parse_args()
    if asked.tables:
        sys.exit(0 if tables() else "not as promised; see above")
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ran = three_commands(folder, asked.images)
        named = planted(folder, FAULTS)
    read = tables()
    if not (ran and named and read):
        sys.exit("not as promised; see above")


if __name__ == "__main__":
    main()
