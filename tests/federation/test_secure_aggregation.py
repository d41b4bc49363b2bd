"""Secure aggregation in a whole federation: the model of the plain run, drop-outs, refusals and replays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from between import Between
from hypothesis_profiles import examples
from noted import noted
from suture.core.errors import ConfigError, FederationError, InUse
from suture.core.files import hold, read_records
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture.federation.loop import federate
from suture.federation.server.checks import check_same_classes
from suture.federation.server.server import Server
from suture.federation.site import masks
from suture.federation.site.masks import FILE, MASKED
from suture.federation.site.site import Site
from suture.federation.state_files import EXPERIMENTS
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import Layout
from suture.privacy import masking
from suture.privacy.masking import Attempt, Masked, MaskingRefused, from_fixed_point, sorted_out, unmask_sum
from suture.privacy.secure_aggregation import SecureAggregation, apart, received_of, ring_of
from suture.protocol.messages import Abstain, Masking, MaskKeys, MaskTask, TaskData, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_results.report import write_report

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
FOUR = {
    "alpha": ("Mass", "Nodule"),
    "beta": ("Mass", "Nodule"),
    "delta": ("Mass",),
    "gamma": ("Mass", "Nodule"),
}
CNN = ModelSpec("cnn", size=16)
Change = Callable[[str, TaskData, Packed], Packed | None]


def honest(site: str, task: TaskData, answer: Packed) -> Packed | None:
    return answer


def secured(federation: Any, colluders: int = 0) -> Any:
    plan = replace(federation.plan, secure_aggregation=SecureAggregation(colluders))
    return replace(federation, plan=plan)


def run(federation: Any, out: str, change: Change = honest) -> Server:
    server: Server = federation.server(out)
    federate(server, Between(federation.sites(out), change))
    return server


def furthest(one: Server, other: Server) -> float:
    a, b = ({**s.model.shared, **s.model.head} for s in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def history(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (server.record.folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.complete
def test_the_model_is_that_of_the_plain_run(tiny: Any) -> None:
    """And the server holds integers: no tensor of an update is near the plain one."""
    seen = {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        if isinstance(update := unpack(answer), Update):
            seen[site] = update
        return answer

    plain = run(tiny(METHOD, FOUR), "plain")
    masked = run(secured(tiny(METHOD, FOUR)), "masked", look)
    assert furthest(plain, masked) < 1e-6
    assert plain.round == masked.round == 2
    for update in seen.values():
        for tensor in (*update.shared.values(), *update.head.values()):
            assert tensor.dtype == torch.int64
            large = tensor.abs() > 2**48
            assert large.double().mean() > 0.9 or tensor.numel() < 8
    lines = history(masked)[0]["sites"]
    assert all(line["norm"] is None and line["status"] == "accepted" for line in lines.values())
    assert any("Secure aggregation" in note for note in noted(masked))
    assert any("is experimental" in note for note in noted(masked))


@pytest.mark.complete
@pytest.mark.parametrize("name", ["fedavg", "vanilla", "condist"])
def test_weights_of_sites_and_rows(name: str, tiny: Any) -> None:
    """By numbers of images, by owners."""
    method = METHODS[name](local=LocalTraining(lr=1e-2, batch_size=8))
    federation = tiny(method, FOUR, rounds=1, selection="last")
    plain, masked = run(federation, "plain"), run(secured(federation), "masked")
    assert furthest(plain, masked) < 1e-6
    assert plain.model.labels == masked.model.labels == ("Mass", "Nodule")
    write_report(masked.record.folder)
    assert "Secure aggregation" in (masked.record.folder / "report.html").read_text()


@pytest.mark.complete
@pytest.mark.parametrize("step", ["update", "survivors", "reveal"])
def test_one_of_four_drops_out(step: str, tiny: Any) -> None:
    """Before its update arrives, it is left out of the sum; afterwards, it is part of it."""
    federation = tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3)

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        asked = task.mask.step if task.mask else "update"
        return None if (site, asked, task.round) == ("delta", step, 1) and task.task != "evaluate" else answer

    masked = run(secured(federation), "masked", lose)
    plain = run(federation, "plain", lose if step == "update" else honest)
    assert furthest(plain, masked) < 1e-6
    assert history(masked)[-1]["sites"]["delta"]["status"] == ("missing" if step == "update" else "accepted")


@pytest.mark.complete
def test_a_class_that_loses_an_owner_costs_an_attempt_and_no_training(tiny: Any) -> None:
    """Its row cannot be unmasked with two sites left; in the next attempt it stays as it was."""
    federation, asked = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3)), []

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        asked.append((site, task.task))
        if site == "gamma" and len([one for one in asked if one == ("gamma", "train")]) and task.mask:
            return None
        return answer

    server = run(federation, "out", lose)
    first, second = history(server)
    assert first["status"] == "unchanged"
    assert second["status"] == "committed"
    row = list(server.model.labels).index("Nodule")
    start = federation.server("fresh")
    run_of_none = Between(federation.sites("fresh"), honest)
    start.begin(run_of_none.exchange("handshake", start.handshake(run_of_none.sites), start.receiver()))
    for name, tensor in server.model.head.items():
        assert torch.equal(tensor[row], start.model.head[name][row])
        assert not torch.equal(tensor[1 - row], start.model.head[name][1 - row])


@pytest.mark.complete
def test_a_restarted_site_takes_part_from_the_next_attempt_on(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last"))
    plain = run(replace(federation, plan=replace(federation.plan, secure_aggregation=None)), "plain")
    sites, server = federation.sites("out"), federation.server("out")
    transport, killed = Between(sites, honest), []

    def kill(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta" and task.mask and task.mask.step == "shares" and not killed:
            killed.append(site)
            sites["beta"].close()
            transport._sites["beta"] = federation.sites("out")["beta"]
        return answer

    transport.change = kill
    federate(server, transport)
    assert [line["status"] for line in history(server)] == ["unchanged", "committed"]
    assert "beta: masking (MaskingRefused)" in json.dumps(
        [json.loads(x) for x in (server.record.folder / "events.jsonl").read_text().splitlines()]
    )
    assert furthest(plain, server) < 1e-6


@pytest.mark.complete
def test_a_server_that_is_killed_goes_on_with_new_keys(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last"))
    numbers = set()

    class Killed(Exception):
        pass

    def kill(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.mask:
            numbers.add((task.round, task.mask.attempt))
        if (
            site == "gamma"
            and task.round == 2
            and task.mask
            and task.mask.step == "reveal"
            and len(numbers) == 2
        ):
            raise Killed  # three sites have revealed their shares
        return answer

    with pytest.raises(Killed):
        run(federation, "out", kill)
    server = run(federation, "out", kill)
    assert [(line["round"], line["status"]) for line in history(server)] == [
        (1, "committed"),
        (2, "committed"),
    ]
    assert len(numbers) == 3
    assert furthest(run(federation, "other"), server) == 0


@pytest.mark.complete
def test_a_round_is_not_added_up_over_two_lists_of_sites(tiny: Any) -> None:
    """The server has the sum of four and asks for that of three: the difference would be delta's update."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=1))
    run(federation, "out")
    for path in (federation.server("out").states.folder).glob("*-000001*"):
        path.unlink()  # the server is set back to before round 1

    def leave_out(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site == "delta" and task.task == "train" else answer

    with pytest.raises(FederationError, match=r"0 sites are left.*alpha: masking \(MaskingRefused\)"):
        run(federation, "out", leave_out)
    said = (federation.sites("out")["alpha"].folder / "errors.jsonl").read_text()
    assert "round 1 was added up over other sites before" in said


class Liar:
    """A server that runs none of this code's server: it asks whom it likes, in an order of its own.

    Args:
        sites: to which it lies.
        tasks: those to train that an honest server has sent, and the numbers of each site's classes.
    """

    def __init__(self, sites: Any, tasks: dict[str, TaskData], numbers: dict[str, dict[str, int]]) -> None:
        self.sites, self.tasks, self.numbers, self.attempts = sites, tasks, numbers, 0

    def ask(self, site: str, step: str, **content: Any) -> Any:
        mask = MaskTask(step, self.number, **content)  # type: ignore[arg-type]
        task = self.tasks[site]
        task = task if step == "update" else TaskData("mask", task.round, task.committed)
        answer = unpack(self.sites[site].answer(replace(task, mask=mask)).packed)
        if isinstance(answer, Abstain):
            raise Refused(site, step)
        return answer

    def add_up(self, members: str, survivors: str, askers: str) -> Masked:
        """Return the sum over the survivors, for which only the askers reveal."""
        self.attempts += 1
        self.number = f"{self.attempts:064x}"
        roster = {m: self.ask(m, "keys", numbers=self.numbers[m]).keys for m in members}
        sealed = {m: self.ask(m, "shares", roster=roster).sealed for m in members}
        updates = {
            m: self.ask(m, "update", sealed={by: of[m] for by, of in sealed.items() if by != m})
            for m in survivors
        }
        signed = {m: self.ask(m, "survivors", survivors=tuple(survivors)).signature for m in askers}
        revealed: dict[str, Masking] = {m: self.ask(m, "reveal", signatures=signed) for m in askers}
        task = self.tasks[members[0]]
        plan = self.sites[members[0]].plan.digest(self.sites[members[0]].rounds)
        attempt = Attempt("lied-to", task.round, self.number, plan=plan)
        egress = METHOD.egress(Layout({}, {}))
        received = {m: received_of(self.tasks[m], self.numbers[m], egress, "") for m in survivors}
        asked = {m: {n: k for n, k in self.numbers[m].items() if n in u.labels} for m, u in updates.items()}
        masked = ((m, ring_of(update, asked[m])) for m, update in updates.items())
        shares, _ = sorted_out(sealed, {}, survivors, revealed)
        return unmask_sum(attempt, roster, list(members), masked, shares, received)


class Refused(Exception):
    """A site does not take a step."""


def told(liar: Liar, site: str) -> str:
    """What a site has written of its refusals."""
    return (liar.sites[site].folder / "errors.jsonl").read_text()


def lied_to(tiny: Any, labels: dict[str, tuple[str, ...]], method: Any = METHOD, rounds: int = 1) -> Liar:
    """Return a server that lies to sites which have answered nothing yet."""
    federation, tasks, numbers = secured(tiny(method, labels, rounds=rounds, selection="last")), {}, {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "train":
            tasks.setdefault(site, replace(task, ledger=None))
        if task.mask and task.mask.step == "keys":
            numbers[site] = dict(task.mask.numbers)
        return answer

    run(federation, "honest", look)
    return Liar(federation.sites("lied-to"), tasks, numbers)


@pytest.mark.complete
def test_two_groups_of_sites_do_not_reveal_for_two_lists(tiny: Any) -> None:
    """a, d and p are most of five, b and c most of three; d alone has the row that is more in one sum."""
    both = ("Mass", "Nodule")
    liar = lied_to(tiny, {"a": both, "b": both, "c": both, "d": both, "p": ("Mass",)})
    row = liar.numbers["d"]["Nodule"]
    five = liar.add_up("abcdp", "abcdp", "adp").rows[row]
    with pytest.raises(Refused):
        liar.add_up("abc", "abc", "bc")  # the difference of the rows would be the row of d
    with pytest.raises(Refused):
        liar.add_up("abcdp", "abc", "abc")
    assert (liar.add_up("abcdp", "abcdp", "abc").rows[row] == five).all()


@pytest.mark.complete
def test_a_round_is_repeated_among_the_same_sites(tiny: Any) -> None:
    """Sites that have masked nothing yet in the round could not tell that another sum was revealed."""
    both = ("Mass", "Nodule")
    names = [*"abcd", *"pqrst"]
    liar = lied_to(tiny, {m: both if m in "abcd" else ("Mass",) for m in names})
    liar.add_up("abcdp", "abcdp", "adp")
    for members in ("abcq", "abcqrst"):  # q, r, s and t would be most of the second
        with pytest.raises(Refused):
            liar.add_up(members, members, members[3:])


@pytest.mark.complete
@pytest.mark.parametrize("names", [("Cyst", "Edema"), ("Edema", "Mass"), ("Cyst", "Mass", "Nodule")])
@pytest.mark.parametrize("name", ["surgical", "vanilla"])
def test_sites_that_train_other_classes_hide_nobody(name: str, names: tuple[str, ...], tiny: Any) -> None:
    """Under names that they do not know, three of four would send the model as it came."""
    method = METHODS[name](local=LocalTraining(lr=1e-2, batch_size=8))
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")), method)
    for site in "bcd":
        task, rows = liar.tasks[site], [0, 1, 1][: len(names)]
        liar.tasks[site] = replace(task, labels=names, head={n: t[rows] for n, t in task.head.items()})
        if old := liar.numbers[site]:
            spare = [number for label, number in old.items() if label not in names] + [1]
            liar.numbers[site] = {label: old.get(label) or spare.pop(0) for label in names}
    if (name, len(names)) == ("vanilla", 3):  # its sites train the classes of others too, as absent ones
        liar.add_up("abcd", "bcda", "abc")
        return
    with pytest.raises(Refused, match=r"'b', 'update'"):
        liar.add_up("abcd", "bcda", "abc")
    said = (liar.sites["b"].folder / "errors.jsonl").read_text()
    assert "the server asks to train with" in said


@pytest.mark.complete
@pytest.mark.parametrize("change", ["plan", "rounds"])
def test_sites_with_another_plan_hide_nobody(change: str, tiny: Any) -> None:
    """With a learning rate of nothing, three of four would send the model as it came."""
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")))
    for name in "bcd":
        site = liar.sites[name]
        still = replace(site.plan, method=replace(METHOD, local=replace(METHOD.local, lr=1e-30)))
        plan, rounds = (still, 1) if change == "plan" else (site.plan, 100)
        liar.sites[name] = Site(name, site.config, plan, rounds, site.folder)
    with pytest.raises(Refused, match=r"'a', 'shares'"):
        liar.add_up("abcd", "abcd", "abc")


@pytest.mark.complete
def test_an_update_of_another_plan_is_not_kept_for_this_one(tiny: Any) -> None:
    """Its sum with updates of a learning rate of nothing would be the kept one."""
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")))
    with pytest.raises(Refused, match=r"'a', 'survivors'"):
        liar.add_up("abcd", "a", "a")  # a alone trains by the first plan
    for name, site in liar.sites.items():
        site.close()
        still = replace(site.plan, method=replace(METHOD, local=replace(METHOD.local, lr=1e-30)))
        liar.sites[name] = Site(name, site.config, still, 1, site.folder)
    shared = liar.tasks["a"].shared
    total = apart(from_fixed_point(liar.add_up("abcd", "abcd", "abc").shared), shared)
    weights = {n: t.double() for n, t in shared.items() if t.ndim > 1}
    assert weights
    assert all(torch.allclose(total[n] / 4, t, atol=1e-7) for n, t in weights.items())


@pytest.mark.complete
@pytest.mark.parametrize("sites", ["abcd", "a"])
@pytest.mark.parametrize("change", ["model", "state"])
def test_a_round_is_added_up_from_one_model_and_state(change: str, sites: str, tiny: Any) -> None:
    """The others would repeat their updates, and the difference of the sums would be of one site."""
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")))
    liar.add_up("abcd", "abcd", "abc")
    for site in sites:
        task = liar.tasks[site]
        moved = replace(task, shared={name: tensor + 1e-3 for name, tensor in task.shared.items()})
        liar.tasks[site] = moved if change == "model" else replace(task, committed=1)
    with pytest.raises(Refused, match=r"'a', 'reveal'"):
        liar.add_up("abcd", "abcd", "abc")
    assert "or from another model" in (liar.sites["a"].folder / "errors.jsonl").read_text()


def test_rows_from_which_sites_learn_are_those_of_all_sites() -> None:
    """ConDist's sites learn from the rows of classes that they do not annotate, and send none of them."""
    egress = METHODS["condist"]().egress(Layout({}, {}))
    task = TaskData("train", 1, labels=("A", "B"), shared={"w": torch.ones(2)}, head={"h": torch.ones(2, 3)})
    others = replace(task, head={"h": torch.tensor([[1.0], [7.0]]).expand(2, 3)})

    def shared(task: TaskData, every: bool) -> bytes:
        return received_of(task, {"A": 1}, egress, "", every=every).shared

    assert shared(task, True) != shared(others, True)
    assert shared(task, False) == shared(others, False)


@pytest.mark.complete
def test_an_experiment_that_began_without_it_has_none(tiny: Any) -> None:
    """The server could have given some sites another state or encoder, which no site has noted."""
    federation = tiny(METHOD, FOUR, rounds=1, selection="last")
    run(federation, "out")
    site = secured(federation).sites("out")["alpha"]
    assert isinstance(unpack(site.answer(TaskData("handshake")).packed), Abstain)
    said = (site.folder / "errors.jsonl").read_text()
    assert "the experiment had none, and this job has secure aggregation" in said


@pytest.mark.complete
def test_a_frozen_encoder_is_that_of_all_sites(tiny: Any) -> None:
    """Else one that is dead at all sites but one would make their sum the update of that one."""
    model = replace(CNN, train="head", weights="random", hidden=8, views=0)
    federation = tiny(METHOD, FOUR, rounds=1, selection="last", model=model, min_sites=3)
    tasks: dict[str, TaskData] = {}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        tasks[site] = task if task.task == "train" else tasks.get(site, task)
        return None if site == "delta" and task.task == "train" else answer

    masked, plain = run(secured(federation), "out", lose), run(federation, "plain", lose)
    assert furthest(plain, masked) < 1e-6  # what a lost mask depends on is the same at server and sites
    site = secured(federation).sites("out")["alpha"]
    dead = {name: torch.zeros_like(tensor) for name, tensor in tasks["alpha"].fixed.items()}
    answer = unpack(site.answer(replace(tasks["alpha"], fixed=dead, ledger=None)).packed)
    assert isinstance(answer, Abstain)
    assert "other fixed tensors" in (site.folder / "errors.jsonl").read_text()


def test_masks_depend_on_all_that_decides_an_update() -> None:
    method = METHODS["fedavg"]()
    egress = method.egress(Layout({}, {}))
    weights = torch.ones(2)
    task = TaskData("train", 1, labels=("A", "B"), shared={"w": weights}, head={"h": torch.ones(2, 3)})
    task = replace(task, channels={"positive_weight": weights})

    def digests(task: TaskData, fixed: str = "") -> list[bytes]:
        got = received_of(task, {"A": 1, "B": 2}, egress, fixed)
        return [got.shared, got.rows[1], got.rows[2]]

    other = torch.tensor([1.0, 0.0])
    for changed, parts in (
        (digests(replace(task, shared={"w": other})), [0]),
        (digests(replace(task, channels={"positive_weight": other})), [2]),
        (digests(replace(task, channels={"lag/w": weights})), [0, 1, 2]),
        (digests(replace(task, phase="second")), [0]),
        (digests(replace(task, committed=1)), [0]),
        (digests(task, "ab"), [0]),
    ):
        same = digests(task)
        assert [i for i in range(3) if changed[i] != same[i]] == parts


@pytest.mark.complete
def test_classes_keep_their_numbers(tiny: Any) -> None:
    """A server that exchanged two classes of a site would add a row to those of another class."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))
    run(federation, "out")
    path = federation.sites("out")["alpha"].folder / FILE
    said = json.loads(path.read_text())
    one, two = said["numbers"]["Mass"], said["numbers"]["Nodule"]
    path.write_text(json.dumps(said | {"numbers": {"Mass": two, "Nodule": one}}))
    with pytest.raises(FederationError, match=r"alpha: masking"):
        run(replace(federation, schedule=replace(federation.schedule, rounds=2)), "out")


def test_an_update_outside_of_an_attempt_is_refused(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last"))
    tasks: dict[str, TaskData] = {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        tasks[task.mask.step if task.mask else task.task] = (
            task if site == "alpha" else tasks.get(task.task, task)
        )
        return answer

    sites = federation.sites("out")
    federate(federation.server("out"), Between(sites, look))
    train = tasks["update"]
    assert train.mask is not None
    for wrong in (
        replace(train, mask=None),
        replace(train, mask=replace(train.mask, attempt="0" * 64)),
        replace(train, round=2),
        replace(train, mask=replace(train.mask, step="shares")),
    ):
        answer = unpack(sites["alpha"].answer(wrong).packed)
        assert isinstance(answer, Abstain)
        assert answer.reason == "masking"


@pytest.mark.complete
def test_a_job_without_it_gets_no_update_that_was_masked(tiny: Any) -> None:
    """Else a second job of the experiment would get the kept update as it is."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last"))
    tasks: dict[str, TaskData] = {}

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        tasks[site] = task if task.task == "train" else tasks.get(site, task)
        return answer

    run(federation, "out", look)
    plain = replace(federation, plan=replace(federation.plan, secure_aggregation=None))
    site = plain.sites("out")["alpha"]
    assert isinstance(unpack(site.answer(replace(tasks["alpha"], mask=None)).packed), Abstain)
    assert "had secure aggregation" in (site.folder / "errors.jsonl").read_text()


@pytest.mark.complete
def test_a_site_can_demand_it(tiny: Any) -> None:
    federation = tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=1)
    own = federation.configs["alpha"]
    strict = own.model_copy(update={"privacy": own.privacy.model_copy(update={"secure_aggregation": True})})
    federation = replace(federation, configs=federation.configs | {"alpha": strict})
    server = run(federation, "plain")
    assert "alpha" not in server.registry.members
    assert (
        "the job has no [secure_aggregation]"
        in (federation.sites("plain")["alpha"].folder / "errors.jsonl").read_text()
    )
    site = federation.sites("plain")["alpha"]
    for task in ("handshake", "train", "calibrate", "evaluate", "mask"):
        answer = unpack(site.answer(TaskData(task, 1, labels=("Mass", "Nodule"))).packed)
        assert isinstance(answer, Abstain)
        assert answer.reason == "masking"
    assert "alpha" in run(secured(federation), "masked").registry.members


def test_the_site_checks_what_the_server_cannot(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of 200 times the model's norm, and one with a number beyond the fixed point."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))
    train = SurgicalAggregation.weigh
    for factor, error, said in (
        (1e4, "UpdateTooLarge", "more than 100 times the model's"),
        (float("nan"), "MaskingRefused", "not finite"),
    ):

        def far(*args: Any, factor: float = factor) -> Update:
            update = train(*args)
            return replace(update, shared={n: t * factor for n, t in update.shared.items()})

        monkeypatch.setattr(SurgicalAggregation, "weigh", far)
        out = f"out-{factor}"
        with pytest.raises(FederationError, match=rf"masking \({error}\)"):
            run(federation, out)
        told = (federation.sites(out)["alpha"].folder / "errors.jsonl").read_text()
        assert said in told
        assert ("lower the learning rate (method.local.lr" in told) == (error == "UpdateTooLarge")
        assert "max_update" not in told


@pytest.mark.complete
def test_a_site_cannot_list_a_row_that_it_was_not_asked_for(tiny: Any) -> None:
    """The number of another's class, which it has from the others' keys, would stop the server."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3))
    sites = federation.sites("out")
    numbers: dict[str, int] = {}

    def claim(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.mask is None or task.mask.step != "keys":
            return answer
        numbers.update(task.mask.numbers)
        keys = sites[site].masks._part.keys
        if site == "delta":
            keys = replace(keys, rows=tuple(sorted(numbers.values())), signature="")
            part = sites[site].masks._part
            signature = part._identity.sign(part.attempt.signed_bytes(site, keys)).hex()
            part.keys = replace(keys, signature=signature)
            return pack(Masking("keys", keys=part.keys))
        return answer

    server = federation.server("out")
    federate(server, Between(sites, claim))
    line = history(server)[0]["sites"]["delta"]
    said = "keys for other rows than those that were asked for"
    assert (line["status"], line["reason"]) == ("rejected", said)


@pytest.mark.complete
def test_a_lying_site_that_sends_a_plain_update_is_rejected(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))

    def plain(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site != "alpha" or not isinstance(update, Update):
            return answer
        return pack(replace(update, shared={n: t.float() for n, t in update.shared.items()}))

    with pytest.raises(FederationError, match=r"float32 instead of torch\.int64"):
        run(federation, "out", plain)


@pytest.mark.parametrize(
    ("sites", "colluders", "said"),
    [
        (
            FOUR | {"delta": ("Hernia", "Mass")},
            0,
            r"these have fewer: Hernia \(delta\).* in a new experiment, remove",
        ),
        (FOUR, 1, r"4 or more.*Nodule \(alpha, beta, gamma\)"),
        (FOUR, 2, "needs 5 sites or more, and 4 take part; .* in a new experiment, lower colluders"),
    ],
)
def test_a_class_with_too_few_owners_is_refused_before_round_1(
    sites: dict[str, tuple[str, ...]], colluders: int, said: str, tiny: Any
) -> None:
    federation = secured(tiny(METHOD, sites), colluders)
    with pytest.raises(FederationError, match=said):
        run(federation, "out")
    assert not any((federation.sites("out")["alpha"].folder).glob("round-*"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["robust.kind=median"], "exclude each other"),
        (["transport=float16"], "exclude each other"),
        (["method=afl"], "makes more of the updates than their weighted sum"),
        (["method=fedmlp"], "prototypes, .*, which would not be masked"),
        (["method=fedlsm"], "the weight 0"),
        (["method=fednml"], "classes that a site has not trained"),
        (["method=pfl"], "keeps heads at the sites"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_settings(load_job("demo"), ["secure_aggregation={}", *settings]).schedule()


def test_sites_that_share_a_process_of_the_simulator_are_refused(tmp_path: Path) -> None:
    made = with_settings(load_job("demo"), ["method=vanilla", "secure_aggregation={}"])
    with pytest.raises(ConfigError, match="lose their keys"):
        run_job(made, "sim", tmp_path / "run", workers=2)
    assert not (tmp_path / "run").exists()


def test_a_class_of_few_annotators_that_all_train_is_noted(tiny: Any) -> None:
    """A row with which only positives move anything lets a lying server see them alone."""
    sites, method = FOUR | {"delta": ("Hernia", "Mass")}, METHODS["vanilla"](local=METHOD.local)
    notes = noted(run(secured(tiny(method, sites, rounds=1, selection="last")), "out"))
    assert [note for note in notes if "fewer than 3 sites annotate Hernia." in note]


def test_the_setting_is_part_of_the_plan(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR))
    assert federation.plan.to_dict()["secure_aggregation"] == {"colluders": 0}
    assert (
        type(federation.plan).from_dict(json.loads(json.dumps(federation.plan.to_dict()))) == federation.plan
    )


# One site of four lies in every attempt


def signed(liar: Site, keys: MaskKeys) -> Masking:
    part = liar.masks._part
    assert part
    signature = part._identity.sign(part.attempt.signed_bytes(liar.name, replace(keys, signature=""))).hex()
    part.keys = replace(keys, signature=signature)
    return Masking("keys", keys=part.keys)


def keys(step: Masking) -> MaskKeys:
    assert step.keys
    return step.keys


ZEROS = "00" * 208

LIES: dict[str, tuple[str, Callable[[Site, Masking], Masking], str, int]] = {
    "a signature of nothing": (
        "keys",
        lambda _, step: replace(step, keys=replace(keys(step), signature="00" * 64)),
        "keys that cannot be used",
        1,
    ),
    "a certificate of nobody": (
        "keys",
        lambda _, step: replace(step, keys=replace(keys(step), certificate="no certificate")),
        "keys that cannot be used",
        1,
    ),
    "a key of low order": (
        "keys",
        lambda site, step: signed(site, replace(keys(step), mask="00" * 32)),
        "the key of delta cannot be used",
        1,
    ),
    "a list of strangers": (
        "keys",
        lambda site, step: signed(site, replace(keys(step), among=("delta", "x", "y"))),
        "names sites of an earlier attempt that no other site names",
        1,
    ),
    "a list of a thousand": (
        "keys",
        lambda site, step: signed(
            site, replace(keys(step), among=("alpha", "beta", "delta", *(f"x{i}" for i in range(900))))
        ),
        "names sites of an earlier attempt that no other site names",
        1,
    ),
    "shares for some": (
        "shares",
        lambda _, step: replace(step, sealed=dict(list(step.sealed.items())[:2])),
        "has not sealed its shares for all sites",
        1,
    ),
    "sealed noise": (
        "shares",
        lambda _, step: replace(step, sealed=dict.fromkeys(step.sealed, ZEROS)),
        "is in dispute over shares with 3 others",
        2,
    ),
    "sealed noise for others": (
        "shares",
        lambda _, step: replace(
            step, sealed={site: text if site == "delta" else ZEROS for site, text in step.sealed.items()}
        ),
        "is in dispute over shares with 3 others",
        2,
    ),
    "another signature": (
        "survivors",
        lambda _, step: replace(step, signature="ab" * 64),
        "has not signed the list",
        1,
    ),
    "another's shares": (
        "reveal",
        lambda _, step: replace(step, seeds=dict.fromkeys(step.seeds, next(iter(step.seeds.values())))),
        "another share of a secret of",
        1,
    ),
    "shares of nobody": (
        "reveal",
        lambda _, step: replace(step, seeds=step.seeds | {"nobody": "00"}),
        "shares of other sites than it was asked for",
        1,
    ),
}


@pytest.mark.complete
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_and_costs_one_attempt_at_most(lie: str, tiny: Any) -> None:
    at, change, said, attempts = LIES[lie]
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last", min_sites=3))
    sites, asked = federation.sites("out"), set()

    def tell(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.mask:
            asked.add((task.round, task.mask.attempt))
        step = unpack(answer)
        if site == "delta" and isinstance(step, Masking) and step.step == at:
            return pack(change(sites[site], step))
        return answer

    server = federation.server("out")
    federate(server, Between(sites, tell))
    lines = history(server)
    assert [line["round"] for line in lines if line["status"] == "committed"] == [1, 2]
    assert len(asked) == attempts + 1
    events = (server.record.folder / "events.jsonl").read_text()
    assert said in events
    named = [line["sites"].get("delta", {}) for line in lines]
    notes = " ".join(noted(server))
    assert any(said in str(one.get("reason")) for one in named) or f"delta {said}" in notes or said in notes


def test_one_that_never_sends_its_update_costs_one_attempt(tiny: Any) -> None:
    """Its class then has too few owners, and stays as it was; the round goes on without it."""
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last", min_sites=3))

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if (site, task.task) == ("gamma", "train") else answer

    server = run(federation, "out", lose)
    lines = history(server)
    assert sorted(line["status"] for line in lines) == ["committed"] * 2 + ["unchanged"] * 2
    assert "without gamma" in (server.record.folder / "events.jsonl").read_text()
    assert "did not arrive" in lines[-1]["sites"]["gamma"]["reason"]


SAME = dict.fromkeys(FOUR, ("Mass", "Nodule"))


def accepted(line: dict[str, Any]) -> list[str]:
    return [site for site, of in line["sites"].items() if of["status"] == "accepted"]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("sites", "more"), [(SAME, [2, 1]), (FOUR | {"delta": SAME["delta"], "beta": ("Mass",)}, [3, 2])]
)
def test_of_two_that_were_lost_none_is_left_out_by_its_name(sites: Any, more: list[int], tiny: Any) -> None:
    """alpha is lost once, delta always: both are asked again. That delta is an owner costs one attempt."""
    schedule = {"rounds": 2, "selection": "last", "min_sites": 3, "max_failed_rounds": 3}
    federation = secured(tiny(METHOD, sites, **schedule))
    attempts = set[str]()

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        attempts.update([task.mask.attempt] if task.mask else [])
        lost = site == "delta" or (site == "alpha" and len(attempts) == 1)
        return None if lost and task.task == "train" else answer

    server = run(federation, "out", lose)
    lines = [line for line in history(server) if line["status"] == "committed"]
    assert [accepted(line) for line in lines] == [["alpha", "beta", "gamma"]] * 2
    assert [sum(line["round"] == r for line in history(server)) for r in (1, 2)] == more


@pytest.mark.complete
def test_nobody_is_left_out_who_was_not_asked(tiny: Any) -> None:
    """Two are lost before the others are asked for their updates."""
    federation = secured(tiny(METHOD, SAME, rounds=1, selection="last", min_sites=3))
    lost = ["delta", "gamma"]

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if site in lost and task.mask and task.mask.step == "shares":
            lost.remove(site)
            return None
        return answer

    first, second = history(run(federation, "out", lose))
    assert first["status"] == "unchanged"
    assert accepted(second) == sorted(FOUR)


@pytest.mark.complete
def test_one_that_comes_late_takes_no_other_ones_place(tiny: Any) -> None:
    """delta cannot take part in the round any more: gamma, once lost, is needed."""
    federation = secured(tiny(METHOD, SAME, rounds=1, selection="last", min_sites=3))
    lost = [("delta", "keys"), ("gamma", "update")]

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if task.mask and (at := (site, task.mask.step)) in lost:
            lost.remove(at)
            return None
        return answer

    first, second = history(run(federation, "out", lose))
    assert first["status"] == "unchanged"
    assert accepted(second) == ["alpha", "beta", "gamma"]


@pytest.mark.complete
def test_no_more_are_left_out_than_the_votes_permit(tiny: Any) -> None:
    """Four of eight are lost once: the four others are enough for `min_sites`, and too few to vote."""
    names = [f"site-{i}" for i in range(8)]
    sites = dict.fromkeys(names, ("Mass",))
    federation = secured(tiny(METHOD, sites, rounds=1, selection="last", min_sites=3))
    lost = names[:4]

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        if site in lost and task.task == "train":
            lost.remove(site)
            return None
        return answer

    first, second = history(run(federation, "out", lose))
    assert first["status"] == "unchanged"
    assert accepted(second) == names


def test_whose_shares_are_enough_is_not_left_out_for_another(tiny: Any) -> None:
    """delta seals noise, so that its seed is lost, and denies the share of alpha, which four others hold."""
    federation = secured(tiny(METHOD, SAME | {"eta": ("Mass",)}, rounds=1, selection="last", min_sites=3))

    def lie(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if site != "delta" or not isinstance(step, Masking):
            return answer
        if step.step == "shares":
            return pack(replace(step, sealed=dict.fromkeys(step.sealed, ZEROS)))
        return pack(replace(step, unopened=("alpha",))) if step.step == "survivors" else answer

    first, second = history(run(federation, "out", lie))
    assert first["status"] == "unchanged"
    assert accepted(second) == ["alpha", "beta", "eta", "gamma"]


@pytest.mark.complete
def test_a_row_that_loses_an_owner_for_good_leaves_no_site(tiny: Any) -> None:
    """From round 2 on two sites are left of those that train it: they do not, and the report says so."""
    federation = secured(tiny(METHOD, FOUR, rounds=3, selection="last", min_sites=3))
    trained: dict[int, list[str]] = {1: [], 2: [], 3: []}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        update = unpack(answer)
        if isinstance(update, Update) and "Nodule" in update.labels:
            trained[task.round].append(site)
        return None if site == "gamma" and task.round > 1 else answer

    server = run(federation, "out", lose)
    assert [accepted(line) for line in history(server)] == [sorted(FOUR)] + [["alpha", "beta", "delta"]] * 2
    assert trained == {1: ["alpha", "beta", "gamma"], 2: [], 3: []}
    notes = [note for note in noted(server) if "Nodule" in note]
    assert len(notes) == 1
    assert "round 2: the row of Nodule stayed as it was, because fewer than 3 sites sent it" in notes[0]
    models = [server.states.folder / f"round-{number:06d}.safetensors" for number in (1, 3)]
    heads = [{n: t for n, t in load(path).tensors.items() if n.startswith("head/")} for path in models]
    row = list(server.model.labels).index("Nodule")
    for name, tensor in heads[0].items():
        assert torch.equal(tensor[row], heads[1][name][row])
        assert not torch.equal(tensor[1 - row], heads[1][name][1 - row])


@pytest.mark.complete
def test_a_later_job_has_no_fewer_colluders(tiny: Any) -> None:
    """With fewer, another list of survivors of a round would have votes enough."""
    federation = secured(tiny(METHOD, SAME, rounds=1, selection="last"), 1)
    tasks: list[TaskData] = []

    def look(site: str, task: TaskData, answer: Packed) -> Packed:
        tasks.extend([task] if task.task == "mask" else [])
        return answer

    run(federation, "out", look)
    site = secured(federation, 0).sites("out")["alpha"]
    assert isinstance(unpack(site.answer(replace(tasks[0], ledger=None)).packed), Abstain)
    said = (site.folder / "errors.jsonl").read_text()
    assert "had secure_aggregation.colluders=1, and this job has 0" in said


@pytest.mark.complete
def test_who_denies_shares_of_several_is_left_out(tiny: Any) -> None:
    """Of one dispute nothing can be told, and it stops no sum while a share is to spare."""
    federation = secured(tiny(METHOD, FOUR, rounds=3, selection="last", min_sites=3))
    denied, unopened = iter(["alpha", "beta"]), ""

    def deny(site: str, task: TaskData, answer: Packed) -> Packed:
        nonlocal unopened
        step = unpack(answer)
        if site == "delta" and isinstance(step, Masking) and step.step == "survivors":
            unopened = next(denied)
            return pack(replace(step, unopened=(unopened,)))
        if site == "delta" and isinstance(step, Masking) and step.step == "reveal":
            return pack(replace(step, seeds={s: share for s, share in step.seeds.items() if s != unopened}))
        return answer

    server = run(federation, "out", deny)
    statuses = [{s: of["status"] for s, of in line["sites"].items()} for line in history(server)]
    accepted = dict.fromkeys(FOUR, "accepted")
    assert statuses == [accepted, accepted, accepted | {"delta": "rejected"}]
    assert any("delta or alpha lied about a share" in note for note in noted(server))


@pytest.mark.complete
def test_who_denies_a_share_that_it_has_said_to_hold_lies(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3))

    def deny(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if site == "delta" and isinstance(step, Masking) and step.step == "reveal":
            return pack(replace(step, seeds={"delta": step.seeds["delta"]}))
        return answer

    server = run(federation, "out", deny)
    assert [line["status"] for line in history(server)] == ["committed"]
    assert any("delta has revealed shares of other sites" in note for note in noted(server))


def test_shares_of_no_secret_are_found_when_they_are_revealed(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too late for the round: a sum was revealed to, and another one without the liar would be its update."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=2))
    sites = federation.sites("out")
    step, split = sites["delta"].masks.step, masking.split

    def wrong(*args: Any) -> Masking:
        with monkeypatch.context() as patch:
            patch.setattr(masking, "split", lambda secret, n, t: split(secret[::-1], n, t))
            return step(*args)

    monkeypatch.setattr(sites["delta"].masks, "step", wrong)
    server = federation.server("out")
    with pytest.raises(FederationError, match="delta: has sent shares that do not match its secrets"):
        federate(server, Between(sites, honest))
    assert any("delta has sent shares" in note for note in noted(server))


@pytest.mark.complete
@pytest.mark.parametrize(("part", "rows"), [("shared", 2), ("head", 2), ("head", 1)])
def test_a_masked_update_of_noise_is_no_model(part: str, rows: int, tiny: Any) -> None:
    """Whose it was is one of those that send this part: the run ends, says so, and keeps the model."""
    sites = FOUR if rows == 2 else FOUR | {"alpha": ("Mass",), "delta": ("Mass", "Nodule")}
    federation = secured(tiny(METHOD, sites, rounds=1, selection="last", min_sites=3, max_failed_rounds=2))
    draw = torch.Generator().manual_seed(0)

    def noise(site: str, task: TaskData, answer: Packed) -> Packed:
        update = unpack(answer)
        if site != "delta" or not isinstance(update, Update):
            return answer
        tensors = {
            name: torch.randint(-(2**62), 2**62, tensor.shape, generator=draw)
            for name, tensor in getattr(update, part).items()
        }
        if rows == 1:  # that of Nodule alone
            tensors = {
                name: torch.cat([getattr(update, part)[name][:1], t[1:]]) for name, t in tensors.items()
            }
        return pack(replace(update, **{part: tensors}))

    server = federation.server("out")
    row, of = ("Nodule", "beta, delta, gamma") if rows == 1 else ("Mass", "alpha, beta, delta, gamma")
    said = f"in {'the shared tensors' if part == 'shared' else f'the row of {row}'} one of {of} has sent"
    with pytest.raises(FederationError, match=said) as stopped:
        federate(server, Between(federation.sites("out"), noise))
    assert "the masks hide which" in str(stopped.value)
    assert "requested" not in str(stopped.value)
    assert server.round == 0


@pytest.mark.complete
@pytest.mark.parametrize("lie", [False, True])
def test_a_class_whose_owner_is_late_is_left_out_of_a_round(lie: bool, tiny: Any) -> None:
    """Two would train it: they train their other class, and both from the next round on."""
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last", min_sites=3))
    sites, attempts, trained = federation.sites("out"), set[str](), dict[int, set[str]]()

    def late(site: str, task: TaskData, answer: Packed) -> Packed | None:
        attempts.update([task.mask.attempt] if task.mask else [])
        step = unpack(answer)
        if isinstance(step, Update):
            trained.setdefault(task.round, set()).update(step.labels)
        if site != "gamma" or len(attempts) != 1:
            return answer
        if lie and isinstance(step, Masking) and step.keys:
            return pack(signed(sites[site], replace(step.keys, rows=step.keys.rows[:1])))
        return answer if lie else None

    server = federation.server("out")
    federate(server, Between(sites, late))
    lines = history(server)
    assert [(line["round"], line["status"]) for line in lines] == [(1, "committed"), (2, "committed")]
    why = "keys for other rows than those that were asked for" if lie else "lost on the way"
    assert lines[0]["sites"]["gamma"]["reason"] == why
    assert accepted(lines[1]) == sorted(FOUR)
    assert trained == {1: {"Mass"}, 2: {"Mass", "Nodule"}}


THREE = dict.fromkeys(["alpha", "beta", "gamma"], ("Mass", "Nodule"))


@pytest.mark.complete
@pytest.mark.parametrize("denied", [False, True])
def test_a_sum_of_three_needs_the_shares_of_two(denied: bool, tiny: Any) -> None:
    """One that says it holds no share of another, or is lost before it reveals, does not stop it."""
    federation = secured(tiny(METHOD, THREE, rounds=1, selection="last"))

    def change(site: str, task: TaskData, answer: Packed) -> Packed | None:
        step = unpack(answer)
        if site != "gamma" or not isinstance(step, Masking) or step.step not in ("survivors", "reveal"):
            return answer
        if not denied:
            return None if step.step == "reveal" else answer
        seeds = {s: share for s, share in step.seeds.items() if s != "alpha"}
        return pack(replace(step, unopened=("alpha",) if step.step == "survivors" else (), seeds=seeds))

    masked = run(federation, "masked", change)
    plain = run(replace(federation, plan=replace(federation.plan, secure_aggregation=None)), "plain")
    assert [line["status"] for line in history(masked)] == ["committed"]
    assert furthest(plain, masked) < 1e-6


@pytest.mark.complete
@pytest.mark.parametrize("liars", [2, 3])
def test_as_many_liars_as_colluders_do_not_have_an_honest_site_left_out(liars: int, tiny: Any) -> None:
    """Each says that alpha has sealed no share for it."""
    names = ["alpha", *(f"site-{i}" for i in range(7))]
    federation = secured(tiny(METHOD, dict.fromkeys(names, ("Mass",)), rounds=2, selection="last"), 2)
    federation = replace(federation, schedule=replace(federation.schedule, min_sites=5))

    def deny(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if site not in names[-liars:] or not isinstance(step, Masking):
            return answer
        if step.step == "survivors":
            return pack(replace(step, unopened=("alpha",)))
        return pack(replace(step, seeds={s: share for s, share in step.seeds.items() if s != "alpha"}))

    server = run(federation, "out", deny)
    statuses = [line["sites"]["alpha"]["status"] for line in history(server) if line["status"] == "committed"]
    assert statuses == ["accepted" if liars == 2 else "rejected"] * 2


def test_an_attempt_with_too_few_sites_says_who_is_missing(tiny: Any) -> None:
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=1))

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if site in ("alpha", "beta") and task.mask else answer

    with pytest.raises(FederationError, match=r"2 sites are left.*alpha: lost on the way; beta: lost"):
        run(federation, "out", lose)


# Two experiments


def at_home(federation: Any, experiment: str, names: Collection[str], seed: int = 1) -> dict[str, Site]:
    """The sites as in a federation of kits: each keeps its experiments side by side."""
    plan = replace(federation.plan, experiment=experiment, seed=seed)
    return {
        name: Site(
            name, federation.configs[name], plan, 1, federation.folder / name / EXPERIMENTS / experiment
        )
        for name in names
    }


@pytest.mark.complete
def test_an_update_is_not_masked_in_two_experiments(tiny: Any) -> None:
    """The same job among three of the four sites: the difference of the sums would be delta's update."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))
    federate(federation.server("first"), Between(at_home(federation, "first", FOUR), honest))
    three = dict.fromkeys(["alpha", "beta", "gamma"])
    sites = at_home(federation, "second", three)
    with pytest.raises(FederationError, match=r"alpha: masking \(ReusedSeed\)"):
        federate(federation.server("second"), Between(sites, honest))
    said = (sites["alpha"].folder / "errors.jsonl").read_text()
    assert "the same update in round 1 of the experiment first; set another seed" in said
    other = replace(federation, plan=replace(federation.plan, seed=2))
    federate(other.server("third"), Between(at_home(federation, "third", three, seed=2), honest))


@pytest.mark.complete
def test_nor_in_one_whose_folder_was_deleted(tiny: Any) -> None:
    """With it the site has lost of which sums it has revealed shares."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))
    federate(federation.server("first"), Between(at_home(federation, "first", FOUR), honest))
    for party in ("alpha", "beta", "gamma"):
        shutil.rmtree(federation.folder / party / EXPERIMENTS / "first")
    shutil.rmtree(federation.server("first").record.folder)
    three = at_home(federation, "first", ["alpha", "beta", "gamma"])
    with pytest.raises(FederationError, match=r"alpha: masking \(ReusedSeed\)"):
        federate(federation.server("first"), Between(three, honest))


@pytest.mark.complete
def test_experiments_at_the_same_time_note_their_updates_in_turn(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both could look before either has written."""
    federation, looked = secured(tiny(METHOD, FOUR, rounds=1, selection="last")), []

    def look(path: Path) -> list[dict[str, Any]]:
        with pytest.raises(InUse):
            hold(path.with_name(f".{MASKED}.lock"), 0.0)
        looked.append(path)
        return read_records(path)

    monkeypatch.setattr(masks, "read_records", look)
    federate(federation.server("first"), Between(at_home(federation, "first", FOUR), honest))
    assert len(looked) == len(FOUR)


@pytest.mark.complete
def test_a_row_alone_is_not_masked_in_two_experiments(tiny: Any) -> None:
    """Where the server has changed another tensor a little, so that no update is whole the same."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", max_failed_rounds=1))
    federate(federation.server("first"), Between(at_home(federation, "first", FOUR), honest))
    path = federation.folder / "alpha" / MASKED
    (line,) = map(json.loads, path.read_text().splitlines())
    assert len(line["parts"]) == 3  # the shared tensors, Mass and Nodule
    path.write_text(json.dumps({**line, "parts": line["parts"][2:]}) + "\n")
    sites = at_home(federation, "second", FOUR)
    with pytest.raises(FederationError, match="alpha: masking"):
        federate(federation.server("second"), Between(sites, honest))
    assert "set another seed" in (sites["alpha"].folder / "errors.jsonl").read_text()


@pytest.mark.complete
@pytest.mark.parametrize("numbers", [{"Nodule": 7}, {}])
def test_a_class_that_nobody_else_trains_is_not_trained(numbers: dict[str, int], tiny: Any) -> None:
    """With the other rows at zero, the shared tensors of the sum would be the update of this site."""
    both = ("Mass", "Nodule")
    liar = lied_to(tiny, {"a": both, "b": both, "c": both, "d": both})
    liar.numbers["a"] = {"Mass": liar.numbers["a"]["Mass"], **numbers}
    with pytest.raises(Refused, match=r"'a', 'update'"):
        liar.add_up("abcd", "abcd", "abcd")
    said = (liar.sites["a"].folder / "errors.jsonl").read_text()
    assert ("1 sites that are present" if numbers else "asks to train with") in said
    assert "'Nodule'" in said


# One site alone would move the shared tensors

ONE_STEP = replace(METHOD, local=replace(METHOD.local, iterations=1))
SIX = dict.fromkeys("abcdef", ("Mass",)) | dict.fromkeys("abc", ("Hernia", "Mass"))


def moves(liar: Liar, members: str, survivors: str) -> bool:
    """Whether a sum moves any weight of the shared tensors."""
    shared = liar.tasks[members[0]].shared
    total = apart(from_fixed_point(liar.add_up(members, survivors, survivors[:-1]).shared), shared)
    return any(
        not torch.allclose(total[n] / len(survivors), t.double(), atol=1e-7)
        for n, t in shared.items()
        if t.ndim > 1
    )


def with_dead(liar: Liar, *names: str, **changes: Any) -> None:
    """Let the rows of some classes be 0, so that they pass nothing on to the shared tensors."""
    for site, task in liar.tasks.items():
        head = {n: t.clone() for n, t in task.head.items()}
        for tensor in head.values():
            tensor[[i for i, name in enumerate(task.labels) if name in names]] = 0
        liar.tasks[site] = replace(task, head=head, **changes)


def test_owners_of_a_class_are_those_of_the_attempt(tiny: Any) -> None:
    """b and c sign keys, and are "lost" in the next attempt. Mass, which all have, is dead; Hernia is not."""
    liar = lied_to(tiny, SIX, ONE_STEP)
    with_dead(liar, "Mass")
    with pytest.raises(MaskingRefused):  # after keys and shares
        liar.add_up("abcdef", "", "")
    with pytest.raises(Refused, match=r"'a', 'update'"):
        moves(liar, "adef", "adef")
    assert "1 sites that are present train the class 'Hernia'" in told(liar, "a")
    task = liar.tasks["a"]
    mass = [task.labels.index("Mass")]
    liar.tasks["a"] = replace(task, labels=("Mass",), head={n: t[mass] for n, t in task.head.items()})
    assert not moves(liar, "adef", "adef")


@pytest.mark.complete
@pytest.mark.parametrize("first", ["alone", "again", "twice", "unlike"])
def test_moments_of_one_site_are_not_a_sum(first: str, tiny: Any) -> None:
    """a has trained round 1 alone, again from another model, or from other rows; then all get a dead one."""
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")), ONE_STEP, rounds=2)
    sent, ask = dict(liar.tasks), liar.ask
    moved = {name: tensor + 1e-3 for name, tensor in sent["a"].shared.items()}
    sealed: dict[str, Any] = {}

    def twice(site: str, step: str, **content: Any) -> Any:
        sealed.update(content if (site, step) == ("a", "update") else {})
        if (site, step, first) == ("a", "survivors", "twice"):
            liar.tasks["a"] = replace(sent["a"], shared=moved)
            with pytest.raises(Refused):
                ask("a", "update", **sealed)
        return ask(site, step, **content)

    if first == "unlike":  # the sum is noise, and all reveal their shares
        with_dead(liar, "Mass", "Nodule")
        liar.tasks["a"] = sent["a"]
        liar.add_up("abcd", "abcd", "abcd")
    if first in ("again", "twice"):  # a, b and c reveal: without a, two sites are left that go on
        liar.ask = twice
        liar.add_up("abcd", "abcd", "abc")
        liar.tasks["a"], liar.ask = replace(sent["a"], shared=moved), ask
    if first in ("alone", "again"):
        with pytest.raises(Refused, match=r"'a', 'survivors'"):
            liar.add_up("abcd", "a", "a")
    liar.tasks = sent
    with_dead(liar, "Mass", "Nodule", round=2, committed=1)
    assert not moves(liar, "abcd", "abcd")


@pytest.mark.complete
def test_moments_of_a_sum_go_on(tiny: Any) -> None:
    """Else a clean run would not be the plain one."""
    liar = lied_to(tiny, dict.fromkeys("abcd", ("Mass", "Nodule")), ONE_STEP, rounds=2)
    liar.add_up("abcd", "abcd", "abcd")
    with_dead(liar, "Mass", "Nodule", round=2, committed=1)
    assert moves(liar, "abcd", "abcd")


def test_where_one_class_is_right_all_sites_have_the_same(tiny: Any) -> None:
    """Of rows that are equal none moves anything: those of two classes that a alone has could differ."""
    both = ("Mass", "Nodule")
    liar = lied_to(tiny, {"a": both, "b": both, "c": both, "d": ("Mass",)})
    labels, samples = liar.sites["a"].trainer.data
    liar.sites["a"].trainer.__dict__["data"] = replace(labels, label_type="multiclass"), samples
    with pytest.raises(Refused, match=r"'a', 'update'"):
        liar.add_up("abcd", "abcd", "abc")
    assert "rows could be equal" in told(liar, "a")
    owners = {"Mass": "abcd", "Nodule": "abc"}
    for label_type, method in (("multilabel", METHOD), ("multiclass", METHODS["vanilla"]())):
        check_same_classes(SecureAggregation(), method, label_type, owners, 4)
    with pytest.raises(FederationError, match="not all have 'Nodule'"):
        check_same_classes(SecureAggregation(), METHOD, "multiclass", owners, 4)


@pytest.mark.complete
def test_who_missed_a_round_begins_afresh(tiny: Any) -> None:
    """Its state is nobody else's; the others go on from theirs."""
    federation = secured(tiny(METHOD, SAME, rounds=3, selection="last", min_sites=3))
    states: dict[tuple[int, str], tuple[str, ...]] = {}

    def lose(site: str, task: TaskData, answer: Packed) -> Packed | None:
        step = unpack(answer)
        if isinstance(step, Masking) and step.keys:
            states[task.round, site] = step.keys.histories
        return None if (site, task.round, task.task) == ("delta", 2, "mask") else answer

    server = run(federation, "out", lose)
    assert [len(accepted(line)) for line in history(server)] == [4, 3, 4]
    assert {states[1, site] for site in SAME} == {()}
    assert len({states[2, site] for site in SAME} - {()}) == 1
    assert states[3, "alpha"] == states[3, "beta"] == states[3, "gamma"] != states[3, "delta"]


# Any message of one site


TEXTS = st.text("0123456789abcdef", max_size=300).map(lambda text: text[: len(text) // 2 * 2])
WRONG = {
    "certificate": st.sampled_from(["", "00" * 32, "ab" * 32, "-----BEGIN CERTIFICATE-----"]),
    "signature": TEXTS,
    "cipher": st.sampled_from(["00" * 32, "ff" * 32, "01" + "00" * 31]),
    "seed": st.just("00" * 32),
    "rows": st.lists(st.integers(0, 2**56 - 1), max_size=3).map(tuple),
    "among": st.lists(st.sampled_from([*FOUR, "x"]), max_size=5).map(tuple),
    "sealed": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
    "unopened": st.lists(st.sampled_from([*FOUR, "x"]), max_size=5).map(tuple),
    "seeds": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
    "secrets": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
}


@pytest.mark.complete
@examples(8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_message_of_one_site_is_taken_or_refused_by_its_name(tiny: Any, data: st.DataObject) -> None:
    """Wrong fields, and messages of another step or attempt: the run ends, or names the site."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=2))
    earlier: list[Packed] = data.draw(st.just([]))

    def hostile(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if site != "delta" or not isinstance(step, Masking):
            return answer
        earlier.append(answer)
        if data.draw(st.integers(0, 3)) == 0:
            return data.draw(st.sampled_from(earlier))
        key = data.draw(st.sampled_from(sorted(WRONG)))
        value = data.draw(WRONG[key])
        if step.keys and hasattr(step.keys, key):
            return pack(replace(step, keys=replace(step.keys, **{key: value})))
        return pack(replace(step, **{key: value})) if hasattr(step, key) else answer

    out = f"out-{len(list(federation.folder.glob('*')))}"
    server = federation.server(out)
    said = "delta"
    try:
        federate(server, Between(federation.sites(out), hostile))
    except FederationError as error:
        said = str(error)
    assert "delta" in said
    assert server.round == (said == "delta")
