"""Over many experiments of a site: a ledger rolled back, states lost, and bounds over all of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from parties import (
    METHOD,
    abstains,
    complaint,
    first_task,
    task_in,
)

from noted import noted
from rounds import reply_of
from suture.core.errors import FederationError, RejectedUpdate
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server, open_server
from suture.federation.site.ledger import Ledger
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.protocol.check import check_reply
from suture.protocol.messages import Abstain, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed
from world import refused

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
