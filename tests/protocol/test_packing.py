"""Messages survive packing and storing; what is no message, or not the file that was written, is refused."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

import suture.protocol.packing as packing
from suture.core.errors import RejectedUpdate, SutureError
from suture.protocol.decisions import CELLS
from suture.protocol.messages import (
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Masking,
    Message,
    Metrics,
    Scores,
    SiteInfo,
    TaskData,
    Update,
    ones,
)
from suture.protocol.packing import (
    Packed,
    _checksum,
    digest,
    load,
    pack,
    read_tensors,
    save,
    unpack,
    without_tensors,
)
from world import refused

METRICS = Metrics(3, "validation", 7, 0.5, {"Mass": ClassScore(0.75, None, None, 2, 5)})
UPDATE = Update(4, ("Mass",), {"w": torch.ones(2)}, {"b": torch.ones(1)}, ones(("Mass",)), metrics=METRICS)
PACKED = pack(UPDATE)
MESSAGES: list[Message] = [
    TaskData("train", 4, 3, "main", "validation", ("Mass",), {"w": torch.ones(2)}, {"b": torch.ones(1)}),
    SiteInfo(("Mass", "Nodule"), {"train": 5, "test": 0}, 1, "abc"),
    UPDATE,
    Evaluation(METRICS),
    Evaluation(replace(METRICS, attributes={"dark": Figures(3, None, {"accuracy": 0.5})}), METRICS),
    Scores(4, ("Mass",), dict.fromkeys(("positives", "negatives"), torch.ones(1, CELLS, dtype=torch.int32))),
    Masking("shares", sealed={"b": "00ff"}),
    Abstain("data_fault", "DataError", 12),
]


def alike(one: Packed, two: Packed) -> bool:
    """Whether header and tensors are the same, with their types."""
    tensors = {name: (t.dtype, t.tolist()) for name, t in one.tensors.items()}
    return one.header == two.header and tensors == {n: (t.dtype, t.tolist()) for n, t in two.tensors.items()}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_the_same_after_a_journey_and_after_a_night_on_disk(
    message: Message, tmp_path: Path
) -> None:
    save(tmp_path / "m", pack(message))
    for packed in (pack(message), load(tmp_path / "m")):
        got = unpack(packed)
        assert type(got) is type(message)
        assert alike(pack(got), pack(message))


def test_a_task_that_is_remembered_has_its_names_and_no_tensor() -> None:
    left = without_tensors(UPDATE)
    assert (left.shared, left.head, left.class_weights.numel(), left.labels) == ({}, {}, 0, UPDATE.labels)


def test_size_counts_tensors_and_header() -> None:
    assert Packed({"shared/w": torch.zeros(10)}, {"type": "x"}).nbytes == 40 + len('{"type": "x"}')


def test_a_digest_is_of_names_types_shapes_values_and_header() -> None:
    one = Packed({"a": torch.zeros(4), "b": torch.zeros(2)}, {"x": 1, "y": [2]})
    same = Packed(dict(reversed(one.tensors.items())), {"y": [2], "x": 1})
    assert digest(one) == digest(same)
    others = [
        Packed({**one.tensors, "a": torch.zeros(2, 2)}, one.header),
        Packed({**one.tensors, "a": torch.zeros(4, dtype=torch.int32)}, one.header),
        Packed({**one.tensors, "a": torch.tensor([0.0, 0.0, 0.0, 1e-45])}, one.header),
        Packed({"a": one.tensors["a"], "c": one.tensors["b"]}, one.header),
        Packed({"a": one.tensors["a"]}, one.header),
        Packed(one.tensors, {"x": 1, "y": [3]}),
    ]
    assert len({digest(packed) for packed in (one, *others)}) == 1 + len(others)


# What is no message


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


STRAY = {
    "another type": ({"type": "letter"}, "'letter'"),
    "a type that is a list": ({"type": ["update"]}, "type"),
    "a long type": ({"type": "y" * 70_000}, "type"),
    "a field": ({"patients": ["p1"]}, "patients"),
    "a field of metrics": ({"metrics": {**PACKED.header["metrics"], "ids": [1]}}, "ids"),
    "a field that is no line": ({"pat\x00ient": 1}, r"pat\x00ient"),
    "a field that is no text": ({("a", "b"): 1}, "key"),
    "a scalar that is no text": ({"scalars": {7: 1.0}}, "key"),
    "half a character": ({"\ud800": 1}, ""),
    "a tensor as numbers": ({"shared": {"w": [1.0]}}, "shared"),
    "no number": ({"weight": float("nan")}, "weight"),
    "a class of a long name": ({"labels": ["x" * 300]}, "labels"),
    "a million labels": ({"labels": ["Mass"] * 1_000_000}, "limit"),
    "more labels than classes": ({"labels": ["Mass"] * 10_001}, "labels"),
    "a long label": ({"labels": ["x" * 100_000_000]}, "limit"),
    "many scalars": ({"scalars": {f"x{i}": 1.0 for i in range(3_000)}}, "scalars"),
    "a long name": ({"scalars": {"x" * 5_000_000: 1.0}}, "limit"),
    "a deep nest": ({"scalars": nested(3_000)}, "limit"),
    "a long integer": ({"round": 10**4000}, "64 bits"),
    "a large integer": ({"round": 10**12}, "round"),
    "bytes": ({"labels": [b"Mass"]}, "bytes"),
    "a tensor": ({"labels": torch.ones(3)}, "Tensor"),
    "many values of an attribute": (
        {
            "metrics": {
                **PACKED.header["metrics"],
                "attributes": {f"p{i}": {"n": 1, "auroc": None, "overall": {}} for i in range(21)},
            }
        },
        "attributes",
    ),
}


@pytest.mark.parametrize(("change", "named"), STRAY.values(), ids=list(STRAY))
def test_a_header_that_is_none_is_refused_at_once_and_in_short(change: dict[Any, Any], named: str) -> None:
    """And takes no memory: a copy of the longest of these would be 100 MB."""
    strange = Packed(PACKED.tensors, {**PACKED.header, **change})
    tracemalloc.start()
    with pytest.raises(RejectedUpdate) as caught:
        unpack(strange)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("header", [[1], None])
def test_a_message_has_a_header(header: Any) -> None:
    with refused("header", by=RejectedUpdate):
        unpack(Packed(PACKED.tensors, header))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"secret": torch.ones(1)}, "'secret'"),
        ({"fixed/w": torch.ones(1)}, "'fixed/w'"),  # of a task
        ({"class_weights/x": torch.ones(1)}, "'class_weights/x'"),
        ({7: torch.ones(1)}, "name"),
        ({f"shared/w{i}": torch.ones(1) for i in range(3_000)}, "3003"),
        ({"shared/w": torch.ones(2).to_sparse()}, "sparse"),
        ({"shared/w": [1.0, 2.0]}, "not a tensor"),
        ({"shared/w": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])}, "nested"),
        ({"shared/w": torch.ones(2, requires_grad=True)}, "gradient"),
        ({"shared/w": torch.ones(2, device="meta")}, "meta"),
        *(
            ({f"shared/{name}": torch.ones(1)}, "shared")
            for name in ("w\n", "a b", "x/../y", "", "ü", "x" * 201)
        ),
    ],
    ids=str,
)
def test_a_tensor_that_is_none_or_is_not_declared_is_refused(tensors: dict[Any, Any], named: str) -> None:
    with refused(named, by=RejectedUpdate):
        unpack(Packed({**PACKED.tensors, **tensors}, PACKED.header))


def test_an_error_names_no_value() -> None:
    with pytest.raises(RejectedUpdate) as caught:
        unpack(Packed(PACKED.tensors, {**PACKED.header, "weight": "patient 00012"}))
    assert "00012" not in str(caught.value)


# Files


def spoiled(path: Path, packed: Packed) -> bool:
    """Whether the file does not give what was saved."""
    try:
        return not alike(load(path), packed)
    except SutureError:
        return True


@given(st.sampled_from(MESSAGES), st.integers(0), st.sampled_from(["flip", "cut", "more", "swap"]), st.data())
def test_a_file_that_was_changed_is_corrupt_or_the_same(
    tmp_path_factory: pytest.TempPathFactory, message: Message, place: int, how: str, data: st.DataObject
) -> None:
    path, packed = tmp_path_factory.getbasetemp() / "changed.safetensors", pack(message)
    save(path, packed)
    content = bytearray(path.read_bytes())
    place %= len(content)
    if how == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "swap":
        content[place:] = content[place:][::-1]
    else:
        content = content[:place] if how == "cut" else content + b"\0"
    path.write_bytes(content)
    with refused(path) if spoiled(path, packed) else nullcontext():
        load(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, "[]", "3", '{"x": NaN}', '{"x": 1' + "0" * 40 + "}"]
)
def test_a_file_whose_header_is_none_is_corrupt(text: str, tmp_path: Path) -> None:
    """Its checksum is right: who writes a file can compute it."""
    save_file({"x": torch.ones(1)}, tmp_path / "m", {"suture": _checksum({"x": torch.ones(1)}, text) + text})
    with refused(tmp_path / "m"):
        load(tmp_path / "m")


def test_a_file_of_this_process_alone_is_read_without_a_look_at_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "spooled", PACKED, durable=False)
    save(tmp_path / "stored", PACKED)
    monkeypatch.setattr(packing, "_checksum", lambda *_: "00000000")
    assert alike(load(tmp_path / "spooled"), PACKED)
    with refused(tmp_path / "stored"):
        load(tmp_path / "stored")


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save(tmp_path / "x", Packed({"a": whole, "b": whole, "c": whole[2:4]}, {}))
    found = load(tmp_path / "x").tensors
    assert [found[name].tolist() for name in "abc"] == [whole.tolist(), whole.tolist(), [2.0, 3.0]]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (SafetensorError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (SafetensorError("unknown"), errno.EIO),
    ],
)
def test_a_full_disk_leaves_the_old_file(
    error: Exception, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    save(tmp_path / "m", PACKED)
    before = (tmp_path / "m").read_bytes()
    monkeypatch.setattr("suture.protocol.packing.save_file", full)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - by its number
        save(tmp_path / "m", pack(MESSAGES[3]))
    assert caught.value.errno == number
    assert (tmp_path / "m").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.complete
def test_a_full_disk_is_told_by_its_number(tmp_path: Path) -> None:
    """The library tells it in words only; a site abstains by the number."""
    script = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from suture.federation.site.abstention import reason_of\n"
        "from suture.protocol.packing import Packed, save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: save(Path(sys.argv[1]), Packed({'a': torch.zeros(10000)}, {}))\n"
        "except OSError as error: print(error.errno, reason_of(error))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG), "disk_full"]
    assert list(tmp_path.iterdir()) == []


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
MANY = {
    "tensors": lambda: dict.fromkeys(map(str, range(250_000)), EMPTY),
    "facts": lambda: {"__metadata__": {str(i): "" for i in range(1_100_000)}},
    "more than are stored": lambda: (
        {str(i): EMPTY for i in range(100_001)} | {"__metadata__": {"suture": "--------{}"}}
    ),
}


@pytest.mark.complete
@pytest.mark.parametrize("kind", MANY)
def test_a_file_of_too_much_is_refused_before_it_is_parsed_or_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(MANY[kind]()).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    if kind != "more than are stored":
        monkeypatch.setattr(packing, "safe_open", lambda *_, **__: pytest.fail("it was parsed"))
    readers: list[tuple[Callable[[Path], object], type[Exception]]] = [
        (load, SutureError),
        (read_tensors, SafetensorError),
    ]
    for read, error in readers:
        with refused("100,000", by=error):
            read(path)


def test_the_length_of_a_header_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(SafetensorError):
        read_tensors(path)
