"""A site's answers when its data, its memory or its configuration fail it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rounds import configured, reply_of
from suture.data.batch import Batch
from suture.data.config import TrainingConfig
from suture.federation.loop import Loop, federate
from suture.federation.server.collector import UpdateCollector
from suture.federation.site import diagnostics as compiling
from suture.federation.site.site import Site
from suture.learning import training
from suture.learning.training import LocalTraining, check_memory
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.protocol.messages import Abstain, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, digest, pack, save, unpack
from suture_papers.metafl.fl import FL
from suture_papers.metafl.metafl import MetaFL
from suture_papers.metafl.pmfl import PMFL

LOCAL = LocalTraining(lr=1e-2, batch_size=8)
METHOD = SurgicalAggregation(local=LOCAL)


@pytest.fixture
def site(tiny: Any) -> Site:
    return tiny(METHOD).sites()["alpha"]  # type: ignore[no-any-return]


def errors(site: Site) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site.folder / "errors.jsonl").read_text().splitlines()]


def test_introduces_itself_with_its_own_labels_only(site: Site) -> None:
    info = reply_of(site, TaskData("handshake"))
    assert isinstance(info, SiteInfo)
    assert info.labels == ("Mass", "Nodule")
    assert info.n == {"train": 15, "validation": 5, "test": 5}


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda table: table.write_text("image,patient,split\n000.png,p,train\n"), "labels"),
        (lambda table: table.write_text(""), "data_fault"),
        (lambda table: table.write_text(table.read_text().replace("patient", "person", 1)), "data_fault"),
        (lambda table: table.write_text(table.read_text().replace("Nodule", "Mass", 1)), "labels"),
        (lambda table: [p.write_bytes(b"x") for p in (table.parent / "images").iterdir()], "data_fault"),
    ],
    ids=["no label", "empty file", "missing column", "duplicate label", "unreadable images"],
)
def test_bad_data_is_an_abstention_and_the_whole_story_stays_at_the_site(
    break_it: Any, reason: str, site: Site
) -> None:
    break_it(site.config.data.table)
    answer = reply_of(site, TaskData("handshake"))
    assert isinstance(answer, Abstain)
    assert answer.reason == reason
    assert "/" not in answer.error
    assert errors(site)[0]["message"]


def test_memory_and_loss_that_is_no_number(site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _train_task(tiny)

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("suture.methods.averaging.fit", out_of_memory)
    answer = reply_of(site, task)
    assert isinstance(answer, Abstain)
    assert answer.reason == "out_of_memory"
    monkeypatch.undo()
    huge = replace(task, shared={k: t * 1e30 for k, t in task.shared.items()})
    answer = reply_of(site, huge)
    assert isinstance(answer, Abstain)
    assert answer.reason == "non_finite_loss"
    assert "diverged" in errors(site)[-1]["message"]


@pytest.mark.parametrize(
    "method", [METHOD, PersonalisedFL(local=LOCAL), PersonalisedFL(local=LOCAL, batch_norm="local")]
)
def test_a_round_with_a_broken_step_leaves_nothing_behind(
    method: Method, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN reaches the weights, the statistics of batch norm and the moments, and further steps follow."""
    task = _train_task(tiny, method)
    second = replace(task, round=2, committed=1)
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

    monkeypatch.setattr(training, "training_batches", break_the_first)
    answer = reply_of(two, second)
    assert isinstance(answer, Abstain)
    assert answer.reason == "non_finite_loss"
    assert "alpha: the loss of round 2, step 1 is nan" in errors(two)[-1]["message"]
    assert len(taken) > 1
    assert {p: p.read_bytes() for p in two.states.files.folder.glob("*.safetensors")} == files
    monkeypatch.undo()
    assert said(one, second) == said(two, second)


@pytest.mark.complete
@pytest.mark.parametrize(("backend", "used"), [("eager", True), ("none such", False)])
def test_a_backbone_is_compiled_once_or_the_site_abstains(
    backend: str, used: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, plain = _train_task(tiny), tiny(METHOD).sites("plain")["alpha"]
    compiled = plain.config.training.model_copy(update={"compile": "kernels"})
    config = plain.config.model_copy(update={"training": compiled})
    site = Site("alpha", config, plain.plan, plain.rounds, plain.folder.parent / "compiled" / "run")
    monkeypatch.setattr(compiling, "OPTIONS", {"kernels": {"backend": backend}})
    answer = reply_of(site, task)
    if used:
        assert said(site, task) == said(plain, task)
        monkeypatch.setattr(compiling, "OPTIONS", {})  # looked at again, it would fail
        assert isinstance(reply_of(site, replace(task, round=2, committed=1)), Update)
    else:
        assert isinstance(answer, Abstain)
        assert answer.reason == "configuration"
        assert "alpha: the backbone cannot be compiled here" in errors(site)[-1]["message"]


def test_a_batch_beyond_the_gpu_is_told_before_the_first_step(
    site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site tries half the batch by itself, so that is what has to fit."""
    sizes = []

    def check(*args: Any) -> None:
        sizes.append(args[3])
        check_memory(*args, free=0)

    monkeypatch.setattr("suture.federation.site.site.check_memory", check)
    answer = reply_of(site, _train_task(tiny))
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert "alpha: a step of 4 images needs at least" in errors(site)[-1]["message"]
    assert sizes == [4]


def said(site: Site, task: TaskData) -> str:
    """The digest of an answer, without that of the ledger, which is salted."""
    answer: Any = reply_of(site, task)
    return digest(pack(replace(answer, ledger=None)))


def _train_task(tiny: Any, method: Method = METHOD) -> TaskData:
    from suture.protocol.packing import unpack

    federation = tiny(method)
    server = federation.server("tasks")
    asked = server.handshake(["alpha"])
    server.collector.receive("alpha", _packed(federation.sites("tasks")["alpha"], asked["alpha"]))
    server.begin({})
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    return replace(task, ledger=None)  # that of the site that has answered


def _packed(site: Site, packed: Any) -> Any:
    from suture.protocol.packing import unpack

    task = unpack(packed)
    assert isinstance(task, TaskData)
    return site.answer(task).packed


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"threads": 2}, "threads was 1 in earlier rounds and is 2 now"),
        ({"amp": True}, "precision was float32 in earlier rounds and is bf16 now"),
        ({"amp": True, "half": "fp16"}, "precision was float32 in earlier rounds and is fp16 now"),
        ({"compile": "kernels"}, "compile was no in earlier rounds and is kernels now"),
        ({"device": "cuda:0"}, "device was cpu in earlier rounds and is cuda now"),
    ],
)
def test_what_gives_other_sums_is_refused(
    site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch, now: dict[str, Any], what: str
) -> None:
    monkeypatch.setattr("suture.federation.site.site.check_device", lambda *_: None)
    task = _train_task(tiny)
    site.answer(task)
    training = site.config.training.model_copy(update=now)
    changed = site.config.model_copy(update={"training": training})
    again = Site(site.name, changed, site.plan, site.rounds, site.folder)
    answer = reply_of(again, replace(task, round=2, committed=1))
    assert isinstance(answer, Abstain)
    assert answer.reason == "computation"
    assert what in errors(site)[-1]["message"]


def in_fp16(site: Site) -> Site:
    return configured(site, training={"amp": True, "half": "fp16"})


@pytest.mark.parametrize("factor", [1e-3, 4e2, 1e4])
def test_a_round_of_few_steps_in_fp16_finds_its_scale(
    factor: float, site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first scale, of 65536, each of its steps would be skipped."""
    monkeypatch.setattr(SurgicalAggregation, "loss", lambda *given: factor * given[1].sum())
    task = _train_task(tiny)
    answer = reply_of(in_fp16(site), task)
    assert isinstance(answer, Update)
    assert not torch.equal(answer.head["head.weight"], task.head["head.weight"])
    kept = site.states.files.newest(not_later_than=1)
    assert kept is not None
    scale = kept[1].tensors["optimiser/loss scale/scale"].item()
    assert (scale == 2.0**16) == (factor < 1)


def test_a_round_without_a_step_in_fp16_is_an_abstention(
    site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SurgicalAggregation, "loss", lambda *given: (given[1] * 0).sum().sqrt())
    answer = reply_of(in_fp16(site), _train_task(tiny))
    assert isinstance(answer, Abstain)
    assert answer.reason == "gradient_overflow"
    assert "every step was skipped; set half" in errors(site)[-1]["message"]
    assert site.states.files.newest(not_later_than=1) is None


def test_the_number_of_a_gpu_may_change() -> None:
    one, two = (TrainingConfig(device=f"cuda:{i}").computation for i in range(2))
    assert one == two == TrainingConfig(device="cuda").computation


def test_other_code_is_refused(site: Site, tiny: Any) -> None:
    task = _train_task(tiny)
    site.answer(task)
    other = Site(site.name, site.config, replace(site.plan, code="another"), site.rounds, site.folder)
    for asked in (
        TaskData("handshake"),
        task,
        replace(task, task="evaluate", round=0),
    ):
        answer = reply_of(other, asked)
        assert isinstance(answer, Abstain)
        assert answer.reason == "code_mismatch"


def test_a_server_that_leaves_out_the_handshake_gets_no_further(tiny: Any) -> None:
    """A site that shows its own class names only trains no method that shows all."""
    federation = tiny(METHOD, view="own")
    task = _train_task(tiny)
    plan = replace(federation.plan, method=VanillaFL(local=METHOD.local))
    site = Site("alpha", federation.configs["alpha"], plan, 2, federation.folder / "skipped")
    answer = reply_of(site, task)
    assert isinstance(answer, Abstain)
    assert answer.reason == "label_view"
    assert not site.states.files.rounds()


def test_a_bug_is_not_hidden_as_an_abstention(site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _train_task(tiny)

    def bug(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("suture.methods.averaging.fit", bug)
    with pytest.raises(ZeroDivisionError):
        site.answer(task)
    assert errors(site)[-1]["error"] == "ZeroDivisionError"


def test_small_counts_are_withheld(tiny: Any) -> None:
    federation = tiny(METHOD)
    config = federation.configs["alpha"]
    strict = config.model_copy(update={"privacy": config.privacy.model_copy(update={"min_count": 100})})
    site = Site("alpha", strict, federation.plan, 2, Path(federation.folder) / "x")
    task = _train_task(tiny)
    answer = reply_of(site, replace(task, task="evaluate", round=0, split="test"))
    classes = answer.metrics.classes  # type: ignore[union-attr]
    assert {score.auroc for score in classes.values()} == {None}
    assert {score.positives for score in classes.values()} == {None}


def sent(tiny: Any, method: Any, min_loss: int) -> Update:
    """What site alpha, with 15 images to train on, says of a round; as the server accepts it."""
    federation = tiny(method)
    config = federation.configs["alpha"]
    privacy = config.privacy.model_copy(update={"min_loss": min_loss})
    federation.configs["alpha"] = config.model_copy(update={"privacy": privacy})
    out = f"over-{min_loss}"
    sites, server = federation.sites(out), federation.server(out)
    site = sites["alpha"]
    answers = {"alpha": site, "beta": sites["beta"]}
    for name, packed in server.handshake(list(answers)).items():
        server.collector.receive(name, answers[name].answer(unpack(packed)).packed)
    server.begin({})
    task = unpack(server.assign()["alpha"])
    update = reply_of(site, task)
    server.collector.receive("alpha", pack(update))
    assert server.collector.lines["alpha"].status == "accepted"
    return update  # type: ignore[no-any-return]


STEPS = replace(METHOD, local=LocalTraining(lr=1e-2, batch_size=4, iterations=2))


@pytest.mark.parametrize(("method", "samples"), [(METHOD, 15), (STEPS, 8), (FL(batches=3), 2)])
def test_a_training_loss_over_too_few_samples_is_withheld(method: Any, samples: int, tiny: Any) -> None:
    """All that a site trains on, what its few steps can have seen, or half a batch."""
    assert sent(tiny, method, samples).train_loss is not None
    assert sent(tiny, method, samples + 1).train_loss is None


@pytest.mark.parametrize("method", [MetaFL(batches=2), PMFL(batches=2)])
def test_losses_on_half_a_batch_are_withheld_where_it_is_small(method: Any, tiny: Any) -> None:
    """Of 15 images in two batches of 7 the support half has 3."""
    enough, few = sent(tiny, method, 3), sent(tiny, method, 4)
    assert enough.scalars.keys() == {"query_loss"}
    assert enough.train_loss is not None
    assert (few.scalars, few.train_loss) == ({}, None)
    assert all(torch.equal(t, few.shared[name]) for name, t in enough.shared.items())


def of_the_cpu() -> RuntimeError:
    """What torch raises where the memory of a CPU is full."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("full", [MemoryError("no more"), of_the_cpu()], ids=["Python", "torch on a CPU"])
def test_a_full_memory_halves_the_batch_once(
    full: Exception, site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    train = SurgicalAggregation.train

    def hungry(self: Any, context: Any, *rest: Any) -> Any:
        seen.append(context.batch_size or 8)
        if seen[-1] > 4:
            raise full
        return train(self, context, *rest)

    monkeypatch.setattr(SurgicalAggregation, "train", hungry)
    assert isinstance(reply_of(site, _train_task(tiny)), Update)
    assert seen == [8, 4]


def test_a_memory_that_is_too_small_is_an_abstention_and_another_error_a_bug(
    site: Site, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Exception] = []

    def fails(*_: Any) -> None:
        raised.append(error)
        raise error

    monkeypatch.setattr(SurgicalAggregation, "train", fails)
    task, error = _train_task(tiny), of_the_cpu()
    answer = reply_of(site, task)
    assert isinstance(answer, Abstain)
    assert (answer.reason, answer.error, len(raised)) == ("out_of_memory", "RuntimeError", 2)
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        site.answer(task)
    assert len(raised) == 3


def test_a_state_of_another_version_is_an_abstention_that_says_what_to_do(site: Site, tiny: Any) -> None:
    task = _train_task(tiny)
    header = {"threads": 1, "labels": list(task.labels), "phase": "main", "round": 1}
    site.folder.mkdir(parents=True)
    save(site.states.files.path(1), Packed({"optimiser/step": torch.ones(1)}, header))
    answer = reply_of(site, replace(task, round=2, committed=1))
    assert isinstance(answer, Abstain)
    assert answer.reason == "configuration"
    assert "written by another version of suture" in errors(site)[-1]["message"]
    assert "or begin a new one" in errors(site)[-1]["message"]


def test_a_job_of_another_version_is_an_abstention_that_says_what_to_do(site: Site) -> None:
    other = Site(site.name, site.config, replace(site.plan, code="0123456789abcdef"), 2, site.folder)
    answer = reply_of(other, TaskData("handshake"))
    assert isinstance(answer, Abstain)
    assert answer.reason == "code_mismatch"
    assert "0123456789abcdef" in errors(site)[-1]["message"]


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
