"""Options of what computes: simulated sites, and commands on saved models."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option(help="Where simulated sites compute: cpu, cuda, cuda:1; else SUTURE_DEVICE says it."),
]
ModelDevice = Annotated[
    str | None,
    typer.Option("--device", help="Where the model computes: cpu, cuda, cuda:1; else SUTURE_DEVICE says it."),
]
SiteThreads = Annotated[int | None, typer.Option(min=1, help="Torch threads of a simulated site.")]
Amp = Annotated[bool, typer.Option("--amp", help="Simulated sites train in mixed precision.")]


def device_of(said: str | None) -> str:
    """The device that an option or the environment names, the CPU where none does.

    Raises:
        ConfigError: torch does not know it, or cannot use it here.
    """
    from suture.simulation.machine import compute_on, this_machine

    compute_on(said)
    return this_machine().device
