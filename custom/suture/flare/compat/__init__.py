"""What leans on the inside of FLARE. Nothing else in this package does.

Each file says which behaviour of FLARE it works around, and in which version that was seen; where it is in
FLARE's source; and the test that fails when FLARE no longer behaves so. Then the file can go. These tests
(tests/flare/compat) run FLARE's code without the workaround. `suture.execution.simulator` and
`suture.execution.simulator` say the same of the processes of FLARE's simulator; they import nothing of
it.
"""

from __future__ import annotations

import ast
import logging
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from suture.core.errors import FederationError
from suture.core.files import read_regular

log = logging.getLogger(__name__)

FLARE = "2.9."
"""The versions of FLARE that the workarounds were written for."""

SAFETY = ("job_guard", "plain_json", "task_client")
"""Files without which a hostile site or submitter could do what the threat model excludes."""


def check_flare() -> None:
    """Warn of a FLARE of another version; refuse one without a place that a workaround for safety changes.

    Raises:
        FederationError: names these workarounds, and the places that are gone.
    """
    if (installed := version("nvflare")).startswith(FLARE):
        return
    gone = {
        path.stem: places
        for path in sorted(Path(__file__).parent.glob("[!_]*.py"))
        if (places := _gone(read_regular(path).decode()))
    }
    lacks = "; ".join(f"{name}.py has no place any more ({places})" for name, places in gone.items())
    text = (
        f"NVFLARE {installed} is installed, and suture.flare.compat was written for {FLARE}x: "
        f"{lacks or 'it has the places of all workarounds'}; install the version that constraints.txt names"
    )
    if gone.keys() & set(SAFETY):
        raise FederationError(text)
    log.warning("%s", text)


def _gone(source: str) -> str:
    """Return those of a file's places, by its docstring, that the installed FLARE does not have."""
    spec = find_spec("nvflare")
    root = Path(spec.origin if spec and spec.origin else ".").parents[1]
    places = re.findall(r"^Where: (\S+): (\w+)$", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)
    return ", ".join(
        f"{file}: {function}"
        for file, function in places
        if not (root / file).is_file() or f"def {function}(" not in (root / file).read_text()
    )
