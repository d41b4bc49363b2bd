"""A site's answers when its data, its memory or its configuration fail it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import METHOD, abstains, begun, complaint, first_task, limited

from one_step import equal
from rounds import configured, reply_of
from suture.data.batch import Batch
from suture.data.config import TrainingConfig
from suture.federation.loop import Loop, federate
from suture.federation.server.collector import UpdateCollector
from suture.federation.site import trainer as compiling
from suture.federation.site.site import Site
from suture.learning import training
from suture.learning.training import LocalTraining, check_memory
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, digest, pack, save
from suture_papers.metafl.fl import FL
from suture_papers.metafl.metafl import MetaFL
from suture_papers.metafl.pmfl import PMFL

LOCAL = METHOD.local


@pytest.fixture
def site(tiny: Any) -> Site:
    return tiny(METHOD).sites()["alpha"]  # type: ignore[no-any-return]


@pytest.fixture
def task(tiny: Any) -> TaskData:
    return first_task(tiny(METHOD))


def next_of(task: TaskData) -> TaskData:
    return replace(task, round=2, committed=1)


def said(site: Site, task: TaskData) -> str:
    """The digest of an answer, without that of the ledger, which is salted."""
    answer: Any = reply_of(site, task)
    return digest(pack(replace(answer, ledger=None)))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda table: table.write_text("image,patient,split\n000.png,p,train\n"), "labels"),
        (lambda table: table.write_text(""), "data_fault"),
        (lambda table: table.write_text(table.read_text().replace("Nodule", "Mass", 1)), "labels"),
        (lambda table: [p.write_bytes(b"x") for p in (table.parent / "images").iterdir()], "data_fault"),
    ],
    ids=["no label", "empty file", "duplicate label", "unreadable images"],
)
def test_bad_data_is_an_abstention_and_the_whole_story_stays_at_the_site(
    break_it: Any, reason: str, site: Site
) -> None:
    table = site.config.data.table
    break_it(table)
    answer = abstains(site, TaskData("handshake"), reason)
    assert "/" not in answer.error
    assert complaint(site)


def test_memory_and_loss_that_is_no_number(
    site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("suture.methods.averaging.fit", out_of_memory)
        abstains(site, task, "out_of_memory")
    huge = replace(task, shared={k: t * 1e30 for k, t in task.shared.items()})
    abstains(site, huge, "non_finite_loss", "diverged")


@pytest.mark.parametrize(
    "method", [METHOD, PersonalisedFL(local=LOCAL), PersonalisedFL(local=LOCAL, batch_norm="local")]
)
def test_a_round_with_a_broken_step_leaves_nothing_behind(
    method: Method, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN reaches the weights, the statistics of batch norm and the moments, and further steps follow."""
    task = first_task(tiny(method))
    one, two = (tiny(method).sites(name)["alpha"] for name in ("whole", "broken"))
    assert said(one, task) == said(two, task)
    before = training.training_batches
    files = {p: p.read_bytes() for p in two.states.files.folder.glob("*.safetensors")}
    taken: list[Batch] = []

    def break_the_first(*of: Any) -> Iterator[Batch]:
        for batch in before(*of):
            taken.append(batch)
            image = batch.inputs["image"] * (float("nan") if len(taken) == 1 else 1.0)
            yield replace(batch, inputs={"image": image})

    with monkeypatch.context() as patch:
        patch.setattr(training, "training_batches", break_the_first)
        abstains(two, next_of(task), "non_finite_loss", "alpha", "round 2, step 1")
    assert len(taken) > 1
    assert {p: p.read_bytes() for p in two.states.files.folder.glob("*.safetensors")} == files
    assert said(one, next_of(task)) == said(two, next_of(task))


@pytest.mark.complete
def test_a_backbone_is_compiled_once_or_the_site_abstains(
    task: TaskData, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled, other = (tiny(METHOD).sites(name)["alpha"] for name in ("plain", "compiled", "other"))
    site, other = (configured(one, training={"compile": "kernels"}) for one in (compiled, other))
    monkeypatch.setattr(compiling, "OPTIONS", {"kernels": {"backend": "eager"}})
    assert said(site, task) == said(plain, task)
    monkeypatch.setattr(compiling, "OPTIONS", {})  # looked at again, it would fail
    assert isinstance(reply_of(site, next_of(task)), Update)
    monkeypatch.setattr(compiling, "OPTIONS", {"kernels": {"backend": "none such"}})
    abstains(other, task, "configuration", "alpha", "backbone")


def test_a_batch_beyond_the_gpu_is_told_before_the_first_step(
    site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site tries half the batch by itself, so that is what has to fit."""
    sizes = []

    def check(*args: Any) -> None:
        sizes.append(args[3])
        check_memory(*args, free=0)

    monkeypatch.setattr("suture.federation.site.trainer.check_memory", check)
    abstains(site, task, "configuration", "alpha", "4 images")
    assert sizes == [4]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"threads": 2}, ("threads", "1", "2")),
        ({"amp": True}, ("precision", "float32", "bf16")),
        ({"compile": "kernels"}, ("compile", "no", "kernels")),
        ({"device": "cuda:0"}, ("device", "cpu", "cuda")),
    ],
)
def test_what_gives_other_sums_is_refused(
    now: dict[str, Any], named: tuple[str, ...], site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suture.federation.site.site.check_device", lambda *_: None)
    site.answer(task)
    abstains(configured(site, training=now), next_of(task), "computation", *named)


def test_the_number_of_a_gpu_may_change() -> None:
    one, two = (TrainingConfig(device=f"cuda:{i}").computation for i in range(2))
    assert one == two == TrainingConfig(device="cuda").computation


@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_a_round_of_few_steps_in_fp16_finds_its_scale(
    factor: float, site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first scale, of 65536, each of its steps would be skipped."""
    monkeypatch.setattr(SurgicalAggregation, "loss", lambda *given: factor * given[1].sum())
    answer = reply_of(configured(site, training={"amp": True, "half": "fp16"}), task)
    assert isinstance(answer, Update)
    assert not torch.equal(answer.head["head.weight"], task.head["head.weight"])
    kept = site.states.files.newest(not_later_than=1)
    assert kept is not None
    scale = kept[1].tensors["optimiser/loss scale/scale"].item()
    assert (scale == 2.0**16) == (factor < 1)


def test_a_round_without_a_step_in_fp16_is_an_abstention(
    site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SurgicalAggregation, "loss", lambda *given: (given[1] * 0).sum().sqrt())
    halves = configured(site, training={"amp": True, "half": "fp16"})
    abstains(halves, task, "gradient_overflow", "half")
    assert site.states.files.newest(not_later_than=1) is None


def test_other_code_is_refused(site: Site, task: TaskData) -> None:
    """Whatever is asked first."""
    plan = replace(site.plan, code="0123456789abcdef")
    for asked in (TaskData("handshake"), task, replace(task, task="evaluate", round=0)):
        other = Site(site.name, site.config, plan, site.rounds, site.folder)
        abstains(other, asked, "code_mismatch", "0123456789abcdef")


def test_a_server_that_leaves_out_the_handshake_gets_no_further(tiny: Any) -> None:
    """A site that shows its own class names only trains no method that shows all."""
    federation = tiny(METHOD, view="own")
    task = first_task(federation)
    plan = replace(federation.plan, method=VanillaFL(local=LOCAL))
    site = Site("alpha", federation.configs["alpha"], plan, 2, federation.folder / "skipped")
    abstains(site, task, "label_view")
    assert not site.states.files.rounds()


def test_a_bug_is_not_hidden_as_an_abstention(
    site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by its own code")

    monkeypatch.setattr("suture.methods.averaging.fit", bug)
    with pytest.raises(ZeroDivisionError):
        site.answer(task)
    assert "by its own code" in complaint(site)


# What is withheld


def test_small_counts_are_withheld(site: Site, task: TaskData) -> None:
    strict = configured(site, privacy={"min_count": 100})
    scores = reply_of(strict, replace(task, task="evaluate", round=0, split="test")).metrics.classes
    assert {(score.auroc, score.positives) for score in scores.values()} == {(None, None)}


STEPS = replace(METHOD, local=LocalTraining(lr=1e-2, batch_size=4, iterations=2))


@pytest.mark.parametrize(
    ("method", "samples"),
    [(METHOD, 15), (STEPS, 8), (FL(batches=3), 2), (MetaFL(batches=2), 3), (PMFL(batches=2), 3)],
    ids=["all", "its few steps", "half a batch", "support of MetaFL", "support of PMFL"],
)
def test_a_training_loss_over_too_few_samples_is_withheld(method: Any, samples: int, tiny: Any) -> None:
    """All that a site trains on, what its few steps can have seen, or half a batch; the rest is the same."""
    updates = []
    for least in (samples, samples + 1):
        federation = limited(tiny(method), "alpha", min_loss=least)
        server, sites, tasks = begun(federation, f"over-{least}")
        updates.append(reply_of(sites["alpha"], tasks["alpha"]))
        server.collector.receive("alpha", pack(updates[-1]))
        assert server.collector.lines["alpha"].status == "accepted"
    enough, few = updates
    assert enough.train_loss is not None
    assert (few.train_loss, few.scalars) == (None, {})
    assert ("query_loss" in enough.scalars) == isinstance(method, (MetaFL, PMFL))
    assert equal(enough.shared, few.shared)


# Full memory


def of_the_cpu() -> RuntimeError:
    """What torch raises where the memory of a CPU is full."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("full", [MemoryError("no more"), of_the_cpu()], ids=["Python", "torch on a CPU"])
def test_a_full_memory_halves_the_batch_once(
    full: Exception, site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    train = SurgicalAggregation.train

    def hungry(self: Any, context: Any, *rest: Any) -> Any:
        seen.append(context.batch_size or 8)
        if seen[-1] > 4:
            raise full
        return train(self, context, *rest)

    monkeypatch.setattr(SurgicalAggregation, "train", hungry)
    assert isinstance(reply_of(site, task), Update)
    assert seen == [8, 4]


def test_a_memory_that_is_too_small_is_an_abstention_and_another_error_a_bug(
    site: Site, task: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Exception] = []

    def fails(*_: Any) -> None:
        raised.append(error)
        raise error

    monkeypatch.setattr(SurgicalAggregation, "train", fails)
    error: Exception = of_the_cpu()
    assert abstains(site, task, "out_of_memory").error == "RuntimeError"
    assert len(raised) == 2
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        site.answer(task)
    assert len(raised) == 3


def test_a_state_of_another_version_is_an_abstention(site: Site, task: TaskData) -> None:
    header = {"threads": 1, "labels": list(task.labels), "phase": "main", "round": 1}
    site.folder.mkdir(parents=True)
    save(site.states.files.path(1), Packed({"optimiser/step": torch.ones(1)}, header))
    abstains(site, next_of(task), "configuration", "another version")


@pytest.mark.complete
@pytest.mark.parametrize(
    "method",
    [SurgicalAggregation(local=LOCAL), FedAvg(local=LOCAL), PersonalisedFL(local=LOCAL)],
    ids=["own classes", "all class names", "a head that stays"],
)
def test_a_site_expects_of_its_answers_what_the_server_expects(
    method: Method, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's filter and the server's check are of one mind about every task of a run."""
    federation = tiny(method, rounds=2)
    sites, tasks = federation.sites(), []
    original = UpdateCollector.open

    def opened(self: UpdateCollector, assigned: Any) -> Any:
        tasks.append(dict(assigned))
        return original(self, assigned)

    monkeypatch.setattr(UpdateCollector, "open", opened)
    federate(federation.server(), Loop(sites))
    compared = [
        (sites[name]._allow(allowed.task), allowed)
        for assigned in tasks
        for name, allowed in assigned.items()
        if allowed.task.task != "handshake"
    ]
    assert len(compared) >= 2 * len(sites)
    for own, servers in compared:
        assert replace(own, limits=None, task=servers.task) == servers
        assert own.limits == federation.configs["alpha"].privacy
