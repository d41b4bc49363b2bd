"""A job at a server: handed in, followed, brought here whole or with the reason why it ended."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from flare_server import KIT, FlareServer, Serve
from hypothesis import given
from hypothesis import strategies as st
from startup_kits import MakeKit

import suture_admin.remote as remote
from own_clock import own_clock
from small_job import SMALL
from suture.core.errors import ConfigError, DataError, FederationError
from suture.execution.job import load_job
from suture.federation.ownership import NotOwner, Submitter, claim
from suture.federation.server.record import Record, describe
from suture.federation.state_files import EXPERIMENTS
from suture.flare import EXPERIMENT, SHARED_WITH
from suture.flare.controller import EventFeed
from suture.flare.kit import Kit, read_kit
from suture_admin.job_commands import status
from suture_admin.remote import Submission, Tail, download, explain, refusals, state, submit
from world import Trained, refused

META = {"status": "FINISHED:COMPLETED", "submitter_role": "lead", "job_deploy_detail": ["server: OK"]}
ABNORMAL = {"status": "FINISHED:ABNORMAL"}
CRASHED = {"status": "FINISHED:EXECUTION_EXCEPTION"}


def left(workspace: Path, meta: dict[str, Any]) -> FlareServer:
    """A server whose job has left a workspace."""
    first = {"job_id": "first", EXPERIMENT: "demo-1", SHARED_WITH: []}
    return FlareServer(first, {"job_id": "j", **meta}, workspace=workspace)


def fetch(
    workspace: Path, out: Path | None, meta: dict[str, Any] = META, kit: Kit = KIT, **more: Any
) -> Path:
    return download(left(workspace, meta), kit, "j", out, **more)  # type: ignore[arg-type]


def change(folder: Path, **values: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def done(tmp_path: Path, trained: Trained) -> Path:
    """A finished run, as it lies at the server."""
    workspace = tmp_path / "workspace"
    skip = shutil.ignore_patterns("sites", "state", "job.json")
    shutil.copytree(trained.run, workspace, ignore=skip)
    change(workspace, experiment="demo-1")
    (workspace / "log.txt").write_text("the log")
    return workspace


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The workspace of a job that was killed at the server: FLARE's log and nothing else."""
    workspace = tmp_path / "killed"
    workspace.mkdir()
    (workspace / "log.txt").write_text("No module named 'suture'")
    return workspace


def test_results_lie_where_a_run_of_the_simulator_leaves_them(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = fetch(done, None)
    assert out == Path("runs") / "demo-1"
    for name in ("metrics.json", "history.jsonl", "model/model.safetensors"):
        assert (out / name).read_bytes() == (done / name).read_bytes()
    assert (out / "report.html").is_file()


def test_a_followed_run_keeps_its_environment_and_hears_the_end(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    Record(out).update(env="prod", flare_job="j", experiment="demo-1")
    events, tail = events_of(done), Tail(out)
    tail.take(0, events[:3])
    fetch(done, out, tail=tail)
    assert events_of(out) == events
    run = json.loads((out / "run.json").read_text())
    assert (run["env"], run["flare_job"], run["status"]) == ("prod", "j", "finished")
    assert "prod" in (out / "report.html").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_folder_of_another_experiment_and_a_damaged_run_change_nothing_here(
    text: str, done: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    Record(out).update(experiment="demo-0")
    before = (out / "run.json").read_bytes()
    with refused("--out", by=ConfigError):
        fetch(done, out)
    assert sorted(path.name for path in out.iterdir()) == ["run.json"]
    assert (out / "run.json").read_bytes() == before
    (done / "run.json").write_text(text)
    with refused("run.json", by=DataError):
        fetch(done, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/../../x", "..", ""])
def test_a_server_names_no_place_outside_of_runs(
    name: str, done: Path, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(done, experiment=name)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    before = sorted(tmp_path.rglob("*"))
    for workspace, meta in ((done, META), (killed, ABNORMAL | {EXPERIMENT: name or "..", SHARED_WITH: []})):
        with refused("name of an experiment", by=ConfigError):
            fetch(workspace, None, meta)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_job_that_never_began_fails_with_the_reason_and_keeps_the_log(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    describe(Record(out), SMALL.plan("demo-1"), SMALL.schedule())
    with refused("server", "Install", by=FederationError):
        fetch(killed, out)
    run = json.loads((out / "run.json").read_text())
    assert (run["status"], "Install" in run["error"]) == ("failed", True)
    assert (out / "flare.log").is_file()
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("damaged", ["run.json", "history.jsonl"])
def test_a_damaged_folder_does_not_hide_why_the_job_was_refused(
    damaged: str, killed: Path, tmp_path: Path
) -> None:
    """As of `suture resume` of another user's experiment."""
    out, why = tmp_path / "mine", "the experiment 'x' is not this submitter's; ask its owner"
    (killed / "log.txt").write_text(f"suture.core.errors.ConfigError: {why}\n")
    if damaged == "run.json":
        Record(out).update(experiment="demo-1", env="poc")
    else:
        describe(Record(out), SMALL.plan("demo-1"), SMALL.schedule())
        (out / damaged).write_text("{}\n")
    with refused(why, by=FederationError):
        fetch(killed, out)


@pytest.mark.parametrize("owner", ["admin@trial.org", "x@trial.org"])
def test_a_failed_run_tells_the_servers_reason_and_its_submitter_the_error_of_a_site_on_this_machine(
    owner: str, done: Path, tmp_path: Path, make_kit: MakeKit
) -> None:
    change(done, status="failed", error="too few updates")
    site, admin = make_kit("site", "harbor"), read_kit(make_kit("admin", "admin@trial.org"))
    folder = site / "local" / "state" / EXPERIMENTS / "demo-1"
    folder.mkdir(parents=True)
    (site / "local" / "suture.toml").write_text('[data]\ndataset = "hospital"\nroot = "."\ntable = "t.csv"\n')
    claim(folder, Submitter(owner, "trial"), None)
    note = {"time": "2999-01-01T00:00:00+00:00", "site": "harbor", "message": "t.csv, row 3: write 0 or 1"}
    (folder / "errors.jsonl").write_text(json.dumps(note) + "\n")
    with pytest.raises(FederationError, match="too few updates") as caught:
        fetch(done, tmp_path / "mine", ABNORMAL, admin)
    assert ("\n- harbor: t.csv, row 3" in str(caught.value)) == (owner == admin.name)
    assert (tmp_path / "mine" / "history.jsonl").is_file()


def test_what_a_crashed_job_committed_is_taken_from_a_server_on_this_machine(
    killed: Path, done: Path, tmp_path: Path, make_kit: MakeKit
) -> None:
    """Elsewhere the message says where its rounds are, and how it goes on."""
    (killed / "log.txt").write_text("the log")
    kit, copy = read_kit(make_kit("admin", "admin@trial.org")), CRASHED | {"cloned_from": "first"}
    with refused("experiments/demo-1/", "[storage] state", by=FederationError):
        fetch(killed, tmp_path / "other", copy, kit)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["flare.log"]
    server = make_kit("server", "server") / "suture" / EXPERIMENTS / "demo-1"
    shutil.copytree(done, server)
    change(server, status="running")
    out = tmp_path / "deep" / "new"
    with refused("suture resume demo-1 --startup-kit", by=FederationError):
        fetch(killed, out, copy, kit)
    assert (out / "history.jsonl").read_bytes() == (done / "history.jsonl").read_bytes()
    assert (out / "flare.log").read_text() == "the log"
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    assert (out / "report.html").is_file()


@pytest.mark.parametrize(
    ("enrolled", "named", "asked"),
    [
        ("ab", "", ["ab", "runs"]),
        ("a", "", ["ab", "a", "runs"]),
        ("", "", ["ab"]),
        ("a", "ab", ["ab"]),
    ],
)
def test_a_job_asks_the_connected_sites_of_its_study(
    enrolled: str, named: str, asked: list[str], tmp_path: Path, serve: Serve
) -> None:
    """A site is a letter here; FLARE names those that it refuses."""
    jobs: list[str] = []

    class Server:
        sites = staticmethod(lambda: ["a", "b"])

        def submit(self, folder: Path) -> str:
            targets = json.loads((folder / "meta.json").read_text())["deploy_map"].values()
            jobs.append("".join(sorted({*chain(*targets)} - {"server"})))
            if strangers := [f"'{site}'" for site in jobs[-1] if site not in enrolled]:
                ends = "is" if len(strangers) == 1 else "are"
                raise FederationError(f"sites {', '.join(strangers)} {ends} not enrolled in study 's'")
            return "runs"

    serve(Server())
    with nullcontext() if "runs" in asked else refused("'b'", by=FederationError):
        jobs.append(submit(load_job("demo"), "prod", KIT, tmp_path / "r", "demo-1", Submission([*named])))
    assert jobs == asked


HOSTILE = "[/bold]\x1b[2J\n\u202e"


def test_names_that_others_chose_are_shown_and_obeyed_by_nobody(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """`suture status` of a job with a hostile name, of hostile sites, and of hostile events."""
    events = [
        {"event": "note", "text": HOSTILE},
        {"event": HOSTILE},
        {},
        {"event": "begin", "rounds": HOSTILE},
    ]

    names = (HOSTILE, "../../../x", "demo", None)
    jobs = [{"job_id": str(i), "name": name, "status": HOSTILE} for i, name in enumerate(names)]
    runs = {"job_id": "j", "name": HOSTILE, "status": "RUNNING", "job_deploy_detail": [f"harbor: {HOSTILE}"]}
    recent = {"first": 0, "events": events}
    serve(FlareServer(*jobs, runs, contacts={HOSTILE: 0.0}, recent=recent))
    status(None, None)
    status("j", None)
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\u202e\r")
    assert "[/bold]" in said
    assert "'../../../x'" in said
    assert said.count("an event that cannot be read") == 2
    assert "  demo\n" in said


@pytest.mark.parametrize("readable", [True, False])
def test_status_says_why_a_job_ended(
    readable: bool,
    killed: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of another user's job FLARE shows no log."""

    def refuse(*_: object) -> Path:
        raise FederationError("not authorized")

    (killed / "log.txt").write_text("Component 'suture.x.Y' at config path 'a' is not in allow_list")
    server = serve(left(killed, META | CRASHED | {"name": "demo"}))
    if not readable:
        monkeypatch.setattr(server, "download", refuse)
    status("j")
    said = " ".join(capsys.readouterr().out.split())
    assert ("suture.x.Y" in said, "WORKSPACE/j/log.txt" in said) == (readable, not readable)


def test_a_waiting_job_says_what_it_waits_for() -> None:
    assert state({"status": "SUBMITTED"})
    history = ["2026-01-01 10:00:00: not enough sites"]
    assert "not enough sites" in state({"status": "SUBMITTED", "schedule_history": history})
    assert state({"status": "RUNNING", "job_deploy_detail": ["server: OK"]}) == ""


# As FLARE 2.9 writes it.
LISTED = (
    "nvflare.fuel.common.excepts.ComponentNotAuthorized: Error processing ['/x/config_fed_client.json'] in "
    "JSON element {'path': 'suture.flare.executor.SiteExecutor'}: path: executors.#1.executor, exception: "
    "ComponentNotAuthorized: component not authorized: Component 'suture.flare.executor.SiteExecutor' at "
    "config path 'executors.#1.executor' is not in allow_list"
)
DATED = "2026-11-28 18:02:49,777 - ServerRunner - INFO - "
ENDED = f"{DATED}[identity=trial, run=j-1] - Server runner finished.\n"
FATAL = "FATAL_SYSTEM_ERROR: "
OTHER = "this party runs another version of suture (ab) than the job was made with (cd)"


@pytest.mark.parametrize(
    ("detail", "log", "words"),
    [
        (
            ["server: OK", "harbor: BYOC not permitted", "num_ok_sites 2 < required_min_sites 3"],
            "",
            ["harbor", "--bundle", "launcher_spec", '"byoc"', "permissions.lead", "authorization.json"],
        ),
        (["harbor: disk full"], "", ["harbor", "disk full"]),
        (["harbor: no reply (deployment timeout)"], "", ["harbor"]),
        (["invalid_clients: x,y"], "", ["x,y"]),
        (["server: OK", "harbor: OK"], "all is well", []),
        (None, LISTED, ["suture.flare.executor.SiteExecutor", "class_allow_list", "local/resources.json"]),
        (None, "ModuleNotFoundError: No module named 'suture.flare'", ["harbor", "Install suture"]),
        (None, "suture.core.errors.ConfigError: no suture.toml; looked at /x", ["harbor: no suture.toml"]),
        (None, f"{FATAL}{OTHER} (unknown method 'prox')", ["harbor", "(ab)", "(unknown method 'prox')"]),
        (
            None,
            f"{FATAL}harbor does not allow 'prox'; `suture policy /kit`",
            ["harbor", "`suture policy /kit`"],
        ),
    ],
)
def test_flares_refusals_are_translated(detail: list[str] | None, log: str, words: list[str]) -> None:
    logs = {"harbor": f"12:00 - INFO - hello\n{log}\nmore"}
    told = refusals(META | ABNORMAL | {"job_deploy_detail": detail}, logs)
    assert bool(told) is bool(words)
    text = "\n".join(told)
    assert [word for word in words if word not in text] == []
    assert "\n" not in text
    assert "server:" not in text


def test_a_refusal_of_anothers_experiment_is_told_whole(tmp_path: Path) -> None:
    claim(tmp_path / "trial", Submitter("lead@a.org", "a"), ())
    with pytest.raises(NotOwner) as refusal:
        claim(tmp_path / "trial", Submitter("lead@b.org", "b"), ())
    log = f"12:00 - ERROR - {FATAL}{refusal.value}\n{DATED} more"
    assert "\n".join(refusals(META, {"server": log})).endswith(f"server: {refusal.value}")


PANIC = "Aborting due to FATAL_SYSTEM_ERROR received:"
HEAD = f"job j-1 ended as {CRASHED['status']}:\n- "


@pytest.mark.parametrize(
    ("meta", "logs", "run", "words"),
    [
        (ABNORMAL, {}, {}, ["FINISHED:ABNORMAL", "j-1/log.txt"]),
        ({"status": "FINISHED:ABORTED"}, {}, {}, ["aborted"]),
        (ABNORMAL, {}, {"error": "harbor: FLARE answered EXECUTION_EXCEPTION"}, ["suture doctor"]),
        (ABNORMAL, {}, {"error": "two sites are needed"}, ["two sites are needed"]),
        # The party whose process was killed is named.
        (CRASHED, {"server": f"{DATED} round 3\n"}, {}, ["at the server failed", "\n- go on"]),
        (
            CRASHED,
            {"server": "", "harbor": "suture.core.errors.DataError: row 3"},
            {},
            ["at the server failed"],
        ),
        (CRASHED, {"server": ENDED}, {}, ["at a site failed"]),
        (CRASHED, {"server": f"{DATED}asked to abort - triggered abort_signal"}, {}, ["at a site failed"]),
        (CRASHED, {}, {"status": "interrupted", "error": "the job was aborted"}, ["at a site failed"]),
        (CRASHED, {}, {}, ["at a site or at the server failed"]),
        # A panic of the server, and an error of labels, is told whole; nothing is to be continued.
        (CRASHED, {"server": f"{DATED}{PANIC} bad plan\nrow 3\n{ENDED}"}, {}, None),
        (CRASHED, {}, {"error": "nearly the same: 'Nodul' (beta) and 'Nodule' (alpha)"}, None),
    ],
)
def test_why_a_job_ended_is_explained(
    meta: dict[str, str], logs: dict[str, str], run: dict[str, str], words: list[str] | None
) -> None:
    text = explain("j-1", meta, logs, run, "go on")
    whole = HEAD + (run.get("error") or "server: bad plan; row 3")
    assert text == whole if words is None else [word for word in words if word not in text] == []


def rounds(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"event": "round", "round": i} for i in range(start, n)]


def test_a_teller_tells_the_end_of_this_job(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in rounds(3)))
    teller = EventFeed(path)
    assert teller.recent() == {"first": 3, "events": [], "begin": None}
    with path.open("a") as file:
        file.write('{"event": "begin"}\n{"event": "rou')
    assert teller.recent() == {"first": 3, "events": [{"event": "begin"}], "begin": {"event": "begin"}}
    with path.open("a") as file:
        file.write('nd"}\n' + "".join(json.dumps(e) + "\n" for e in rounds(250)))
    told = teller.recent()
    assert (len(told["events"]), told["first"]) == (100, 3 + 2 + 150)
    assert told["begin"] == {"event": "begin"}, "it says how many rounds there are"
    assert told["events"][-1]["round"] == 249


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_each_event_once_and_in_order(spans: list[tuple[int, int]]) -> None:
    """Answers overlap or leave gaps, as polls and the server's window make them."""
    everything = rounds(31)
    with tempfile.TemporaryDirectory() as name:
        tail = Tail(Path(name))
        for low, high in sorted((min(s), max(s)) for s in spans):
            tail.take(low, everything[low:high])
        tail.finish(everything)
        got = [e["round"] for e in events_of(Path(name))]
    assert got == sorted(set(got))
    if any(a != b for a, b in spans):
        assert got[-1] == 30


def test_a_run_that_was_never_heard_of_begins_at_its_beginning(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    tail.note("job 1")
    tail.note("job 1")
    tail.finish([{"event": "begin", "n": 1}, *rounds(2), {"event": "begin", "n": 2}, *rounds(1)])
    assert [e["event"] for e in events_of(tmp_path)] == ["note", "begin", "round"]
    assert events_of(tmp_path)[1]["n"] == 2


class Polled:
    """A server's answers to the polls of a run: its clock, seconds that it lasts, events a second."""

    def __init__(self, clock: list[float], ends: float, rate: float) -> None:
        self.clock, self.ends, self.rate = clock, ends, rate
        self.commands = 0

    def meta(self, job_id: str) -> dict[str, Any]:
        self.commands += 1
        return {"status": "FINISHED:COMPLETED" if self.clock[0] > self.ends else "RUNNING"}

    def recent(self, job_id: str) -> dict[str, Any]:
        self.commands += 1
        if self.clock[0] > self.ends:
            return {}
        number = int(self.clock[0] * self.rate)
        first = max(0, number - 100)
        return {"first": first, "events": rounds(number, first)}


@pytest.mark.parametrize(("rate", "hourly"), [(0.01, 500), (0.5, 500), (60.0, 3700)])
def test_a_run_that_is_followed_for_a_day_writes_few_lines_into_the_servers_audit(
    rate: float, hourly: int, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE writes a line for each command and never begins the file anew; it was two a second."""
    clock = [0.0]
    server = serve(Polled(clock, 86_400 if rate < 1 else 7_200, rate))
    moved = {"monotonic": lambda: clock[0], "sleep": lambda s: clock.__setitem__(0, clock[0] + s)}
    own_clock(monkeypatch, "suture_admin.remote", **moved)
    monkeypatch.setattr(remote, "following", lambda *_: nullcontext())
    monkeypatch.setattr(remote, "download", lambda *_: None)
    gaps: list[int] = []

    def take(tail: Tail, first: int, new: list[dict[str, Any]]) -> None:
        gaps.extend([first] if first > tail.taken else [])
        tail._next = max(tail.taken, first + len(new))  # without its file

    monkeypatch.setattr(Tail, "take", take)
    remote.follow("demo", "poc", KIT, tmp_path, "j")
    assert server.commands < hourly * server.ends / 3600
    assert not gaps
    assert clock[0] - server.ends < 20
