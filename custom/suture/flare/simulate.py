"""Runs a run folder in FLARE's simulator: `python -m suture.flare.simulate DIR`.

It runs in a process of its own, because importing FLARE's recipes removes options from the command line and
the simulator leaves global state behind. It imports at once, and begins when its standard input has a line:
the number of the sites' processes. The sites find their configurations through SUTURE_SITES.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from nvflare import SimulatorRunner

from suture.core.errors import ConfigError
from suture.core.files import make_folder, read_json, write_json
from suture.core.names import check_job
from suture.federation.plan import Plan, Schedule
from suture.federation.server.record import Record
from suture.flare.compat.allow_list import allowing
from suture.flare.recipe import FederationRecipe
from suture.methods import entry_of
from suture.methods.source import list_entry


def main(folder: Path, threads: int) -> None:
    """Run the job that FOLDER/job.json describes, in a number of processes.

    Raises:
        SystemExit: it failed; names FLARE's return code.
        ConfigError: this process cannot read the job, for instance because the method's package is not on its
            path; run.json has the message.
    """
    job = read_json(folder / "job.json", "name", "sites", "plan", "schedule")
    sites: list[str] = job["sites"]
    check_job(job["name"])
    try:
        plan, schedule = Plan.from_dict(job["plan"]), Schedule.from_dict(job["schedule"])
    except ConfigError as error:
        Record(folder).update(error=str(error))
        raise
    # A site that waits would keep the others from the thread that they share.
    recipe = FederationRecipe(job["name"], plan, schedule, sites, bell=threads >= len(sites))
    workspace = folder / "flare"
    # The packages are installed here, so their classes are allowed, as at a site where they are installed.
    point = entry_of(plan.method.about.name)
    own = ["suture.flare.", *([list_entry(point)] if point else [])]
    local = workspace / job["name"] / "local"
    make_folder(local)
    write_json(local / "resources.json.default", allowing(own))
    with tempfile.TemporaryDirectory() as exported:
        recipe.export(exported)
        # Not `SimEnv`, which starts another process: the server, which is forked, has these imports at once.
        code = SimulatorRunner(
            job_folder=str(Path(exported) / job["name"]),
            workspace=str(workspace / job["name"]),
            clients=",".join(sites),
            n_clients=len(sites),
            threads=threads,
            log_config=os.environ.get("FL_LOG_LEVEL", "concise"),
        ).run()
    if code:
        raise SystemExit(f"FLARE's simulator ended with return code {code}")


if __name__ == "__main__":
    if number := sys.stdin.readline():  # without one, the process that started this has ended
        main(Path(sys.argv[1]).resolve(), int(number))
