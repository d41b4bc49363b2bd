"""Devices of torch that a configuration names."""

from __future__ import annotations

import torch


def unusable(device: str) -> str:
    """Why torch cannot compute on a device, in a line; empty if it can, be its memory full just now."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return ""
    # An unknown name, a build without such devices, one that holds no data: torch has an error for each.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).splitlines()[0].partition(". ")[0]
    return ""
