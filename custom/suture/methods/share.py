"""Partial sharing: which rows of each tensor are shared; the rest belongs to each party."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.validation import STRICT

_GATES = re.compile(r"(weight|bias)_(ih|hh)_l\d+(_reverse)?$")
"""Tensors of an LSTM, whose rows are those of its input, forget, cell and output gates in turn."""


@dataclass(frozen=True, config=STRICT)
class Share:
    """The part of each tensor that is shared.

    The head is shared only as a whole: its rows are classes, and half of a class has no meaning.

    Attributes:
        fraction: of the rows of each tensor, rounded down.
        of: the first ``rows`` of each tensor, as in the published program (of an LSTM the input and forget
            gates of all units); or whole hidden ``units`` of an LSTM, all four gates of the first of them.
        init: where a site's own part begins: at the ``server``'s values, or each at random by itself
            (``own``: Zhang et al. 2021, Algorithm 2, line 1).
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    of: Literal["rows", "units"] = "rows"
    init: Literal["server", "own"] = "server"

    @property
    def head(self) -> bool:
        """Whether the head is shared."""
        return self.fraction == 1

    def rows(self, name: str, length: int) -> Tensor:
        """The indices of the shared rows of a tensor with `length` rows."""
        if self.of == "units" and _GATES.search(name):
            units = length // 4
            first = torch.arange(int(self.fraction * units))
            return torch.cat([first + gate * units for gate in range(4)])
        return torch.arange(int(self.fraction * length))


def cut(share: Share | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shared rows of each tensor; a tensor without any is left out."""
    if share is None:
        return dict(tensors)
    parts = {name: tensor[share.rows(name, len(tensor))] for name, tensor in tensors.items()}
    return {name: part for name, part in parts.items() if len(part)}


def put(share: Share | None, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors with the shared rows replaced."""
    if share is None:
        return {**whole, **parts}
    done = dict(whole)
    for name, part in parts.items():
        done[name] = whole[name].index_copy(0, share.rows(name, len(whole[name])), part)
    return done
