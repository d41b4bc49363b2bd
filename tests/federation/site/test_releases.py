"""What a site releases: once for each task, kept, in its ledger, within its budgets."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import METHOD, abstains, begun, exported, first_task, history, lines
from torch import Tensor

from rounds import configured, reply_of
from suture.core.privacy import PrivacyConfig
from suture.federation.site.ledger import Ledger
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS, RETAINED
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.check import check_reply
from suture.protocol.egress import BOUND, may_be
from suture.protocol.messages import Abstain, Evaluation, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, pack
from suture_papers.fedlsm.fedlsm import FedLSM

ALPHA = {"alpha": ("Mass", "Nodule")}


class Asked:
    """A federation of one site, whose tasks a test changes and repeats."""

    def __init__(self, tiny: Any, **privacy: Any) -> None:
        self.federation = tiny(METHOD, ALPHA)
        self.task = first_task(self.federation)
        self.privacy = {"min_count": 0, "min_loss": 0, "clip": 1e-3, "noise": 1.0} | privacy

    def site(self, experiment: str = "one", **privacy: Any) -> Site:
        """The site of an experiment as it is after a restart, with other settings."""
        site = configured(self.federation.sites()["alpha"], privacy=self.privacy | privacy)
        folder = site.folder.parents[1] / EXPERIMENTS / experiment
        return Site("alpha", site.config, site.plan, site.rounds, folder)

    def update(self, experiment: str = "one", task: TaskData | None = None, **privacy: Any) -> Update:
        answer = reply_of(self.site(experiment, **privacy), task or self.task)
        assert isinstance(answer, Update), answer
        return answer

    def moved(self, update: Update) -> Tensor:
        """The change that an update tells."""
        sent = {**update.shared, **update.head}
        base = {**self.task.shared, **self.task.head}
        return torch.cat([(t - base[name]).flatten() for name, t in sorted(sent.items())])

    def other(self, number: int) -> TaskData:
        """The same task with another model."""
        name = next(iter(self.task.shared))
        return replace(self.task, shared={**self.task.shared, name: self.task.shared[name] + 1e-3 * number})

    def noises(self) -> list[float]:
        return [line["noise"] for line in self.lines() if line["experiment"] == "one"]

    def lines(self) -> list[dict[str, Any]]:
        return lines(self.site().folder.parents[1] / "ledger.jsonl")


@pytest.fixture
def asked(tiny: Any) -> Asked:
    return Asked(tiny)


def same(one: Packed, two: Packed) -> bool:
    return one.header == two.header and all(torch.equal(t, two.tensors[k]) for k, t in one.tensors.items())


@pytest.mark.parametrize("lost", ["nothing", "the answer", "the state"])
def test_a_task_that_is_asked_with_other_noise_does_not_give_the_update_away(lost: str, asked: Asked) -> None:
    """Two draws of one noise gave the clipped update away: 2 s1 - s2, with an error of 5e-5 of it.

    Where the kept answer is lost, the noise is another and the ledger has both. Where only the state is,
    the kept one leaves: computed again, with other noise or on a GPU, it would be another.
    """
    one, site = asked.update(), asked.site()
    if lost == "the answer":
        shutil.rmtree(site.folder / "answers")
    if lost == "the state":
        site.states.files.path(1).unlink()
    two = asked.update(noise=2.0)
    assert same(pack(one), pack(two)) == (lost != "the answer")
    assert asked.noises() == ([1.0, 2.0] if lost == "the answer" else [1.0])
    assert site.states.files.is_whole(1)
    clipped = asked.moved(asked.update("clean", noise=0.0))
    guess = 2 * asked.moved(one) - asked.moved(two)
    assert clipped.norm().item() <= 1.01e-3
    assert ((guess - clipped).norm() / clipped.norm()).item() >= 1


@pytest.mark.complete
@pytest.mark.parametrize("moment", ["kept", "in the ledger"])
@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_a_site_that_is_killed_before_it_sends_says_the_same_bytes_again(
    moment: str, task: str, asked: Asked
) -> None:
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
    (path,) = (asked.site().folder / "answers" / ("train" if task == "train" else "test")).iterdir()
    kept = path.read_bytes()
    assert len(asked.lines()) == (moment == "in the ledger")
    first = reply_of(asked.site(noise=3.0), question)
    assert not isinstance(first, Abstain)
    assert same(pack(first), asked.site().answer(question).packed)
    assert path.read_bytes() == kept
    (line,) = asked.lines()
    assert (line["task"], line["noise"]) == (task, 1.0)  # as it was when the noise was drawn


def test_the_same_task_with_another_model_has_a_budget(tiny: Any) -> None:
    asked = Asked(tiny, reanswers=2)
    sent = [asked.update(task=asked.other(number)) for number in range(3)]
    assert (asked.moved(sent[0]) - asked.moved(sent[1])).norm() > 1e-3
    abstains(asked.site(), asked.other(3), "budget", "reanswers = 2")
    assert same(pack(asked.update(task=asked.other(2))), pack(sent[2]))
    abstains(asked.site(), asked.other(0), "budget")  # its answer is kept no longer
    assert isinstance(reply_of(asked.site(reanswers=3), asked.other(0)), Update)


def test_what_an_answer_depends_on_makes_it_another_task(asked: Asked) -> None:
    """A job with more rounds has other learning rates; which round is the best one has no part in it."""
    first = pack(asked.update())
    assert same(first, pack(asked.update(task=replace(asked.task, best=0))))
    site = asked.site()
    longer = Site(site.name, site.config, site.plan, site.rounds + 1, site.folder)
    assert not same(first, pack(reply_of(longer, asked.task)))
    measured = replace(asked.task, task="evaluate", split="test")
    digests = [one.releases.digest_request(measured, one._allow(measured)) for one in (site, longer)]
    assert digests[0] == digests[1], "more rounds are no other question about the same model"


def test_an_experiment_has_a_budget_of_answers(tiny: Any) -> None:
    asked = Asked(tiny, max_answers=2)
    site = asked.site()
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)
    assert isinstance(reply_of(site, asked.task), Update)
    for question in (replace(asked.task, round=2), replace(asked.task, task="evaluate")):
        abstains(site, question, "budget", "max_answers")
    assert isinstance(reply_of(site, asked.task), Update)  # the kept one
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)  # the same
    abstains(asked.site(delta=1e-6), TaskData("handshake"), "budget")
    assert isinstance(reply_of(asked.site("two"), asked.task), Update)


def test_figures_have_a_budget_over_all_experiments(tiny: Any) -> None:
    asked = Asked(tiny, max_figures=2)
    for experiment in ("one", "two"):
        asked.update(experiment)
    measured = replace(asked.task, task="evaluate", split="test", round=0)
    for experiment in ("two", "three"):
        abstains(asked.site(experiment), measured, "budget", "'Mass'", "max_figures = 2")
    assert isinstance(reply_of(asked.site("three", max_figures=3), measured), Evaluation)


def test_public_data_have_no_budget() -> None:
    """PMFL's published schedule has 4,000 rounds."""
    limits = PrivacyConfig.of_public_data("own")
    assert min(limits.max_answers, limits.max_figures) >= 10**6


def test_a_site_introduces_itself_again_without_another_release(asked: Asked) -> None:
    for _ in range(3):
        assert isinstance(reply_of(asked.site(), TaskData("handshake")), SiteInfo)
    assert [line["task"] for line in asked.lines()] == ["handshake"]
    table = asked.site().config.data.table
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    asked.site().answer(TaskData("handshake"))
    assert [line["task"] for line in asked.lines()] == ["handshake"] * 2


def test_counts_are_in_the_ledger_and_no_sign_of_an_older_experiment(tiny: Any) -> None:
    """The site writes the counts that it sends into the folder by which it knows older experiments."""
    site = tiny(FedLSM(local=METHOD.local), ALPHA).sites()["alpha"]
    assert set(reply_of(site, TaskData("handshake")).counts) == {"Mass", "Nodule"}
    (line,) = lines(site.folder.parents[1] / "ledger.jsonl")
    assert (line["task"], line["numbers"]) == ("handshake", 3 + 2 * 2)


def test_a_kept_evaluation_is_not_computed_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    question = replace(asked.task, task="evaluate", split="test", round=0)
    one = reply_of(asked.site(), question)
    monkeypatch.delattr("suture.federation.site.site.measure")
    assert same(pack(one), asked.site().answer(replace(question, committed=5, best=0)).packed)


def test_what_a_site_says_of_its_ledger_is_new_with_each_answer(asked: Asked) -> None:
    """The kept part is the same; what other experiments have released meanwhile counts."""
    one, _, again = asked.update(), asked.update("two", noise=2.0), asked.update()
    kept = {"spent": None, "ledger": None}
    assert same(pack(replace(one, **kept)), pack(replace(again, **kept)))
    assert one.spent
    assert again.spent
    assert (one.spent.updates, one.spent.experiments) == (1, 1)
    assert (again.spent.updates, again.spent.experiments) == (2, 2)
    assert again.spent.epsilon
    assert one.spent.epsilon
    assert again.spent.epsilon > one.spent.epsilon
    last = asked.update("three", noise=0.0).spent
    assert last
    assert (last.epsilon, last.unprotected) == (None, 1)
    assert asked.update("four", clip=None, noise=0.0).spent is None


@pytest.mark.parametrize(
    ("path", "same_answer"),
    [("answers/train/round-000001.safetensors", False), ("round-000001.safetensors", True)],
)
def test_a_corrupt_kept_answer_or_state_is_made_again(path: str, same_answer: bool, asked: Asked) -> None:
    before = pack(asked.update())
    file = asked.site().folder / path
    file.write_bytes(file.read_bytes()[:-5])
    assert same(before, pack(asked.update())) == same_answer
    assert len(asked.lines()) == 2 - same_answer
    assert asked.site().states.files.is_whole(1)


@pytest.mark.complete
def test_a_tightened_limit_does_not_hold_back_the_open_round(tiny: Any) -> None:
    """The kept answer has six digits, which the site's own filter would refuse again and again."""
    _, sites, tasks = begun(tiny(METHOD, n=300))
    task, site = tasks["alpha"], sites["alpha"]
    first = reply_of(site, task)
    site.close()
    strict = configured(site, privacy={"min_count": 5, "min_loss": 20})
    again = reply_of(strict, task)
    assert isinstance(again, Update)
    check_reply(again, site.answer(task).allowed)
    assert again.weight == first.weight


@pytest.mark.complete
def test_a_federation_keeps_few_answers_and_a_line_for_each(tiny: Any) -> None:
    federation = tiny(METHOD, ALPHA, rounds=RETAINED + 3)
    federation.run()
    site = federation.sites()["alpha"]
    answers = {p.name: len(list(p.iterdir())) for p in (site.folder / "answers").iterdir()}
    assert answers == {"train": RETAINED + 1, "validation": 1, "test": 1}
    written = lines(site.folder.parents[1] / "ledger.jsonl")
    tasks = [(line["task"], line["round"], line["split"]) for line in written]
    rounds = [("train", number, "") for number in range(1, RETAINED + 4)]
    assert tasks[:-2] == [("handshake", 0, ""), *rounds]
    assert [task[::2] for task in tasks[-2:]] == [("evaluate", "validation"), ("evaluate", "test")]
    assert all(line["figures"] == {"Mass": 1, "Nodule": 1} for line in written[1:])


@pytest.mark.complete
def test_limits_change_figures_and_no_byte_of_the_training(tiny: Any) -> None:
    """Default ones: the same training, coarser figures."""
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=16))
    sites = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    federation = tiny(method, sites, n=150, rounds=3, selection="last")
    exact, limits = federation.run("exact"), PrivacyConfig(label_view="all")
    for name, config in federation.configs.items():
        federation.configs[name] = config.model_copy(update={"privacy": limits})
    limited = federation.run("limited")
    assert exported(exact) == exported(limited)
    for before, after in zip(history(exact), history(limited), strict=True):
        for site in sites:
            loss, own = (line["sites"][site]["validation_loss"] for line in (before, after))
            assert may_be(own, BOUND / 30)
            assert not may_be(loss, BOUND / 30)
            assert abs(loss - own) <= 0.1
