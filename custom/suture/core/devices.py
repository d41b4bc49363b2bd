"""Torch devices that a configuration names."""

from __future__ import annotations

import torch


def unusable(device: str) -> str:
    """Say in one line why torch cannot compute on a device; empty if it can, even if its memory is full."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return ""
    # torch has an error of its own for an unknown name, a build without such devices, and the meta device.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).splitlines()[0].partition(". ")[0]
    return ""
