"""Updates out of all proportion or direction, and merges that bear liars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import METHOD, Change, begun, events, exported, history, record, run
from torch import Tensor

from between import Between
from noted import noted
from rounds import conformant
from suture.core.errors import ConfigError, FederationError, RejectedUpdate
from suture.execution.job import load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.server import collector
from suture.federation.server import server as server_module
from suture.federation.server.collector import Receiver
from suture.federation.server.norms import Direction, Measure, NormBound, Norms, class_signs, cosines
from suture.flare.codec import from_shareable_, to_shareable
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.robust import robustly_merged
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import Labels, TaskData, TaskName, Update, ones
from suture.protocol.packing import VARIANCE, Packed, pack, unpack
from suture.protocol.records import read_history
from suture_papers.missing_labels.fedalign import FedAlign
from suture_results.notes import site_updates
from suture_results.report import write_report
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused


def test_norms_by_hand() -> None:
    received = TaskData("train", shared={"w": torch.tensor([3.0, 4.0])}, head={"b": torch.tensor([0.0])})
    update = Update(1, ("x",), {"w": torch.tensor([3.0, 6.0])}, {"b": torch.tensor([1.0])}, ones(("x",)))
    egress = Egress({}, {})
    assert Measure()(update, received, egress) == Norms(pytest.approx(5**0.5), 5.0)
    gradient = replace(update, kind="gradient")
    assert Measure()(gradient, received, egress) == Norms(pytest.approx(46**0.5), 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_several_blocks_leave_what_they_measure(dtype: torch.dtype) -> None:
    n = 2 * 2**15 + 3
    received = TaskData("train", shared={"w": torch.ones(n, dtype=dtype)})
    update = Update(1, (), {"w": torch.full((n,), 3.0, dtype=dtype)}, {}, ones(()))
    found = Measure()(update, received, Egress({}, {}))
    assert (found.update, found.model) == (pytest.approx(2 * n**0.5), pytest.approx(n**0.5))
    assert (update.shared["w"] == 3).all()
    assert (received.shared["w"] == 1).all()


def test_the_largest_floats_have_a_norm() -> None:
    received = TaskData("train", shared={"w": torch.full((4,), 3e38)})
    update = Update(1, (), {"w": torch.full((4,), -3e38)}, {}, ones(()))
    assert Measure()(update, received, Egress({}, {})).update == pytest.approx(1.2e39)


def fits(bound: NormBound, norms: Norms, site: str = "a") -> bool:
    try:
        bound.check(site, norms)
    except RejectedUpdate:
        return False
    return True


def test_limits_by_hand() -> None:
    bound = NormBound(10.0, initial=2.0)
    assert fits(bound, Norms(20.0, 1.0))
    assert fits(bound, Norms(40.0, 4.0))
    with refused("41", "10", "4", "max_update", by=RejectedUpdate):
        bound.check("a", Norms(41.0, 4.0))
    assert fits(replace(bound, factor=None), Norms(1e9, 4.0))
    later = bound.after({"a": Norms(0.1, 1.0), "b": Norms(0.2, 1.0), "c": Norms(0.3, 1.0)})
    assert fits(later, Norms(2.0, 1.0)), "the median of all is .2"
    assert not fits(later, Norms(2.1, 1.0))
    assert fits(later, Norms(3.0, 1.0), "c"), "its own is .3"
    assert fits(later, Norms(20.0, 1.0), "new")
    assert fits(later.in_phase("next"), Norms(20.0, 1.0))
    assert fits(later.after({"c": Norms(0.01, 1.0)}), Norms(3.0, 1.0), "c")


def test_channels_are_bounded_by_the_norm_of_the_whole_model() -> None:
    """Of what is trained 3, of the frozen encoder 4, so 5 together: ten times 5."""
    bound = NormBound(10.0, initial=3.0, encoder=4.0)
    sent = Norms(1.0, 1.0, {"means": 50.0})
    assert fits(bound, sent)
    with refused("means", "51", by=RejectedUpdate):
        bound.check("a", replace(sent, channels={"means": 51.0}))
    assert not fits(bound, replace(sent, update=31.0))
    later = bound.after(
        {
            site: replace(sent, channels={"means": own})
            for site, own in zip("pqr", (0.2, 0.3, 0.4), strict=True)
        }
    )
    assert fits(later, replace(sent, channels={"means": 3.0}), "p"), "the median is .3"
    assert not fits(later, replace(sent, channels={"means": 3.1}), "p")
    assert fits(later, replace(sent, channels={"means": 9.0}), "new")


def test_channels_of_one_scale_are_measured_by_hand() -> None:
    sent = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    update = Update(1, ("x", "y"), {}, {}, ones(("x", "y")), channels=sent)
    a = Channel("a", "up", (CLASSES,), range="alike")
    egress = Egress({}, {}, (a, Channel("b", "up", (CLASSES,), range=(0.0, 1.0))))
    assert Measure()(update, TaskData("train"), egress) == Norms(0.0, 0.0, {"a": 5.0})


def test_the_server_measures_what_is_frozen_of_the_encoder() -> None:
    """Its parameters, not its batch norm's statistics; a model that is trained as a whole has none."""
    with Trial(METHOD, replace(SMALL, train="head"), "multilabel") as trial:
        trial.payload("alpha")
        fixed = {n: t for n, t in trial.server.model.fixed.items() if n.startswith("backbone.")}
        assert any("running" in n for n in fixed)
        parameters = [float(t.square().sum()) for n, t in fixed.items() if "running" not in n]
        assert trial.server.state.bound.encoder == pytest.approx(sum(parameters) ** 0.5)
        assert trial.server.state.bound.encoder > 1
    with Trial(METHOD, SMALL, "multilabel") as trial:
        trial.payload("alpha")
        assert trial.server.state.bound.encoder == 0


def test_no_site_is_shut_out_by_what_others_or_itself_sent_before() -> None:
    """As of a stricter clip, or of colluders who send next to nothing: what the model outweighs is let in."""
    zeros = NormBound(10.0, initial=0.0).after({"b": Norms(1e-9, 0.0), "c": Norms(1e-9, 0.0)})
    assert fits(zeros, Norms(1.0, 1e-9)), "a model of zeros bounds nothing"
    assert fits(NormBound(10.0, initial=5.0), Norms(1.0, 1e-6)), "nor one that was shrunk"
    small = {site: {"": 0.001} for site in ("alpha", "beta", "gamma")}
    bound = NormBound(factor=100, initial=10.0, largest=small)
    assert fits(bound, Norms(9.9, 10.0), "alpha")
    assert not fits(bound, Norms(10.1, 10.0), "alpha")


def scaled(factor: float, who: Callable[[str, int], bool] = lambda site, _: site == "alpha") -> Change:
    """Who scales its change, in all that it sends, and in which round."""

    def change(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if not isinstance(update, Update) or not who(site, task.round):
            return answer
        base = {**task.shared, **task.head} if update.kind == "weights" else {}
        parts = {
            group: {name: of(name, tensor, base.get(name)) for name, tensor in getattr(update, group).items()}
            for group in ("shared", "head", "channels")
        }
        return pack(replace(update, **parts))

    def of(name: str, tensor: Tensor, base: Tensor | None) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        moved = tensor * factor if base is None else (tensor - base) * factor + base
        return moved.clamp_min(0) if name.endswith(VARIANCE) and base is not None else moved

    return change


def lose(since: int) -> Change:
    def lost(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if (site, task.task) == ("alpha", "train") and task.round >= since else answer

    return lost


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "factor", "since"), [("surgical", 1e3, 2), ("metafl", 1e3, 2), ("surgical", 1e5, 1)]
)
def test_an_update_a_thousand_times_too_large_costs_itself_alone(
    name: str, factor: float, since: int, tiny: Any
) -> None:
    """After an honest one, or the first; of a method that sends weights, and of one that sends gradients."""
    federation = tiny(conformant(name), rounds=3, min_sites=2, selection="last")
    lied = run(federation, "lied", scaled(factor, lambda site, number: site == "alpha" and number >= since))
    assert exported(lied) == exported(run(federation, "lost", lose(since)))
    reasons = [line["sites"]["alpha"]["reason"] for line in history(lied)[since - 1 :]]
    assert all("(max_update)" in reason for reason in reasons)


@pytest.mark.complete
def test_the_job_sets_the_bound(tiny: Any) -> None:
    federation = tiny(METHOD, rounds=1, min_sites=2, selection="last", max_update=None)
    assert history(run(federation, change=scaled(1e3)))[0]["sites"]["alpha"]["status"] == "accepted"


@pytest.mark.complete
@pytest.mark.parametrize("name", ["afl", "fedmlp", "metafl", "pfl"])
def test_two_of_three_who_send_next_to_nothing_take_nobody_out(name: str) -> None:
    """Of sums, prototypes, gradients, and no head."""
    method = conformant(name)
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=2) as trial:
        federate(trial.server, Between(trial.sites, scaled(1e-6, lambda site, _: site != "alpha")))
        lines = trial.history()
    assert lines
    assert {line["sites"]["alpha"]["status"] for line in lines} == {"accepted"}


def test_what_is_too_large_does_not_end_the_wait_for_others(tiny: Any) -> None:
    """With a grace period the exchange would otherwise end early, and then lack an update."""
    server, sites, tasks = begun(tiny(METHOD, min_sites=2, grace=0.0))
    receive, large = server.receiver(), scaled(1e30)
    for site in ("beta", "alpha"):
        answer = large(site, tasks[site], sites[site].answer(tasks[site]).packed)
        assert answer
        receive(site, answer)
    assert not receive.enough(["gamma"])
    receive("gamma", sites["gamma"].answer(tasks["gamma"]).packed)
    assert receive.enough([])
    server.close_round({})
    assert server.round == 1


# Directions


def of(values: Tensor) -> Tensor:
    direction = Direction()
    direction.add("w", 0, values.double())
    return direction.unit()


def test_small_updates_are_compared_exactly() -> None:
    found = cosines(
        {
            "a": of(torch.tensor([1.0, 0.0])),
            "b": of(torch.tensor([0.0, 5.0])),
            "c": of(torch.tensor([-2.0, 0.0])),
        }
    )
    # Of unit length: the others' mean of a is (-1, 1) / 2, that of b is 0.
    assert found == {
        "a": pytest.approx(-(0.5**0.5), abs=1e-3),
        "b": None,
        "c": pytest.approx(-(0.5**0.5), abs=1e-3),
    }
    assert cosines({"a": of(torch.ones(2))}) == {"a": None}
    assert cosines({"a": of(torch.zeros(2)), "b": of(torch.ones(2))}) == {"a": None, "b": None}
    assert cosines({s: of(torch.full((3,), 3e38)) for s in "ab"}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_large_updates_are_compared_to_a_few_hundredths(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(300_001, generator=g)
    updates = {s: common + 2 * torch.randn(300_001, generator=g) for s in "abcd"}
    updates["d"] = -updates["d"]
    units = {s: t / t.norm() for s, t in updates.items()}
    total = sum(units.values())
    exact = {s: float(u @ (total - u) / (total - u).norm()) for s, u in units.items()}
    assert cosines({s: of(t) for s, t in updates.items()}) == pytest.approx(exact, abs=0.08)


def measured(labels: Labels, rows: Tensor, shared: Tensor) -> Tensor:
    task = TaskData(
        "train", labels=labels, shared={"w": torch.zeros_like(shared)}, head={"b": torch.zeros_like(rows)}
    )
    update = Update(1, labels, {"w": shared}, {"b": rows}, ones(labels))
    return Measure()(update, task, Egress({}, {})).direction


def test_rows_of_classes_are_compared_by_name() -> None:
    rows, shared = torch.randn(3, 5), torch.randn(70_000)
    one = measured(("Mass", "Nodule", "Edema"), rows, shared)
    assert torch.allclose(one, measured(("edema", "Mass", "Nodule"), rows[[2, 0, 1]], shared), atol=1e-6)
    assert not torch.allclose(one, measured(("Edema", "Mass", "Nodule"), rows, shared), atol=1e-3)
    assert class_signs(("Mass", "Nodule")).abs().tolist() == [1, 1]


SITES = dict.fromkeys(("alpha", "beta", "delta", "epsilon", "gamma"), ("Mass", "Nodule"))
HARDLY = SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=8), batch_norm="frozen")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("factor", "marks"),
    [
        (1.0, []),
        (-10.0, ["opposed to the other sites", "over 10 times as long"]),
        (0.0, ["less than a hundredth as long"]),  # a free rider, which sends back what it received
    ],
)
def test_a_sign_flip_is_marked_and_honest_sites_are_not(factor: float, marks: list[str], tiny: Any) -> None:
    server = run(tiny(HARDLY, SITES, rounds=4, selection="last"), change=scaled(factor))
    found = site_updates(read_history(server.record.folder))
    assert {s: [text.split(" in ")[0] for text in one.marks] for s, one in found.items()} == (
        {site: [] for site in SITES} | {"alpha": marks}
    )
    told = [list(event["sites"]) for event in events(server, "outliers")]
    assert told == [["alpha"]] * (4 if marks else 0)
    write_report(server.record.folder)
    page = (server.record.folder / "report.html").read_text()
    assert all(f"{mark} in 4 of 4" in page for mark in marks)
    assert ("opposed to the other sites in" in page) == (factor < 0)


def test_of_few_sites_nobody_can_tell_who_lies(tiny: Any) -> None:
    """Two of three send a twentieth of their change: gamma is long beside them; of two none is marked."""
    three = dict.fromkeys(("alpha", "beta", "gamma"), ("Mass", "Nodule"))
    liars = scaled(0.05, lambda site, _: site in ("alpha", "beta"))
    server = run(tiny(HARDLY, three, rounds=2, selection="last"), "three", liars)
    [said] = [note for note in noted(server) if "over 10 times as long in 2 of 2" in note]
    assert "alpha, beta; and gamma: " in said
    pair = tiny(HARDLY, dict(list(three.items())[:2]), rounds=2, selection="last")
    lines = read_history(run(pair, "two", scaled(-10.0)).record.folder)
    assert all(site.cosine is not None and site.norm for line in lines for site in line.sites.values())
    assert site_updates(lines) == {}


FOUR = {
    "alpha": ("Mass", "Nodule"),
    "beta": ("Mass", "Nodule"),
    "delta": ("Hernia", "Mass"),
    "gamma": ("Hernia", "Mass", "Nodule"),
}

SEVEN = dict.fromkeys(("alpha", "beta", "delta", "eps", "eta", "gamma", "zeta"), ("Mass", "Nodule"))


def times(factor: float, *liars: str) -> Change:
    """Some send so many times their change."""

    def part(sent: dict[str, Tensor], was: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t if "running" in n else was[n] + factor * (t - was[n]) for n, t in sent.items()}

    def change(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site not in liars or not isinstance(update, Update):
            return answer
        shared, head = part(update.shared, task.shared), part(update.head, task.head)
        return pack(replace(update, shared=shared, head=head))

    return change


@pytest.mark.complete
def test_liars_who_agree_move_the_model_less_than_with_the_mean(tiny: Any) -> None:
    """As many as the merge is for, who send the same multiple of an honest change.

    By a merge of each number and by one of whole updates; methods/test_robust.py has what holds for each.
    """

    def moved(robust: dict[str, Any] | None) -> float:
        federation = tiny(METHOD, SEVEN, selection="last", rounds=1, robust=robust)
        name = robust["kind"] if robust else "mean"
        lied = run(federation, f"{name}-lied", times(-10.0, "alpha", "beta"))
        if robust and robust["kind"] == "krum":
            assert [history(lied)[0]["sites"][site]["kept"] for site in SEVEN] == [0, 0, 1, 1, 1, 1, 1]
        one, two = (server.model for server in (lied, run(federation, name)))
        pairs = [(t, two.shared[n]) for n, t in one.shared.items() if n not in one.buffers]
        return float(torch.cat([(a - b).flatten() for a, b in pairs]).norm())

    by_mean = moved(None)
    for kind in ("trimmed", "krum"):
        assert moved({"kind": kind, "liars": 2}) < 0.4 * by_mean, kind


@pytest.mark.complete
def test_rows_that_too_few_sites_send_are_listed_before_the_first_round(tiny: Any) -> None:
    """And where an absent site leaves another one so, in that round."""
    robust = {"kind": "trimmed", "liars": 1}
    federation = tiny(METHOD, FOUR, selection="last", min_sites=3, robust=robust)

    def absent(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if (site, task.task, task.round) == ("beta", "train", 2) else answer

    server = run(federation, change=absent)
    made = record(server, "run.json")
    assert (made["robust"], made["unprotected"]) == (robust, ["Hernia"])
    before, later = ([*values["labels"]] for note in made["notes"] if "fewest" in (values := note["values"]))
    assert (before, later) == (["Hernia"], ["Nodule"])
    kinds = [event["event"] for event in events(server)]
    told = next(
        i for i, event in enumerate(events(server)) if event.get("values", {}).get("labels") == before
    )
    assert told < kinds.index("round")
    write_report(server.record.folder)
    assert (server.record.folder / "report.html").read_text().count("(unprotected)") == 1
    assert "unprotected" not in record(run(tiny(METHOD, FOUR, rounds=1), "mean"), "run.json")


def test_too_few_sites_or_updates_for_a_merge_are_refused(tiny: Any) -> None:
    with refused("5", "4", by=FederationError):
        tiny(METHOD, FOUR, robust={"kind": "krum", "liars": 1}).run()
    few = tiny(METHOD, FOUR, selection="last", min_sites=1, robust={"liars": 1}, max_failed_rounds=1)

    def only_two(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return answer if task.task != "train" or site in ("alpha", "beta") else None

    with refused("2 usable updates of 3", by=FederationError):
        run(few, "few", only_two)


def test_a_method_with_another_merge_is_refused(tiny: Any) -> None:
    federation = tiny(FedAlign(local=METHOD.local), robust={"kind": "median"})
    with refused("FedAlign", "robust", by=ConfigError):
        federation.server()
    job = with_settings(load_job("demo"), ["robust.kind=krum", "robust.liars=1"])
    assert (job.robust.kind, job.robust.fewest) == ("krum", 5)  # type: ignore[union-attr]
    with refused("liars", by=ConfigError):
        with_settings(job, ["robust.liars=0"])
    with refused("FedAlign", by=ConfigError):
        with_settings(job, ["method=fedalign"]).schedule()


@pytest.mark.complete
def test_a_merge_goes_on_where_it_was(tiny: Any) -> None:
    """The radius and the last change of the model are those of the committed rounds."""
    robust = {"kind": "centered", "liars": 1}
    whole = tiny(METHOD, FOUR, selection="last", robust=robust, rounds=3).run("whole")
    tiny(METHOD, FOUR, selection="last", robust=robust, rounds=2).run("parts")
    parts = tiny(METHOD, FOUR, selection="last", robust=robust, rounds=3).run("parts")
    assert all(torch.equal(tensor, parts.model.shared[name]) for name, tensor in whole.model.shared.items())
    assert whole.state.bound.radii == parts.state.bound.radii
    assert set(whole.state.bound.radii) == {"", "Mass", "Nodule"}


@pytest.mark.complete
def test_the_last_change_of_a_phase_is_none_of_the_next(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    befores = []

    def merge(robust: Any, model: Any, before: Any, *others: Any) -> Any:
        befores.append(before is not None)
        return robustly_merged(robust, model, before, *others)

    monkeypatch.setattr(server_module, "robustly_merged", merge)
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, iterations=1, warmup_epochs=1))
    tiny(method, FOUR, selection="last", robust={"kind": "centered", "liars": 1}, rounds=3).run()
    assert befores == [False, False, True]


class AsInFlare(Loop):
    """Messages as FLARE carries them; every update lies on disk; the last site answers first."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        for name in sorted(payloads, reverse=True):
            received = unpack(from_shareable_(to_shareable(payloads[name])))
            assert isinstance(received, TaskData)
            receive(name, from_shareable_(to_shareable(self._sites[name].answer(received).packed)))
        return {}


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["median", "centered", "krum"])
def test_a_robust_merge_is_the_same_in_the_loop_and_in_flare(
    kind: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, where the updates come in another order, are read from files.

    Of each number, of whole updates with a memory of the round before, and of some of them.
    """
    federation = tiny(METHOD, SEVEN, selection="last", rounds=2, robust={"kind": kind, "liars": 1})
    loop = federation.run("loop").model
    monkeypatch.setattr(collector, "IN_MEMORY", 0)
    server = federation.server("flare")
    federate(server, AsInFlare(federation.sites("flare")))
    for part, other in ((loop.shared, server.model.shared), (loop.head, server.model.head)):
        assert all(torch.equal(tensor, other[name]) for name, tensor in part.items())
