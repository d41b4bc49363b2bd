"""Large tensors of the simulator's messages pass in files: whole, once, and nothing of them stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from torch import Tensor

from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat import tensor_files
from suture.flare.compat.tensor_files import FOLDER, Incoming, Outgoing, TensorFile, written_once
from suture.flare.compat.tensors import LARGE, Tensors, register
from suture.protocol.packing import Packed

N = LARGE // 4
"""Numbers of the smallest tensor that passes in a file."""


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


@pytest.mark.complete
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8]),
            st.sampled_from([(), (0,), (3,), (N - 1,), (N,), (N + 1, 3), (1, 2 * N + 5)]),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_tensors_of_any_type_and_size_arrive(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, tuple[int, ...], bool]]
) -> None:
    register()
    tensors = {}
    for number, (type_, shape, transposed) in enumerate(kinds):
        tensor = (torch.arange(prod(shape)) + number).remainder(251).to(type_).view(shape)
        tensors[f"shared/{number}"] = tensor.mT if transposed and len(shape) > 1 else tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("files")))
        found = received(sent(tensors))
        assert not list(Path(os.environ[FOLDER]).iterdir())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_message_has_one_file_and_none_of_its_bytes(folder: Path) -> None:
    tensors = {"shared/a": torch.ones(N), "shared/b": torch.zeros(3 * N), "shared/c": torch.ones(2)}
    message = sent(tensors)
    [file] = folder.iterdir()
    assert file.stat().st_size == 4 * LARGE
    assert len(message) < LARGE / 4
    found = received(message)
    assert not file.exists()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_nobody_else_sees_what_is_written_into_a_tensor_that_came(folder: Path) -> None:
    tensor = torch.ones(N)
    with written_once([{"w": tensor}] * 2, LARGE):
        first, second = (received(sent({"shared/w": tensor}))["shared/w"] for _ in range(2))
    first += 1
    assert [each.unique().tolist() for each in (tensor, first, second)] == [[1], [2], [1]]


def test_what_several_sites_receive_is_written_once(folder: Path) -> None:
    backbone, rows = torch.ones(N), [torch.full((N,), float(site)) for site in range(3)]
    payloads = [{"shared/w": backbone, "head/w": own} for own in rows]
    with written_once(payloads, LARGE):
        messages = [sent(payload) for payload in payloads]
        assert len({file.stat().st_ino for file in folder.iterdir()}) == 1 + 3
    assert sum(file.stat().st_nlink for file in folder.iterdir()) == 3 * 3 + 3  # without the sender's name
    for message, own in zip(messages, rows, strict=True):
        found = received(message)
        assert torch.equal(found["shared/w"], backbone)
        assert torch.equal(found["head/w"], own)
    assert not list(folder.iterdir())


def test_after_the_exchange_a_tensor_of_the_same_identity_is_written_anew(folder: Path) -> None:
    tensor = torch.ones(N)
    with written_once([{"w": tensor}] * 2, LARGE):
        pass
    tensor.zero_()
    assert not received(sent({"shared/w": tensor}))["shared/w"].any()


@pytest.mark.parametrize("alone", [True, False])
def test_a_file_system_without_links_takes_a_file_for_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", no_link)
    tensors = {"shared/w": torch.ones(N)}
    with written_once([tensors] * (1 if alone else 2), LARGE):
        assert all(torch.equal(received(sent(tensors))["shared/w"], torch.ones(N)) for _ in range(2))
    assert not list(folder.iterdir())


def test_on_a_full_disk_tensors_travel_in_the_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = TensorFile.append

    def full(file: TensorFile, tensor: Tensor) -> int:
        if tensor.numel() > N:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, tensor)

    monkeypatch.setattr(TensorFile, "append", full)
    tensors = {"shared/a": torch.ones(N), "shared/b": torch.full((2 * N,), 2.0), "shared/c": torch.zeros(N)}
    with written_once([tensors] * 2, LARGE):
        messages = [sent(tensors) for _ in range(2)]
    assert "No space left on device" in caplog.text
    for message in messages:
        assert len(message) > 2 * LARGE
        found = received(message)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_folder_that_is_gone_costs_no_message(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.rmdir()
    tensors = {"shared/w": torch.ones(N)}
    with written_once([tensors] * 2, LARGE):
        assert torch.equal(received(sent(tensors))["shared/w"], torch.ones(N))
    assert "could not be written" in caplog.text


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
        ["NAME", -64],
        ["NAME", 32],
        ["NAME", 64],
        ["NAME", 2**70],
        ["NAME", True],
        ["NAME", 0.0],
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
    with pytest.raises(ValueError, match=r"a (tensor|file)"):
        Tensors().native_recompose([*claimed, "torch.float32", [N]], DatumManager())
    assert (folder.parent / "secret").exists()


def test_only_the_simulator_takes_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = sent({"shared/w": torch.ones(N)})
    monkeypatch.delenv(FOLDER)
    with pytest.raises(ValueError, match="only the simulator"):
        received(message)
    assert len(list(folder.iterdir())) == 1
    with written_once([{"w": torch.ones(N)}] * 2, LARGE):
        assert len(sent({"shared/w": torch.ones(N)})) > LARGE
    assert len(list(folder.iterdir())) == 1


def test_an_empty_file_is_refused(folder: Path) -> None:
    (folder / ("a" * 32)).touch()
    with pytest.raises(ValueError, match="empty file"):
        Incoming(folder).take("a" * 32, 0, [N], torch.float32)


def test_files_are_whole_before_a_message_is_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Path] = []
    monkeypatch.setattr(
        tensor_files.TensorFile, "close", lambda file: (file._file.close(), closed.append(file.path))
    )
    sent({"shared/w": torch.ones(N)})
    assert closed == list(folder.iterdir())
