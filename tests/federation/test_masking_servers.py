"""A server lies to sites with secure aggregation: none masks or reveals what would show one update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from masked import BOTH, secured
from parties import METHOD, complaint, run

from suture.core.errors import FederationError
from suture.federation.server.checks import check_same_classes
from suture.federation.site.site import Site
from suture.methods import METHODS
from suture.models.classifier import Layout
from suture.privacy.masking import Attempt, Masked, MaskingRefused, from_fixed_point, sorted_out, unmask_sum
from suture.privacy.secure_aggregation import SecureAggregation, apart, received_of, ring_of
from suture.protocol.messages import Abstain, Masking, MaskTask, TaskData
from suture.protocol.packing import Packed, unpack
from world import refused


class Refused(Exception):
    """A site does not take a step."""


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
            raise Refused(f"{site}: {step}: {complaint(self.sites[site])}")
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
        first = members[0]
        plan = self.sites[first].plan.digest(self.sites[first].rounds)
        attempt = Attempt("lied-to", self.tasks[first].round, self.number, plan=plan)
        egress = METHOD.egress(Layout({}, {}))
        received = {m: received_of(self.tasks[m], self.numbers[m], egress, "") for m in survivors}
        asked = {m: {n: k for n, k in self.numbers[m].items() if n in u.labels} for m, u in updates.items()}
        masked = ((m, ring_of(update, asked[m])) for m, update in updates.items())
        shares, _ = sorted_out(sealed, {}, survivors, revealed)
        return unmask_sum(attempt, roster, list(members), masked, shares, received)

    def moves(self, members: str, survivors: str, askers: str) -> bool:
        """Whether a sum moves any weight of the shared tensors."""
        shared = self.tasks[members[0]].shared
        total = apart(from_fixed_point(self.add_up(members, survivors, askers).shared), shared)
        weights = {n: t.double() for n, t in shared.items() if t.ndim > 1}
        return any(not torch.allclose(total[n] / len(survivors), t, atol=1e-7) for n, t in weights.items())

    def reopen(self, *names: str, rounds: int = 1, **plan: Any) -> None:
        """Let sites run another job."""
        for name in names:
            site = self.sites[name]
            site.close()
            self.sites[name] = Site(name, site.config, replace(site.plan, **plan), rounds, site.folder)

    def with_dead(self, *names: str, **changes: Any) -> None:
        """Let the rows of some classes be 0, so that they pass nothing on to the shared tensors."""
        for site, task in self.tasks.items():
            head = {n: t.clone() for n, t in task.head.items()}
            for tensor in head.values():
                tensor[[i for i, name in enumerate(task.labels) if name in names]] = 0
            self.tasks[site] = replace(task, head=head, **changes)


FOUR_SITES = dict.fromkeys("abcd", BOTH)
STILL = replace(METHOD, local=replace(METHOD.local, lr=1e-30))


def lied_to(tiny: Any, labels: Any = FOUR_SITES, method: Any = METHOD, rounds: int = 1) -> Liar:
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
    """a, d and p are most of five, b and c most of three; d alone has the row that is more in one sum.

    Sites that have masked nothing yet in the round could not tell that another sum was revealed.
    """
    names = {m: BOTH if m in "abcd" else ("Mass",) for m in "abcdpqrst"}
    liar = lied_to(tiny, names)
    row = liar.numbers["d"]["Nodule"]
    five = liar.add_up("abcdp", "abcdp", "adp").rows[row]
    # q, r, s and t would be most of the last.
    for members, survivors, askers in (
        ("abc", "abc", "bc"),
        ("abcdp", "abc", "abc"),
        ("abcqrst",) * 2 + ("qrst",),
    ):
        with refused(by=Refused):
            liar.add_up(members, survivors, askers)  # the difference of the rows would be the row of d
    assert (liar.add_up("abcdp", "abcdp", "abc").rows[row] == five).all()


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("surgical", ("Cyst", "Edema")),
        ("surgical", ("Cyst", "Mass", "Nodule")),
        ("vanilla", ("Edema", "Mass")),
    ],
)
def test_sites_that_train_other_classes_hide_nobody(name: str, names: tuple[str, ...], tiny: Any) -> None:
    """Under names that they do not know, three of four would send the model as it came."""
    liar = lied_to(tiny, method=METHODS[name](local=METHOD.local))
    for site in "bcd":
        task, rows = liar.tasks[site], [0, 1, 1][: len(names)]
        liar.tasks[site] = replace(task, labels=names, head={n: t[rows] for n, t in task.head.items()})
        if old := liar.numbers[site]:
            spare = [number for label, number in old.items() if label not in names] + [1]
            liar.numbers[site] = {label: old.get(label) or spare.pop(0) for label in names}
    with refused("b: update", "the server asks to train with", by=Refused):
        liar.add_up("abcd", "bcda", "abc")


@pytest.mark.complete
@pytest.mark.parametrize("job", [{"method": STILL}, {"rounds": 100}], ids=["plan", "rounds"])
def test_sites_with_another_plan_hide_nobody(job: dict[str, Any], tiny: Any) -> None:
    """With a learning rate of nothing, three of four would send the model as it came."""
    liar = lied_to(tiny)
    liar.reopen(*"bcd", **job)
    with refused("a: shares", by=Refused):
        liar.add_up("abcd", "abcd", "abc")


@pytest.mark.complete
def test_an_update_of_another_plan_is_not_kept_for_this_one(tiny: Any) -> None:
    """Its sum with updates of a learning rate of nothing would be the kept one."""
    liar = lied_to(tiny)
    with refused("a: survivors", by=Refused):
        liar.add_up("abcd", "a", "a")  # a alone trains by the first plan
    liar.reopen(*"abcd", method=STILL)
    assert not liar.moves("abcd", "abcd", "abc")


@pytest.mark.complete
@pytest.mark.parametrize(("change", "sites"), [("model", "abcd"), ("model", "a"), ("state", "a")])
def test_a_round_is_added_up_from_one_model_and_state(change: str, sites: str, tiny: Any) -> None:
    """The others would repeat their updates, and the difference of the sums would be of one site."""
    liar = lied_to(tiny)
    liar.add_up("abcd", "abcd", "abc")
    for site in sites:
        task = liar.tasks[site]
        moved = replace(task, shared={name: tensor + 1e-3 for name, tensor in task.shared.items()})
        liar.tasks[site] = moved if change == "model" else replace(task, committed=1)
    with refused("a: reveal", by=Refused):
        liar.add_up("abcd", "abcd", "abc")


@pytest.mark.complete
@pytest.mark.parametrize(("numbers", "said"), [({"Nodule": 7}, "1 sites"), ({}, "asks to train with")])
def test_a_class_that_nobody_else_trains_is_not_trained(
    numbers: dict[str, int], said: str, tiny: Any
) -> None:
    """With the other rows at zero, the shared tensors of the sum would be the update of this site."""
    liar = lied_to(tiny)
    liar.numbers["a"] = {"Mass": liar.numbers["a"]["Mass"], **numbers}
    with refused("a: update", "'Nodule'", said, by=Refused):
        liar.add_up("abcd", "abcd", "abcd")


# One site alone would move the shared tensors


ONE_STEP = replace(METHOD, local=replace(METHOD.local, iterations=1))
SIX = dict.fromkeys("abcdef", ("Mass",)) | dict.fromkeys("abc", ("Hernia", "Mass"))


def test_owners_of_a_class_are_those_of_the_attempt(tiny: Any) -> None:
    """b and c sign keys, and are "lost" in the next attempt. Mass, which all have, is dead; Hernia is not."""
    liar = lied_to(tiny, SIX, ONE_STEP)
    liar.with_dead("Mass")
    with refused(by=MaskingRefused):  # after keys and shares
        liar.add_up("abcdef", "", "")
    with refused("a: update", "1 sites", "'Hernia'", by=Refused):
        liar.add_up("adef", "adef", "ade")
    task = liar.tasks["a"]
    mass = [task.labels.index("Mass")]
    liar.tasks["a"] = replace(task, labels=("Mass",), head={n: t[mass] for n, t in task.head.items()})
    assert not liar.moves("adef", "adef", "ade")


@pytest.mark.complete
@pytest.mark.parametrize("first", ["alone", "again", "twice", "unlike", "honest"])
def test_moments_of_one_site_are_not_a_sum(first: str, tiny: Any) -> None:
    """a has trained round 1 alone, again from another model, or from other rows; then all get a dead one.

    Moments of an honest sum go on: else a clean run would not be the plain one.
    """
    liar = lied_to(tiny, FOUR_SITES, ONE_STEP, rounds=2)
    sent, ask = dict(liar.tasks), liar.ask
    moved = {name: tensor + 1e-3 for name, tensor in sent["a"].shared.items()}
    sealed: dict[str, Any] = {}

    def twice(site: str, step: str, **content: Any) -> Any:
        sealed.update(content if (site, step) == ("a", "update") else {})
        if (site, step, first) == ("a", "survivors", "twice"):
            liar.tasks["a"] = replace(sent["a"], shared=moved)
            with refused(by=Refused):
                ask("a", "update", **sealed)
        return ask(site, step, **content)

    if first == "honest":
        liar.add_up("abcd", "abcd", "abcd")
    if first == "unlike":  # the sum is noise, and all reveal their shares
        liar.with_dead("Mass", "Nodule")
        liar.tasks["a"] = sent["a"]
        liar.add_up("abcd", "abcd", "abcd")
    if first in ("again", "twice"):  # a, b and c reveal: without a, two sites are left that go on
        liar.ask = twice  # type: ignore[method-assign]
        liar.add_up("abcd", "abcd", "abc")
        liar.tasks["a"], liar.ask = replace(sent["a"], shared=moved), ask  # type: ignore[method-assign]
    if first in ("alone", "again"):
        with refused("a: survivors", by=Refused):
            liar.add_up("abcd", "a", "a")
    liar.tasks = sent
    liar.with_dead("Mass", "Nodule", round=2, committed=1)
    assert liar.moves("abcd", "abcd", "abc") == (first == "honest")


def test_where_one_class_is_right_all_sites_have_the_same(tiny: Any) -> None:
    """Of rows that are equal none moves anything: those of two classes that a alone has could differ."""
    liar = lied_to(tiny, FOUR_SITES | {"d": ("Mass",)})
    labels, samples = liar.sites["a"].trainer.data
    liar.sites["a"].trainer.__dict__["data"] = replace(labels, label_type="multiclass"), samples
    with refused("a: update", "equal", by=Refused):
        liar.add_up("abcd", "abcd", "abc")
    owners = {"Mass": "abcd", "Nodule": "abc"}
    for label_type, method in (("multilabel", METHOD), ("multiclass", METHODS["vanilla"]())):
        check_same_classes(SecureAggregation(), method, label_type, owners, 4)
    with refused("'Nodule'", by=FederationError):
        check_same_classes(SecureAggregation(), METHOD, "multiclass", owners, 4)


# What a mask depends on


def test_rows_from_which_sites_learn_are_those_of_all_sites() -> None:
    """ConDist's sites learn from the rows of classes that they do not annotate, and send none of them."""
    egress = METHODS["condist"]().egress(Layout({}, {}))
    task = TaskData("train", 1, labels=("A", "B"), shared={"w": torch.ones(2)}, head={"h": torch.ones(2, 3)})
    others = replace(task, head={"h": torch.tensor([[1.0], [7.0]]).expand(2, 3)})

    def shared(task: TaskData, every: bool) -> bytes:
        return received_of(task, {"A": 1}, egress, "", every=every).shared

    assert shared(task, True) != shared(others, True)
    assert shared(task, False) == shared(others, False)


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
