"""What simulated parties and the tests of an experiment compute on: a matter of this machine, not of the job.

It is said by the environment, which every process of a run inherits, so it is part of no plan and of no run's
name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from suture.core.devices import unusable
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture.data.config import TrainingConfig

VARIABLES = {"device": "SUTURE_DEVICE", "threads": "SUTURE_THREADS", "amp": "SUTURE_AMP"}
"""The variable of each setting of a suture.toml's [training] that simulated parties share."""


def this_machine() -> TrainingConfig:
    """The [training] of every simulated party: the values of `VARIABLES`, else the defaults.

    Raises:
        ConfigError: torch does not know the device or cannot use it here, or a value does not fit.
    """
    return _training(_said())


def compute_on(device: str | None, threads: int | None = None, amp: bool = False) -> None:
    """Says it for this process and those that it starts; what is not given stays as the environment has it.

    Raises:
        ConfigError: as `this_machine`; the environment is then as it was.
    """
    given = {"device": device, "threads": threads, "amp": amp or None}
    said = _said() | {key: str(value) for key, value in given.items() if value is not None}
    _training(said)
    os.environ.update({VARIABLES[key]: value for key, value in said.items()})


def _said() -> dict[str, str]:
    return {key: os.environ[name] for key, name in VARIABLES.items() if os.environ.get(name)}


def _training(said: Mapping[str, str]) -> TrainingConfig:
    training = parse(TrainingConfig, said, ", ".join(VARIABLES[key] for key in said))
    if reason := unusable(training.device):
        raise ConfigError(
            f"device {training.device!r} cannot be used here: {reason}; choose cpu, cuda or cuda:1 with "
            f"--device, or correct {VARIABLES['device']}"
        )
    return training
