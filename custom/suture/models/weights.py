"""Tensors of a file that somebody else made (safetensors, or a pickle of nothing but tensors), in a network.

Every tensor is taken, in its shape, or the file is refused.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from suture.core.errors import ConfigError, as_word
from suture.core.files import open_regular, sha256_of
from suture.protocol.packing import read_tensors

_REMEDY = (
    'ask its maker to write it with safetensors.torch.save_file(model.state_dict(), "weights.safetensors")'
)

_FOREIGN = re.compile(r"(?i)(?:global|class|import)[^.\n]*?\b([\w.]+\.\w+)\b")
"""The name by which torch says what it does not unpickle."""


def read_checkpoint(path: Path, what: str = "") -> Mapping[object, object]:
    """Read a safetensors file, or a torch file with tensors and plain values by name.

    Args:
        what: the checkpoint that is expected, for the message.

    Raises:
        ConfigError: names the file, what is wrong with it, and the remedy. Never in torch's words, which say
            how to run what the file holds.
    """
    of = f" of {what}" if what else ""
    try:
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            if file.read(9)[8:] == b"{":
                return dict(read_tensors(path).items())
            _check_packing(file)
            file.seek(0)
            loaded: object = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    except (SafetensorError, MemoryError) as error:
        raise ConfigError(
            f"{path} cannot be read as safetensors{of}: {as_word(error)}; fetch it again"
        ) from None
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever the unpickler meets
        if path.suffix == ".safetensors":
            raise ConfigError(f"{path} is damaged, or not a safetensors file{of}; fetch it again") from None
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint{of}: {_why(error)}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} contains a {type(loaded).__name__} instead of tensors by name; {_REMEDY}")
    return loaded


def _check_packing(file: BinaryIO) -> None:
    """Refuse a file that is compressed: torch writes none, and one could unpack to any size."""
    file.seek(0)
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as packed:
        if any(part.compress_type != zipfile.ZIP_STORED for part in packed.infolist()):
            raise ConfigError(f"is compressed, like TorchScript; torch.save does not compress; {_REMEDY}")


def _why(error: Exception) -> str:
    """Why torch has refused a file, by what it holds."""
    if found := _FOREIGN.search(str(error)):
        return f"besides tensors it contains {as_word(found[1])}, which could run any program; {_REMEDY}"
    return f"it is damaged, or not a checkpoint; {_REMEDY}"


_FILES = ("model.safetensors", "model.pt", "pytorch_model.bin", "model.pth", "prior.safetensors")
"""The files of weights in a folder of timm, transformers, MONAI or `suture pretrain`: it reads the first."""

_CONSTANT = ("num_batches_tracked", "position_ids", "relative_position_index", "attn_mask")
"""The ends of names of tensors that follow from the network, which not every version of a library stores."""


def read_weights(weights: str, official: Any = None) -> Mapping[str, Tensor]:
    """Read the tensors of a checkpoint by name.

    Args:
        weights: a file of tensors by name, a folder with one, or ``download``.
        official: torchvision's entry for the download, if it has one.

    Raises:
        ConfigError: naming the file and what is wrong with it.
    """
    if weights == "download":
        try:
            state: Mapping[str, Tensor] = official.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, or another file under that name
            raise ConfigError(
                f"{official.url} cannot be downloaded: {error}; fetch it on another machine and name the file"
            ) from error
        return state
    loaded = read_checkpoint(_weights_file(weights))
    for key in ("state_dict", "model_state_dict", "model"):  # of checkpoints of a training
        inner = loaded.get(key)
        loaded = inner if isinstance(inner, Mapping) else loaded
    return {str(n): dense(str(n), t, weights) for n, t in loaded.items() if isinstance(t, Tensor)}


def load_weights(
    network: torch.nn.Module,
    weights: str,
    what: str,
    leave_out: tuple[str, ...] | None = None,
    official: Any = None,
) -> None:
    """Fill a network with a checkpoint; arguments as of `read_weights` and `fill`."""
    fill(network.state_dict(), read_weights(weights, official), weights, what, leave_out)


_TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Real numbers with which torch computes on a CPU; with float8 it does not."""


def dense(name: str, tensor: Tensor, weights: str) -> Tensor:
    """Return a table of real numbers; refuse another, and one that repeats the few that the file holds."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if not plain or tensor.dtype not in _TYPES or tensor.nbytes > tensor.untyped_storage().nbytes():
        kind = f"of the type {tensor.dtype}".replace("torch.", "")
        raise ConfigError(f"{weights}: {as_word(name)} ({kind}) is no dense table of numbers; write float32")
    return tensor


def _weights_file(weights: str) -> Path:
    """Return the file of weights: the path itself, or what it holds as a folder of another library.

    Raises:
        ConfigError: there is none.
    """
    path = Path(weights).expanduser()
    if not path.exists():
        raise ConfigError(f"the pretrained weights {path} do not exist; name a file or a folder")
    if not path.is_dir():
        return path
    places = [folder / name for folder in (path, path / "models", path / "0_Transformer") for name in _FILES]
    if found := next((place for place in places if place.is_file()), None):
        return found
    raise ConfigError(f"{path} contains no file of weights ({', '.join(_FILES)}); name the file itself")


def file_digest(weights: str) -> str:
    """Return the SHA-256 of a file of weights, or of the one in a folder, in hexadecimal digits.

    Raises:
        ConfigError: there is none.
    """
    return sha256_of(_weights_file(weights))


def within(source: Mapping[str, Tensor], names: Collection[str], weights: str) -> dict[str, Tensor]:
    """Return the tensors of a network by its own names, from a file in which it may be a part of another one.

    Raises:
        ConfigError: several parts have these names, as a student and its teacher.
    """
    wanted = [name for name in names if not name.endswith(_CONSTANT)]
    parts = {name.removesuffix(first) for first in wanted[:1] for name in source if name.endswith(first)}
    shared = {part: sum(part + name in source for name in wanted) for part in parts if part[-1:] in ("", ".")}
    best = sorted(part for part, number in shared.items() if number == max(shared.values()))
    if len(best) > 1 and shared[best[0]] == len(wanted):
        raise ConfigError(
            f"{weights} contains several networks: {', '.join(map(as_word, best))}; write the tensors of one "
            "to a file of its own"
        )
    part = best[0] if len(best) == 1 else ""
    return {name.removeprefix(part): tensor for name, tensor in source.items() if name.startswith(part)}


def fill(
    target: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    weights: str,
    what: str,
    leave_out: tuple[str, ...] | None = None,
) -> None:
    """Copy tensors by name; the source may lack the counters of batch norm, and be for images of one channel.

    Args:
        leave_out: how the names of the tensors begin that only the source has, such as those of its
            classifier; None permits any.

    Raises:
        ConfigError: naming the file, and the first tensor that is missing, has another shape, is not
            finite or is too many.
    """
    source = {n: dense(n, t, weights) for n, t in within(source, target, weights).items()}
    for name, tensor in target.items():
        if name.endswith(_CONSTANT):
            continue
        found = source.get(name)
        if found is not None and found.ndim == 4 and found.shape[1:2] + tensor.shape[1:2] == (1, 3):
            found = found.expand(-1, 3, -1, -1) / 3  # for gray images, which have three equal channels here
        if found is None or found.shape != tensor.shape:
            has = "missing" if found is None else f"{list(found.shape)} instead of {list(tensor.shape)}"
            raise ConfigError(f"{weights} does not contain {what}: {name} is {has}")
        with torch.no_grad():
            tensor.copy_(found)
        if not tensor.isfinite().all():
            raise ConfigError(f"{weights}: {name} is not finite; name another file")
    if leave_out is None:
        return
    more = [name for name in source.keys() - target.keys() if not name.startswith(leave_out)]
    if more := [name for name in more if not name.endswith(_CONSTANT)]:
        raise ConfigError(
            f"{weights} contains another network than {what}: it has {as_word(min(more))} too; name another "
            "file, or another model"
        )
