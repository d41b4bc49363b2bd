"""Runs a run folder in FLARE's simulator: `python -m suture.flare.simulate DIR`.

It runs in a process of its own, because importing FLARE's recipes removes options from the command line and
the simulator leaves global state behind. It imports at once, and begins when its standard input has a line:
the number of the sites' processes. The sites find their configurations through SUTURE_SITES.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from nvflare import SimulatorRunner

from suture.core.errors import ConfigError
from suture.core.files import make_folder, read_json, write_json, writing
from suture.core.labels import check_job
from suture.core.validation import with_paths
from suture.data.config import load_server_config, write_site_config
from suture.execution.job import Job, job_in_folder
from suture.execution.run import with_vocabulary
from suture.execution.simulator import check_paths
from suture.federation.plan import Plan, Schedule
from suture.federation.server.record import Record
from suture.flare.compat.allow_list import allowing
from suture.flare.recipe import FederationRecipe
from suture.methods import entry_of
from suture.methods.base import Method
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
    plan = job_in_folder(plan, Path.cwd())  # FLARE's processes have folders of their own
    # A site that waits would keep the others from the thread that they share.
    recipe = FederationRecipe(job["name"], plan, schedule, sites, bell=threads >= len(sites))
    workspace = folder / "flare"
    _allow(workspace / job["name"] / "local", plan.method)
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


def _allow(local: Path, method: Method) -> None:
    """Allow the classes of a job in the simulator, since their packages are installed here."""
    point = entry_of(method.about.name)
    own = ["suture.flare.", *([list_entry(point)] if point else [])]
    write_json(local / "resources.json.default", allowing(own))


def simulator_workspace(job: Job, folder: Path) -> tuple[Job, list[str]]:
    """Write what FLARE's own simulator needs for an exported job: policy, data, each party's suture.toml.

    FLARE's workspace is FOLDER/JOB, for ``nvflare simulator -w`` as for ``SimEnv(workspace_root=FOLDER)``.
    At each start FLARE deletes what is in it, the state of the run too, but for ``local``, of which each
    party gets a copy. The data lie in FOLDER/sites.

    Returns:
        the job, with its vocabulary, and the names of the sites.

    Raises:
        ConfigError: the job simulates no sites, the folder is in use, or FLARE cannot work with its path.
    """
    folder = folder.expanduser().resolve()
    check_paths(folder, "--simulator")
    if job.simulation is None:
        raise ConfigError(f"{job.name} does not simulate its sites; write them with `suture init`")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name another folder for --simulator")
    data, local, files = folder / "sites", folder / job.name / "local", folder / "files"
    with writing(folder):
        make_folder(files)
        sites = job.simulation.prepare(data, folder, job.seed, job.method)
        job = with_vocabulary(job, data)
        with_paths(job.plan(job.name), lambda _key, path, _mark: _place(path, files))
        for path in sorted(data.glob("*/suture.toml")):
            party = load_server_config(path)
            kept = {"state": Path("state"), "files": files}
            config = (party.held_out or party).model_copy(
                update={"storage": party.storage.model_copy(update=kept)}
            )
            write_site_config(local / "sites" / path.parent.name / "suture.toml", config)
        _allow(local, job.method)
    return job, sites


def _place(path: str, files: Path) -> str:
    """Copy what the job names to where each party looks for it; a word, such as `download`, stays."""
    source = Path(path).expanduser().absolute()
    if source.is_dir():
        shutil.copytree(source, files / source.name, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy2(source, files)
    return path


if __name__ == "__main__":
    if number := sys.stdin.readline():  # without one, the process that started this has ended
        main(Path(sys.argv[1]).resolve(), int(number))
