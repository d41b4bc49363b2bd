"""The page that is served while a run works, `suture watch`, and the option of `suture run` that does it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from example_run import history_records, metrics_record, run_record, write_run
from own_clock import own_clock
from suture.core.errors import ConfigError
from suture_results import watch
from suture_results.live_commands import accompany
from suture_results.report import write_report
from suture_results.watch import LivePage, serve, states
from world import exit_of, refused

EVENTS: tuple[dict[str, Any], ...] = (
    {
        "event": "begin",
        "round": 0,
        "rounds": 8,
        "sites": ["harbour", "st-anne"],
        "labels": ["a"],
        "refused": {},
    },
    {"event": "round", "round": 3, "phase": "train"},
    {"event": "answer", "site": "harbour", "status": "accepted", "reason": None},
    {"event": "note", "text": "<script>alert(1)</script>"},
)
FIGURE, NOW, REFUSED_AT = "0.893", "Round 3 of 8", 421


def write_events(folder: Path, *events: dict[str, Any]) -> None:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


def begin(folder: Path) -> Path:
    """A run folder whose run works in its third round, with figures of an earlier end of it."""
    folder.mkdir(exist_ok=True)
    run = run_record() | {"status": "running", "finished": None, "selected_round": None}
    write_run(folder, run, history_records(2), metrics_record())
    write_events(folder, *EVENTS)
    return folder


def end(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps(run_record()))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LivePage]:
    with serve(begin(tmp_path / "run"), 0) as found:
        yield found


def ask(page: LivePage, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, str | None]:
    connection = HTTPConnection(watch.HOST, page.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.getheader("ETag")
    connection.close()
    return found


def test_a_run_that_works_has_a_page_and_ends_with_its_figures(page: LivePage) -> None:
    status, text, _ = ask(page)
    assert status == 200
    assert "2 of 8 rounds" in text
    assert NOW in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert FIGURE not in text
    assert "<script" not in write_report(page.folder).read_text()  # the saved page loads nothing again
    end(page.folder)
    text = ask(page)[1]
    assert NOW not in text
    assert FIGURE in text


def test_each_site_has_its_state_and_the_run_its_time_left(page: LivePage) -> None:
    times = ("10:00:00", "10:00:00", "10:00:05", "10:02:00", "10:02:00", "10:02:01")
    events = (
        {"event": "begin", "round": 0, "rounds": 3, "sites": ["a", "b"], "labels": ["x"], "refused": {}},
        {"event": "round", "round": 1, "phase": "train"},
        {"event": "answer", "site": "a", "status": "rejected", "reason": "no"},
        {"event": "committed", "round": 1, "seconds": 120.0},
        {"event": "round", "round": 2, "phase": "train"},
        {"event": "gone", "site": "b"},
    )
    stamped = [{"time": f"2026-10-09T{at}+00:00"} | one for at, one in zip(times, events, strict=True)]
    write_events(page.folder, *stamped)
    found = watch.live(page.folder, "")
    assert found.sites == {"a": "training", "b": "not responding"}
    assert "4:00 left" in found.now  # two rounds of two minutes
    text = ask(page)[1]
    assert '<span class="chip bad"><b>b</b> not responding</span>' in text
    assert 'class="alarm"' not in text  # a run that works is no alarm


@pytest.mark.parametrize("opened", [True, False])
def test_an_open_page_still_gets_the_finished_report(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LINGER", 1.0)
    texts = []
    with serve(begin(tmp_path / "run"), 0) as page:
        if opened:
            ask(page)
            own_clock(monkeypatch, "suture_results.watch", sleep=lambda _: texts.append(ask(page)[1]))
        end(page.folder)
    assert [FIGURE in text for text in texts] == [True] * opened
    with pytest.raises(ConnectionRefusedError):
        ask(page)


def test_an_interrupted_command_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_clock(monkeypatch, "suture_results.watch", sleep=lambda _: pytest.fail("waited"))

    def interrupted() -> None:
        with serve(begin(tmp_path / "run"), 0) as page:
            ask(page)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_the_page_follows_the_files_and_head_tells_without_rendering(page: LivePage) -> None:
    first = ask(page)
    assert ask(page) == first
    assert ask(page, method="HEAD") == (200, "", first[2])
    with (page.folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(history_records(3)[2]) + "\n" + '{"round": 4, "ph')  # half of the next
    assert ask(page, method="HEAD")[2] != first[2]
    assert "3 of 8 rounds" in ask(page)[1]


@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "metrics.json"])
def test_a_damaged_file_is_said_and_the_page_recovers(page: LivePage, name: str) -> None:
    end(page.folder)
    whole = (page.folder / name).read_bytes()
    (page.folder / name).write_text("{]\n{}\n")
    text = ask(page)[1]
    assert name in text
    assert "harbour" not in text
    (page.folder / name).write_bytes(whole)
    assert "harbour" in ask(page)[1]


def test_nothing_else_is_served_and_nothing_but_reading_is_possible(page: LivePage) -> None:
    for path in ("/run.json", "/report.html", "//run.json", "/?x", "/../run.json", "/%2e%2e/run.json", "*"):
        assert ask(page, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        assert ask(page, method=method)[0] == 501, method


def test_no_host_but_this_machine_is_answered(page: LivePage) -> None:
    for host in (f"localhost:{page.port}", f"127.0.0.1:{page.port}"):
        assert ask(page, Host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", ""):
        for method in ("GET", "HEAD"):
            status, text, tag = ask(page, method=method, Host=host)
            assert (status, tag) == (REFUSED_AT, None)
            assert "harbour" not in text
    own = f"Host: 127.0.0.1:{page.port}\r\n"
    for lines in (
        f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET /\r\n\r\n",
    ):
        with socket.create_connection((watch.HOST, page.port), timeout=10) as line:
            line.sendall(lines.encode())
            assert b"harbour" not in line.recv(100_000)
    assert page.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", page.port), timeout=10)


def test_it_waits_for_a_run_and_says_each_state_once(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    found = states(folder)
    with serve(folder, 0) as page:
        said = [next(found)]
        assert "run.json" in ask(page)[1]
        begin(folder)
        said.append(next(found))
        assert NOW in ask(page)[1]
        end(folder)
        said += islice(found, 1)
    assert len(set(said)) == 3
    assert "finished" in said[-1]


def test_a_file_and_a_port_in_use_are_refused_unless_it_was_not_asked_for(
    page: LivePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("")
    with refused(tmp_path / "x", by=ConfigError), serve(tmp_path / "x"):
        pass
    with refused("--port", by=ConfigError), serve(tmp_path, page.port):
        pass
    monkeypatch.setattr(watch, "PORT", page.port)
    with serve(tmp_path) as other:
        assert other.port != page.port
        assert ask(other)[0] == 200


@pytest.mark.complete
def test_ctrl_c_ends_watching_cleanly(tmp_path: Path) -> None:
    end(begin(tmp_path))
    command = [sys.executable, "-m", "suture", "watch", str(tmp_path), "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        assert "finished" in process.stdout.readline()
        assert b"st-anne" in urlopen(url, timeout=20).read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_a_run_is_served_while_it_works_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, real = [], watch.serve

    @contextmanager
    def served(folder: Path) -> Iterator[LivePage]:
        with real(folder, 0) as page:
            pages.append(page)
            yield page

    monkeypatch.setattr(watch, "serve", served)
    with accompany(tmp_path / "run"):
        assert b"run.json" in urlopen(pages[0].url, timeout=20).read()
    with pytest.raises(OSError, match="refused"):
        urlopen(pages[0].url, timeout=20)
    assert not (tmp_path / "run").exists()  # a folder that is not empty would stop the run

    def refuse(*_: object) -> None:
        raise OSError(97, "Address family not supported")

    monkeypatch.setattr(watch, "serve", real)
    monkeypatch.setattr(watch, "LivePage", refuse)
    with accompany(tmp_path):  # a page that cannot be served does not stop the run
        pages.clear()
    assert not pages


def test_a_command_that_does_not_wait_cannot_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(monkeypatch, "run", "demo", "--env", "poc", "--detach", "--watch") == 2
    assert "--detach" in capsys.readouterr().err
