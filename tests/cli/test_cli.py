"""The command line, as a person types it: a run, its predictions, and how each command ends."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from example_run import diagnostic_records, history_records, metrics_record, run_record, write_run
from shadows import plant
from small_hospitals import write_hospital
from suture.cli import run as running
from suture.cli.app import PANELS, app, documented
from suture.cli.common import guard, known_names, literal
from suture.cli.run import export
from suture.core import VERSION
from suture.core.errors import DataError
from suture.core.processes import wait_for_end
from suture.federation.server.record import Record
from suture.flare.kit import Kit
from suture.protocol.records import read_history
from suture_admin.job_commands import _follow
from suture_results.report import write_report
from world import DAMAGE, exit_of, refused, suture

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--env", "local", "--rounds", "1", "--set", "images=40", "--set", "held_out=60"]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def started(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command, env = [sys.executable, "-m", "suture", *words], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "r"
    done = started("run", "demo", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "Cardiomegaly" in done.stdout
    assert str(out / "report.html") in done.stdout
    return out


def test_second_run_report_and_predict(
    run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    assert exit_of(monkeypatch, "run", "demo", *SMALL, "--out", run) == 2
    assert "--resume" in capsys.readouterr().err
    assert "Mean (" in suture("report", run)
    images = run / "sites" / "harbor" / "images"
    (tmp_path / "broken.png").write_bytes(b"x")
    (tmp_path / "good.png").write_bytes((images / "00000.png").read_bytes())
    assert exit_of(monkeypatch, "predict", run / "model", tmp_path, "-o", tmp_path / "p.csv") == 1
    said = capsys.readouterr()
    assert "1 of 2 images" in said.err
    assert "broken.png" in said.out
    assert "broken.png" in (tmp_path / "p.left_out.csv").read_text()
    (row,) = csv.DictReader((tmp_path / "p.csv").open())
    assert len(row) == 1 + 10 + 1
    assert all(0 <= float(v) <= 1 for k, v in row.items() if k not in ("image", "model digest"))
    site = run / "sites" / "harbor"
    assert "all experiments: 1 updates, 1 of them without noise; ε = ∞" in " ".join(
        suture("ledger", site / "state").split()
    )
    found = json.loads(suture("ledger", site, "--json"))
    assert (found["lines"][0]["updates"], found["lines"][0]["epsilon"]) == (1, None)
    assert set(found["figures"]) == set(found["lines"][0]["figures"])
    config, table = (run / "sites" / "lakeside" / name for name in ("suture.toml", "labels.csv"))
    assert "Emphysema" in suture("data", "check", config)
    table.write_text(table.read_text().replace(",train,", ",trian,", 1))
    assert exit_of(monkeypatch, "data", "check", config)
    assert "trian" in "".join(capsys.readouterr())


@pytest.mark.complete
def test_a_process_of_its_own_says_the_same_and_ends_with_the_code(tmp_path: Path) -> None:
    done = started("report", "nowhere", cwd=tmp_path)
    assert (done.returncode, "nowhere" in done.stderr, "Traceback" in done.stderr) == (1, True, False)
    done = started("run", "demo", "--rounds", "many")
    assert (done.returncode, "'--rounds'" in done.stderr, "pydantic" in done.stderr) == (2, True, False)
    line = started("--version").stdout
    assert re.fullmatch(
        rf"suture {VERSION}, nvflare [\d.]+\S*, torch \S+, Python {platform.python_version()}\n", line
    )
    words = {"_SUTURE_COMPLETE": "complete_bash", "COMP_WORDS": "suture run fedlsm_", "COMP_CWORD": "2"}
    found = started(**words).stdout.split()
    assert "fedlsm_nih" in found
    assert all(name.startswith("fedlsm_") for name in found)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run dmeo", "'demo'"),
        ("run {}/studdy/", "'{}/study'"),
        ("run demo --set rouns=2", "'rounds'"),
        ("run demo --env prod", "startup kit"),
        ("run demo --env loca", "'loca'"),
        ("run demo --env poc --workers 2", "--workers"),
        *(
            (f"run demo {where} {option}", option.split()[0])
            for where in ("--env sim", "--compare vanilla")
            for option in ("--sites alpha", "--startup-kit kit", "--study lungs", "--bundle", "--detach")
        ),
        ("report nowhere", "nowhere"),
        ("report file", "file"),
        ("predict nowhere x.png -o o.csv", "nowhere"),
        ("data check nowhere.toml", "nowhere.toml"),
        ("ledger study", "ledger.jsonl"),
        *(
            (f"{command} --out file{below}", "file")
            for command in ("run demo", "export demo")
            for below in ("", "/x")
        ),
        ("egress --out file/x.md", "file"),
        ("init file/x --site=alpha=data --yes", "file"),
        ("init file --site=alpha=data --yes", "file"),
        ("init s --yes --site=alpha={}/R\udcf6ntgen", "ntgen"),  # of a former Windows: no utf-8
        ("vocab --texts words.txt --minimum 1 --patients 1 --out file/x", "file"),
        ("plot labels data/suture.toml --out file/x", "file"),
        ("poc up demo --dir file", ""),
        ("poc down --dir file", ""),
        ("results job --out file/x", ""),
    ],
)
def test_a_mistake_is_one_line_and_a_code_and_changes_nothing(
    words: str, named: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "R\udcf6ntgen"):
        write_hospital(tmp_path / folder, ("Mass", "Nodule"), 20, 1)
    for file, text in (("words.txt", "a b a\n"), ("file", "years of work"), ("study/job.toml", "")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    assert exit_of(monkeypatch, *words.format(tmp_path).split()) in (1, 2)
    said = capsys.readouterr().err
    assert named.format(tmp_path) in said
    assert len(re.findall("(?m)^error: ", said)) == 1 or "Usage" in said
    assert (tmp_path / "file").read_text() == "years of work"
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_system_is_one_line_in_any_command(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def raising(error: OSError) -> Callable[..., Any]:
        def fails(*_: object, **__: object) -> None:
            raise error

        return fails

    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR):
        with pytest.raises(SystemExit) as ended:
            guard(raising(OSError(number, os.strerror(number), "/data/out.csv")))
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: /data/out.csv: {os.strerror(number)}; ")
    with pytest.raises(ConnectionResetError):  # a bug, which keeps its traceback
        guard(raising(ConnectionResetError(errno.ECONNRESET, "a bug")))
    monkeypatch.setattr(os, "replace", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert exit_of(monkeypatch, "egress", "--out", tmp_path / "page.md") == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'page.md'}: No space left on device")
    assert not list(tmp_path.iterdir())


HOSTILE = "[/bold]\x1b[2J\x07\u202e[link=file:///etc/passwd]x[/link]"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A run folder with every record."""
    (folder := tmp_path / "r").mkdir()
    history = history_records()
    return write_run(folder, run_record(), history, metrics_record(), diagnostic_records(history))


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.json", "history.jsonl", "diagnostics.jsonl", "tuned.json"]
)
def test_a_damaged_file_is_a_line_that_names_it(
    name: str, records: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    lines = name.endswith("l")
    for harm in DAMAGE:
        (records / name).write_bytes(harm.replace(b"\n", b"") + b"\n" if lines else harm)
        code, said = exit_of(monkeypatch, "report", records), capsys.readouterr()
        if lines and not harm:
            assert code == 0
            continue
        (line,) = said.err.splitlines()
        assert (code, line.startswith("error: "), name in line) == (1, True, True)
        assert not lines or "line 1" in line


def test_a_torn_last_line_of_the_history_is_left_out_and_a_damaged_one_ends_it(
    records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, path = read_history(records), records / "history.jsonl"
    with path.open("a") as file:
        file.write('{"round": 9, "ph')
    assert read_history(records) == whole
    write_report(records)
    assert "history.jsonl: line 9" in caplog.text
    Record(records).rewind(5)
    assert [line.round for line in read_history(records)] == [1, 2, 3, 4]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:50], *lines[3:], ""]))
    before = path.read_bytes()
    with refused("history.jsonl, line 3", by=DataError):
        Record(records).rewind(4)
    assert path.read_bytes() == before


def test_a_hostile_run_is_shown_and_commands_no_terminal(records: Path) -> None:
    label = json.loads((records / "run.json").read_text())["labels"][0]
    for name, more in (
        ("run.json", {"title": HOSTILE, "job": "../../../x", "error": HOSTILE}),
        ("metrics.json", {}),
    ):
        text = (records / name).read_text().replace(json.dumps(label), json.dumps(HOSTILE))
        (records / name).write_text(json.dumps(json.loads(text) | more))
    said = suture("report", records)
    assert "[/bold]" in said
    assert not set(said) & set("\x1b\x07\u202e")
    page = (records / "report.html").read_text()
    assert "<script" not in page or HOSTILE not in page


def test_export_has_the_options_of_run_that_change_the_job(tmp_path: Path) -> None:
    settings = ["rounds=5", "seed=7", 'accept_labels=["Mass"]']
    export("demo", tmp_path / "set", "trial", settings=settings, sites="harbor")
    export("demo", tmp_path / "options", "trial", rounds=5, seed=7, accept_labels=["Mass"], sites="harbor")
    by_set, by_options = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "set", tmp_path / "options")
    )
    assert by_set == by_options
    assert b'"rounds": 5' in by_set["demo/app_server/config/schedule.json"]


@pytest.mark.parametrize("found", ["/usr/bin/suture", None])
def test_the_demo_ends_with_commands_for_own_data_that_exist(found: str | None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(running, "execute", lambda job, *_, **__: running.print_line(f"report of {job.name}"))
    monkeypatch.setattr(running, "which", lambda _: found)
    monkeypatch.setattr(sys, "argv", ["a b/bin/suture", "demo"])
    first, *lines = suture("demo").splitlines()
    assert first == "report of demo"
    words = [shlex.split(line) for line in lines if line.startswith("  ")]
    called = "suture" if found else "a b/bin/suture"
    assert [line[:2] for line in words] == [[called, name] for name in ("demo", "init", "check", "run")]
    for _, name, *arguments in words:
        documented()[name].make_context(name, arguments)  # refuses an option that does not exist
    recipe = (ROOT / "Makefile").read_text().split("\ndemo: $(VENV)/.demo\n")[1].split("\n\n")[0]
    assert recipe == "\t$(BIN)/suture demo"


@pytest.mark.parametrize(
    ("cores", "given", "workers"), [(2, [], 3), (1, [], None), (2, ["--env", "sim"], None)]
)
def test_each_site_of_the_demo_has_a_process_where_there_are_cores(
    cores: int, given: list[str], workers: int | None, monkeypatch: Patch
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(running, "execute", lambda *_, workers, **__: seen.append(workers))
    monkeypatch.setattr(running, "usable_cores", lambda: cores)
    suture("demo", *given)
    assert seen == [workers]


def test_whom_the_simulator_is_open_to_is_said_where_it_runs(monkeypatch: Patch) -> None:
    monkeypatch.setattr("suture.execution.simulator.open_to_others", lambda: "mallory can join")
    monkeypatch.setattr("suture.execution.run.run_job", lambda *_, **__: None)
    monkeypatch.setattr("suture.cli.run.if_installed", lambda _: lambda *_: None)
    for env, times in (("sim", 1), ("local", 0)):
        assert suture("run", "demo", "--env", env).count("mallory") == times


def test_a_help_text_keeps_its_brackets_and_every_command_is_in_a_panel(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    literal(app).main(["finetune", "--help"], standalone_mode=False)
    assert "[training]" in capsys.readouterr().out
    assert {command.rich_help_panel for command in documented().values()} == set(PANELS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert known_names("mi") == ["mine"]


@pytest.mark.complete
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_loop_says_the_command_that_continues_it(workers: int, tmp_path: Path) -> None:
    """No process of it imports a module of the working directory, which may be anybody's."""
    out, imported = tmp_path / "my runs" / "r", plant(tmp_path)
    words = ["--rounds", "200", *SMALL[4:], "--workers", str(workers), "--out", "my runs/r"]
    process = subprocess.Popen(
        [Path(sys.executable).with_name("suture"), "run", "demo", "--env", "local", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    events = out / "events.jsonl"
    while not (events.exists() and '"committed"' in events.read_text()):
        assert process.poll() is None, imported.exists() and imported.read_text()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    spawned = sum("spawn_main" in " ".join(child.cmdline()) for child in children)
    assert spawned == (0 if workers == 1 else 1 + workers)  # and the one that has forked them
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    said, _ = process.communicate()
    assert process.returncode == 130
    assert not imported.exists(), imported.read_text()
    wait_for_end(children, math.inf)  # Python's own tracker of processes ends after it
    assert "Traceback" not in said
    words = shlex.split(said.splitlines()[-1])
    assert words[words.index("--workers") + 1] == str(workers)
    assert words[-3:] == ["--out", str(out), "--resume"]
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert list(out.rglob("*.tmp")) == []
    done = max(int(path.stem.rpartition("-")[2]) for path in (out / "state").glob("round-*.safetensors"))
    suture(*words[1:], "--set", f"rounds={done + 1}")
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("place", "run", "named"),
    [
        ("_begin", None, "no files are left"),
        ("run_job", {"status": "finished"}, "suture report {}"),
        (
            "run_job",
            {},
            "suture run demo --env sim --set 'title=two words' --set seed=3 --set accept_labels=true "
            "--device cpu --site-threads 2 --workers 2 --amp --out {} --resume",
        ),
    ],
)
def test_an_interruption_names_the_command_that_goes_on(
    place: str, run: dict[str, str] | None, named: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Before the run, after its end, and between: with every option of the run."""
    out = tmp_path / "r"

    def stop(*_: Any, **__: Any) -> None:
        if run is not None:
            out.mkdir()
            (out / "run.json").write_text(json.dumps(run))
        raise KeyboardInterrupt

    monkeypatch.setattr(f"suture.execution.run.{place}", stop)
    given = (
        "--env sim --device cpu --site-threads 2 --workers 2 --amp --seed 3 --accept-labels all --overwrite"
    )
    words = given.split() if run == {} else ["--env", "local"]
    code = exit_of(monkeypatch, "run", "demo", *words, "--set", "title=two words", "--out", out)
    assert (code, named.format(out) in capsys.readouterr().out) == (130, True)
    assert run is not None or not out.exists()


def test_a_job_that_is_no_longer_followed_goes_on_and_its_commands_are_named(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("suture_admin.remote.follow", stop)
    kit = Kit(Path("my kits/admin"), "admin", "admin@trial.org", "trial", "localhost", 8002)
    with pytest.raises(typer.Exit) as caught:
        _follow("demo", "poc", kit, tmp_path / "r", "j1", False)
    assert caught.value.exit_code == 130
    said, option = capsys.readouterr().out, "--startup-kit 'my kits/admin'"
    for command in ("suture status j1", f"suture results j1 --out {tmp_path / 'r'}", "nvflare job abort j1"):
        assert f"{command} {option}\n" in said
