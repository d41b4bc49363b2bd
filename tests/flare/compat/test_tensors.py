"""Messages through FLARE's serialiser: tensors arrive whole and once, and what is no message is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.dxo import MetaKey, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat import tensor_files
from suture.flare.compat.tensor_files import FOLDER, Incoming, Outgoing, TensorFile, written_once
from suture.flare.compat.tensors import LARGE, Tensors, register
from suture.protocol.packing import Packed
from world import refused

N = LARGE // 4
"""Numbers of the smallest tensor that passes in a file of the simulator."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a simulator, in which this process is a party."""
    register()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def sent(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a message."""
    content: bytes = fobs.dumps(to_shareable(Packed(tensors, {"type": "update"})), fobs_ctx={})
    return content


def received(message: bytes) -> dict[str, Tensor]:
    return dict(from_shareable_(fobs.loads(message, fobs_ctx={})).tensors)


def arrive(messages: list[bytes], tensors: Mapping[str, Tensor]) -> bool:
    """Whether each message brings exactly these tensors, of their types."""
    for found in map(received, messages):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    return True


TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (0,), (3,), (N - 1,), (N,), (N + 1, 3), (1, 2 * N + 5)]


@pytest.mark.parametrize("in_files", [False, True])
@given(
    st.lists(
        st.tuples(st.sampled_from(TYPES), st.sampled_from(SHAPES), st.booleans()), min_size=1, max_size=4
    )
)
def test_tensors_of_any_type_and_size_arrive(
    tmp_path_factory: pytest.TempPathFactory,
    in_files: bool,
    kinds: list[tuple[torch.dtype, tuple[int, ...], bool]],
) -> None:
    register()
    tensors = {}
    for number, (type_, shape, transposed) in enumerate(kinds):
        tensor = (torch.arange(prod(shape)) + number).remainder(251).to(type_).view(shape)
        tensors[f"shared/{number}"] = tensor.mT if transposed and len(shape) > 1 else tensor
    place = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        if in_files:
            patch.setenv(FOLDER, str(place))
        assert arrive([sent(tensors)], tensors)
        pieces = fobs.dumps(to_shareable(Packed(tensors, {"type": "update"})), buffer_list=True, fobs_ctx={})
        assert arrive([pieces], tensors)
    assert not list(place.iterdir())


@pytest.mark.parametrize("in_files", [False, True])
def test_nobody_else_sees_what_is_written_into_a_tensor_that_came(
    in_files: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_files:
        monkeypatch.delenv(FOLDER)
    tensor = torch.ones(2 * N)
    with written_once([{"w": tensor}] * 2, LARGE):
        first, second = (received(sent({"shared/w": tensor}))["shared/w"] for _ in range(2))
    first += 1
    assert [each.unique().tolist() for each in (tensor, first, second)] == [[1], [2], [1]]


# What is no message


def deep() -> object:
    value: object = 0
    for _ in range(20_000):
        value = [value]
    return value


@pytest.mark.parametrize("strange", [torch.ones(3), deep(), "\ud800", None, 3, {}, [1]], ids=type)
@pytest.mark.parametrize(
    "place",
    [("DXO",), ("__headers__",), ("__headers__", "__content_type__"), ("DXO", "kind"), ("DXO", "data")],
    ids=".".join,
)
def test_a_strange_value_in_any_place_is_rejected(place: tuple[str, ...], strange: Any) -> None:
    shareable = to_shareable(Packed({"shared/w": torch.ones(2)}, {"type": "update"}))
    inner: Any = shareable
    for key in place[:-1]:
        inner = inner[key]
    assert place[-1] in inner
    inner[place[-1]] = strange
    if place == ("DXO", "data") and (strange is None or strange == {}):  # FLARE takes both for no tensors
        assert from_shareable_(shareable).tensors == {}
        return
    with pytest.raises(RejectedUpdate) as caught:
        from_shareable_(shareable)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_an_empty_message_and_an_encrypted_one_are_rejected() -> None:
    """What FLARE's HEModelEncryptor makes of an update, added to the job by hand."""
    dxo = from_shareable(to_shareable(Packed({"shared/w": torch.ones(2)}, {"type": "update"})))
    dxo.set_meta_prop(MetaKey.PROCESSED_KEYS, {"shared/w": True})
    dxo.set_meta_prop(MetaKey.PROCESSED_ALGORITHM, "CKKS")
    for message, named in ((Shareable(), "DXO"), (dxo.to_shareable(), "encryption")):
        with refused(named, by=RejectedUpdate):
            from_shareable_(message)


@pytest.mark.parametrize(
    "claimed",
    [
        ["other", "torch.float32", [4]],
        ["w", "torch.float32", [5]],
        ["w", "torch.float32", [-2, -2]],
        ["w", "torch.float32", [True, 4]],
        ["w", "torch.float32", [4.0]],
        ["w", "torch.qint8", [16]],
        ["w", "torch.float32"],
        ["text", "torch.float32", [4]],
        [],
    ],
    ids=str,
)
def test_a_tensor_that_is_not_as_it_claims_is_refused(claimed: list[Any]) -> None:
    manager = DatumManager()
    sections = {"w": Datum.blob_datum(bytes(16)), "text": Datum.text_datum("0" * 16)}
    for name, section in sections.items():
        section.datum_id = name
        manager.add_datum(section)
    assert Tensors().native_recompose(["w", "torch.float32", [2, 2]], manager).tolist() == [[0, 0], [0, 0]]
    with refused("a tensor", by=ValueError):
        Tensors().native_recompose(claimed, manager)


def test_a_tensor_with_the_header_of_many_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a message within a message, such a header would be parsed for minutes."""
    many = safetensors.torch.save({f"t{i}": torch.zeros(0) for i in range(200)})
    monkeypatch.setattr("nvflare.app_opt.pt.decomposers.load", lambda _: pytest.fail("it was parsed"))
    with refused("header", by=ValueError):
        Tensors().native_recompose(many)


# Files of the simulator


def test_a_message_has_one_file_which_is_whole_before_it_is_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    close = tensor_files.TensorFile.close
    monkeypatch.setattr(TensorFile, "close", lambda file: (close(file), closed.append(file.path)))
    tensors = {"shared/a": torch.ones(N), "shared/b": torch.zeros(3 * N), "shared/c": torch.ones(2)}
    message = sent(tensors)
    [file] = folder.iterdir()
    assert closed == [file]
    assert file.stat().st_size == 4 * LARGE
    assert len(message) < LARGE / 4
    assert arrive([message], tensors)
    assert not file.exists()


def test_what_several_sites_receive_is_written_once(folder: Path) -> None:
    """And after the exchange, a tensor of the same identity anew."""
    backbone, rows = torch.ones(N), [torch.full((N,), float(site)) for site in range(3)]
    payloads = [{"shared/w": backbone, "head/w": own} for own in rows]
    with written_once(payloads, LARGE):
        messages = [sent(payload) for payload in payloads]
        assert len({file.stat().st_ino for file in folder.iterdir()}) == 1 + 3
    assert sum(file.stat().st_nlink for file in folder.iterdir()) == 3 * 3 + 3  # without the sender's name
    for message, payload in zip(messages, payloads, strict=True):
        assert arrive([message], payload)
    assert not list(folder.iterdir())
    backbone.zero_()
    assert not received(sent({"shared/w": backbone}))["shared/w"].any()


@pytest.mark.parametrize("sites", [1, 2])
def test_a_file_system_without_links_takes_a_file_for_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sites: int
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", no_link)
    tensors = {"shared/w": torch.ones(N)}
    with written_once([tensors] * sites, LARGE):
        assert arrive([sent(tensors) for _ in range(2)], tensors)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("gone", [False, True])
def test_on_a_full_disk_or_without_a_folder_tensors_travel_in_the_message(
    gone: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = TensorFile.append

    def full(file: TensorFile, tensor: Tensor) -> int:
        if tensor.numel() > N:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, tensor)

    monkeypatch.setattr(TensorFile, "append", full)
    if gone:
        folder.rmdir()
    tensors = {"shared/a": torch.ones(N), "shared/b": torch.full((2 * N,), 2.0), "shared/c": torch.zeros(N)}
    with written_once([tensors] * 2, LARGE):
        messages = [sent(tensors) for _ in range(2)]
    assert ("No such file" if gone else "No space left") in caplog.text
    assert all(len(message) > 2 * LARGE for message in messages)
    assert arrive(messages, tensors)


def test_a_failed_step_of_the_block_leaves_no_file(folder: Path) -> None:
    with pytest.raises(KeyError), written_once([{"w": torch.ones(N)}] * 2, LARGE):
        raise KeyError
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "place",
    [
        ["../secret", 0],
        ["/etc/passwd", 0],
        ["", 0],
        ["0" * 32, 0],
        *(["NAME", start] for start in (-64, 32, 64, 2**70, True, 0.0)),
        ["NAME", 0, 0],
        [0, 0],
    ],
    ids=str,
)
def test_a_tensor_that_no_sender_has_put_there_is_refused(folder: Path, place: list[Any]) -> None:
    (folder.parent / "secret").write_bytes(bytes(LARGE))
    out = Outgoing(folder)
    name, _ = out.put(torch.ones(N))
    out.close()
    claimed = [name if part == "NAME" else part for part in place]
    with refused(by=ValueError):
        Tensors().native_recompose([*claimed, "torch.float32", [N]], DatumManager())
    assert (folder.parent / "secret").exists()
    (folder / ("a" * 32)).touch()
    with refused("empty", by=ValueError):
        Incoming(folder).take("a" * 32, 0, [N], torch.float32)


def test_only_the_simulator_takes_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = sent({"shared/w": torch.ones(N)})
    monkeypatch.delenv(FOLDER)
    with refused("simulator", by=ValueError):
        received(message)
    for block in (nullcontext(), written_once([{"w": torch.ones(N)}] * 2, LARGE)):
        with block:
            assert len(sent({"shared/w": torch.ones(N)})) > LARGE
    assert len(list(folder.iterdir())) == 1
