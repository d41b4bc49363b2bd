"""The chain of a ledger: whatever is removed, changed or brought back is told, and nothing is released."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import ConfigError
from suture.core.privacy import PrivacyConfig
from suture.federation.site import ledger as chain
from suture.federation.site.abstention import LedgerBroken
from suture.federation.site.ledger import Ledger, Release, read_anchor
from suture.federation.state_files import EXPERIMENTS
from suture_admin.ledger import read_statement
from suture_results.notes import describe_spent
from world import refused, site_config, suture

LIMITS = PrivacyConfig(clip=1.0, noise=2.0)


def release(number: int, experiment: str = "one", noise: float = 2.0, **more: Any) -> Release:
    facts = {"update": True, "clip": 1.0, "noise": noise, "answer": f"{experiment}-{number}-{noise}"}
    return Release("2026-01-01T00:00:00+00:00", experiment, "train", number, **{**facts, **more})


def ledger(state: Path, experiment: str = "one", limits: PrivacyConfig = LIMITS) -> Ledger:
    return Ledger(state / "ledger.jsonl", limits, state / EXPERIMENTS / experiment)


def filled(state: Path, lines: int = 6) -> Path:
    for number in range(1, lines + 1):
        ledger(state).record(release(number))
    return state / "ledger.jsonl"


def without_chain(line: str) -> str:
    return json.dumps({key: value for key, value in json.loads(line).items() if key not in PLAIN})


PLAIN = {"after", "salt"}


TAMPERED = {
    "rolled back": lambda lines: lines[:3],
    "by one line": lambda lines: lines[:-1],
    "emptied": lambda _: [],
    "edited": lambda lines: [lines[0], lines[1].replace('"noise": 2.0', '"noise": 9.0'), *lines[2:]],
    "last edited": lambda lines: [*lines[:-1], lines[-1].replace('"noise": 2.0', '"noise": 9.0')],
    "one missing": lambda lines: [*lines[:2], *lines[3:]],
    "first missing": lambda lines: lines[1:],
    "two exchanged": lambda lines: [lines[1], lines[0], *lines[2:]],
    "one twice": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "damaged": lambda lines: [lines[0], "{", *lines[2:]],
    "no text": lambda lines: [lines[0], "\x00\x85\r", *lines[2:]],
    "no table": lambda lines: [lines[0], "[1]", *lines[2:]],
    "a blank line": lambda lines: [lines[0], "", *lines[1:]],
    "unchained": lambda lines: [without_chain(line) for line in lines],
    "unchained and shortened": lambda lines: [without_chain(line) for line in lines[:2]],
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_done_to_a_ledger_is_told_and_accepted_in_a_new_line(how: str, tmp_path: Path) -> None:
    path = filled(tmp_path)
    before = path.read_text()
    path.write_text("".join(f"{line}\n" for line in TAMPERED[how](before.splitlines())))
    tampered = path.read_text()
    for experiment in ("one", "two"):
        with refused("ledger.jsonl", "--accept", by=LedgerBroken):
            ledger(tmp_path, experiment).record(release(7, experiment))
    assert path.read_text().startswith(tampered)
    assert read_statement(tmp_path).breaks
    ledger(tmp_path).accept()
    ledger(tmp_path, "two").record(release(7, "two"))
    found = read_statement(tmp_path)
    assert (found.breaks, len(found.accepted) >= 1, found.spent.missing >= 1) == ([], True, True)
    (note,) = describe_spent({"a": {"clip": 1.0, "noise": 2.0, "delta": 1e-5}}, {"a": found.spent})
    assert "a lower bound" in note
    assert "ε ≤" not in note
    with refused(by=ConfigError):
        ledger(tmp_path).accept()  # there is nothing to accept
    path.write_text(before)  # the newest copy, found late: what was accepted, and the release since, are gone
    with refused(by=LedgerBroken):
        ledger(tmp_path).record(release(8))


def test_the_newest_copy_needs_no_acceptance(tmp_path: Path) -> None:
    path = filled(tmp_path)
    before = path.read_text()
    path.write_text("")
    with refused("line 6", "0 lines", by=LedgerBroken):
        ledger(tmp_path).record(release(7))
    path.write_text(before)
    ledger(tmp_path).record(release(7))
    assert (read_statement(tmp_path).spent.missing, len(ledger(tmp_path).releases())) == (0, 7)


def test_a_deleted_ledger_is_told_also_to_a_new_experiment(tmp_path: Path) -> None:
    filled(tmp_path).unlink()
    assert "line 6" in read_statement(tmp_path).breaks[0]
    with refused("line 6", "0 lines", by=LedgerBroken):
        ledger(tmp_path, "two").record(release(1, "two"))
    ledger(tmp_path, "two").accept()
    ledger(tmp_path, "two").record(release(1, "two"))
    spent = read_statement(tmp_path).spent
    assert (spent.missing, spent.epsilon) == (6, 4.38)


def test_a_ledger_that_is_changed_while_a_job_runs_is_told(tmp_path: Path) -> None:
    own = ledger(tmp_path)
    own.record(release(1))
    path = tmp_path / "ledger.jsonl"
    one = path.read_text()
    own.record(release(2))
    path.write_text(one)
    with refused(by=LedgerBroken):
        own.record(release(3))
    own.accept()
    own.record(release(3))
    assert [r.round for r in own.releases()] == [1, 3]
    path.unlink()
    path.mkdir()
    with refused("ledger.jsonl", by=ConfigError):  # a folder in its place
        ledger(tmp_path).record(release(4))


def test_no_line_can_be_guessed_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sites that release the same have nothing in common; with a known salt they would."""
    digests = [ledger(tmp_path / str(n)).record(release(1)) for n in range(2)]
    assert len(set(digests)) == 2
    monkeypatch.setattr(chain.secrets, "token_hex", lambda _: "00")
    digests = [ledger(tmp_path / str(n)).record(release(1)) for n in range(2, 4)]
    assert len(set(digests)) == 1


def test_a_server_that_lies_about_the_digest_blocks_its_own_experiment_alone(tmp_path: Path) -> None:
    path = filled(tmp_path, 2)
    own, other = ledger(tmp_path), ledger(tmp_path, "two")
    true = other.record(release(1, "two"))
    with refused("the server of one", by=LedgerBroken):
        own.confirm("0" * 64)
    with refused(by=LedgerBroken):
        ledger(tmp_path).confirm(None)  # a server that forgets does not help a ledger that was rolled back
    other.confirm(true)
    other.record(release(2, "two"))
    own.confirm(true)  # one that the ledger has
    own.record(release(3))
    assert len(path.read_text().splitlines()) == 5


@given(data=st.data())
def test_every_prefix_and_every_changed_byte_is_a_break(data: st.DataObject, tmp_path_factory: Any) -> None:
    state = tmp_path_factory.mktemp("chain")
    path = filled(state, 3)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        end = data.draw(st.integers(0, len(content) - 1))
        content = content[:end]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255).filter(lambda b: b != content[at]))
    path.write_bytes(bytes(content))
    with pytest.raises(LedgerBroken):
        ledger(state).record(release(4))


@pytest.mark.complete
def test_killed_at_any_step_of_a_release_the_chain_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each write: of the line, a part of it, and of the anchor."""
    calls = 0
    for point in range(40):
        child = os.fork()
        if not child:
            calls = 0

            def step(real: Any, at: int) -> Any:
                def counted(*args: Any, **more: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **more)

                return counted

            for name in ("fsync", "replace", "pread", "open"):
                setattr(os, name, step(getattr(os, name), point))
            chain.append_line = step(chain.append_line, point)
            chain.replacing = step(chain.replacing, point)
            ledger(tmp_path).record(release(point))
            os._exit(0)
        os.waitpid(child, 0)
        own = ledger(tmp_path)
        own.confirm(read_anchor(tmp_path / EXPERIMENTS / "one").digest)
        own.record(release(point))
    assert [r.round for r in ledger(tmp_path).releases()] == list(range(40))


def test_the_command_shows_what_is_missing_and_accepts_it(tmp_path: Path) -> None:
    """With the bounds of the site's suture.toml, and by which rule ε is composed."""
    path = filled(tmp_path / "local" / "state", 2)
    bounds = {"clip": 1.0, "noise": 2.0, "max_epsilon": 9.0, "max_experiments": 7}
    site_config(tmp_path / "local", data={"dataset": "hospital", "root": "x", "table": "y"}, privacy=bounds)
    text = suture("ledger", tmp_path)
    for fact in ("ε = 6.58", "max_epsilon: 9", "max_experiments: 7"):
        assert fact in text
    with refused(by=ConfigError):
        suture("ledger", tmp_path, "--accept")
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    text = suture("ledger", tmp_path)
    for fact in ("ε ≥ 4.38", "experiment one", "line 2", "--accept"):
        assert fact in text
    assert "a lower bound" in suture("ledger", tmp_path, "--accept")
    found = json.loads(suture("ledger", tmp_path, "--json"))
    assert (found["breaks"], len(found["accepted"]), found["spent"]["missing"]) == ([], 1, 1)
