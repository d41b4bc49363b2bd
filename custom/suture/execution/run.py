"""Runs of a job on this machine with simulated sites: in a plain loop, or in FLARE's simulator. Only
files of a run folder that a run has written are ever deleted.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from suture.core import VERSION
from suture.core.entry_points import hook, if_installed
from suture.core.errors import ConfigError, DataError, FederationError, InUse, SutureError, unknown
from suture.core.escaping import printable
from suture.core.files import (
    atomic_write,
    hold,
    is_temporary,
    make_folder,
    note_own,
    own_note,
    read_json,
    read_records,
    read_regular,
    remove_leftovers,
    temporary_beside,
    write_json,
    writing,
)
from suture.core.labels import LabelSet, canonical, check_experiment, shown_name
from suture.core.ontology import Stated
from suture.data.config import SiteConfig, load_server_config, load_site_config
from suture.data.readers import load_table, read_table
from suture.data.text import build_vocabulary
from suture.execution.exact_figures import without_limits
from suture.execution.job import TUNED, Job, check_federated, check_finetuning, command_of
from suture.execution.progress import following
from suture.execution.simulator import Simulator, check_paths, simulate, with_first_error
from suture.execution.sites import TARGETS
from suture.execution.study import SERVER, StudySites
from suture.federation.loop import Loop, federate
from suture.federation.plan import Plan
from suture.federation.server.record import Record, describe
from suture.federation.server.registry import Agreement, Member, SiteRegistry, agree
from suture.federation.server.server import open_server
from suture.federation.server.state import check_unchanged, fixed_settings
from suture.federation.site.site import Site, check_consent
from suture.federation.site.trainer import DIAGNOSTICS_FILE, LEFT_OUT_FILE, write_left_out
from suture.federation.state_files import Rounds, experiment_folder
from suture.federation.workers import Openers, Workers
from suture.learning.samples import SiteSamples, load_samples, pool
from suture.methods.source import source_of
from suture.models import CORPUS
from suture.protocol.messages import SiteInfo

log = logging.getLogger(__name__)

LOCK, PREPARING = ".lock", ".preparing"
"""The lock of a run folder, and the mark of a run that is not described yet: it is begun anew."""

MADE = ".folder.json"
"""Names the folder in which a run was begun, by its inode: in a copy, or a folder of somebody else, it is
another one."""

REPLACED = ".replaced"
"""Folder of the run that is being replaced, until the new one is described."""

_OWN = re.compile(
    r"\.server\.lock|flare\.log|report\.html|(run|job|metrics|tuned)\.json"
    r"|(events|history|diagnostics|errors)\.jsonl|model/(README\.md|model_card\.html|model\.(json|safetensors|sig))"
    r"|(sites/[^/]+|state/spool|state/updates|flare|\.messages|targets)/.+"
    r"|state/([a-z]+-\d{6}\.safetensors|constant\.safetensors|\.?ledgers\.json(\.lock)?|mask(\.key|-lists\.json))",
    re.DOTALL,
)


def begin_here(out: Path) -> None:
    """Record that a run begins in this folder, and that it is not described yet."""
    note_own(out / MADE)
    atomic_write(out / PREPARING, b"")  # in place of a link, which `touch` follows


def set_aside(out: Path, files: list[Path]) -> None:
    """Move the files of a run to `REPLACED`. Where that is broken off, `put_back` finds no `PREPARING`."""
    for path in files:
        make_folder((to := out / REPLACED / path.relative_to(out)).parent)
        path.replace(to)
    delete_files(out, [])


def put_back(out: Path) -> None:
    """Delete what was begun in place of the run that was set aside, and move that run back.

    It may be broken off anywhere and repeated: without `PREPARING` nothing is deleted.
    """
    if (out / PREPARING).exists():
        delete_files(out, [path for path in files_of_run(out)[0] if out / REPLACED not in path.parents])
        (out / PREPARING).unlink()
    for path in [path for path in (out / REPLACED).rglob("*") if not path.is_dir()]:
        make_folder((to := out / path.relative_to(out / REPLACED)).parent)
        path.replace(to)
    delete_files(out, [])


def files_of_run(out: Path) -> tuple[list[Path], list[str]]:
    """Return the files that a run has written in a folder, and the names of the others, but for its marks.

    Raises:
        ConfigError: no run was begun in this folder, or it holds a link.
    """
    refuse_links(out)
    written: list[Path] = []
    temporary, others = 0, list[str]()
    for root, folders, files in os.walk(out):
        for path in (Path(root, name) for name in (*files, *folders)):
            name = path.relative_to(out).as_posix()
            if name in (LOCK, PREPARING, MADE) or path.is_dir():
                continue
            half = any(map(is_temporary, name.split("/")))
            temporary += half
            if half or _OWN.fullmatch(name.removeprefix(f"{REPLACED}/")):
                written.append(path)
            else:
                others.append(printable(name))
    if not made_here(out) and len(written) + len(others) > temporary:
        raise ConfigError(
            f"{out} is not empty, but no run was started in it: its files were copied. "
            "Remove those that you do not need, or choose another --out"
        )
    return written, sorted(others)


def refuse_links(out: Path) -> None:
    """Refuse a folder with links: a run makes none, and would write or delete what they lead to.

    Raises:
        ConfigError: it holds one; names it.
    """
    for root, folders, files in os.walk(out):
        for path in (Path(root, name) for name in (*files, *folders)):
            if path.is_symlink():
                name = printable(path.relative_to(out).as_posix())
                raise ConfigError(f"{out} contains the link {name}; remove it, because a run could follow it")


def claim(folder: Path) -> None:
    """Make a folder for what a simulation writes, or take one that an earlier call has made.

    Raises:
        ConfigError: it holds something else, which would be replaced, or a link.
    """
    refuse_links(folder)
    if folder.exists() and any(folder.iterdir()) and not made_here(folder):
        raise ConfigError(f"{folder} is not empty, and is not a simulation; choose another --out")
    make_folder(folder)
    note_own(folder / MADE)


def made_here(out: Path) -> bool:
    """Whether a run was begun in this folder, and not in one that it is a copy of."""
    return own_note(out / MADE) is not None


def delete_files(out: Path, files: list[Path]) -> None:
    """Delete files of a folder, and the folders below it that are then empty."""
    for path in files:
        path.unlink(missing_ok=True)
    for root, folders, _ in os.walk(out, topdown=False):
        for name in folders:
            with suppress(OSError):  # not empty, or a link
                Path(root, name).rmdir()


Environment = Literal["local", "sim"]
"""Where simulated sites run: in a plain loop in this process, or in FLARE's simulator."""

POOLED = "pooled"
"""Name of the only party of a reference method that trains on the pooled data of all sites."""


def run_job(
    job: Job,
    env: Environment = "local",
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: bool = False,
) -> Path:
    """Run a job with simulated sites and return the absolute path of its run folder.

    Args:
        env: ``local`` for a plain loop in this process, ``sim`` for FLARE's simulator in another process.
        out: run folder, by default ``runs/JOB-TIME``; its last part is the name of the experiment.
        resume: continue the unfinished run in the folder.
        overwrite: delete the content of the folder first.
        workers: processes that the sites share, at most one each; by default one each in the simulator, and
            this one in the loop, whose others are spawned: a program needs `if __name__ == "__main__":`.
        progress: show the progress on the standard output, as a live display where that is a terminal.

    Raises:
        ConfigError: the job cannot run in this environment, or the folder is in use; nothing is written.
        FederationError: the run failed; run.json and the message hold the first error of a site.
    """
    folder = new_run_folder(job, out)
    _check(job, env, folder, workers)
    check_folder(folder, job, resume=resume, overwrite=overwrite)
    with lock(folder), _processes(job, env, folder, workers or 1) as processes:
        with preparing(folder, job, resume=resume, overwrite=overwrite):
            if isinstance(processes, Simulator):
                processes.start()  # it imports while the sites are written
            job, sites = _begin(job, folder, env)
        with _recorded_end(folder):
            with following(folder, job.title, env) if progress else nullcontext():
                _rounds(job, folder, sites, processes, workers)
            _finish(job, folder)
    return folder


@contextmanager
def _processes(job: Job, env: str, folder: Path, number: int) -> Iterator[Simulator | Workers | None]:
    """What runs beside this process; where a run is broken off, what it was writing goes with it."""
    several = number > 1 and not job.method.about.pooled
    try:
        if env == "sim":
            with closing(Simulator(folder)) as simulator:
                yield simulator
        elif several:
            with closing(Workers(number)) as workers:
                yield workers
        else:
            yield None
    finally:
        remove_leftovers(folder)  # of processes that were killed, as FLARE's are at the end too


def new_run_folder(job: Job, out: str | Path | None = None) -> Path:
    """Return the absolute path of the folder of a new run: OUT, by default ``runs/JOB-TIME``."""
    return Path(out or Path("runs") / f"{job.name}-{datetime.now():%Y%m%d-%H%M%S}").expanduser().resolve()


def _check(job: Job, env: str, folder: Path, workers: int | None) -> None:
    """Check everything that can be checked before anything is written.

    Raises:
        ConfigError: the environment is unknown, the job or the number of workers does not fit it, or the
            folder's name is not valid.
    """
    if env not in get_args(Environment):
        raise unknown("environment of simulated sites", env, get_args(Environment))
    if env != "local":
        check_federated(job.method)
    elif (workers or 1) > 1:
        source_of(type(job.method))  # raises where other processes could not load it
    if env == "sim":
        check_paths(folder)
    check_finetuning(job)
    if job.secure_aggregation and env == "sim" and workers and job.simulation:
        raise ConfigError(
            f"--workers {workers}: sites that share a process of FLARE's simulator lose their keys of secure "
            "aggregation between two tasks. Leave --workers out, or use --env local"
        )
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: give 1 or more")
    if job.simulation is None:
        raise ConfigError(
            f"{job.name} does not simulate its sites, and no folder beside its file has a suture.toml. "
            "Write them with `suture init`, or submit it with --env poc or --env prod"
        )
    check_experiment(folder.name)


def _begin(job: Job, folder: Path, env: str) -> tuple[Job, list[str]]:
    """Write the simulated sites and describe the run; return the job with its vocabulary, and the sites."""
    simulation, command = job.simulation, command_of(job, env)
    assert simulation is not None
    sites = simulation.prepare(folder / "sites", folder.parent, job.seed, job.method)
    job = with_vocabulary(job, folder / "sites")
    plan, schedule = job.plan(folder.name), job.schedule()
    said = ""
    if isinstance(simulation, StudySites) and not simulation.limits:
        said = without_limits(simulation.configs(), job)
    synthetic = bool(getattr(simulation, "synthetic", False))
    facts: dict[str, Any] = {"env": env, "command": command, "without_limits": said, "synthetic": synthetic}
    describe(Record(folder), plan, schedule, **facts)
    content = {"name": job.name, "plan": plan.to_dict(), "schedule": schedule.to_dict(), "sites": sites}
    write_json(folder / "job.json", {**content, "simulation": asdict(simulation)})
    (folder / TUNED).unlink(missing_ok=True)  # the figures of an earlier model, which is now trained further
    return job, sites


def finetune_on(job: Job, folder: Path, data: Path) -> bool:
    """Fine-tune the model of a run on the tasks of the job's simulation, and write the run's report again.

    Args:
        folder: of the run.
        data: of the simulated sites.

    Returns:
        False where there are no such tasks.
    """
    if not job.finetuning or not (data / TARGETS).is_dir():
        return False
    hook("tune_targets")(folder, job.finetuning, job.seed, data / TARGETS)
    if_installed("write_report")(folder)
    return True


def _finish(job: Job, folder: Path) -> None:
    """Fine-tune the trained model where the job says so, collect the diagnostics, write report and card."""
    if job.finetuning:
        hook("tune_targets")(folder, job.finetuning, job.seed)
    collect_diagnostics(folder)
    _note_left_out(folder)
    if_installed("write_pages")(folder)


def _note_left_out(folder: Path) -> None:
    """Add to run.json what the sites left out of their data: they are on this machine, and tell no server."""
    record = Record(folder)
    found, known = read_left_out(folder, folder.name), record.run.get("left_out", [])
    record.update(left_out=[*known, *(line for line in found if line not in known)])


@contextmanager
def _recorded_end(folder: Path) -> Iterator[None]:
    """Record in run.json that a run was interrupted or failed, and write the report of what there is.

    Raises:
        FederationError: the run failed; the message holds the first error of a site.
    """
    try:
        yield
    except KeyboardInterrupt:
        Record(folder).give_up("interrupted", "stopped by the user")
        if_installed("try_report")(folder)
        raise
    except (SutureError, OSError) as error:
        whole = with_first_error(folder, str(error))
        # Report and record may be passed on, and the error of a site may quote a cell of its table.
        Record(folder).give_up("failed", str(error))
        with suppress(SutureError, OSError):
            _note_left_out(folder)
        if_installed("try_report")(folder)
        raise FederationError(whole) from error
    except Exception as error:  # of a method's own code: its author needs the traceback
        Record(folder).give_up("failed", f"{type(error).__name__}: {error}")
        if_installed("try_report")(folder)
        raise


def with_vocabulary(job: Job, folder: Path) -> Job:
    """Return the job with the words of all documents of its simulation, where its vocabulary is `CORPUS`."""
    if job.model.vocabulary != CORPUS:
        return job
    configs = [load_server_config(path).held_out for path in sorted(folder.rglob("suture.toml"))]
    tables = [load_table(config.data) for config in configs if config]
    texts = [text for table in tables for text in table.texts or ()]
    return _with_words(job, build_vocabulary(texts, tokeniser=job.model.tokeniser).words)


def _with_words(job: Job, words: str | tuple[str, ...]) -> Job:
    return replace(job, model=replace(job.model, vocabulary=words))


def _rounds(
    job: Job, folder: Path, sites: list[str], processes: Simulator | Workers | None, workers: int | None
) -> None:
    """Run the federation: in FLARE's simulator, or in a loop with the sites in this process or in several."""
    if isinstance(processes, Simulator):
        simulate(folder, min(workers or len(sites), len(sites)), processes)
        return
    plan = job.plan(folder.name)
    configs = {name: load_site_config(folder / "sites" / name / "suture.toml") for name in sites}
    parties, origins = _parties(job, plan, folder, configs)
    held_out = load_server_config(folder / "sites" / SERVER / "suture.toml").held_out
    transport: Loop | Workers
    if processes is None:
        transport = Loop({name: opener() for name, opener in parties.items()})
    else:
        images = {name: len(read_table(config.data).table.images) for name, config in configs.items()}
        devices = {name: config.training.device for name, config in configs.items()}
        processes.open(parties, images, devices, folder / ".messages")
        transport = processes
    with closing(transport):
        federate(open_server(plan, job.schedule(), held_out, folder.parent, origins), transport)


def _parties(
    job: Job, plan: Plan, out: Path, configs: Mapping[str, SiteConfig]
) -> tuple[Openers, dict[str, Member] | None]:
    """Return the sites of a simulation, or, for a method on pooled data, the one party that holds the data.

    Returns:
        what opens the parties, by name, and, for pooled data, the description of the sites of their origin.
    """

    def opener(
        name: str, config: SiteConfig, load: Callable[[], SiteSamples] | None = None
    ) -> Callable[[], Site]:
        state = experiment_folder(out / "sites" / name / "state", plan.experiment)
        return partial(Site, name, config, plan, job.rounds, state, load)

    if not job.method.about.pooled:
        return {name: opener(name, config) for name, config in configs.items()}, None
    parts, infos = {}, {}
    for name, config in configs.items():
        check_consent(name, plan, config)
        every = config.data.model_copy(update={"labels": None}) if job.method.labels.complete else config.data
        noted = partial(write_left_out, experiment_folder(out / "sites" / name / "state", plan.experiment))
        every_label = config.model_copy(update={"data": every})
        labels, samples = load_samples(every_label, job.model, name, left_out=noted)
        sizes = {split: len(part) for split, part in samples.items()}
        infos[name] = SiteInfo(
            labels.names, sizes, 1, plan.code, labels.label_type, codes=config.data.stated_codes()
        )
        parts[name] = labels, samples
    registry = agree(infos, Agreement((), job.label_map, True))
    parts = {
        name: (LabelSet(registry.members[name].names, labels.label_type), samples)
        for name, (labels, samples) in parts.items()
    }
    together = pool(parts, absent=job.method.labels.unknown == "negative")
    party = _pooled_config(next(iter(configs.values())), registry.codes)
    origins = {name: _origin(registry, name, config) for name, config in configs.items()}
    return {POOLED: opener(POOLED, party, lambda: together)}, origins


def _origin(registry: SiteRegistry, site: str, config: SiteConfig) -> Member:
    """Return a site whose data are pooled, with the classes that it annotates."""
    member = registry.members[site]
    if config.data.labels is None:
        return member
    own = tuple(canonical(name, config.data.synonyms) for name in config.data.labels)
    return replace(member, own=own, names=tuple(registry.names[name] for name in own))


def _pooled_config(config: SiteConfig, codes: Stated) -> SiteConfig:
    """Return a site's configuration for the party of all data: with the codes of all sites, and without the
    site's own learning rate, as training on pooled data uses the job's, and its ledger.
    """
    training = config.training.model_copy(update={"lr": None})
    data = config.data.model_copy(update={"codes": codes, "synonyms": {}})
    storage = config.storage.model_copy(update={"ledger": None})
    return config.model_copy(update={"training": training, "data": data, "storage": storage})


# The folder of a run
def check_folder(out: Path, job: Job, *, resume: bool, overwrite: bool) -> None:
    """Check that a job may run in a folder; a run that has a round needs `resume` or `overwrite`.

    Raises:
        ConfigError: the folder holds a run that neither applies to, or something else.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        if resume:
            raise ConfigError(
                f"{out} contains no run to resume; name the folder of one with --out, or leave out --resume"
            )
    elif _is_unprepared(out) or (not resume and _failed_early(out)):
        if not (resume and _copied_half(out)):
            files_of_run(out)
    elif not (out / "run.json").exists():
        raise ConfigError(f"{out} is not empty and is not a run of suture; choose another --out")
    elif overwrite:
        files_of_run(out)
    else:
        _check_run(out, job, resume=resume)


def _is_unprepared(out: Path) -> bool:
    """Whether a process was killed before it had described a run: there is nothing to continue."""
    names = {path.name for path in out.iterdir()}
    return bool({PREPARING, REPLACED} & names) or (
        LOCK in names and all(map(is_temporary, names - {LOCK, MADE}))
    )


def _copied_half(out: Path) -> bool:
    """Whether a folder is a copy of one whose run was not described yet: nothing of it may be deleted."""
    refuse_links(out)
    return (out / PREPARING).exists() and not (made_here(out) or (out / REPLACED).exists())


def _failed_early(out: Path) -> bool:
    """Whether a run failed before its first round, as with a fault in the data: there is nothing to keep."""
    if any(path.name > "round-000001" for path in (out / "state").glob("round-*")):  # 0 is the initial model
        return False
    with suppress(DataError):
        lines = read_records(out / "history.jsonl")
        committed = any(line.get("status") == "committed" for line in lines)
        return not committed and read_json(out / "run.json").get("status") == "failed"
    return False


def _check_run(out: Path, job: Job, *, resume: bool) -> None:
    """Check that a job may continue the run in a folder.

    Raises:
        ConfigError: it may not, the run is damaged, or the folder holds a link.
    """
    refuse_links(out)
    try:
        run = read_json(out / "run.json")
    except DataError as error:
        raise ConfigError(str(error)) from error
    content = f"{out} contains a run of {shown_name(run.get('job'))} ({printable(run.get('status'))})"
    rounds = run.get("rounds")
    if not resume:
        raise ConfigError(f"{content}; choose another --out, or continue it with --resume")
    if run.get("job") != job.name:
        raise ConfigError(f"{content}, not of {job.name}; choose another --out")
    done = isinstance(rounds, int) and rounds >= job.rounds and run.get("status") == "finished"
    untuned = job.finetuning is not None and not (out / TUNED).exists()
    if done and not untuned:
        raise ConfigError(f"{content} with all its {rounds} rounds; request more with --rounds")
    _refuse_another(out, job, run)


def _refuse_another(out: Path, job: Job, run: Mapping[str, Any]) -> None:
    """Refuse to continue another job's run, before anything is written; the server checks its state too.

    Args:
        run: the content of run.json.
    """
    path = out / "job.json"
    if not path.exists():  # a run of a server, whose plan is in its state
        return
    pooled_words = job.model.vocabulary == CORPUS  # which are read later, from the sites that are written
    plan = (_with_words(job, "clinical") if pooled_words else job).plan(out.name)
    settings = fixed_settings(plan)
    try:
        begun = read_json(path, "plan")
        before: dict[str, Any] = dict(begun["plan"])
        if missing := settings.keys() - before.keys():
            raise KeyError(min(missing))
        if pooled_words:
            was = before["model"]["vocabulary"]
            settings["model"]["vocabulary"] = CORPUS if isinstance(was, str) else was
        check_unchanged(before, settings, out.name)
        _refuse_other_limits(job, bool(begun.get("simulation", {}).get("limits", True)), out)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # parts of other types
        by = run.get("versions")
        maker = (by.get("suture"), run.get("code")) if isinstance(by, dict) else (VERSION, plan.code)
        if maker == (VERSION, plan.code):
            remedy = "restore it from a backup, or choose another --out"
            raise ConfigError(f"{path} is damaged ({error}); {remedy}") from error
        raise ConfigError(
            f"{out} was begun by version {printable(maker[0])} of suture, code {printable(maker[1])}. "
            f"This one, {VERSION}, code {plan.code}, does not continue it: {error}; take that version, or "
            "choose another --out"
        ) from error
    Rounds(out / "state").newest()  # refuses a state of another version


def _refuse_other_limits(job: Job, before: bool, out: Path) -> None:
    """Refuse to continue a study with other limits: its rounds would be measured in two ways.

    Args:
        before: whether the run was begun with the sites' limits of disclosure.

    Raises:
        ConfigError: it would be.
    """
    if isinstance(job.simulation, StudySites) and job.simulation.limits is not before:
        how = ("without", "leave out") if not before else ("with", "add")
        raise ConfigError(
            f"{out} was started {how[0]} the sites' limits of disclosure; {how[1]} --limits to continue it"
        )


@contextmanager
def preparing(out: Path, job: Job, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Set the run of a locked folder aside, unless it is continued; mark it until the block has described it.

    Where the block fails, the run that was there is put back, and a new folder is removed, so that it can be
    used again. A process that is killed in the block leaves the mark: the next one puts the former run back,
    or begins anew. What no run has written stays.

    Raises:
        ConfigError: as `check_folder`, which was called before the folder was locked.
        DiskError: the folder cannot be written.
    """
    if (out / REPLACED).exists():
        with writing(out):
            put_back(out)
    check_folder(out, job, resume=resume, overwrite=overwrite)
    if resume and (out / "run.json").exists() and not _is_unprepared(out) and not overwrite:
        yield
        return
    if (out / PREPARING).exists():
        log.warning("%s contains a run that ended during its preparation; it starts again", out)
    if resume and _copied_half(out):
        yield
        (out / PREPARING).unlink()
        return
    before, others = files_of_run(out)
    if others:
        log.warning("%s has files that no run wrote, and keeps them: %s", out, ", ".join(others))
    try:
        with writing(out):
            if (out / "run.json").exists() and not (out / PREPARING).exists():
                set_aside(out, before)
            begin_here(out)
            delete_files(out, before)
        yield
    except BaseException:
        if (out / REPLACED).exists():
            put_back(out)
        # Without the mark nothing of a former run was deleted yet, and none of it may be lost.
        elif (out / PREPARING).exists() or not before:
            with suppress(OSError, ConfigError):
                delete_files(out, [*files_of_run(out)[0], *(out / name for name in (LOCK, PREPARING, MADE))])
                out.rmdir()
        raise
    if (out / REPLACED).exists():
        gone = temporary_beside(out / REPLACED)  # at once: half of a run must never be put back
        (out / REPLACED).rename(gone)
        (out / PREPARING).unlink()
        shutil.rmtree(gone)
    else:
        (out / PREPARING).unlink()


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Lock a run folder, which is made where there is none, against a second run at the same time.

    Raises:
        ConfigError: another process uses it.
    """
    try:
        held = hold(out / LOCK, 0)
    except InUse as error:
        raise ConfigError(
            f"another run is using {out}{error.who}; wait for it, or choose another --out"
        ) from None
    with held:
        yield


def read_left_out(run: Path, experiment: str) -> list[str]:
    """Return what the sites of a simulation left out of their data, each sentence with its site.

    Args:
        run: folder of the simulation's run.

    Raises:
        DataError: a file is damaged.
    """
    lines: list[str] = []
    for site in sorted((run / "sites").glob("*")):
        path = experiment_folder(site / "state", experiment) / LEFT_OUT_FILE
        sentences = read_json(path, "left_out")["left_out"] if path.is_file() else ()
        lines += [f"{site.name}: {sentence}" for sentence in sentences]
    return lines


def collect_diagnostics(run: Path) -> bool:
    """Join the diagnostics of a simulation's sites in one file of the run folder; False if there are none."""
    found = sorted(run.glob(f"sites/*/state/**/{DIAGNOSTICS_FILE}"))
    if found:
        atomic_write(run / DIAGNOSTICS_FILE, b"".join(map(read_regular, found)), private=True)
    return bool(found)
