"""examples/flare-fedavg/job.py in this process: one of its own imports torch and FLARE for four seconds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "flare-fedavg"


def job_py(*words: str | Path) -> None:
    """Call it with the words of a command line; what it changes in this process is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path.cwd())
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", ["job.py", *map(str, words)])
        try:
            runpy.run_path(str(EXAMPLE / "job.py"), run_name="__main__")
        finally:
            sys.modules.pop("net", None)
