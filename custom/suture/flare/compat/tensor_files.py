"""Files in which large tensors pass between the processes of FLARE's simulator, beside its messages.

FLARE 2.9.0: a message has all bytes of its tensors, or its receiver requests them through the same socket,
also within one machine. Here the sender writes them into a file, the message names it, and the receiver
takes it into its memory and deletes it. What several sites receive is written once. Only the simulator has
a folder for such files; elsewhere there are none, and none are taken.
Where: nvflare/app_opt/pt/decomposers.py: native_decompose
Expires with: test_a_message_of_flare_has_all_bytes_of_its_tensors
"""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from suture.core.files import open_regular

FOLDER = "SUTURE_MESSAGES"
"""Variable of the environment with the folder, which `suture.execution.simulator` makes and deletes."""

_NAME = re.compile(r"[0-9a-f]{32}")

_ALIGNED = 64
"""Bytes at whose multiples each tensor begins."""

_common: dict[int, tuple[Path, int]] = {}
"""Where tensors that several sites receive have been written already, by their identity."""


def folder() -> Path | None:
    """Return the folder of the simulator's files; None elsewhere."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, not copied where it is contiguous and in the memory of the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class Outgoing:
    """The files of one message. They are complete once it is closed, before the message is sent."""

    def __init__(self, where: Path) -> None:
        self._folder = where
        self._links: dict[Path, str] = {}
        self._own: TensorFile | None = None

    def put(self, tensor: Tensor) -> tuple[str, int]:
        """Write a tensor; return the name of the file, and the byte at which it begins.

        Raises:
            OSError: the disk is full; what was put before can be read.
        """
        if written := _common.get(id(tensor)):
            path, start = written
            with suppress(OSError):  # a file system without links, or the block has just ended
                return self._link(path), start
        self._own = self._own or TensorFile(self._folder)
        return self._own.path.name, self._own.append(tensor)

    def _link(self, path: Path) -> str:
        """Give the file another name for this message, because its receiver deletes it."""
        if path not in self._links:
            name = uuid4().hex
            os.link(path, self._folder / name)
            self._links[path] = name
        return self._links[path]

    def close(self) -> None:
        if self._own:
            self._own.close()


class TensorFile:
    """A new file of tensors that is being written."""

    def __init__(self, where: Path) -> None:
        self.path = where / uuid4().hex
        self._file = self.path.open("xb", buffering=0)

    def append(self, tensor: Tensor) -> int:
        """Write a tensor; return the byte at which it begins.

        Raises:
            OSError: the disk is full; what was written before is left as it was.
        """
        start = -(-self._file.tell() // _ALIGNED) * _ALIGNED
        self._file.seek(start)
        left = bytes_of(tensor)
        while left:
            left = left[self._file.write(left) :]
        return start

    def close(self) -> None:
        self._file.close()


class Incoming:
    """The files of one message that has come; each is deleted as it is taken into memory."""

    def __init__(self, where: Path) -> None:
        self._folder = where
        self._files: dict[str, mmap.mmap] = {}

    def take(self, name: str, start: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of a file. Nobody else sees what is written into it.

        Args:
            shape: of one element or more.

        Raises:
            ValueError: there is no such file, or no such tensor in it.
        """
        count = torch.Size(shape).numel()
        if name not in self._files:
            self._files[name] = self._map(name)
        file = self._files[name]
        if start < 0 or start % _ALIGNED or start + count * dtype.itemsize > len(file):
            raise ValueError("a tensor outside of its file")
        return torch.frombuffer(file, dtype=dtype, count=count, offset=start).view(shape)

    def _map(self, name: str) -> mmap.mmap:
        if not _NAME.fullmatch(name):
            raise ValueError("a file that no sender has named")
        path = self._folder / name
        try:
            with open_regular(path) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            path.unlink()
        except OSError as error:
            raise ValueError(f"the file of a tensor is not there ({type(error).__name__})") from error
        return content


@contextmanager
def written_once(messages: Iterable[Mapping[str, Tensor]], least: int) -> Iterator[None]:
    """Write what several of these messages have in common, for all that are sent within the block.

    Their tensors must not change meanwhile.

    Args:
        least: bytes of the smallest tensor that is written.
    """
    every = [t for tensors in messages for t in tensors.values() if t.nbytes >= least]
    times = Counter(map(id, every))
    common = {id(tensor): tensor for tensor in every if times[id(tensor)] > 1}
    where = folder()
    if where is None or not common:
        yield
        return
    path = None
    try:
        with suppress(OSError), closing(TensorFile(where)) as file:  # else each message tries, and says so
            path = file.path
            for key, tensor in common.items():
                _common[key] = path, file.append(tensor)
        yield
    finally:
        _common.clear()
        if path:
            path.unlink(missing_ok=True)
