"""Runs a prepared run folder in FLARE's simulator: `python -m suture.flare.simulate DIR [THREADS]`.

A process of its own, because importing FLARE's recipes takes options out of the command line and the
simulator leaves global state behind. The sites' configurations are found through SUTURE_SITES.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nvflare.recipe import SimEnv

from suture.flare.recipe import FederationRecipe
from suture.plan import Plan, Schedule


def main(folder: Path, threads: int | None) -> None:
    """Runs the job described by DIR/job.json."""
    job = json.loads((folder / "job.json").read_text())
    sites: list[str] = job["sites"]
    recipe = FederationRecipe(
        job["name"], Plan.from_dict(job["plan"]), Schedule.from_dict(job["schedule"]), len(sites), bundle=False
    )
    env = SimEnv(clients=sites, num_threads=threads or len(sites), workspace_root=str(folder / "flare"))
    recipe.execute(env)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else None)
