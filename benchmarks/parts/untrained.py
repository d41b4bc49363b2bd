"""A method that costs a round everything but training, as a package beside Suture's installs one.

A job may not be without training; a method may have a phase of no epochs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from suture.methods.base import Phase, hyperparameters
from suture.methods.surgical import SurgicalAggregation

_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: suture-benchmarks\nVersion: 1.0\n",
    "entry_points.txt": f"[suture.methods]\nuntrained = {__name__}:Untrained\n",
}


@hyperparameters
class Untrained(SurgicalAggregation):
    """Surgical Aggregation without local epochs."""

    about = replace(SurgicalAggregation.about, name="untrained", title="without training")

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        """One phase, in which a site trains nothing."""
        return (Phase("main", rounds, epochs=0),)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Have this process, and those that it starts, find the method by its name."""
    info = folder / "suture_benchmarks-1.0.dist-info"
    info.mkdir()
    for name, text in _METADATA.items():
        (info / name).write_text(text)
    paths, known = [str(folder), str(Path(__file__).parents[1])], os.environ.get("PYTHONPATH")
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([known] if known else [])])
    try:
        yield
    finally:
        del sys.path[:2]
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": known} if known is not None else {})
