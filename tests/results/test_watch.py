"""The page that is served while a run works."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path

import pytest

from example_run import history_records, metrics_record, run_record, write_run
from own_clock import own_clock
from suture.core.errors import ConfigError
from suture_results import watch
from suture_results.report import write_report
from suture_results.watch import LivePage, serve, states

EVENTS = (
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


def begin(folder: Path, rounds: int = 2) -> Path:
    """A run folder whose run works in its third round."""
    folder.mkdir(exist_ok=True)
    run = run_record() | {"status": "running", "finished": None, "selected_round": None}
    write_run(folder, run, history_records(rounds), metrics_record())
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    return folder


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


def test_a_run_that_works_has_a_page(page: LivePage) -> None:
    status, text, _ = ask(page)
    assert status == 200
    assert "This run is still running." in text
    assert "2 of 8 rounds" in text
    assert "Round 3 of 8: training." in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "0.893" not in text  # the test figures are of an earlier end of this run


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
    lines = [{"time": f"2026-10-09T{at}+00:00"} | one for at, one in zip(times, events, strict=True)]
    (page.folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
        (page.folder / "run.json").write_text(json.dumps(run_record()))
    assert ["0.893" in text for text in texts] == [True] * opened
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


def test_the_page_of_a_remote_run_says_what_it_cannot_know(page: LivePage) -> None:
    (page.folder / "history.jsonl").unlink()
    run = run_record() | {"env": "poc", "status": "running", "sites": {}, "labels": []}
    (page.folder / "run.json").write_text(json.dumps(run))
    text = ask(page)[1]
    assert "sites, classes and rounds are at the server" in text
    assert "Round 3 of 8: training." in text


def test_the_page_follows_the_files_and_head_tells_without_rendering(page: LivePage) -> None:
    first = ask(page)
    assert ask(page) == first
    assert ask(page, method="HEAD") == (200, "", first[2])
    with (page.folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(history_records(3)[2]) + "\n" + '{"round": 4, "ph')  # half of the next
    assert ask(page, method="HEAD")[2] != first[2]
    assert "3 of 8 rounds" in ask(page)[1]


def test_it_says_when_the_run_has_ended(page: LivePage) -> None:
    (page.folder / "run.json").write_text(json.dumps(run_record()))
    text = ask(page)[1]
    assert "still running" not in text
    assert "Round 3 of 8" not in text
    assert "0.893" in text


@pytest.mark.parametrize(
    "path", ["/run.json", "/report.html", "//run.json", "/?x", "/../run.json", "/%2e%2e/run.json", "*"]
)
def test_nothing_else_is_served(page: LivePage, path: str) -> None:
    assert ask(page, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_but_reading_is_possible(page: LivePage, method: str) -> None:
    assert ask(page, method=method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", ""])
def test_another_host_is_refused(page: LivePage, host: str) -> None:
    for method in ("GET", "HEAD"):
        status, text, tag = ask(page, method=method, Host=host)
        assert (status, tag) == (421, None)
        assert "harbour" not in text


def test_two_hosts_and_none_are_refused(page: LivePage) -> None:
    own = f"Host: 127.0.0.1:{page.port}\r\n"
    for lines in (
        f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET /\r\n\r\n",
    ):
        with socket.create_connection((watch.HOST, page.port), timeout=10) as line:
            line.sendall(lines.encode())
            assert b"harbour" not in line.recv(100_000)


def test_both_names_of_this_machine_are_answered(page: LivePage) -> None:
    assert ask(page, Host=f"localhost:{page.port}")[0] == ask(page, Host=f"127.0.0.1:{page.port}")[0] == 200


def test_no_other_interface_is_used(page: LivePage) -> None:
    assert page.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", page.port), timeout=10)


def test_the_saved_page_loads_nothing_again(tmp_path: Path) -> None:
    text = write_report(begin(tmp_path)).read_text()
    assert "<script" not in text
    assert "refresh" not in text
    assert "Round 3 of 8" not in text


@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "metrics.json"])
def test_a_damaged_file_is_said_and_the_page_recovers(page: LivePage, name: str) -> None:
    (page.folder / "run.json").write_text(json.dumps(run_record()))
    whole = (page.folder / name).read_bytes()
    (page.folder / name).write_text("{]\n{}\n")
    text = ask(page)[1]
    assert f"{name}" in text
    assert "harbour" not in text
    (page.folder / name).write_bytes(whole)
    assert "harbour" in ask(page)[1]


def test_it_waits_for_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with serve(folder, 0) as page:
        assert "has no run.json yet" in ask(page)[1]
        begin(folder)
        assert "Round 3 of 8" in ask(page)[1]


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="is a file; give the folder of a run"), serve(tmp_path / "x"):
        pass


def test_a_port_in_use_is_an_error_only_if_it_was_asked_for(
    page: LivePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="choose another --port"), serve(tmp_path, page.port):
        pass
    monkeypatch.setattr(watch, "PORT", page.port)
    with serve(tmp_path) as other:
        assert other.port != page.port
        assert ask(other)[0] == 200


def test_states_are_said_once_each(tmp_path: Path) -> None:
    found = states(tmp_path)
    said = [next(found)]
    begin(tmp_path)
    said.append(next(found))
    (tmp_path / "run.json").write_text(json.dumps(run_record()))
    said += islice(found, 1)
    assert [line.partition(":")[0] for line in said] == [
        "waiting for a run",
        "the run is running",
        "the run has ended",
    ]
