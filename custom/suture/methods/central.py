"""Centralised training: the data of all sites in one place. Two references, no federation.

    Kulkarni et al. 2024, arXiv:2301.06683v5, Sec. 3.3.1 ("Central"; "Naive" of the MIDL 2023 version), and
    the baseline trained on complete data of the simulations (Sec. 4.2.1).

    central:        minimise  L = 1/|C| sum_{c in C} BCE_c,  with y_c = 0 for c not in C_k
    central_full:   minimise  L = 1/|C| sum_{c in C} BCE_c,  every label known: the upper bound

Hospitals that could pool their images would need no federation; these say what the federation costs.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from suture.core.validation import STRICT
from suture.methods.averaging import LocalAveraging
from suture.methods.base import LabelView

_WHY = "pools the images of all sites"


@dataclass(frozen=True, config=STRICT)
class Central(LocalAveraging):
    """Pooled data; what a site does not annotate is absent. See `LocalAveraging` for the fields."""

    name: ClassVar[str] = "central"
    title: ClassVar[str] = "Centralised training"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 3.3.1"
    label_view: ClassVar[LabelView] = "own"
    missing_is_negative: ClassVar[bool] = True
    pooled: ClassVar[bool] = True
    here_only: ClassVar[str] = _WHY


@dataclass(frozen=True, config=STRICT)
class CentralFull(LocalAveraging):
    """Pooled data of which every label is known. See `LocalAveraging` for the fields."""

    name: ClassVar[str] = "central_full"
    title: ClassVar[str] = "Centralised training on complete labels"
    paper: ClassVar[str] = "Kulkarni et al. 2024, Sec. 4.2.1"
    label_view: ClassVar[LabelView] = "own"
    pooled: ClassVar[bool] = True
    every_label: ClassVar[bool] = True
    here_only: ClassVar[str] = _WHY
