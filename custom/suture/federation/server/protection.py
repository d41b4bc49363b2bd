"""What sites that clip their updates or add noise have spent of their privacy, in words for the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from suture.core.files import whole_lines
from suture.federation.differential_privacy import epsilon


def spent(folder: Path, protection: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A sentence for each protected site, by the rounds in which its update counted.

    Args:
        folder: of the run, for its history.
        protection: clip, noise and delta of each site.
    """
    if not protection:
        return []
    history = [json.loads(line) for line in whole_lines(folder / "history.jsonl")]
    return [_sentence(site, own, _rounds(site, history)) for site, own in sorted(protection.items())]


def _rounds(site: str, history: Iterable[Mapping[str, Any]]) -> int:
    """The rounds in which an update may have left the site, counted or not: all but those it abstained in."""
    asked = [line["sites"][site]["status"] for line in history if site in line["sites"]]
    return sum(status != "abstained" for status in asked)


def _sentence(site: str, own: Mapping[str, float], rounds: int) -> str:
    told = f"{site} clips its updates to a norm of {own['clip']:g}"
    if not own["noise"]:
        return f"{told} and adds no noise."
    told += f" and adds noise of {own['noise']:g} times that"
    try:
        value = epsilon(own["noise"], rounds, own["delta"])
    except ImportError:
        return f"{told}; install suture[dp] at the server to see what {rounds} updates spend."
    return (
        f"{told}: ε = {value:.3g} at δ = {own['delta']:g} over {rounds} updates (local differential privacy "
        "per site update, sampling rate 1; not per patient; of tensors alone, not of counts and figures)."
    )
