"""Suture's tests of FLARE with another version of FLARE: `make canary FLARE=2.9.1rc5` prints a table.

`newest` is the newest that can be had, release candidates too. It is installed in an environment of its own,
`.canary/VERSION`, which takes all other packages from the environment that runs this. A test that fails in
`tests/flare/compat` says which workaround may go or has to change; one elsewhere says what no longer works.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(version: str) -> Path:
    """Return the Python of an environment with that version of FLARE."""
    folder = ROOT / ".canary" / version
    python = folder / "bin" / "python"
    wanted = ["--pre", "--upgrade", "nvflare"] if version == "newest" else [f"nvflare=={version}"]
    if not python.exists() or version == "newest":
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *wanted], check=True)
        # After its own packages in the path, so that its FLARE is found first.
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        here = sysconfig.get_path("purelib")
        (own / "others.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python


def main(version: str, arguments: list[str]) -> int:
    """Run the tests, print a line for each file, then each failure; return the exit code of pytest."""
    report = ROOT / ".canary" / f"{version}.xml"
    wanted = arguments or ["tests/flare", "-m", "not faults"]
    command = [str(environment(version)), "-m", "pytest", "-q", "-p", "no:xdist", *wanted]
    command.append(f"--junitxml={report}")
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if not report.exists():
        print(done.stdout, done.stderr)
        return done.returncode
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = kinds.pop() if kinds else "passed"
        counts[case.get("classname", "")][kind] += 1
        if kind in ("failure", "error"):
            why = next(child for child in case if child.tag == kind).get("message", "").splitlines()
            failures.append(f"- `{case.get('name')}`: {why[0][:160] if why else ''}")
    print(f"| tests with FLARE {version} | passed | failed | skipped |\n|---|---|---|---|")
    for name, found in sorted(counts.items()):
        print(f"| {name} | {found['passed']} | {found['failure'] + found['error']} | {found['skipped']} |")
    print("\n".join(failures))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
