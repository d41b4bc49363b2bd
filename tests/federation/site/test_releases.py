"""What a site releases: once for each task, kept, in its ledger, within its budgets."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from noted import noted
from rounds import reply_of
from suture.federation.loop import Loop, federate
from suture.federation.site.ledger import Ledger
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS, RETAINED
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, Evaluation, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from suture_papers.fedlsm.fedlsm import FedLSM

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
ALPHA = {"alpha": ("Mass", "Nodule")}


class Asked:
    """A federation of one site, whose tasks a test changes and repeats."""

    def __init__(self, tiny: Any, **privacy: Any) -> None:
        self.federation = tiny(METHOD, ALPHA)
        server = self.federation.server("server")
        info = unpack(server.handshake(["alpha"])["alpha"])
        other = self.federation.sites("other")["alpha"]
        server.collector.receive("alpha", other.answer(info).packed)
        server.begin({})
        task = unpack(server.assign()["alpha"])
        assert isinstance(task, TaskData)
        self.task = replace(task, ledger=None)  # that of the other site
        self.privacy = {"min_count": 0, "min_loss": 0, "clip": 1e-3, "noise": 1.0} | privacy

    def site(self, experiment: str = "one", **privacy: Any) -> Site:
        """The site of an experiment as it is after a restart, with other settings."""
        site: Site = self.federation.sites()["alpha"]
        own = site.config.privacy.model_copy(update=self.privacy | privacy)
        config = site.config.model_copy(update={"privacy": own})
        folder = site.folder.parents[1] / EXPERIMENTS / experiment
        return Site("alpha", config, site.plan, site.rounds, folder)

    def moved(self, update: Update) -> Tensor:
        """The change that an update tells."""
        sent = {**update.shared, **update.head}
        base = {**self.task.shared, **self.task.head}
        return torch.cat([(t - base[name]).flatten() for name, t in sorted(sent.items())])

    def other(self, number: int) -> TaskData:
        """The same task with another model."""
        name = next(iter(self.task.shared))
        return replace(self.task, shared={**self.task.shared, name: self.task.shared[name] + 1e-3 * number})


def update_of(site: Site, task: TaskData) -> Update:
    answer = reply_of(site, task)
    assert isinstance(answer, Update), answer
    return answer


def same(one: Packed, two: Packed) -> bool:
    return one.header == two.header and all(torch.equal(t, two.tensors[k]) for k, t in one.tensors.items())


def lines(site: Site) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (site.folder.parents[1] / "ledger.jsonl").read_text().splitlines()]


def test_a_task_that_is_asked_with_other_noise_has_the_answer_that_was_sent(tiny: Any) -> None:
    """Two draws of one noise gave the clipped update away: 2 s1 - s2, with an error of 5e-5 of it."""
    asked = Asked(tiny)
    one, two = (update_of(asked.site(noise=z), asked.task) for z in (1.0, 2.0))
    assert same(pack(one), pack(two))
    clipped = asked.moved(update_of(asked.site("clean", noise=0.0), asked.task))
    guess = 2 * asked.moved(one) - asked.moved(two)
    assert clipped.norm().item() <= 1.01e-3
    assert ((guess - clipped).norm() / clipped.norm()).item() >= 1
    assert [line["noise"] for line in lines(asked.site()) if line["experiment"] == "one"] == [1.0]


def test_where_the_kept_answer_is_lost_the_noise_is_another_and_the_ledger_has_both(tiny: Any) -> None:
    asked = Asked(tiny)
    one = update_of(asked.site(), asked.task)
    shutil.rmtree(asked.site().folder / "answers")
    two = update_of(asked.site(noise=2.0), asked.task)
    clipped = asked.moved(update_of(asked.site("clean", noise=0.0), asked.task))
    guess = 2 * asked.moved(one) - asked.moved(two)
    assert ((guess - clipped).norm() / clipped.norm()).item() >= 1
    assert [line["noise"] for line in lines(asked.site()) if line["experiment"] == "one"] == [1.0, 2.0]


def test_where_only_the_state_is_lost_the_kept_answer_leaves(tiny: Any) -> None:
    """The round is computed again for the state: with other noise, or on a GPU, it has another answer."""
    asked = Asked(tiny)
    one = update_of(asked.site(), asked.task)
    states = asked.site().states.files
    states.path(1).unlink()
    two = update_of(asked.site(noise=2.0), asked.task)
    assert same(pack(one), pack(two))
    assert states.is_whole(1)
    assert [line["noise"] for line in lines(asked.site()) if line["experiment"] == "one"] == [1.0]


@pytest.mark.complete
@pytest.mark.parametrize("moment", ["kept", "in the ledger"])
@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_a_site_that_is_killed_before_it_sends_says_the_same_bytes_again(
    moment: str, task: str, tiny: Any
) -> None:
    asked = Asked(tiny)
    question = asked.task if task == "train" else replace(asked.task, task="evaluate", split="test", round=0)
    record = Ledger.record

    def killed(ledger: Ledger, release: Any) -> Any:
        if moment == "in the ledger":
            record(ledger, release)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        Ledger.record = killed  # type: ignore[method-assign]
        asked.site().answer(question)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = asked.site().folder / "answers" / ("train" if task == "train" else "test")
    (path,) = folder.iterdir()
    kept = path.read_bytes()
    assert len(lines(asked.site())) == (moment == "in the ledger")
    first = reply_of(asked.site(noise=3.0), question)
    assert not isinstance(first, Abstain)
    assert same(pack(first), asked.site().answer(question).packed)
    assert path.read_bytes() == kept
    (line,) = lines(asked.site())
    assert (line["task"], line["noise"]) == (task, 1.0)  # as it was when the noise was drawn


def test_the_same_task_with_another_model_has_a_budget(tiny: Any) -> None:
    asked = Asked(tiny, reanswers=2)
    site = asked.site()
    sent = [asked.moved(update_of(site, asked.other(number))) for number in range(3)]
    assert (sent[0] - sent[1]).norm() > 1e-3
    refused = reply_of(asked.site(), asked.other(3))
    assert refused == Abstain("budget", "BudgetSpent")
    assert same(pack(update_of(asked.site(), asked.other(2))), pack(update_of(site, asked.other(2))))
    assert isinstance(reply_of(asked.site(), asked.other(0)), Abstain)  # its answer is kept no longer
    assert isinstance(reply_of(asked.site(reanswers=3), asked.other(0)), Update)
    error = json.loads((site.folder / "errors.jsonl").read_text().splitlines()[-1])
    assert "reanswers = 2 under [privacy]" in error["message"]


def test_what_an_answer_depends_on_makes_it_another_task(tiny: Any) -> None:
    """A job with more rounds has other learning rates; which round is the best one has no part in it."""
    asked = Asked(tiny)
    first = pack(update_of(asked.site(), asked.task))
    assert same(first, pack(update_of(asked.site(), replace(asked.task, best=0))))
    site = asked.site()
    longer = Site(site.name, site.config, site.plan, site.rounds + 1, site.folder)
    assert not same(first, pack(update_of(longer, asked.task)))


def test_an_experiment_has_a_budget_of_answers(tiny: Any) -> None:
    asked = Asked(tiny, max_answers=2)
    site = asked.site()
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)
    assert isinstance(reply_of(site, asked.task), Update)
    for question in (replace(asked.task, round=2), replace(asked.task, task="evaluate")):
        assert reply_of(site, question) == Abstain("budget", "BudgetSpent")
    assert isinstance(reply_of(site, asked.task), Update)  # the kept one
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)  # the same
    assert reply_of(asked.site(delta=1e-6), TaskData("handshake")) == Abstain("budget", "BudgetSpent")
    assert isinstance(reply_of(asked.site("two"), asked.task), Update)


def test_figures_have_a_budget_over_all_experiments(tiny: Any) -> None:
    asked = Asked(tiny, max_figures=2)
    for experiment in ("one", "two"):
        assert isinstance(reply_of(asked.site(experiment), asked.task), Update)
    measured = replace(asked.task, task="evaluate", split="test", round=0)
    for experiment in ("two", "three"):
        assert reply_of(asked.site(experiment), measured) == Abstain("budget", "BudgetSpent")
    assert isinstance(reply_of(asked.site("three", max_figures=3), measured), Evaluation)
    error = json.loads((asked.site("three").folder / "errors.jsonl").read_text().splitlines()[-1])
    assert "2 figures of 'Mass'; max_figures = 2" in error["message"]


def test_a_site_introduces_itself_again_without_another_release(tiny: Any) -> None:
    asked = Asked(tiny)
    for _ in range(3):
        assert isinstance(reply_of(asked.site(), TaskData("handshake")), SiteInfo)
    assert [line["task"] for line in lines(asked.site())] == ["handshake"]
    table = asked.site().config.data.table
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    asked.site().answer(TaskData("handshake"))
    assert [line["task"] for line in lines(asked.site())] == ["handshake"] * 2


def test_counts_are_in_the_ledger_and_no_sign_of_an_older_experiment(tiny: Any) -> None:
    """The site writes the counts that it sends into the folder by which it knows older experiments."""
    site = tiny(FedLSM(local=METHOD.local), ALPHA).sites()["alpha"]
    info = reply_of(site, TaskData("handshake"))
    assert isinstance(info, SiteInfo)
    assert set(info.counts) == {"Mass", "Nodule"}
    (line,) = lines(site)
    assert (line["task"], line["numbers"]) == ("handshake", 3 + 2 * 2)


def test_a_kept_evaluation_is_not_computed_again(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tiny)
    question = replace(asked.task, task="evaluate", split="test", round=0)
    one = reply_of(asked.site(), question)

    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("suture.federation.site.site.measure", computed)
    assert same(pack(one), asked.site().answer(replace(question, committed=5, best=0)).packed)


def test_what_a_site_says_of_its_ledger_is_new_with_each_answer(tiny: Any) -> None:
    """The kept part is the same; what other experiments have released meanwhile counts."""
    asked = Asked(tiny)
    one = update_of(asked.site(), asked.task)
    update_of(asked.site("two", noise=2.0), asked.task)
    again = update_of(asked.site(), asked.task)
    assert one.spent is not None
    assert again.spent is not None
    kept = {"spent": None, "ledger": None}
    assert same(pack(replace(one, **kept)), pack(replace(again, **kept)))
    assert (one.spent.updates, one.spent.experiments) == (1, 1)
    assert (again.spent.updates, again.spent.experiments) == (2, 2)
    assert again.spent.epsilon is not None
    assert one.spent.epsilon is not None
    assert again.spent.epsilon > one.spent.epsilon
    last = update_of(asked.site("three", noise=0.0), asked.task)
    assert last.spent is not None
    assert (last.spent.epsilon, last.spent.unprotected) == (None, 1)
    assert update_of(asked.site("four", clip=None, noise=0.0), asked.task).spent is None


@pytest.mark.parametrize(
    ("path", "same_answer"),
    [("answers/train/round-000001.safetensors", False), ("round-000001.safetensors", True)],
)
def test_a_corrupt_kept_answer_or_state_is_made_again(path: str, same_answer: bool, tiny: Any) -> None:
    asked = Asked(tiny)
    before = pack(update_of(asked.site(), asked.task))
    file = asked.site().folder / path
    file.write_bytes(file.read_bytes()[:-5])
    assert same(before, pack(update_of(asked.site(), asked.task))) == same_answer
    assert len(lines(asked.site())) == 2 - same_answer
    assert asked.site().states.files.is_whole(1)


@pytest.mark.complete
def test_a_federation_keeps_few_answers_and_a_line_for_each(tiny: Any) -> None:
    federation = tiny(METHOD, ALPHA, rounds=RETAINED + 3)
    sites = federation.sites()
    federate(federation.server(), Loop(sites))
    site = sites["alpha"]
    answers = {p.name: len(list(p.iterdir())) for p in (site.folder / "answers").iterdir()}
    assert answers == {"train": RETAINED + 1, "validation": 1, "test": 1}
    tasks = [(line["task"], line["round"], line["split"]) for line in lines(site)]
    rounds = [("train", number, "") for number in range(1, RETAINED + 4)]
    assert tasks[:-2] == [("handshake", 0, ""), *rounds]
    assert [task[::2] for task in tasks[-2:]] == [("evaluate", "validation"), ("evaluate", "test")]
    assert all(line["figures"] == {"Mass": 1, "Nodule": 1} for line in lines(site)[1:])


@pytest.mark.complete
def test_a_run_of_sites_with_noise_says_their_epsilon(tiny: Any) -> None:
    """Three noisy rounds after one without noise are not a small ε, whatever the server's history says."""
    federation = tiny(METHOD, ALPHA, rounds=2)
    privacy = federation.configs["alpha"].privacy.model_copy(update={"clip": 0.1, "noise": 2.0})
    federation.configs["alpha"] = federation.configs["alpha"].model_copy(update={"privacy": privacy})
    notes = noted(federation.run("noisy"))
    assert "ε ≤ 6.58 at δ = 1e-05 over all its 2 updates in 1 experiment, by its own ledger" in notes[-1]
    plain = privacy.model_copy(update={"noise": 0.0})
    mixed = tiny(METHOD, ALPHA, rounds=1)
    mixed.configs["alpha"] = mixed.configs["alpha"].model_copy(update={"privacy": plain})
    mixed.run("mixed")
    again = tiny(METHOD, ALPHA, rounds=3)
    again.configs["alpha"] = federation.configs["alpha"]
    notes = noted(again.run("mixed"))
    assert "ε = ∞, because 1 of its 3 updates" in notes[-1]
