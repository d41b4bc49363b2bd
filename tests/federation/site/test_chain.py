"""The chain of a ledger, alone and in federations: what is removed or brought back is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parties import METHOD, abstains, complaint, first_task, task_in

from noted import noted
from rounds import reply_of
from suture.core.errors import ConfigError, FederationError, RejectedUpdate
from suture.core.privacy import PrivacyConfig
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server, open_server
from suture.federation.site import ledger as chain
from suture.federation.site.abstention import LedgerBroken
from suture.federation.site.ledger import Ledger, Release, read_anchor
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.protocol.check import check_reply
from suture.protocol.messages import Abstain, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed
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


PRIVACY = {"min_count": 0, "min_loss": 0, "clip": 1e-3, "noise": 1.0}


@dataclass
class House:
    """A server and sites with the folders of real ones: several experiments, a ledger each."""

    federation: Any

    def state(self, party: str, experiment: str = "") -> Path:
        folder: Path = self.federation.folder / party / "state"
        return folder / EXPERIMENTS / experiment if experiment else folder

    def site(self, name: str, experiment: str, rounds: int = 2, **privacy: Any) -> Site:
        config = self.federation.configs[name]
        own = type(config.privacy).model_validate({**config.privacy.model_dump(), **PRIVACY, **privacy})
        plan = replace(self.federation.plan, experiment=experiment)
        changed = config.model_copy(update={"privacy": own})
        return Site(name, changed, plan, rounds, self.state(name, experiment))

    def sites(self, experiment: str, rounds: int = 2) -> dict[str, Site]:
        return {name: self.site(name, experiment, rounds) for name in self.federation.configs}

    def server(self, experiment: str, rounds: int = 2) -> Server:
        plan = replace(self.federation.plan, experiment=experiment)
        schedule = replace(self.federation.schedule, rounds=rounds)
        state = self.state("server")
        return open_server(plan, schedule, None, state / EXPERIMENTS, ledgers=state / "ledgers.json")

    def run(self, experiment: str = "one", rounds: int = 2) -> Server:
        loop, server = Loop(self.sites(experiment, rounds)), self.server(experiment, rounds)
        try:
            federate(server, loop)
        finally:
            loop.close()
        return server

    def ledger(self) -> Path:
        return self.state("alpha") / "ledger.jsonl"

    def accept(self) -> None:
        Ledger(self.ledger(), self.federation.configs["alpha"].privacy).accept()

    def task(self) -> TaskData:
        """The task of a first round, from a server whose sites are others'."""
        return first_task(self.federation)


@pytest.fixture
def house(tiny: Any) -> House:
    return House(tiny(METHOD, {"alpha": ("Mass", "Nodule"), "beta": ("Mass", "Hernia")}))


def note_of(server: Server, site: str = "alpha") -> str:
    (note,) = [text for text in noted(server) if text.startswith(f"{site} clips")]
    return str(note)


@pytest.mark.complete
@pytest.mark.parametrize("how", ["rolled back", "edited"])
def test_a_ledger_that_was_tampered_with_states_no_smaller_epsilon(how: str, house: House) -> None:
    """Of two runs of two rounds ε is 24.4; it became 15.5 and 15.6, without a note."""
    assert "ε ≤ 15.5" in note_of(house.run("one"))
    lines = house.ledger().read_text().splitlines(keepends=True)
    edited = [line.replace('"noise": 1.0', '"noise": 99.0') for line in lines]
    house.ledger().write_text("".join(edited if how == "edited" else lines[:2]))
    with refused("alpha: ledger", by=FederationError):
        house.run("two")
    assert "--accept" in complaint(house.site("alpha", "two"))
    house.accept()
    assert "a lower bound" in note_of(house.run("two"))


@pytest.mark.complete
def test_a_whole_backup_that_is_brought_back_shows_against_the_servers_digest(house: House) -> None:
    house.run("one", rounds=1)
    state = house.state("alpha")
    backup = state.with_name("backup")
    shutil.copytree(state, backup)
    house.run("one", rounds=2)
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    for experiment, rounds in (("two", 2), ("one", 3)):  # the server holds it over all experiments
        with refused("alpha: ledger", by=FederationError):
            house.run(experiment, rounds)
    assert house.ledger().read_bytes().count(b"\n") == (backup / "ledger.jsonl").read_bytes().count(b"\n")
    house.accept()
    server = house.run("one", rounds=3)
    assert "a lower bound" in note_of(server)
    (older,) = [n for n in noted(server) if "alpha trained round 3 from its state of round 1" in n]
    assert "round 2" in older


@pytest.mark.complete
def test_other_sites_go_on_without_the_one_whose_ledger_is_broken(house: House) -> None:
    """In a new run, or from the round on in which it breaks; noted once."""
    house.federation.schedule = replace(house.federation.schedule, min_sites=1)

    class Breaking(Loop):
        def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
            if task == "train" and task_in(payloads["alpha"]).round == 2:
                house.ledger().write_text("")
            return super().exchange(task, payloads, receive)

    broken, loop = house.server("one", 4), Breaking(house.sites("one", 4))
    federate(broken, loop)
    loop.close()
    server = house.run("two")
    assert list(server.registry.members) == ["beta"]
    for one in (broken, server):
        assert [n.startswith("alpha releases nothing") for n in noted(one)].count(True) == 1


@pytest.mark.complete
def test_a_state_that_was_lost_or_restored_is_noted_and_an_unbroken_run_is_not(house: House) -> None:
    house.run("one", rounds=2)
    folder = house.state("alpha") / EXPERIMENTS / "one"
    (folder / "round-000002.safetensors").unlink()
    server = house.run("one", rounds=3)
    assert any("alpha trained round 3 from its state of round 1" in n for n in noted(server))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    server = house.run("one", rounds=4)
    assert any("alpha trained round 4 without a state" in n for n in noted(server))
    server = house.run("one", rounds=5)
    assert not any("trained round" in n for n in noted(server))


def test_the_digest_is_of_the_answer_and_the_filter_lets_no_other_one_through(house: House) -> None:
    site, task = house.site("alpha", "one"), TaskData("handshake")
    reply = reply_of(site, task)
    check_reply(reply, site.answer(task).allowed)
    for other in ("0" * 64, None):
        with refused("ledger", by=RejectedUpdate):
            check_reply(replace(reply, ledger=other), site.answer(task).allowed)
    for wrong in ("0" * 63, "0" * 63 + "\n", "G" * 64, "0" * 64 + "\n"):
        with refused("ledger", by=ValueError):
            replace(reply, ledger=wrong)


# Bounds over all experiments


@pytest.mark.complete
def test_epsilon_has_a_bound_over_all_experiments(house: House) -> None:
    """120 experiments reached 106, and their mean had a tenth of the noise."""
    task, sent = house.task(), []
    for number in range(5):
        answer = reply_of(house.site("alpha", f"e-{number}", max_epsilon=20.0), task)
        sent.append(isinstance(answer, Update))
        assert sent[-1] or answer == Abstain("budget", "BudgetSpent")
    assert sent == [True, True, False, False, False]  # 10.0, 15.5, 20.2
    refusal = complaint(house.site("alpha", "e-4"))
    assert "max_epsilon = 20.0" in refusal
    assert "20.2" in refusal
    first = house.site("alpha", "e-0", max_epsilon=20.0)
    assert isinstance(reply_of(first, task), Update)  # the kept one is no other release
    assert isinstance(reply_of(house.site("alpha", "e-9", max_epsilon=20.0), TaskData("handshake")), SiteInfo)
    assert isinstance(reply_of(house.site("alpha", "e-4", max_epsilon=20.2), task), Update)
    abstains(house.site("alpha", "e-5", max_epsilon=1e6, noise=1e-6), task, "budget", "max_epsilon")
    house.site("alpha", "clear", noise=0.0).answer(task)
    abstains(house.site("alpha", "e-6", max_epsilon=1e9), task, "budget", "ε would be ∞")


def test_experiments_have_a_bound(house: House) -> None:
    for number in range(4):
        answer = reply_of(house.site("alpha", f"e-{number}", max_experiments=2), TaskData("handshake"))
        assert isinstance(answer, SiteInfo) == (number < 2)
    last, task = house.site("alpha", "e-3", max_experiments=2), house.task()
    assert "max_experiments = 2" in complaint(last)
    assert isinstance(reply_of(house.site("alpha", "e-1", max_experiments=2), task), Update)
    abstains(last, task, "budget", "e-3")
    assert isinstance(reply_of(house.site("alpha", "e-3", max_experiments=3), task), Update)
