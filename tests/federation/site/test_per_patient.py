"""A site with ε per patient: what it plans, refuses, sends, and writes into its ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from parties import abstains, first_task, history, limited, lines

from noted import noted
from rounds import configured, reply_of
from suture.core.errors import Aborted, ConfigError
from suture.core.privacy import PrivacyConfig
from suture.data.batch import MILD
from suture.federation.site.ledger import Ledger
from suture.federation.site.releases import mechanism_of_round
from suture.federation.site.site import Site, check_protected
from suture.federation.state_files import EXPERIMENTS
from suture.learning.dp_sgd import gaussian
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.differential_privacy import Mechanism, compose
from suture.protocol.messages import Abstain, TaskData, Update
from suture_admin.ledger import state_of
from world import refused

ALPHA = {"alpha": ("Mass", "Nodule")}
EPSILON = {"epsilon": 8.0, "clip": 1.0, "min_count": 0, "min_loss": 0}


@pytest.fixture(autouse=True)
def _exact_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test but one gives the accountant the same rates, which takes seconds once."""
    monkeypatch.setattr("suture.federation.site.releases.gaussian", torch.zeros)


PLAIN = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=4), batch_norm="frozen")


@dataclass
class Clinic:
    """The site alpha, protected, in experiments that share a ledger, and the first task of a server."""

    federation: Any
    run: str = "one"

    @property
    def task(self) -> TaskData:
        return first_task(self.federation)

    def site(self, experiment: str = "own", rounds: int | None = None) -> Site:
        """The site of an experiment as it is after a restart."""
        site: Site = self.federation.sites(self.run)["alpha"]
        folder = site.folder.parents[1] / EXPERIMENTS / experiment
        return Site("alpha", site.config, site.plan, rounds or site.rounds, folder)

    def lines(self, experiment: str = "") -> list[dict[str, Any]]:
        """Of the ledger; those of an experiment that was trained."""
        written = lines(self.federation.sites(self.run)["alpha"].folder.parents[1] / "ledger.jsonl")
        releases = [line for line in written if "task" in line]
        if not experiment:
            return releases
        return [line for line in releases if (line["experiment"], line["task"]) == (experiment, "train")]

    def spent(self, experiment: str = "") -> float | None:
        """The ε of its lines, by the accountant itself."""
        steps = [line for line in self.lines() if line["steps"] and experiment in ("", line["experiment"])]
        return compose([Mechanism(line["multiplier"], line["rate"], line["steps"]) for line in steps], 1e-5)


@pytest.fixture
def clinic(tiny: Any) -> Any:
    def make(method: Any = PLAIN, rounds: int = 2, **privacy: Any) -> Clinic:
        return Clinic(limited(tiny(method, ALPHA, rounds=rounds), **(EPSILON | privacy)))

    return make


@pytest.mark.complete
def test_a_run_spends_its_epsilon_and_no_exact_number_leaves(clinic: Any) -> None:
    own = clinic()
    server = own.federation.run("one")
    site: Site = own.federation.sites("one")["alpha"]
    count, info, *rounds = own.lines()[:4]
    assert (count["multiplier"], count["rate"], count["steps"], count["answer"]) == (5.0, 1.0, 1, "")
    assert info["steps"] == 0
    patients, sigma = site.releases.first_counts.patients, site.releases.first_counts.multiplier
    assert patients
    assert sigma
    steps = -(-patients // 4)
    assert [(r["rate"], r["steps"], r["multiplier"]) for r in rounds] == [(4 / patients, steps, sigma)] * 2
    spent = compose([Mechanism(5.0), Mechanism(sigma, 4 / patients, 2 * steps)], 1e-5)
    assert spent is not None
    assert 7.8 < spent <= 8
    assert server.registry.members["alpha"].n["train"] == patients
    assert all(line["sites"]["alpha"].get("train_loss") is None for line in history(server))
    assert any("alpha trains with DP-SGD per patient, for ε = 8" in note for note in noted(server))
    limits = site.config.privacy
    found = state_of(Ledger(site.folder.parents[1] / "ledger.jsonl", limits), limits)
    assert found.spent.epsilon is not None
    assert found.spent.epsilon <= 8
    assert f"{2 * steps} steps, σ {sigma:.3g}, q {4 / patients:.2g}" == found.lines[0].steps
    # Another round than those that were planned has no ε left.
    longer = clinic(rounds=3)
    again = Site("alpha", longer.federation.configs["alpha"], site.plan, 3, site.folder)
    abstains(again, replace(longer.task, round=3), "budget")


@pytest.mark.complete
def test_the_same_task_has_the_same_bytes_and_a_lost_state_costs_again(clinic: Any) -> None:
    own = clinic(rounds=8, max_epsilon=30.0)
    task, site = own.task, own.site()
    first = reply_of(site, task)
    assert isinstance(first, Update)
    assert first.train_loss is None
    assert first.spent
    assert first.spent.epsilon
    for lost in (False, True):
        if lost:
            for path in site.folder.glob("**/round-*.safetensors"):
                if "answers" not in path.parts:
                    path.unlink()
        again = reply_of(own.site(), task)
        assert isinstance(again, Update)
        assert all(t.equal(again.head[name]) for name, t in first.head.items())
        assert [line["answer"] == "" for line in own.lines("own")] == [False, True][: 1 + lost]
    assert len({line["steps"] for line in own.lines("own")}) == 1


@pytest.mark.complete
def test_a_failure_of_any_kind_after_steps_costs_them(clinic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose models overflow by the sign of a gradient would read one bit of new noise each time."""
    own = clinic(replace(PLAIN, local=replace(PLAIN.local, lr=1e38, optimiser="sgd", iterations=50)))
    task, site = own.task, own.site()
    assert [reply_of(site, task).reason for _ in range(4)] == ["non_finite_loss"] * 2 + ["budget"] * 2
    assert [line["answer"] for line in own.lines("own")] == ["", ""]
    assert all(line["steps"] and not line["update"] for line in own.lines("own"))

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("a large batch was drawn")

    monkeypatch.setattr("suture.learning.dp_sgd.PatientPrivacy.step", full)
    abstains(own.site("full"), task, "out_of_memory")
    assert [line["answer"] for line in own.lines("full")] == [""]


def test_an_aborted_round_from_which_nothing_left_costs_nothing(
    clinic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = clinic()
    task, site = own.task, own.site()

    def aborted(*_: Any) -> Any:
        raise Aborted("the job was aborted")

    with monkeypatch.context() as patch:
        patch.setattr("suture.learning.dp_sgd.PatientPrivacy.step", aborted)
        with pytest.raises(Aborted):
            site.answer(task)
    assert not own.lines("own")
    assert isinstance(reply_of(site, task), Update)


@pytest.mark.complete
@pytest.mark.parametrize("how", ["train", "evaluate", "calibrate"])
def test_a_state_whose_answer_a_crash_kept_back_costs_once_it_is_used(
    how: str, clinic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that ends jobs at that moment would get figures, or rounds, of models without ε."""
    own = clinic(rounds=3)
    task, site = own.task, own.site()

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.releases, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            site.answer(task)
    assert not own.lines("own")
    site.close()
    again = own.site()
    later = replace(task, task=how, round=2 if how == "train" else 1, committed=1)
    assert not isinstance(reply_of(again, later), Abstain)
    first = own.lines("own")[0]
    assert (first["round"], first["answer"]) == (1, "")
    if how == "evaluate":  # once
        assert not isinstance(reply_of(again, replace(later, split="test")), Abstain)
        assert len(own.lines("own")) == 1


@pytest.mark.complete
@pytest.mark.parametrize(
    ("local", "rounds"), [({}, 2), ({}, 9), ({"lr": 0.5}, 2), ({"batch_size": 8}, 2)], ids=str
)
def test_a_server_that_changes_task_or_job_gets_no_more_than_epsilon(
    local: dict[str, Any], rounds: int, clinic: Any
) -> None:
    own = clinic()
    task, site = own.task, own.site()
    assert isinstance(reply_of(site, task), Update)
    site.close()
    other = clinic(replace(PLAIN, local=replace(PLAIN.local, **local)), rounds=rounds)
    for attempt in range(6):
        head = {name: tensor + attempt + 1 for name, tensor in task.head.items()}
        again = other.site(rounds=rounds)
        reply_of(again, replace(task, head=head, round=1 + attempt % rounds))
        again.close()
    spent, limits = own.spent("own"), site.config.privacy
    assert spent is not None
    assert spent <= 8
    stated = state_of(Ledger(site.folder.parents[1] / "ledger.jsonl", limits), limits)
    assert stated.spent.unprotected == 0
    assert len(own.lines("own")) <= 2


def test_a_changed_epsilon_holds_from_the_next_answer_on(clinic: Any) -> None:
    own = clinic()
    task, site = own.task, own.site()
    assert isinstance(reply_of(site, task), Update)
    sigma = site.releases.first_counts.multiplier
    site.close()
    larger = clinic(epsilon=40.0).site()
    larger.releases.plan_privacy(())
    assert larger.releases.first_counts.multiplier == sigma
    abstains(clinic(epsilon=1.0).site(), replace(task, round=2, committed=1), "budget")
    assert len(own.lines("own")) == 1


@pytest.mark.complete
def test_the_number_of_patients_is_sent_once_with_noise(clinic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # With too few patients for a batch, as noise may have it, there would be no answer.
    monkeypatch.setattr("suture.federation.site.releases.gaussian", lambda shape: gaussian(shape).abs())
    monkeypatch.setattr("suture.federation.site.releases.planned_multiplier", lambda *_: 20.0)
    own = clinic(epsilon=1.0)
    infos = [reply_of(own.site("one"), TaskData("handshake")) for _ in range(2)]
    assert infos[0].protection == {"clip": 1.0, "epsilon": 1.0, "delta": 1e-5}
    assert infos[0].n == infos[1].n
    assert sum(line["steps"] for line in own.lines()) == 1
    assert len({reply_of(own.site(f"{i}"), TaskData("handshake")).n["train"] for i in range(4)}) > 1


@pytest.mark.complete
def test_max_epsilon_holds_across_experiments(clinic: Any) -> None:
    own = clinic(max_epsilon=9.0)
    own.federation.run("one")
    abstains(own.site("two"), TaskData("handshake"), "budget", "max_epsilon = 9.0")
    abstains(clinic(max_epsilon=0.1).site("three"), TaskData("handshake"), "budget")


@pytest.mark.parametrize(
    ("method", "training", "augmentation", "named"),
    [
        (FedAvg(), {}, False, "FedAvg"),
        (replace(PLAIN, class_weights="known"), {}, False, "counts of labels"),
        (PLAIN, {"amp": True}, False, "amp"),
        (PLAIN, {"compile": "kernels"}, False, "compile"),
        (PLAIN, {}, True, "augmentation"),
    ],
)
def test_what_mixes_patients_is_refused(
    method: Any, training: dict[str, Any], augmentation: bool, named: str, clinic: Any
) -> None:
    site = configured(clinic(method).site(), training=training)
    plan = site.plan
    if augmentation:
        plan = replace(plan, augmentation=MILD, model=replace(plan.model, train="head", weights="random"))
    with refused("alpha: [privacy] epsilon", named, by=ConfigError):
        check_protected("alpha", plan, site.config)


@pytest.mark.parametrize(
    ("method", "privacy", "named"),
    [
        (replace(PLAIN, batch_norm="average"), {}, "alpha: [privacy] epsilon: the batch norm"),
        (replace(PLAIN, local=LocalTraining(batch_size=4_000)), {}, "4000 patients"),
        (
            replace(PLAIN, local=LocalTraining(batch_size=4, iterations=10**6)),
            {"epsilon": 0.05},
            "100 times clip",
        ),
    ],
)
def test_a_job_that_the_site_cannot_protect_is_refused_before_the_first_round(
    method: Any, privacy: dict[str, float], named: str, clinic: Any
) -> None:
    abstains(clinic(method, **privacy).site(), TaskData("handshake"), "configuration", named)


@pytest.mark.parametrize(
    ("length", "steps"), [({"epochs": 2}, 6), ({"iterations": 5}, 5), ({"epochs": 0}, 0)], ids=str
)
def test_the_steps_of_a_round_are_those_of_its_epochs(
    length: dict[str, int], steps: int, clinic: Any
) -> None:
    """Of 9 patients 4 a step: an epoch has 9 / 4, rounded up."""
    site = clinic(replace(PLAIN, local=LocalTraining(batch_size=4, **length))).site()  # type: ignore[arg-type]
    found = mechanism_of_round(site.plan, site.config, 2, 1, 9, 1.0)
    assert (found.rate, found.steps) == (4 / 9, steps)


def test_a_class_aware_phase_is_refused(clinic: Any) -> None:
    site = clinic(replace(PLAIN, local=LocalTraining(batch_size=4, sampling="class_aware"))).site()
    with refused("shuffled", by=ConfigError):
        mechanism_of_round(site.plan, site.config, 2, 1, 20)


@pytest.mark.complete
def test_a_personal_head_is_protected_too(clinic: Any) -> None:
    own = clinic(PersonalisedFL(local=PLAIN.local, batch_norm="frozen"), rounds=1)
    own.federation.run("one")
    assert [line["steps"] > 0 for line in own.lines() if line["task"] == "train"] == [True]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epsilon": 4, "noise": 1.0, "clip": 1.0}, ("epsilon", "noise")),
        ({"epsilon": "4"}, ("epsilon",)),
        ({"epsilon": True}, ("epsilon",)),
        ({"noise": 1.0}, ("clip",)),
        ({"epsilon": 1e-3}, ("epsilon = 0.001",)),
        ({"epsilon": 4, "delta": 1e-12}, ("epsilon", "1e-10")),
        ({"max_epsilon": 4}, ("max_epsilon",)),
        ({"epsilon": 4, "max_epsilon": 3.9}, ("max_epsilon = 3.9", "epsilon = 4")),
        ({"encryption": "ckks"}, ("encryption",)),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(values: dict[str, Any], named: tuple[str, ...]) -> None:
    with refused(*named, by=ValueError):
        PrivacyConfig.model_validate(values)
