"""The device, threads and precision of simulated parties and of an experiment's tests.

They belong to this machine, not to the job: environment variables hold them, which every process of a run
inherits, so that they are part of no plan and of no run's name.
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
    return _training(_environment())


def compute_on(device: str | None, threads: int | None = None, amp: bool = False) -> None:
    """Set the variables for this process and those that it starts; what is not given stays as it is.

    Raises:
        ConfigError: as `this_machine`; the environment is then as it was.
    """
    given = {"device": device, "threads": threads, "amp": amp or None}
    settings = _environment() | {key: str(value) for key, value in given.items() if value is not None}
    _training(settings)
    os.environ.update({VARIABLES[key]: value for key, value in settings.items()})


def _environment() -> dict[str, str]:
    return {key: os.environ[name] for key, name in VARIABLES.items() if os.environ.get(name)}


def _training(settings: Mapping[str, str]) -> TrainingConfig:
    training = parse(TrainingConfig, settings, ", ".join(VARIABLES[key] for key in settings))
    if reason := unusable(training.device):
        raise ConfigError(
            f"device {training.device!r} cannot be used here: {reason}; choose cpu, cuda or cuda:1 with "
            f"--device, or correct {VARIABLES['device']}"
        )
    return training
