"""Half-precision transport of the model's tensors: what is exact, what is rounded, and by how much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import Egress
from suture.protocol.half import Narrow, narrow, received, restored, sent
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import pack, unpack

LABELS = ("Edema", "Mass")
EGRESS = Egress(
    {"w": ((3,), "torch.float32"), "bn.running_var": ((1,), "torch.float32"), "n": ((), "torch.int64")},
    {"head.weight": ((2,), "torch.float32")},
    class_weight=(0.0, 1.0),
)


def payload(w: Tensor, variance: float = 1.0) -> TaskData:
    shared = {"w": w, "bn.running_var": torch.tensor([variance]), "n": torch.tensor(2**40 + 1)}
    return TaskData("train", 1, labels=LABELS, shared=shared, head={"head.weight": torch.full((2, 2), 0.1)})


def travelled(model: TaskData) -> TaskData:
    message = unpack(Narrow()(pack(model)))
    assert isinstance(message, TaskData)
    return received(message)


def trained(model: TaskData, by: float) -> Update:
    shared = {n: t + by if t.is_floating_point() else t + 1 for n, t in model.shared.items()}
    head = {n: t + by for n, t in model.head.items()}
    return Update(1, LABELS, shared, head, torch.tensor([1 / 3, 1.0], dtype=torch.float64))


def test_a_payload_arrives_as_the_nearest_halves_and_its_integers_exactly() -> None:
    model = payload(torch.tensor([0.1, -3.14159, 1e-9]))
    packed = Narrow()(pack(model))
    assert {n: t.dtype for n, t in packed.tensors.items()} == {
        "shared/w": torch.float16,
        "shared/bn.running_var": torch.float16,
        "shared/n": torch.int64,
        "head/head.weight": torch.float16,
    }
    arrived = travelled(model)
    assert arrived.shared["w"].dtype == torch.float32
    # By hand: halves between 1/16 and 1/8 are 2^-14 apart, those between 2 and 4 are 2^-9 apart.
    assert arrived.shared["w"].tolist() == [round(0.1 * 2**14) / 2**14, -round(3.14159 * 2**9) / 2**9, 0.0]
    assert arrived.shared["n"].item() == 2**40 + 1


@pytest.mark.parametrize("value", [65_520.0, -1e30, 3e38, float("inf"), float("nan")])
def test_a_number_beyond_the_range_of_halves_never_becomes_infinite(value: float) -> None:
    tensor = torch.tensor([0.5, value, 1.0])
    assert narrow(tensor) is tensor
    model = payload(torch.zeros(3))
    update = replace(trained(model, 0.0), shared={**model.shared, "w": tensor})
    back = restored(sent(update, travelled(model)), model, EGRESS)
    assert torch.equal(back.shared["w"], tensor) or torch.isnan(tensor).any()


def test_the_largest_half_travels_as_one() -> None:
    assert narrow(torch.tensor([65_504.0])).dtype == torch.float16
    assert narrow(torch.empty(0)).dtype == torch.float16


def test_the_server_adds_a_sites_change_to_its_own_weights() -> None:
    model = payload(torch.tensor([0.1, 0.2, 0.3]))
    update = trained(travelled(model), 2**-12)  # less than the halves near 0.2 are apart
    back = restored(sent(update, travelled(model)), model, EGRESS)
    assert torch.equal(back.shared["w"], model.shared["w"] + 2**-12)
    assert back.shared["n"].item() == 2**40 + 2
    assert torch.equal(back.class_weights, update.class_weights)


def test_what_nobody_trains_stays_as_it_is_to_the_bit() -> None:
    model = payload(torch.tensor([0.1, 1 / 3, 1e-9]))
    back = restored(sent(trained(travelled(model), 0.0), travelled(model)), model, EGRESS)
    assert torch.equal(back.shared["w"], model.shared["w"])
    assert torch.equal(back.head["head.weight"], model.head["head.weight"])


def test_the_error_of_an_update_is_that_of_its_change() -> None:
    g = torch.Generator().manual_seed(1)
    model = payload(torch.randn(100_000, generator=g))
    base = travelled(model)
    change = 1e-2 * torch.randn(100_000, generator=g)
    update = replace(trained(base, 0.0), shared={**base.shared, "w": base.shared["w"] + change})
    back = restored(sent(update, base), model, EGRESS).shared["w"] - model.shared["w"]
    exact = update.shared["w"] - base.shared["w"]
    # 2^-11 of the change, and float32's own rounding of numbers up to 8.
    assert bool(((back - exact).abs() <= exact.abs() * 2**-11 + 2**-21).all())


def test_gradients_travel_as_they_are() -> None:
    model = payload(torch.tensor([5.0, 6.0, 7.0]))
    update = replace(trained(model, 0.0), kind="gradient", shared={**model.shared, "w": torch.ones(3) / 4})
    small = sent(update, travelled(model))
    assert small.shared["w"].dtype == torch.float16
    assert restored(small, model, EGRESS).shared["w"].tolist() == [0.25] * 3


def test_a_variance_does_not_become_negative() -> None:
    exact = 0.3334  # its half is larger
    model = payload(torch.zeros(3), variance=exact)
    base = travelled(model)
    assert base.shared["bn.running_var"].item() > exact
    update = replace(trained(base, 0.0), shared={**base.shared, "bn.running_var": torch.zeros(1)})
    assert restored(sent(update, base), model, EGRESS).shared["bn.running_var"].item() == 0.0


def test_halves_are_taken_only_where_the_job_says_so() -> None:
    model = payload(torch.zeros(3))
    update = sent(trained(model, 0.1), model)
    full = AllowedReply("train", 1, 0, "validation", LABELS, LABELS, EGRESS)
    check_reply(update, replace(full, half=True))
    with pytest.raises(RejectedUpdate, match=r"shared/w is torch.float16 instead of torch.float32"):
        check_reply(update, full)


def test_an_infinite_half_and_an_integer_in_halves_are_refused() -> None:
    model = payload(torch.zeros(3))
    half = AllowedReply("train", 1, 0, "validation", LABELS, LABELS, EGRESS, half=True)
    update = sent(trained(model, 0.1), model)
    bad = update.shared["w"].clone()
    bad[0] = float("inf")
    with pytest.raises(RejectedUpdate, match="shared/w is not finite"):
        check_reply(replace(update, shared={**update.shared, "w": bad}), half)
    with pytest.raises(RejectedUpdate, match=r"shared/n is torch.float16 instead of torch.int64"):
        check_reply(replace(update, shared={**update.shared, "n": torch.tensor(1.0).half()}), half)


def test_what_sites_share_is_converted_once() -> None:
    narrowed, model = Narrow(), payload(torch.zeros(3))
    one, two = narrowed(pack(model)), narrowed(pack(replace(model, round=2)))
    assert one.tensors["shared/w"] is two.tensors["shared/w"]
