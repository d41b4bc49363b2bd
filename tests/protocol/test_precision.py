"""Transport of the model's tensors in 16 and 8 bits: what is exact, what is rounded, and by how much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import Egress, Layout
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import (
    BLOCK,
    Narrow,
    Transport,
    check_narrowed,
    narrow,
    pack,
    restore_task,
    restore_update,
    sent,
    unpack,
)
from world import refused

LABELS = ("Edema", "Mass")
FLOAT = "torch.float32"
EGRESS = Egress(
    {"w": ((3,), "torch.float32"), "bn.running_var": ((1,), "torch.float32"), "n": ((), "torch.int64")},
    {"head.weight": ((2,), "torch.float32")},
    class_weight=(0.0, 1.0),
)

LAYOUT = Layout(EGRESS.shared, EGRESS.head)


NONE = torch.empty(0, dtype=torch.float64)
BEYOND = [65_520.0, -1e30, 3e38, float("inf"), float("nan")]
"""Beyond the range of halves, or no number."""


def payload(w: Tensor, variance: float = 1.0) -> TaskData:
    shared = {"w": w, "bn.running_var": torch.tensor([variance]), "n": torch.tensor(2**40 + 1)}
    return TaskData("train", 1, labels=LABELS, shared=shared, head={"head.weight": torch.full((2, 2), 0.1)})


def travelled(model: TaskData, transport: Transport = "float16", layout: Layout = LAYOUT) -> TaskData:
    """The model on which a site trains."""
    message = unpack(Narrow()(pack(model), transport))
    assert isinstance(message, TaskData)
    return restore_task(message, layout, transport)


def trained(model: TaskData, by: float) -> Update:
    shared = {n: t + by if t.is_floating_point() else t + 1 for n, t in model.shared.items()}
    head = {n: t + by for n, t in model.head.items()}
    return Update(1, LABELS, shared, head, torch.tensor([1 / 3, 1.0], dtype=torch.float64))


def returned(update: Update, model: TaskData, base: TaskData | None = None) -> Update:
    """What the server takes of an update in halves."""
    return restore_update(sent(update, base or travelled(model), "float16"), model, EGRESS, "float16")


def allowed(transport: Transport) -> AllowedReply:
    return AllowedReply(TaskData("train", 1, labels=LABELS), replace(EGRESS, transport=transport), LABELS)


def test_a_payload_arrives_as_the_nearest_halves_and_its_integers_exactly() -> None:
    model = payload(torch.tensor([0.1, -3.14159, 1e-9]))
    packed = Narrow()(pack(model), "float16")
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


@pytest.mark.parametrize("value", BEYOND)
def test_a_number_beyond_the_range_of_halves_never_becomes_infinite(value: float) -> None:
    tensor, wide = torch.tensor([0.5, value, 1.0]), torch.zeros(2, 9)
    wide[1, 3] = value
    assert narrow(tensor, "float16") is tensor
    assert narrow(wide, "int8") is wide
    model = payload(torch.zeros(3))
    back = returned(replace(trained(model, 0.0), shared={**model.shared, "w": tensor}), model)
    assert torch.equal(back.shared["w"], tensor) or torch.isnan(tensor).any()


def test_the_largest_numbers_and_empty_tensors_travel_in_fewer_bits() -> None:
    assert narrow(torch.tensor([65_504.0]), "float16").dtype == torch.float16
    assert narrow(torch.empty(0), "float16").dtype == torch.float16
    tensor = torch.full((2, 200), 65_504.0)
    assert check_narrowed("w", narrow(tensor, "int8"), ((2, 200), FLOAT), "int8")
    assert torch.allclose(there_and_back(tensor), tensor)


def test_the_server_adds_a_sites_change_to_its_own_weights() -> None:
    """What nobody trains stays as it is to the bit; a change may be less than the halves are apart."""
    model = payload(torch.tensor([0.1, 1 / 3, 1e-9]))
    update = trained(travelled(model), 2**-12)
    back = returned(update, model)
    assert torch.equal(back.shared["w"], model.shared["w"] + 2**-12)
    assert back.shared["n"].item() == 2**40 + 2
    assert torch.equal(back.class_weights, update.class_weights)
    same = returned(trained(travelled(model), 0.0), model)
    assert torch.equal(same.shared["w"], model.shared["w"])
    assert torch.equal(same.head["head.weight"], model.head["head.weight"])


def there_and_back(tensor: Tensor) -> Tensor:
    """What a gradient of this tensor arrives as in eight bits."""
    form = (tuple(tensor.shape), FLOAT)
    update = Update(1, (), {"w": tensor}, {}, NONE, kind="gradient")
    model = TaskData("train", 1, shared={"w": torch.zeros(form[0])})
    egress = Egress({"w": form}, {}, kind="gradient")
    return restore_update(sent(update, model, "int8"), model, egress, "int8").shared["w"]


@pytest.mark.parametrize(("transport", "shape"), [("float16", (100_000,)), ("int8", (8, 200))])
def test_the_error_of_an_update_is_that_of_its_change(transport: Transport, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    model = TaskData("train", 1, shared={"w": torch.randn(shape, generator=g)})
    layout, egress = (kind({"w": (shape, FLOAT)}, {}) for kind in (Layout, Egress))
    base = travelled(model, transport, layout)
    change = 1e-3 * torch.randn(shape, generator=g)
    update = Update(1, (), {"w": base.shared["w"] + change}, {}, NONE)
    back = restore_update(sent(update, base, transport), model, egress, transport)
    moved = back.shared["w"] - model.shared["w"]
    exact = update.shared["w"] - base.shared["w"]
    if transport == "float16":  # 2^-11 of the change, and float32's own rounding of numbers up to 8
        assert bool(((moved - exact).abs() <= exact.abs() * 2**-11 + 2**-21).all())
    else:  # the weights are wrong by up to 4 / 254; of the change arrives all but 4e-3 / 254
        assert (base.shared["w"] - model.shared["w"]).abs().max() > 1e-3
        assert (moved - change).abs().max() < 4e-3 / 254 + 1e-6


def test_gradients_travel_as_they_are() -> None:
    model = payload(torch.tensor([5.0, 6.0, 7.0]))
    update = replace(trained(model, 0.0), kind="gradient", shared={**model.shared, "w": torch.ones(3) / 4})
    assert sent(update, travelled(model), "float16").shared["w"].dtype == torch.float16
    assert returned(update, model).shared["w"].tolist() == [0.25] * 3


def test_a_variance_does_not_become_negative() -> None:
    exact = 0.3334  # its half is larger
    model = payload(torch.zeros(3), variance=exact)
    base = travelled(model)
    assert base.shared["bn.running_var"].item() > exact
    update = replace(trained(base, 0.0), shared={**base.shared, "bn.running_var": torch.zeros(1)})
    assert returned(update, model, base).shared["bn.running_var"].item() == 0.0


def test_what_sites_share_is_converted_once() -> None:
    narrowed, model = Narrow(), payload(torch.zeros(3))
    one, two = (narrowed(pack(m), "float16") for m in (model, replace(model, round=2)))
    assert one.tensors["shared/w"] is two.tensors["shared/w"]


# Eight bits


def test_eight_bits_by_hand() -> None:
    row = torch.tensor([[127.0, -63.4, 0.6, 0.4, 0.0, 1.0], [0.0] * 6])
    small = narrow(row, "int8")
    # The scale of the first row is 1; its codes are the numbers, rounded. float32's 1.0 is 00 00 80 3f.
    assert small.tolist() == [[127, -63, 1, 0, 0, 1, 0, 0, -128, 63], [0] * 10]
    assert there_and_back(row).tolist() == [[127.0, -63.0, 1.0, 0.0, 0.0, 1.0], [0.0] * 6]


@pytest.mark.parametrize(
    ("shape", "travels"),
    [
        ((64, 576), (64, 576 + 4 * 5)),  # 0.26 of the bytes
        ((2, 3, 50), (2, 150 + 4 * 2)),  # two blocks a row, the second of 22 numbers
        ((3, BLOCK), (3, BLOCK + 4)),
        ((3, 9), (3, 13)),  # smaller than a block
        ((3, 4), None),  # eight bytes in float16, and with a scale
        ((1280,), None),
        ((), None),
        ((0, 9), None),
        ((9, 0), None),
    ],
)
def test_which_tensors_travel_in_eight_bits(shape: tuple[int, ...], travels: tuple[int, int] | None) -> None:
    tensor = torch.ones(shape)
    small = narrow(tensor, "int8")
    assert (tuple(small.shape), small.dtype) == ((travels, torch.int8) if travels else (shape, torch.float16))
    assert check_narrowed("w", small, (shape, FLOAT), "int8")
    assert torch.equal(there_and_back(tensor), tensor)


@pytest.mark.complete
@given(rows=st.integers(1, 3), row=st.integers(5, 300), data=st.data())
def test_the_error_is_at_most_half_a_scale_in_each_block(rows: int, row: int, data: st.DataObject) -> None:
    sizes = st.sampled_from([1e-44, 1e-38, 1e-9, 1e-3, 1.0, 6.5e4])
    numbers = data.draw(st.lists(st.floats(-65_504, 65_504, width=32), min_size=1, max_size=40))
    exact = torch.tensor(numbers, dtype=torch.float64).repeat(rows * row // len(numbers) + 1)[: rows * row]
    tensor = (exact / 65_504 * data.draw(sizes)).float().view(rows, row)
    back = there_and_back(tensor)
    for start in range(0, row, BLOCK):
        block, arrived = (t[:, start : start + BLOCK].double() for t in (tensor, back))
        half = block.abs().amax(dim=1, keepdim=True) / 127 / 2
        # Quotients are rounded to float32; and below 2^-126 a scale has few digits, or is 0.
        assert bool(((block - arrived).abs() <= half * (1 + 1e-4) + 2.0**-142).all())
    assert torch.equal(there_and_back(back), back) or bool((tensor.abs() < 1e-36).any())


# What is refused


def test_fewer_bits_are_taken_only_where_the_job_says_so() -> None:
    """And a negative variance in none: one beside a large number travels as its value, not as a change."""
    model = payload(torch.zeros(3))
    update = sent(trained(model, 0.1), model, "float16")
    check_reply(update, allowed("float16"))
    infinite, negative = update.shared["w"].clone(), torch.tensor([-1e6])
    infinite[0] = float("inf")
    for name, tensor in (("w", infinite), ("n", torch.tensor(1.0).half()), ("bn.running_var", negative)):
        with refused(name, by=RejectedUpdate):
            check_reply(replace(update, shared={**update.shared, name: tensor}), allowed("float16"))
    for transport in ("float32", "int8"):
        exact = sent(trained(model, 0.1), model, transport)
        check_reply(exact, allowed(transport))
        with refused("bn.running_var", by=RejectedUpdate):
            check_reply(
                replace(exact, shared={**exact.shared, "bn.running_var": negative}), allowed(transport)
            )
    with refused("shared/w", "float16", by=RejectedUpdate):
        check_reply(update, allowed("float32"))


WHOLE = narrow(torch.ones(2, 200), "int8")


def scaled(scale: float) -> Tensor:
    """The tensor with another scale in its second row."""
    small = WHOLE.clone()
    small[1, 200:204] = torch.tensor([scale]).view(torch.int8)
    return small


@pytest.mark.parametrize(
    ("tensor", "transport"),
    [
        *((scaled(s), "int8") for s in (float("nan"), float("inf"), -1.0, -float("inf"), 516.0, 3e38)),
        (WHOLE[:, :-1].contiguous(), "int8"),
        (WHOLE[:1].clone(), "int8"),
        (WHOLE.view(-1), "int8"),
        (torch.zeros(2, 200, dtype=torch.int8), "int8"),
        (WHOLE.view(torch.uint8), "int8"),
        (torch.zeros(2, 200, dtype=torch.int64), "int8"),
        (torch.full((2, 200), float("inf")).half(), "int8"),
        (WHOLE, "float32"),
        (WHOLE, "float16"),
    ],
)
def test_bytes_that_no_tensor_gives_are_refused(tensor: Tensor, transport: Transport) -> None:
    form = {"w": ((2, 200), FLOAT)}
    narrowed = AllowedReply(TaskData("train", 1), Egress(form, {}, transport=transport))
    update = Update(1, (), {"w": WHOLE}, {}, NONE)
    check_reply(update, replace(narrowed, egress=Egress(form, {}, transport="int8")))
    with refused("shared/w", by=RejectedUpdate):
        check_reply(replace(update, shared={"w": tensor}), narrowed)
    if tensor.dtype == torch.int8 and transport == "int8":
        with refused("w has", by=RejectedUpdate):
            restore_task(TaskData("train", 1, shared={"w": tensor}), Layout(form, {}), "int8")
