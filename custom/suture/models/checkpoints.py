"""Reading the tensors of a file that somebody else made: safetensors, or a pickle of nothing but tensors."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError

from suture.core.errors import ConfigError, as_word
from suture.core.plain import open_regular
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
