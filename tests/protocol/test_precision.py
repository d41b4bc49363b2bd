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

LABELS = ("Edema", "Mass")
FLOAT = "torch.float32"
EGRESS = Egress(
    {"w": ((3,), "torch.float32"), "bn.running_var": ((1,), "torch.float32"), "n": ((), "torch.int64")},
    {"head.weight": ((2,), "torch.float32")},
    class_weight=(0.0, 1.0),
)

LAYOUT = Layout(EGRESS.shared, EGRESS.head)


def payload(w: Tensor, variance: float = 1.0) -> TaskData:
    shared = {"w": w, "bn.running_var": torch.tensor([variance]), "n": torch.tensor(2**40 + 1)}
    return TaskData("train", 1, labels=LABELS, shared=shared, head={"head.weight": torch.full((2, 2), 0.1)})


def travelled(model: TaskData, transport: Transport = "float16") -> TaskData:
    message = unpack(Narrow()(pack(model), transport))
    assert isinstance(message, TaskData)
    return restore_task(message, LAYOUT, transport)


def trained(model: TaskData, by: float) -> Update:
    shared = {n: t + by if t.is_floating_point() else t + 1 for n, t in model.shared.items()}
    head = {n: t + by for n, t in model.head.items()}
    return Update(1, LABELS, shared, head, torch.tensor([1 / 3, 1.0], dtype=torch.float64))


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


@pytest.mark.parametrize("value", [65_520.0, -1e30, 3e38, float("inf"), float("nan")])
def test_a_number_beyond_the_range_of_halves_never_becomes_infinite(value: float) -> None:
    tensor = torch.tensor([0.5, value, 1.0])
    assert narrow(tensor, "float16") is tensor
    model = payload(torch.zeros(3))
    update = replace(trained(model, 0.0), shared={**model.shared, "w": tensor})
    back = restore_update(sent(update, travelled(model), "float16"), model, EGRESS, "float16")
    assert torch.equal(back.shared["w"], tensor) or torch.isnan(tensor).any()


def test_the_largest_half_travels_as_one() -> None:
    assert narrow(torch.tensor([65_504.0]), "float16").dtype == torch.float16
    assert narrow(torch.empty(0), "float16").dtype == torch.float16


def test_the_server_adds_a_sites_change_to_its_own_weights() -> None:
    model = payload(torch.tensor([0.1, 0.2, 0.3]))
    update = trained(travelled(model), 2**-12)  # less than the halves near 0.2 are apart
    back = restore_update(sent(update, travelled(model), "float16"), model, EGRESS, "float16")
    assert torch.equal(back.shared["w"], model.shared["w"] + 2**-12)
    assert back.shared["n"].item() == 2**40 + 2
    assert torch.equal(back.class_weights, update.class_weights)


def test_what_nobody_trains_stays_as_it_is_to_the_bit() -> None:
    model = payload(torch.tensor([0.1, 1 / 3, 1e-9]))
    back = restore_update(
        sent(trained(travelled(model), 0.0), travelled(model), "float16"), model, EGRESS, "float16"
    )
    assert torch.equal(back.shared["w"], model.shared["w"])
    assert torch.equal(back.head["head.weight"], model.head["head.weight"])


def test_the_error_of_an_update_is_that_of_its_change() -> None:
    g = torch.Generator().manual_seed(1)
    model = TaskData("train", 1, shared={"w": torch.randn(100_000, generator=g)})
    layout, egress = (kind({"w": ((100_000,), FLOAT)}, {}) for kind in (Layout, Egress))
    arrived = unpack(Narrow()(pack(model), "float16"))
    assert isinstance(arrived, TaskData)
    base = restore_task(arrived, layout, "float16")
    change = 1e-2 * torch.randn(100_000, generator=g)
    update = Update(1, (), {"w": base.shared["w"] + change}, {}, torch.empty(0, dtype=torch.float64))
    back = (
        restore_update(sent(update, base, "float16"), model, egress, "float16").shared["w"]
        - model.shared["w"]
    )
    exact = update.shared["w"] - base.shared["w"]
    # 2^-11 of the change, and float32's own rounding of numbers up to 8.
    assert bool(((back - exact).abs() <= exact.abs() * 2**-11 + 2**-21).all())


def test_gradients_travel_as_they_are() -> None:
    model = payload(torch.tensor([5.0, 6.0, 7.0]))
    update = replace(trained(model, 0.0), kind="gradient", shared={**model.shared, "w": torch.ones(3) / 4})
    small = sent(update, travelled(model), "float16")
    assert small.shared["w"].dtype == torch.float16
    assert restore_update(small, model, EGRESS, "float16").shared["w"].tolist() == [0.25] * 3


def test_a_variance_does_not_become_negative() -> None:
    exact = 0.3334  # its half is larger
    model = payload(torch.zeros(3), variance=exact)
    base = travelled(model)
    assert base.shared["bn.running_var"].item() > exact
    update = replace(trained(base, 0.0), shared={**base.shared, "bn.running_var": torch.zeros(1)})
    assert (
        restore_update(sent(update, base, "float16"), model, EGRESS, "float16")
        .shared["bn.running_var"]
        .item()
        == 0.0
    )


def test_halves_are_taken_only_where_the_job_says_so() -> None:
    model = payload(torch.zeros(3))
    update = sent(trained(model, 0.1), model, "float16")
    full = AllowedReply(TaskData("train", 1, labels=LABELS), EGRESS, LABELS)
    check_reply(update, replace(full, egress=replace(EGRESS, transport="float16")))
    with pytest.raises(RejectedUpdate, match=r"shared/w is torch.float16 instead of torch.float32"):
        check_reply(update, full)


def test_an_infinite_half_and_an_integer_in_halves_are_refused() -> None:
    model = payload(torch.zeros(3))
    half = AllowedReply(TaskData("train", 1, labels=LABELS), replace(EGRESS, transport="float16"), LABELS)
    update = sent(trained(model, 0.1), model, "float16")
    bad = update.shared["w"].clone()
    bad[0] = float("inf")
    with pytest.raises(RejectedUpdate, match="shared/w is not finite"):
        check_reply(replace(update, shared={**update.shared, "w": bad}), half)
    with pytest.raises(RejectedUpdate, match=r"shared/n is torch.float16 instead of torch.int64"):
        check_reply(replace(update, shared={**update.shared, "n": torch.tensor(1.0).half()}), half)


@pytest.mark.parametrize("transport", ["float32", "float16", "int8"])
def test_a_negative_variance_in_float32_is_refused_whatever_the_transport(transport: Transport) -> None:
    """A tensor with a large number travels in float32, as its values, and not as a change."""
    model = payload(torch.zeros(3))
    allowed = AllowedReply(TaskData("train", 1, labels=LABELS), replace(EGRESS, transport=transport), LABELS)
    update = sent(trained(model, 0.1), model, transport)
    bad = {**update.shared, "bn.running_var": torch.tensor([-1e6])}
    with pytest.raises(RejectedUpdate, match=r"bn\.running_var has a negative variance"):
        check_reply(replace(update, shared=bad), allowed)


def test_what_sites_share_is_converted_once() -> None:
    narrowed, model = Narrow(), payload(torch.zeros(3))
    one, two = (narrowed(pack(m), "float16") for m in (model, replace(model, round=2)))
    assert one.tensors["shared/w"] is two.tensors["shared/w"]


# Eight bits


def there_and_back(tensor: Tensor) -> Tensor:
    """What a gradient of this tensor arrives as."""
    shape = tuple(tensor.shape)
    update = Update(1, (), {"w": tensor}, {}, torch.empty(0, dtype=torch.float64), kind="gradient")
    model = TaskData("train", 1, shared={"w": torch.zeros(shape)})
    egress = Egress({"w": (shape, FLOAT)}, {}, kind="gradient")
    return restore_update(sent(update, model, "int8"), model, egress, "int8").shared["w"]


def test_eight_bits_by_hand() -> None:
    row = torch.tensor([[127.0, -63.4, 0.6, 0.4, 0.0, 1.0], [0.0] * 6])
    small = narrow(row, "int8")
    # The scale of the first row is 1; its codes are the numbers, rounded. float32's 1.0 is 00 00 80 3f.
    assert small.tolist() == [[127, -63, 1, 0, 0, 1, 0, 0, -128, 63], [0] * 10]
    assert there_and_back(row).tolist() == [[127.0, -63.0, 1.0, 0.0, 0.0, 1.0], [0.0] * 6]


@pytest.mark.parametrize(
    ("shape", "travels"),
    [
        ((10, 1280), (10, 1280 + 4 * 10)),
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


def test_eight_bits_are_about_a_quarter_of_the_bytes() -> None:
    assert narrow(torch.ones(64, 576), "int8").nbytes / (4 * 64 * 576) == (576 + 4 * 5) / (4 * 576) < 0.26


NUMBERS = st.floats(-65_504, 65_504, width=32)


@pytest.mark.complete
@given(rows=st.integers(1, 3), row=st.integers(5, 300), data=st.data())
def test_the_error_is_at_most_half_a_scale_in_each_block(rows: int, row: int, data: st.DataObject) -> None:
    sizes = st.sampled_from([1e-44, 1e-38, 1e-9, 1e-3, 1.0, 6.5e4])
    numbers = data.draw(st.lists(NUMBERS, min_size=1, max_size=40))
    exact = torch.tensor(numbers, dtype=torch.float64).repeat(rows * row // len(numbers) + 1)[: rows * row]
    tensor = (exact / 65_504 * data.draw(sizes)).float().view(rows, row)
    back = there_and_back(tensor)
    for start in range(0, row, BLOCK):
        block, arrived = (t[:, start : start + BLOCK].double() for t in (tensor, back))
        half = block.abs().amax(dim=1, keepdim=True) / 127 / 2
        # Quotients are rounded to float32; and below 2^-126 a scale has few digits, or is 0.
        assert bool(((block - arrived).abs() <= half * (1 + 1e-4) + 2.0**-142).all())
    assert torch.equal(there_and_back(back), back) or bool((tensor.abs() < 1e-36).any())


@pytest.mark.parametrize("value", [65_520.0, -1e30, float("inf"), float("nan")])
def test_eight_bits_do_not_take_a_number_that_sixteen_cannot_hold(value: float) -> None:
    tensor = torch.zeros(2, 9)
    tensor[1, 3] = value
    assert narrow(tensor, "int8") is tensor


def test_a_change_in_eight_bits_is_added_to_the_servers_own_weights() -> None:
    g = torch.Generator().manual_seed(1)
    model = TaskData("train", 1, shared={"w": torch.randn(8, 200, generator=g)})
    layout, egress = (kind({"w": ((8, 200), FLOAT)}, {}) for kind in (Layout, Egress))
    arrived = unpack(Narrow()(pack(model), "int8"))
    assert isinstance(arrived, TaskData)
    assert arrived.shared["w"].dtype == torch.int8
    base = restore_task(arrived, layout, "int8")
    change = 1e-3 * torch.randn(8, 200, generator=g)
    none = torch.empty(0, dtype=torch.float64)
    update = Update(1, (), {"w": base.shared["w"] + change}, {}, none)
    back = restore_update(sent(update, base, "int8"), model, egress, "int8").shared["w"] - model.shared["w"]
    # The weights are wrong by up to 4 / 254; of the change arrives all but 4e-3 / 254.
    assert (base.shared["w"] - model.shared["w"]).abs().max() > 1e-3
    assert (back - change).abs().max() < 4e-3 / 254 + 1e-6


def hostile(**scales: float) -> Tensor:
    small = narrow(torch.ones(2, 200), "int8").clone()
    if scales:
        small[1, 200:204] = torch.tensor([scales["scale"]]).view(torch.int8)
    return small


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -float("inf"), 516.0, 3e38])
def test_a_scale_that_no_tensor_gives_is_refused(scale: float) -> None:
    egress = Egress({"w": ((2, 200), FLOAT)}, {})
    allowed = AllowedReply(TaskData("train", 1), replace(egress, transport="int8"))
    update = Update(1, (), {"w": hostile(scale=scale)}, {}, torch.empty(0, dtype=torch.float64))
    with pytest.raises(RejectedUpdate, match="shared/w has a scale that is negative, too large"):
        check_reply(update, allowed)
    layout = Layout({"w": ((2, 200), FLOAT)}, {})
    with pytest.raises(RejectedUpdate, match="w has a scale"):
        restore_task(TaskData("train", 1, shared={"w": hostile(scale=scale)}), layout, "int8")


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (hostile()[:, :-1].contiguous(), r"has shape \(2, 207\) instead of \(2, 208\) in int8"),
        (hostile()[:1].clone(), r"has shape \(1, 208\) instead of \(2, 208\) in int8"),
        (hostile().view(-1), r"has shape \(416,\) instead of \(2, 208\) in int8"),
        (torch.zeros(2, 200, dtype=torch.int8), r"has shape \(2, 200\) instead of \(2, 208\) in int8"),
        (hostile().view(torch.uint8), r"has shape \(2, 208\) instead of \(2, 200\)"),
        (torch.zeros(2, 200, dtype=torch.int64), "is torch.int64 instead of torch.float32"),
        (torch.full((2, 200), float("inf")).half(), "is not finite"),
    ],
)
def test_malformed_bytes_are_refused(tensor: Tensor, why: str) -> None:
    egress = Egress({"w": ((2, 200), FLOAT)}, {})
    allowed = AllowedReply(TaskData("train", 1), replace(egress, transport="int8"))
    update = Update(1, (), {"w": tensor}, {}, torch.empty(0, dtype=torch.float64))
    with pytest.raises(RejectedUpdate, match=f"shared/w {why}"):
        check_reply(update, allowed)


@pytest.mark.parametrize("transport", ["float32", "float16"])
def test_eight_bits_are_taken_only_where_the_job_says_so(transport: Transport) -> None:
    egress = Egress({"w": ((2, 200), FLOAT)}, {})
    allowed = AllowedReply(TaskData("train", 1), replace(egress, transport=transport))
    update = Update(1, (), {"w": hostile()}, {}, torch.empty(0, dtype=torch.float64))
    with pytest.raises(RejectedUpdate, match=r"shared/w has shape \(2, 208\) instead of \(2, 200\)"):
        check_reply(update, allowed)


def test_the_largest_numbers_are_taken() -> None:
    tensor = torch.full((2, 200), 65_504.0)
    assert check_narrowed("w", narrow(tensor, "int8"), ((2, 200), FLOAT), "int8")
    assert torch.allclose(there_and_back(tensor), tensor)
