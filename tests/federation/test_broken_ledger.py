"""A federation in which a site's ledger, or all of its state, was rolled back: nobody is deceived by it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noted import noted
from rounds import reply_of
from suture.core.errors import FederationError
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server, open_server
from suture.federation.site.ledger import Ledger
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
PRIVACY = {"min_count": 0, "min_loss": 0, "clip": 1e-3, "noise": 1.0}


@dataclass
class House:
    """A server and sites with the folders of real ones: several experiments, a ledger each."""

    federation: Any
    privacy: dict[str, Any]

    def state(self, party: str) -> Path:
        folder: Path = self.federation.folder
        return folder / party / "state"

    def site(self, name: str, experiment: str, rounds: int = 2, **privacy: Any) -> Site:
        config = self.federation.configs[name]
        own = type(config.privacy).model_validate({**config.privacy.model_dump(), **self.privacy, **privacy})
        plan = replace(self.federation.plan, experiment=experiment)
        folder = self.state(name) / EXPERIMENTS / experiment
        return Site(name, config.model_copy(update={"privacy": own}), plan, rounds, folder)

    def server(self, experiment: str, rounds: int = 2) -> Server:
        plan = replace(self.federation.plan, experiment=experiment)
        schedule = replace(self.federation.schedule, rounds=rounds)
        state = self.state("server")
        return open_server(plan, schedule, None, state / EXPERIMENTS, ledgers=state / "ledgers.json")

    def run(self, experiment: str = "one", rounds: int = 2, **privacy: Any) -> Server:
        names = self.federation.configs
        loop = Loop({name: self.site(name, experiment, rounds, **privacy) for name in names})
        server = self.server(experiment, rounds)
        try:
            federate(server, loop)
        finally:
            loop.close()
        return server

    def ledger(self, name: str = "alpha") -> Path:
        return self.state(name) / "ledger.jsonl"

    def accept(self, name: str = "alpha") -> None:
        Ledger(self.ledger(name), self.federation.configs[name].privacy).accept()


@pytest.fixture
def house(tiny: Any) -> House:
    return House(tiny(METHOD, {"alpha": ("Mass", "Nodule"), "beta": ("Mass", "Hernia")}), PRIVACY)


def note_of(server: Server, site: str = "alpha") -> str:
    (note,) = [text for text in noted(server) if text.startswith(f"{site} clips")]
    return str(note)


TAMPERED: Mapping[str, Any] = {
    "rolled back": lambda lines: lines[:2],
    "emptied": lambda _: [],
    "edited": lambda lines: [line.replace('"noise": 1.0', '"noise": 99.0') for line in lines],
}


@pytest.mark.complete
@pytest.mark.parametrize("how", TAMPERED)
def test_a_ledger_that_was_tampered_with_states_no_smaller_epsilon(how: str, house: House) -> None:
    """Of two runs of two rounds ε is 24.4; it became 15.5, 15.5 and 15.6, without a note."""
    assert "ε ≤ 15.5" in note_of(house.run("one"))
    path = house.ledger()
    path.write_text("".join(f"{line}\n" for line in TAMPERED[how](path.read_text().splitlines())))
    with pytest.raises(FederationError, match=r"alpha: ledger \(LedgerBroken\)"):
        house.run("two")
    assert json.loads((house.state("server") / EXPERIMENTS / "two" / "run.json").read_text())
    errors = house.state("alpha") / EXPERIMENTS / "two" / "errors.jsonl"
    assert "--accept" in json.loads(errors.read_text().splitlines()[-1])["message"]
    house.accept()
    assert "a lower bound: its administrator has accepted that at least" in note_of(house.run("two"))


@pytest.mark.complete
def test_a_whole_backup_that_is_brought_back_shows_against_the_servers_digest(house: House) -> None:
    house.run("one", rounds=1)
    state = house.state("alpha")
    shutil.copytree(state, state.with_name("backup"))
    house.run("one", rounds=2)
    shutil.rmtree(state)
    shutil.copytree(state.with_name("backup"), state)
    with pytest.raises(FederationError, match=r"alpha: ledger \(LedgerBroken\)"):
        house.run("two")  # the server holds it over all experiments
    with pytest.raises(FederationError, match=r"alpha: ledger \(LedgerBroken\)"):
        house.run("one", rounds=3)
    assert len(house.ledger().read_text().splitlines()) == len(
        (state.with_name("backup") / "ledger.jsonl").read_text().splitlines()
    )
    house.accept()
    server = house.run("one", rounds=3)
    assert "a lower bound" in note_of(server)
    older = [n for n in noted(server) if "alpha trained round 3 from its state of round 1" in n]
    assert len(older) == 1
    assert "sent an update of round 2" in older[0]


@pytest.mark.complete
def test_other_sites_go_on_without_the_one_whose_ledger_is_broken(house: House) -> None:
    house.federation.schedule = replace(house.federation.schedule, min_sites=1)
    house.run("one")
    house.ledger().write_text("")
    server = house.run("two")
    assert list(server.registry.members) == ["beta"]
    (note,) = [n for n in noted(server) if "releases nothing" in n]
    assert note.startswith("alpha releases nothing")


def test_a_ledger_that_breaks_in_a_run_is_noted_once(house: House) -> None:
    house.federation.schedule = replace(house.federation.schedule, min_sites=1)

    class Breaking(Loop):
        def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
            sent = unpack(payloads["alpha"])
            assert isinstance(sent, TaskData)
            if task == "train" and sent.round == 2:
                house.ledger().write_text("")
            return super().exchange(task, payloads, receive)

    server = house.server("one", 4)
    federate(server, Breaking({name: house.site(name, "one", 4) for name in ("alpha", "beta")}))
    assert [n.startswith("alpha releases nothing") for n in noted(server)].count(True) == 1


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
    from suture.core.errors import RejectedUpdate
    from suture.protocol.check import check_reply

    site, task = house.site("alpha", "one"), TaskData("handshake")
    reply = reply_of(site, task)
    assert isinstance(reply, SiteInfo)
    check_reply(reply, site.answer(task).allowed)
    with pytest.raises(RejectedUpdate, match="the digest of another ledger"):
        check_reply(replace(reply, ledger="0" * 64), site.answer(task).allowed)
    with pytest.raises(RejectedUpdate, match="the digest of another ledger"):
        check_reply(replace(reply, ledger=None), site.answer(task).allowed)
    for wrong in ("0" * 63, "0" * 63 + "\n", "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(ValueError, match="ledger"):
            replace(reply, ledger=wrong)


# Bounds over all experiments


def last_error(house: House, experiment: str) -> str:
    path = house.state("alpha") / EXPERIMENTS / experiment / "errors.jsonl"
    return str(json.loads(path.read_text().splitlines()[-1])["message"])


def task_of(house: House) -> TaskData:
    """The task of a first round, from a server of its own."""
    server = house.server("asks")
    lent = House(house.federation, house.privacy)
    lent.state = lambda party: house.federation.folder / "lent" / party  # type: ignore[method-assign]
    sites = {name: lent.site(name, "asks") for name in ("alpha", "beta")}
    server.begin(Loop(sites).exchange("handshake", server.handshake(list(sites)), server.receiver()))
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    return replace(task, ledger=None)


@pytest.mark.complete
def test_epsilon_has_a_bound_over_all_experiments(house: House) -> None:
    """120 experiments reached 106, and their mean had a tenth of the noise."""
    task, sent = task_of(house), []
    for number in range(5):
        answer = reply_of(house.site("alpha", f"e-{number}", max_epsilon=20.0), task)
        sent.append(isinstance(answer, Update))
        assert sent[-1] or answer == Abstain("budget", "BudgetSpent")
    assert sent == [True, True, False, False, False]  # 10.0, 15.5, 20.2
    assert "max_epsilon = 20.0 under [privacy]" in last_error(house, "e-4")
    assert "with what is asked for ε would be 20.2" in last_error(house, "e-4")
    first = house.site("alpha", "e-0", max_epsilon=20.0)
    assert isinstance(reply_of(first, task), Update)  # the kept one is no other release
    assert isinstance(reply_of(house.site("alpha", "e-9", max_epsilon=20.0), TaskData("handshake")), SiteInfo)
    assert isinstance(reply_of(house.site("alpha", "e-4", max_epsilon=20.2), task), Update)
    assert reply_of(house.site("alpha", "e-5", max_epsilon=1e6, noise=1e-6), task).reason == "budget"


def test_an_update_without_noise_exceeds_every_bound(house: House) -> None:
    task = task_of(house)
    house.site("alpha", "one", noise=0.0).answer(task)
    assert isinstance(reply_of(house.site("alpha", "two", max_epsilon=1e9), task), Abstain)
    assert "ε would be ∞" in last_error(house, "two")


def test_experiments_have_a_bound(house: House) -> None:
    for number in range(4):
        answer = reply_of(house.site("alpha", f"e-{number}", max_experiments=2), TaskData("handshake"))
        assert isinstance(answer, SiteInfo) == (number < 2)
    assert "max_experiments = 2 under [privacy]" in last_error(house, "e-3")
    assert "answers in 2 experiments, not counting e-3" in last_error(house, "e-3")
    task = task_of(house)
    assert isinstance(reply_of(house.site("alpha", "e-1", max_experiments=2), task), Update)
    assert isinstance(reply_of(house.site("alpha", "e-3", max_experiments=2), task), Abstain)
    assert isinstance(reply_of(house.site("alpha", "e-3", max_experiments=3), task), Update)


@pytest.mark.complete
@pytest.mark.parametrize("bound", [{"max_epsilon": 20.0}, {"max_experiments": 2}])
def test_bounds_hold_for_experiments_that_run_at_once(bound: dict[str, Any], house: House) -> None:
    """Four processes train at the same time, and all have passed the check before any has written."""
    task, children = task_of(house), []
    reading, writing = os.pipe()
    for number in range(4):
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            site = house.site("alpha", f"e-{number}", **bound)
            real = site._perform

            def late(*given: Any, real: Any = real) -> Any:
                answer = real(*given)
                os.write(writing, b"x")
                while not (house.federation.folder / "go").exists():
                    pass
                return answer

            site._perform = late  # type: ignore[method-assign]
            os._exit(isinstance(reply_of(site, task), Update))
        children.append(child)
    for _ in children:
        os.read(reading, 1)
    (house.federation.folder / "go").touch()
    answered = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert answered == 2
    spent = Ledger(house.ledger(), house.site("alpha", "x").config.privacy).spent()
    assert (spent.updates, spent.epsilon, spent.missing) == (2, 15.5, 0)
