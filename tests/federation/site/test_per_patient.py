"""A site with ε per patient: what it plans, refuses, sends, and writes into its ledger."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from noted import noted
from rounds import reply_of
from suture.core.errors import Aborted, ConfigError
from suture.core.privacy import PrivacyConfig
from suture.data.batch import MILD
from suture.federation.site.ledger import Ledger
from suture.federation.site.patient_privacy import check_protected, mechanism_of_round
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.learning.dp_sgd import gaussian
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.differential_privacy import Mechanism, compose
from suture.protocol.messages import Abstain, SiteInfo, Spent, TaskData, Update
from suture.protocol.packing import unpack
from suture_admin.ledger import state_of
from suture_results.notes import describe_spent

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=4), batch_norm="frozen")
ALPHA = {"alpha": ("Mass", "Nodule")}
EPSILON = {"epsilon": 8.0, "clip": 1.0, "min_count": 0, "min_loss": 0}


@pytest.fixture(autouse=True)
def _exact_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test but one gives the accountant the same rates, which takes seconds once."""
    monkeypatch.setattr("suture.federation.site.store.gaussian", torch.zeros)


def protected(federation: Any, **privacy: Any) -> Any:
    config = federation.configs["alpha"]
    own = config.privacy.model_copy(update=EPSILON | privacy)
    federation.configs["alpha"] = config.model_copy(update={"privacy": own})
    return federation


def site_of(federation: Any, experiment: str, run: str = "one") -> Site:
    """The site of an experiment as it is after a restart; its ledger is that of `run`."""
    site: Site = federation.sites(run)["alpha"]
    return Site(
        "alpha", site.config, site.plan, site.rounds, site.folder.parents[1] / EXPERIMENTS / experiment
    )


def lines(site: Site) -> list[dict[str, Any]]:
    path = site.folder.parents[1] / "ledger.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if "task" in line]


def refusal(site: Site) -> str:
    reply = reply_of(site, TaskData("handshake"))
    assert isinstance(reply, Abstain), reply
    recorded = (site.folder / "errors.jsonl").read_text().splitlines()[-1]
    return f"{reply.reason}: {json.loads(recorded)['message']}"


@pytest.mark.complete
def test_a_run_spends_its_epsilon_and_no_exact_number_leaves(tiny: Any) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=2))
    server = federation.run("one")
    site: Site = federation.sites("one")["alpha"]
    count, info, *rounds = lines(site)[:4]
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
    history = [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]
    assert all(line["sites"]["alpha"].get("train_loss") is None for line in history)
    notes = noted(server)
    assert any("alpha trains with DP-SGD per patient, for ε = 8 an experiment: ε ≤ " in n for n in notes)
    assert any("not of validation and test patients" in n for n in notes)

    found = state_of(
        Ledger(site.folder.parents[1] / "ledger.jsonl", site.config.privacy), site.config.privacy
    )
    assert found.spent.epsilon is not None
    assert found.spent.epsilon <= 8
    assert f"{2 * steps} steps, σ {sigma:.3g}, q {4 / patients:.2g}" == found.lines[0].steps

    # Another round than those that were planned has no ε left.
    longer = protected(tiny(METHOD, ALPHA, rounds=3))
    again = Site("alpha", longer.configs["alpha"], site.plan, 3, site.folder)
    task = replace(first_task(longer), round=3)
    reply = reply_of(again, task)
    assert isinstance(reply, Abstain)
    assert reply.reason == "budget"


def first_task(federation: Any) -> TaskData:
    server = federation.server("server")
    server.handshake(["alpha"])
    info = federation.sites("elsewhere")["alpha"].answer(TaskData("handshake")).packed
    server.collector.receive("alpha", info)
    server.begin({})
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    return replace(task, ledger=None)


@pytest.mark.complete
def test_the_same_task_has_the_same_bytes_and_a_lost_state_costs_again(tiny: Any) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=8), max_epsilon=30.0)
    task, site = first_task(federation), site_of(federation, "own")
    first = reply_of(site, task)
    assert isinstance(first, Update)
    assert first.train_loss is None
    assert first.spent is not None
    assert first.spent.epsilon is not None
    again = reply_of(site_of(federation, "own"), task)
    assert isinstance(again, Update)
    assert all(t.equal(again.head[name]) for name, t in first.head.items())
    own = [line for line in lines(site) if line["experiment"] == "own" and line["task"] == "train"]
    assert len(own) == 1
    shutil.rmtree(site.folder / "rounds", ignore_errors=True)
    for path in site.folder.glob("**/round-*.safetensors"):
        if "answers" not in path.parts:
            path.unlink()
    third = reply_of(site_of(federation, "own"), task)
    assert isinstance(third, Update)
    assert all(t.equal(third.head[name]) for name, t in first.head.items())
    own = [line for line in lines(site) if line["experiment"] == "own" and line["task"] == "train"]
    assert [line["answer"] == "" for line in own] == [False, True]
    assert own[0]["steps"] == own[1]["steps"]


def trained_lines(site: Site) -> list[dict[str, Any]]:
    return [
        line for line in lines(site) if line["experiment"] == site.folder.name and line["task"] == "train"
    ]


@pytest.mark.complete
def test_a_model_that_diverges_after_noisy_steps_costs_them(tiny: Any) -> None:
    """A job whose models overflow by the sign of a gradient would read one bit of new noise each time."""
    overflow = replace(METHOD, local=replace(METHOD.local, lr=1e38, optimiser="sgd", iterations=50))
    federation = protected(tiny(overflow, ALPHA, rounds=2))
    task, site = first_task(federation), site_of(federation, "own")
    replies = [reply_of(site, task) for _ in range(4)]
    assert [r.reason for r in replies] == ["non_finite_loss"] * 2 + ["budget"] * 2
    spent = trained_lines(site)
    assert [line["answer"] for line in spent] == ["", ""]
    assert all(line["steps"] and not line["update"] for line in spent)


@pytest.mark.complete
def test_a_failure_of_any_kind_after_steps_costs_them(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=2))
    task, site = first_task(federation), site_of(federation, "own")

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("a large batch was drawn")

    monkeypatch.setattr("suture.learning.dp_sgd.PatientPrivacy.step", full)
    assert reply_of(site, task).reason == "out_of_memory"
    assert [line["answer"] for line in trained_lines(site)] == [""]


def test_an_aborted_round_from_which_nothing_left_costs_nothing(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=2))
    task, site = first_task(federation), site_of(federation, "own")

    def aborted(*_: Any) -> Any:
        raise Aborted("the job was aborted")

    with monkeypatch.context() as patch:
        patch.setattr("suture.learning.dp_sgd.PatientPrivacy.step", aborted)
        with pytest.raises(Aborted):
            site.answer(task)
    assert not trained_lines(site)
    assert isinstance(reply_of(site, task), Update)


@pytest.mark.complete
@pytest.mark.parametrize("how", ["train", "evaluate", "calibrate"])
def test_a_state_whose_answer_a_crash_kept_back_costs_once_it_is_used(
    how: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that ends jobs at that moment would get figures, or rounds, of models without ε."""
    federation = protected(tiny(METHOD, ALPHA, rounds=3))
    task, site = first_task(federation), site_of(federation, "own")

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.releases, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            site.answer(task)
    assert not trained_lines(site)
    site.close()
    again = site_of(federation, "own")
    later = replace(task, task=how, round=2 if how == "train" else 1, committed=1)
    assert not isinstance(reply_of(again, later), Abstain)
    assert [(line["round"], line["answer"] == "") for line in trained_lines(again)][:1] == [(1, True)]
    if how == "evaluate":  # once
        assert not isinstance(reply_of(again, replace(later, split="test")), Abstain)
        assert len(trained_lines(again)) == 1


@pytest.mark.complete
@pytest.mark.parametrize("change", ["another model", "other rounds", "another rate", "larger batches"])
def test_a_server_that_changes_task_or_job_gets_no_more_than_epsilon(change: str, tiny: Any) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=2))
    task, site = first_task(federation), site_of(federation, "own")
    assert isinstance(reply_of(site, task), Update)
    site.close()
    local, rounds = METHOD.local, 2
    if change == "another rate":
        local = replace(local, lr=0.5)
    if change == "larger batches":
        local = replace(local, batch_size=8)
    other = protected(tiny(replace(METHOD, local=local), ALPHA, rounds=9 if change == "other rounds" else 2))
    rounds = 9 if change == "other rounds" else 2
    for attempt in range(6):
        head = {name: tensor + attempt + 1 for name, tensor in task.head.items()}
        again = Site("alpha", other.configs["alpha"], other.sites("x")["alpha"].plan, rounds, site.folder)
        reply_of(again, replace(task, head=head, round=1 + attempt % rounds))
        again.close()
    stated = state_of(
        Ledger(site.folder.parents[1] / "ledger.jsonl", site.config.privacy), site.config.privacy
    )
    found = compose(
        [
            Mechanism(line["multiplier"], line["rate"], line["steps"])
            for line in lines(site)
            if line["steps"] and line["experiment"] == "own"
        ],
        1e-5,
    )
    assert found is not None
    assert found <= 8
    assert stated.spent.unprotected == 0
    assert len(trained_lines(site)) <= 2


def test_a_changed_epsilon_holds_from_the_next_answer_on(tiny: Any) -> None:
    federation = protected(tiny(METHOD, ALPHA, rounds=2))
    task, site = first_task(federation), site_of(federation, "own")
    assert isinstance(reply_of(site, task), Update)
    sigma = site.releases.first_counts.multiplier
    site.close()
    larger = site_of(protected(federation, epsilon=40.0), "own")
    larger.releases.plan_privacy(())
    assert larger.releases.first_counts.multiplier == sigma
    smaller = site_of(protected(federation, epsilon=1.0), "own")
    assert reply_of(smaller, replace(task, round=2, committed=1)).reason == "budget"
    assert len(trained_lines(site)) == 1


@pytest.mark.complete
def test_the_number_of_patients_is_sent_once_with_noise(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # With too few patients for a batch, as noise may have it, there would be no answer.
    monkeypatch.setattr("suture.federation.site.store.gaussian", lambda shape: gaussian(shape).abs())
    monkeypatch.setattr("suture.federation.site.store.planned_multiplier", lambda *_: 20.0)
    federation = protected(tiny(METHOD, ALPHA), epsilon=1.0)
    site, told = site_of(federation, "one"), set()
    for _ in range(2):
        info = reply_of(site, TaskData("handshake"))
        assert isinstance(info, SiteInfo)
        assert info.protection == {"clip": 1.0, "epsilon": 1.0, "delta": 1e-5}
        told.add(info.n["train"])
    assert len(told) == 1
    assert sum(line["steps"] for line in lines(site)) == 1
    others = {reply_of(site_of(federation, f"{i}"), TaskData("handshake")).n["train"] for i in range(4)}
    assert len(others) > 1


@pytest.mark.complete
def test_max_epsilon_holds_across_experiments(tiny: Any) -> None:
    federation = protected(tiny(METHOD, ALPHA), max_epsilon=9.0)
    federation.run("one")
    text = refusal(site_of(federation, "two"))
    assert text.startswith("budget: this site has already released ")
    assert "max_epsilon = 9.0" in text
    assert "budget: " in refusal(site_of(protected(federation, max_epsilon=0.1), "three"))


@pytest.mark.parametrize(
    ("method", "config", "says"),
    [
        (FedAvg(), {}, "FedAvg .* choose a method that docs/protection.md names"),
        (METHOD, {"training": {"amp": True}}, "remove amp and compile under"),
        (METHOD, {"training": {"compile": "kernels"}}, "remove amp and compile under"),
        (METHOD, {"augmentation": MILD}, "remove the job's augmentation"),
    ],
)
def test_what_mixes_patients_is_refused(method: Any, config: dict[str, Any], says: str, tiny: Any) -> None:
    federation = protected(tiny(method, ALPHA))
    site = federation.sites()["alpha"]
    plan, own = site.plan, site.config
    if "augmentation" in config:
        frozen = replace(plan.model, train="head", weights="random")
        plan = replace(plan, augmentation=MILD, model=frozen)
    if "training" in config:
        own = own.model_copy(update={"training": own.training.model_copy(update=config["training"])})
    with pytest.raises(ConfigError, match=f"alpha: .privacy. epsilon protects each patient, but .*{says}"):
        check_protected("alpha", plan, own)


def test_a_job_that_the_site_cannot_protect_is_refused_before_the_first_round(tiny: Any) -> None:
    plain = replace(METHOD, batch_norm="average")
    assert "configuration: [privacy] epsilon: the batch norm backbone" in refusal(
        site_of(protected(tiny(plain, ALPHA)), "norm")
    )
    large = replace(METHOD, local=LocalTraining(batch_size=4_000))
    assert "a batch has 4000 patients, and the site about" in refusal(
        site_of(protected(tiny(large, ALPHA)), "large")
    )
    many = replace(METHOD, local=LocalTraining(batch_size=4, iterations=1_000_000))
    assert "needs noise of more than 100 times clip" in refusal(
        site_of(protected(tiny(many, ALPHA), epsilon=0.05), "many")
    )


@pytest.mark.parametrize(
    ("length", "steps"), [({"epochs": 2}, 6), ({"iterations": 5}, 5), ({"epochs": 0}, 0)], ids=str
)
def test_the_steps_of_a_round_are_those_of_its_epochs(length: dict[str, int], steps: int, tiny: Any) -> None:
    """Of 9 patients 4 a step: an epoch has 9 / 4, rounded up."""
    method = replace(METHOD, local=LocalTraining(batch_size=4, **length))  # type: ignore[arg-type]
    site = protected(tiny(method, ALPHA)).sites()["alpha"]
    found = mechanism_of_round(site.plan, site.config, 2, 1, 9, 1.0)
    assert (found.rate, found.steps) == (4 / 9, steps)


def test_a_class_aware_phase_is_refused(tiny: Any) -> None:
    aware = replace(METHOD, local=LocalTraining(batch_size=4, sampling="class_aware"))
    site = protected(tiny(aware, ALPHA)).sites()["alpha"]
    with pytest.raises(ConfigError, match=r"samples classes .*shuffled"):
        mechanism_of_round(site.plan, site.config, 2, 1, 20)


@pytest.mark.complete
def test_a_personal_head_is_protected_too(tiny: Any) -> None:
    method = PersonalisedFL(local=METHOD.local, batch_norm="frozen")
    federation = protected(tiny(method, ALPHA, rounds=1))
    federation.run("one")
    site = federation.sites("one")["alpha"]
    assert [line["steps"] > 0 for line in lines(site) if line["task"] == "train"] == [True]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"epsilon": 4, "noise": 1.0, "clip": 1.0}, "epsilon and noise exclude each other"),
        ({"epsilon": 0}, "greater than 0"),
        ({"epsilon": True}, "valid number"),
        ({"epsilon": "4"}, "valid number"),
        ({"noise": "2", "clip": 1}, "valid number"),
        ({"clip": True}, "valid number"),
        ({"delta": "0.1"}, "valid number"),
        ({"epsilon": 4, "max_epsilon": True}, "valid number"),
        ({"epsilon": 1e-3}, "epsilon = 0.001 must be between 0.01 and 50"),
        ({"epsilon": 4, "delta": 1e-12}, "must be at least 1e-10 with epsilon"),
        ({"max_epsilon": 4}, "needs epsilon, or clip and noise"),
        ({"epsilon": 4, "max_epsilon": 3.9}, r"max_epsilon = 3.9 is below epsilon = 4, so .* raise max_eps"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PrivacyConfig(**values)


def test_epsilon_clips_gradients_to_one_unless_it_is_set() -> None:
    assert PrivacyConfig(epsilon=4).protection == {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5}
    assert PrivacyConfig(epsilon=4, clip=0.5, max_epsilon=8).clip == 0.5
    assert PrivacyConfig(epsilon=4, max_epsilon=4).max_epsilon == 4  # of one experiment


def test_the_report_names_what_epsilon_covers() -> None:
    own = {"a": {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5}}
    (text,) = describe_spent(own, {"a": Spent(3.99, 10, 0, 1, 5, 7)})
    assert "ε ≤ 3.99 at δ = 1e-05 over all its 10 updates in 1 experiment" in text
    assert "per training patient, of whom a step draws one image; not of validation" in text
