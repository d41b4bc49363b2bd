"""Messages survive packing; what is not a message does not pass."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import suture.protocol.packing as packing
from suture.core.errors import RejectedUpdate, SutureError
from suture.protocol.messages import (
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Message,
    Metrics,
    SiteInfo,
    TaskData,
    Update,
    ones,
)
from suture.protocol.packing import Packed, _checksum, digest, load, pack, read_tensors, save, unpack

METRICS = Metrics(3, "validation", 7, 0.5, {"Mass": ClassScore(0.75, None, None, 2, 5)})
MESSAGES: list[Message] = [
    TaskData("train", 4, 3, "main", "validation", ("Mass",), {"w": torch.ones(2)}, {"b": torch.ones(1)}),
    SiteInfo(("Mass", "Nodule"), {"train": 5, "test": 0}, 1, "abc"),
    Update(4, ("Mass",), {"w": torch.ones(2)}, {"b": torch.ones(1)}, ones(("Mass",)), metrics=METRICS),
    Evaluation(METRICS),
    Evaluation(replace(METRICS, attributes={"dark": Figures(3, None, {"accuracy": 0.5})}), METRICS),
    Abstain("data_fault", "DataError", 12),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip_through_a_file(message: Message, tmp_path: Path) -> None:
    save(tmp_path / "m", pack(message))
    got = unpack(load(tmp_path / "m"))
    assert type(got) is type(message)
    assert pack(got).header == pack(message).header
    for name, tensor in pack(message).tensors.items():
        assert torch.equal(pack(got).tensors[name], tensor)


def test_size_counts_tensors_and_header() -> None:
    packed = Packed({"shared/w": torch.zeros(10)}, {"type": "x"})
    assert packed.nbytes == 40 + len('{"type": "x"}')


@pytest.mark.parametrize(
    ("change", "tensors", "says"),
    [
        ({"type": "letter"}, {}, "unknown message type"),
        ({"patients": ["p1"]}, {}, "patients"),
        ({"weight": float("nan")}, {}, "weight"),
        ({"labels": ["x" * 300]}, {}, "labels"),
        ({"shared": {"w": [1.0]}}, {}, "must be tensors"),
        ({}, {"secret": torch.ones(1)}, "undeclared tensor"),
        ({}, {"fixed/w": torch.ones(1)}, "undeclared tensor"),
        (
            {"metrics": {"round": 1, "split": "test", "n": 1, "loss": None, "classes": {}, "ids": [1]}},
            {},
            "ids",
        ),
    ],
)
def test_a_stray_field_or_tensor_is_refused(
    change: dict[str, object], tensors: dict[str, torch.Tensor], says: str
) -> None:
    packed = pack(MESSAGES[2])
    broken = Packed({**packed.tensors, **tensors}, {**packed.header, **change})
    with pytest.raises(RejectedUpdate, match=says):
        unpack(broken)


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": ["Mass"] * 1_000_000}, "size limit"),
        ({"labels": [f"x{i}" for i in range(11_000)]}, "labels"),
        ({"labels": ["x" * 100_000_000]}, "size limit"),
        ({"scalars": {f"x{i}": 1.0 for i in range(3_000)}}, "scalars"),
        ({"scalars": {"x" * 5_000_000: 1.0}}, "size limit"),
        ({"scalars": nested(3_000)}, "size limit"),
        ({"round": 10**4000}, "64 bits"),
        ({"round": 10**12}, "round"),
        ({"labels": [b"Mass"]}, "bytes"),
        ({"labels": torch.ones(3)}, "Tensor"),
    ],
    ids=[
        *("a million labels", "more labels than classes", "a long label", "many scalars", "a long name"),
        *("a deep nest", "a long integer", "a large integer", "bytes", "a tensor"),
    ],
)
def test_a_header_larger_than_any_message_is_refused_at_once(change: dict[str, object], says: str) -> None:
    """And takes no memory: a copy of the longest of these would be 100 MB."""
    packed = pack(MESSAGES[2])
    huge = Packed(packed.tensors, {**packed.header, **change})
    tracemalloc.start()
    with pytest.raises(RejectedUpdate, match=says):
        unpack(huge)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_too_many_tensors_and_sparse_ones_are_refused() -> None:
    packed = pack(MESSAGES[2])
    many = {f"shared/w{i}": torch.ones(1) for i in range(3_000)}
    with pytest.raises(RejectedUpdate, match="3002 tensors"):
        unpack(replace(packed, tensors={"shared/w": torch.ones(1), "class_weights": torch.ones(1), **many}))
    for stray in (torch.ones(2).to_sparse(), [1.0, 2.0]):
        with pytest.raises(RejectedUpdate, match="a sparse tensor"):
            unpack(replace(packed, tensors={**packed.tensors, "shared/w": stray}))


@pytest.mark.parametrize("name", ["w\n", "a b", "x/../y", "", "ü", "x" * 201])
def test_names_of_the_program_are_plain(name: str) -> None:
    packed = pack(MESSAGES[2])
    with pytest.raises(RejectedUpdate, match="shared"):
        unpack(replace(packed, tensors={**packed.tensors, f"shared/{name}": torch.ones(1)}))
    with pytest.raises(RejectedUpdate, match="error"):
        unpack(Packed({}, {"type": "abstain", "reason": "labels", "error": name or "a/b"}))


def test_an_error_names_no_value() -> None:
    packed = pack(MESSAGES[2])
    with pytest.raises(RejectedUpdate) as caught:
        unpack(replace(packed, header={**packed.header, "weight": "patient 00012"}))
    assert "00012" not in str(caught.value)


def test_corrupt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"not a file of ours")
    with pytest.raises(SutureError, match="corrupt"):
        load(tmp_path / "m")


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "m", pack(MESSAGES[4]))
    before = (tmp_path / "m").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("suture.protocol.packing.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "m", pack(MESSAGES[3]))
    assert (tmp_path / "m").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.complete
def test_a_full_disk_is_told_by_its_number(tmp_path: Path) -> None:
    """The library tells it in words only; a site abstains by the number."""
    target = tmp_path / "x.safetensors"
    script = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from suture.federation.site.abstention import reason_of\n"
        "from suture.protocol.packing import Packed, save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: save(Path(sys.argv[1]), Packed({'a': torch.zeros(10000)}, {}))\n"
        "except OSError as error: print(error.errno, reason_of(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG), "disk_full"]
    assert list(tmp_path.iterdir()) == []


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


def test_a_file_without_a_checksum_is_read_without_computing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = Packed({"a": torch.ones(2)}, {"x": 1})
    save(tmp_path / "spooled", packed, durable=False)
    save(tmp_path / "state", packed)
    computed: list[str] = []
    whole = packing._checksum
    monkeypatch.setattr(packing, "_checksum", lambda *of: computed.append(of[1]) or whole(*of))
    assert load(tmp_path / "spooled").header == load(tmp_path / "state").header == {"x": 1}
    assert computed == ['{"x": 1}']


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save(tmp_path / "x", Packed({"a": whole, "b": whole, "c": whole[2:4]}, {}))
    found = load(tmp_path / "x").tensors
    assert [found[name].tolist() for name in "abc"] == [whole.tolist(), whole.tolist(), [2.0, 3.0]]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([1], "has no header"),
        (None, "has no header"),
        ({("a", "b"): 1}, "a key that is not text"),
        ({"scalars": {7: 1.0}}, "a key that is not text"),
        ({"type": ["update"]}, "unknown message type"),
        ({"type": "y" * 70_000}, "unknown message type"),
        ({"pat\x00ient": 1}, r"pat\\x00ient: Unexpected keyword argument"),
        ({"\ud800": 1}, ""),
    ],
)
def test_a_header_that_is_none_is_refused_in_short(header: Any, says: str) -> None:
    packed = pack(MESSAGES[2])
    strange = {**packed.header, **header} if isinstance(header, dict) else header
    with pytest.raises(RejectedUpdate, match=says) as caught:
        unpack(replace(packed, header=strange))
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("class_weights/x", torch.ones(1), "undeclared tensor 'class_weights/x'"),
        ("shared/w", torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested"),
        ("shared/w", torch.ones(2, requires_grad=True), "gradient"),
    ],
)
def test_a_strange_tensor_is_refused(name: str, tensor: torch.Tensor, says: str) -> None:
    packed = pack(MESSAGES[2])
    with pytest.raises(RejectedUpdate, match=says):
        unpack(replace(packed, tensors={**packed.tensors, name: tensor}))


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, "[]", "3", '{"x": NaN}', '{"x": 1' + "0" * 40 + "}"]
)
def test_a_file_whose_header_is_none_is_corrupt(text: str, tmp_path: Path) -> None:
    """Its checksum is right: who writes a file can compute it."""
    save_file({"x": torch.ones(1)}, tmp_path / "m", {"suture": _checksum({"x": torch.ones(1)}, text) + text})
    with pytest.raises(SutureError, match="m is corrupt"):
        load(tmp_path / "m")


def test_a_file_of_this_process_alone_is_read_without_a_look_at_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "spooled", pack(MESSAGES[2]), durable=False)
    save(tmp_path / "stored", pack(MESSAGES[2]))
    summed = []
    monkeypatch.setattr(packing, "_checksum", lambda *_: summed.append(1) or "00000000")
    assert unpack(load(tmp_path / "spooled")).labels == MESSAGES[2].labels
    assert not summed
    with pytest.raises(SutureError, match="corrupt"):
        load(tmp_path / "stored")


@pytest.mark.complete
def test_packing_storing_and_reading_hold_no_third_copy(tmp_path: Path) -> None:
    """The process's own peak, in a process of its own: the message, and what is read of the file."""
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from suture.protocol.messages import TaskData\n"
        "from suture.protocol.packing import load, pack, save, unpack\n"
        "def kept(n): return TaskData('train', labels=(), shared={'a': torch.ones(n), 'b': torch.ones(n)})\n"
        "def peak(): return next(int(x.split()[1]) for x in open('/proc/self/status') if 'VmHWM' in x)\n"
        "def round(message, file):\n"
        "    save(file, pack(unpack(pack(message))))\n"
        "    return unpack(load(file))\n"
        "file = Path(sys.argv[1]); round(kept(9), file); before, message = peak(), kept(2**24)\n"
        "found = round(message, file)\n"
        "assert torch.equal(found.shared['b'], message.shared['b'])\n"
        "print((peak() - before) / 2**17)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")], check=True, stdout=subprocess.PIPE, text=True
    )
    assert 1.5 < float(done.stdout) < 2.2


def stored(folder: Path, header: dict[str, Any]) -> Path:
    text = json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.complete
@pytest.mark.parametrize("read", [load, read_tensors])
@pytest.mark.parametrize("what", ["tensors", "facts"])
def test_a_header_of_too_much_is_refused_before_it_is_parsed(
    read: Callable[[Path], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = range(1_100_000 if what == "facts" else 250_000)
    header = (
        {"__metadata__": {str(i): "" for i in many}}
        if what == "facts"
        else dict.fromkeys(map(str, many), EMPTY)
    )
    path = stored(tmp_path, header)
    monkeypatch.setattr(packing, "safe_open", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises((SutureError, SafetensorError), match="header lists more than 100,000 tensors"):
        read(path)


@pytest.mark.complete
@pytest.mark.parametrize("read", [load, read_tensors])
def test_tensors_are_counted_before_they_are_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = stored(
        tmp_path, {str(i): EMPTY for i in range(100_001)} | {"__metadata__": {"suture": "--------{}"}}
    )
    with pytest.raises((SutureError, SafetensorError), match="more than 100,000 tensors"):
        read(path)


def test_the_length_of_a_header_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(SafetensorError):
        read_tensors(path)
