"""A run in a POC or in production: submission, progress, results, and why a job failed."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError, FederationError, SutureError
from suture.core.escaping import printable
from suture.core.files import (
    append_line,
    make_folder,
    read_json,
    read_records,
    read_regular,
    replacing,
    writing,
)
from suture.core.labels import check_experiment, shown_name
from suture.data.config import load_site_config
from suture.execution.job import Job, check_federated
from suture.execution.progress import following
from suture.execution.run import check_folder, lock, preparing
from suture.federation.ownership import may_use
from suture.federation.server.record import Record, describe
from suture.federation.site.abstention import first_recorded
from suture.federation.state_files import experiment_folder
from suture.flare.kit import Kit
from suture_admin.recovery import experiment_of, how_to_continue, state_on_this_machine
from suture_results.card import write_pages
from suture_results.report import try_report

if TYPE_CHECKING:
    from suture_admin.session import Connection

_POLL, _START = 1.0, 4.0
_LONGEST_POLL, _MANY = 10.0, 30
"""Longest pause of a poll in seconds; number of new events after which it is short: a reply holds 100."""

_PATIENCE = 600.0
"""Seconds for which the server may be unreachable while a run is followed."""

_NOT_LISTED = re.compile(r"Component '([\w.]+)' at config path '[^']*' is not in allow_list")
_NO_MODULE = re.compile(r"No module named '(suture[\w.]*)'")
_NOT_ENROLLED = re.compile(r"sites? ('.+') (?:is|are) not enrolled in study")
_OWN_ERROR = re.compile(r"suture\.core\.errors\.(?:CodeMismatch|ConfigError|DataError|FederationError): (.+)")
_PANIC = re.compile(r"FATAL_SYSTEM_ERROR(?: received)?: (.+(?:\n(?!\d{4}-).+)*)")
_ENDED = re.compile(r"asked to abort|Server runner finished")
"""What FLARE logs at the end of a server's job that was not cut off."""


@dataclass(frozen=True)
class Submission:
    """How a job is submitted.

    Attributes:
        sites: names of the sites that take part; by default all of the user's study that are connected.
        bundle: whether the package travels with the job.
        resume: whether the job continues the run in its folder, under the identifier of that run.
        overwrite: whether the content of the folder is deleted.
    """

    sites: Sequence[str] = ()
    bundle: bool = False
    resume: bool = False
    overwrite: bool = False


def submit(job: Job, env: str, kit: Kit, out: Path, experiment: str, how: Submission | None = None) -> str:
    """Submit a job and prepare the run folder OUT for its results.

    Args:
        env: ``poc`` or ``prod``, for the report.
        kit: of an administrator who may submit.
        experiment: identifier under which the parties store their state.

    Returns:
        FLARE's id of the job.

    Raises:
        FederationError: no site is connected, or the server does not accept the job.
        ConfigError: OUT is in use, or the method cannot run in a federation.
    """
    from suture.flare.recipe import export_job
    from suture_admin.session import connect

    how = how or Submission()
    check_federated(job.method)
    with connect(kit) as federation, tempfile.TemporaryDirectory() as folder:
        names = list(how.sites) or federation.sites()
        if not names:
            raise FederationError(f"no site is connected to {kit.server}; start them, then try again")
        check_folder(out, job, resume=how.resume, overwrite=how.overwrite)
        with lock(out), preparing(out, job, resume=how.resume, overwrite=how.overwrite):
            record = Record(out)
            name = str(record.run.get("experiment", experiment))

            def write(sites: Sequence[str]) -> Path:
                return export_job(
                    job, Path(tempfile.mkdtemp(dir=folder)), name, sites, how.bundle, kit.scheme
                )

            job_id = federation.submit(write(names)) if how.sites else _submit(federation, write, names)
            describe(record, job.plan(name), job.schedule(), env=env, flare_job=job_id)
    return job_id


def _submit(federation: Connection, write: Callable[[Sequence[str]], Path], names: Sequence[str]) -> str:
    """Submit a job for those of the connected sites that are in the user's study; return its id.

    FLARE shows the sites of a study to its administrators alone: a lead learns them from the refusal.

    Args:
        write: exports the job for some sites.
    """
    try:
        return federation.submit(write(names))
    except FederationError as error:
        others = _NOT_ENROLLED.search(str(error))
        if not (enrolled := [name for name in names if others and f"'{name}'" not in others[1]]):
            raise
        return federation.submit(write(enrolled))


class Tail:
    """Appends the new events of a server's run to events.jsonl of a local run folder, for the display.

    Args:
        folder: of the run, on this machine.
        facts: of the job, for run.json; by default those that it has.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
        self.facts = facts
        self._record = Record(folder)
        self._path = folder / "events.jsonl"
        self._next: int | None = None
        self._last_note = ""

    @property
    def taken(self) -> int:
        """Number of the event after the newest in the server's file; 0 before the first."""
        return self._next or 0

    def take(self, first: int, events: Sequence[dict[str, Any]]) -> None:
        """Append the events that the file does not have yet.

        Args:
            first: number of the first of them in the server's file.
        """
        start = first if self._next is None else self._next
        self._next = max(start, first + len(events))
        with writing(self._path):
            self._path.touch()
        for event in events[max(0, start - first) :]:
            append_line(self._path, event)

    def finish(self, everything: Sequence[dict[str, Any]]) -> None:
        """Append the events after the last `take`; `everything` is the whole file of the server."""
        begun = [number for number, event in enumerate(everything) if event.get("event") == "begin"]
        first = self._next if self._next is not None else (begun[-1] if begun else len(everything))
        self.take(first, everything[first:])

    def note(self, text: str) -> None:
        """Append a line of text for the reader, unless it repeats the last one."""
        if text and text != self._last_note:
            self._record.event("note", text=text)
            self._last_note = text


def follow(title: str, env: str, kit: Kit, out: Path, job_id: str) -> None:
    """Show the progress of a job until it has ended, and download its results into OUT.

    Raises:
        FederationError: the job failed; names the party that refused it and the reason.
    """
    from suture_admin.session import NoAnswer, connect

    tail = Tail(out, {"env": env, "flare_job": job_id})
    begun = answered = time.monotonic()
    with lock(out), following(out, title, env):
        tail.note(f"job {job_id} at {kit.server}")
        while True:
            try:
                with connect(kit) as federation:
                    taken = 0
                    while not _has_ended(federation, job_id, tail):
                        answered = time.monotonic()
                        time.sleep(_pause(answered - begun, tail.taken - taken))
                        taken = tail.taken
                    download(federation, kit, job_id, out, tail)
                    return
            except NoAnswer:
                if time.monotonic() - answered > _PATIENCE:
                    raise
                tail.note(f"{kit.server} does not answer; trying again")
                time.sleep(5 * _POLL)


def _pause(elapsed: float, news: int) -> float:
    """Return the seconds until the next poll: each is a line in the server's audit.log, which never ends.

    Args:
        elapsed: seconds since the run is followed.
        news: number of new events.
    """
    return _POLL if news > _MANY else min(max(_POLL, elapsed / 60), _LONGEST_POLL)


def _has_ended(federation: Connection, job_id: str, tail: Tail) -> bool:
    """Append new events to the tail; return whether the job has ended."""
    if tail.taken and (recent := federation.recent(job_id)):
        tail.take(recent["first"], recent["events"])
        return False
    meta = federation.meta(job_id)
    tail.note(state(meta))
    if meta.get("status") == "RUNNING":
        if recent := federation.recent(job_id):
            tail.take(recent["first"], recent["events"])
        else:
            # The job's process at the server is starting, and logs an error for each request until it is up.
            time.sleep(_START)
    return str(meta.get("status")).startswith("FINISHED")


def state(meta: Mapping[str, Any]) -> str:
    """Return what a job waits for, and which parties refused it; empty where neither applies."""
    lines = refusals(meta, {})
    history = [str(line) for line in meta.get("schedule_history") or ()]
    if meta.get("status") in ("SUBMITTED", "APPROVED", "DISPATCHED"):
        waits = printable(history[-1].partition(": ")[2]) if history else ""
        lines.append("waiting to be started" + (f": {waits}" if waits not in ("", "scheduled") else ""))
    return "\n".join(lines)


def fetch(kit: Kit, job_id: str, out: Path | None) -> Path:
    """Download the results of a job that has ended into OUT, by default runs/EXPERIMENT; return the folder.

    Raises:
        FederationError: the job has not ended, or failed; gives the reason.
        ConfigError: OUT holds another run.
    """
    from suture_admin.session import connect

    with connect(kit) as federation:
        status = str(federation.meta(job_id).get("status"))
        if not status.startswith("FINISHED"):
            raise FederationError(
                f"job {job_id} has not ended ({status}); see `suture status {quote(job_id)}`"
            )
        return download(federation, kit, job_id, out)


def download(
    federation: Connection, kit: Kit, job_id: str, out: Path | None, tail: Tail | None = None
) -> Path:
    """Copy the results of the server's run to where the simulator would write them; return the folder.

    A job whose process at the server has died left nothing to download; its committed rounds are then taken
    from the server's own folder, where that is on this machine.

    Raises:
        FederationError: the job failed; names the party that refused it and why, or how to continue.
        ConfigError: OUT holds another run, or the server's run has a name that is none.
        DataError: the server's run is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        workspace = federation.download(job_id, Path(folder))
        experiment = None
        left: Path | None = workspace
        if not (workspace / "run.json").is_file():
            experiment = experiment_of(federation.meta(job_id), federation.metas())
            left = state_on_this_machine(kit, experiment) if experiment else None
        run = read_json(left / "run.json", "experiment") if left else {}
        target = out or (Path("runs") / check_experiment(str(run["experiment"])) if run else None)
        if target:
            make_folder(target)
            if left:
                _copy(left, target, tail)
            if (workspace / "log.txt").exists():
                with replacing(target / "flare.log") as temporary:
                    shutil.copy2(workspace / "log.txt", temporary)
        if target and run.get("status") == "finished":
            return target
        advice = how_to_continue(experiment, kit) if experiment else ""
        reason = _reason(federation, job_id, workspace, advice)
        if run and (first := _error_on_this_machine(kit, run)):
            reason += f"\n- {printable(first)}"
        if target and "job" in (here := Record(target)).run:
            here.close("failed", reason)
            try_report(target)  # an error in it would hide the reason
        raise FederationError(reason)


def _copy(workspace: Path, out: Path, tail: Tail | None) -> None:
    """Copy the files of a run into OUT, note the environment, and write report and card again."""
    from suture.flare.controller import copy_results

    run, here = read_json(workspace / "run.json", "experiment"), Record(out)
    if here.run and here.run.get("experiment") != run["experiment"]:
        raise ConfigError(
            f"{out} holds a run of {shown_name(here.run.get('experiment'))}; choose another --out"
        )
    own = (tail and tail.facts) or {key: here.run[key] for key in ("env", "flare_job") if key in here.run}
    if tail:
        tail.finish(read_records(workspace / "events.jsonl"))
    copy_results(workspace, out, without=("events.jsonl",) if tail else ())
    Record(out).update(**own)
    write_pages(out)


# Why a job did not run or finish: FLARE's messages, translated for the submitter


def _reason(federation: Connection, job_id: str, workspace: Path, advice: str = "") -> str:
    """Return why a job did not finish, from everything that this administrator may read."""
    logs, path, log = federation.error_logs(job_id), workspace / "run.json", workspace / "log.txt"
    run = read_json(path) if path.is_file() else {}
    if log.is_file() and not run:
        logs["server"] = read_regular(log).decode(errors="replace")
    return explain(job_id, federation.meta(job_id), logs, run, advice)


def why_ended(federation: Connection, job_id: str) -> str:
    """Return why a job ended without success, as far as this user may read it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            workspace = federation.download(job_id, Path(folder))
        except FederationError:  # another user's job, or one that left nothing
            return explain(job_id, federation.meta(job_id), federation.error_logs(job_id), {})
        return _reason(federation, job_id, workspace)


def _error_on_this_machine(kit: Kit, run: Mapping[str, Any]) -> str | None:
    """Return the first error of a site that runs on this machine, as in a POC, since the run began.

    It is that of the experiment, which another submitter may not read, or of a site that could not open it.
    """
    experiment, paths = check_experiment(str(run["experiment"])), []
    for startup in sorted(kit.folder.parent.glob("*/startup/fed_client.json")):
        root = startup.parents[1]
        with suppress(SutureError, OSError):
            state = load_site_config(root / "local" / "suture.toml").storage.state
            folder = experiment_folder(state, experiment)
            if may_use(folder, kit.name, kit.study):
                paths += [folder / "errors.jsonl", root / "suture" / "errors.jsonl"]
    return first_recorded(paths, str(run.get("started", "")))


def explain(
    job_id: str, meta: Mapping[str, Any], logs: Mapping[str, str], run: Mapping[str, Any], advice: str = ""
) -> str:
    """Return why a job ended as it did, in plain words.

    Args:
        logs: of the sites, and of a server that left no run.json.
        run: the server's run.json; empty where the job did not get that far.
        advice: how to continue, for a job that was cut off.
    """
    status, own = str(meta.get("status")), logs.get("server")
    reasons = refusals(meta, logs) + ([printable(run["error"])] if run.get("error") else [])
    told = bool(reasons) and run.get("status") != "interrupted"
    cut_off = (
        own is not None and not _ENDED.search(own) and _log("server", own) is None and "ABORTED" not in status
    )
    # The status of a job that the server ended for its own reason is that of a crash, too.
    if cut_off or "EXECUTION_EXCEPTION" in (" ".join(reasons) if told else status):
        party = "at the server" if cut_off else "at a site" if run or own else "at a site or at the server"
        reasons.append(
            f"a process {party} failed, or was killed for lack of memory; its messages stay there: in "
            f"WORKSPACE/{job_id}/log.txt, or in the system's log; `suture doctor` there may tell too"
        )
    if not reasons and "ABORTED" in status:
        reasons = ["it was aborted"]
    elif not reasons:
        reasons = [
            "no party reports a reason to the submitter. It is in the log of the party that ended the job, "
            f"WORKSPACE/{job_id}/log.txt; `suture doctor` there may tell, and a project_admin sees more: "
            f"`suture results {quote(str(job_id))} --startup-kit DIR`"
        ]
    if advice and (cut_off or not told):
        reasons.append(advice)
    return f"job {job_id} ended as {status}:\n" + "\n".join(f"- {reason}" for reason in reasons)


def refusals(meta: Mapping[str, Any], logs: Mapping[str, str]) -> list[str]:
    """Return one sentence for each party that did not accept the job.

    Args:
        meta: FLARE's facts of the job.
        logs: of each party, as far as the submitter may read them.
    """
    found = [_deployment(printable(line), meta) for line in meta.get("job_deploy_detail") or ()]
    for party, text in sorted(logs.items()):
        found += [_log(party, text)]
    return list(dict.fromkeys(sentence for sentence in found if sentence))


def _deployment(line: str, meta: Mapping[str, Any]) -> str | None:
    """Translate a line such as ``harbor: BYOC not permitted``."""
    party, separator, text = line.partition(": ")
    if party == "invalid_clients":
        return f"the server does not know the sites {text}; `suture status` names those that are connected"
    if text == "OK" or not separator:
        return None
    if "BYOC not permitted" in text:
        role = meta.get("submitter_role", "ROLE")
        return (
            f"{party} refuses jobs that bring their code or name an image. Submit without --bundle or "
            f"flare.launcher_spec, with suture installed at every party. Or, at {party}, set "
            f'"byoc" to "any" under permissions.{role} in local/authorization.json and restart it'
        )
    if _NOT_LISTED.search(text):
        return _log(party, text)
    if "no reply" in text:
        return f"{party} did not answer while the job was deployed; see whether it runs (`suture status`)"
    return f"{party} did not accept the job: {text}"


def _log(party: str, text: str) -> str | None:
    """Translate the first message in a party's log that explains the end of a job."""
    if listed := _NOT_LISTED.search(text):
        return (
            f'{party} does not allow {listed[1]}. At {party}, add "{listed[1]}" to class_allow_list in '
            "local/resources.json (`suture policy WORKSPACE` does it); or submit with --bundle"
        )
    if module := _NO_MODULE.search(text):
        return f"{party} has no {module[1]}. Install suture there, or submit with --bundle"
    if error := _PANIC.search(text) or _OWN_ERROR.search(text):
        return f"{party}: {printable('; '.join(error[1].splitlines()))}"
    return None
