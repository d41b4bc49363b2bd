"""Simulated sites: each gets a folder with a labels.csv and a suture.toml, as a hospital has.

All of them use the devices and the threads of this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.entry_points import Registry
from suture.core.errors import ConfigError, unknown
from suture.core.escaping import as_csv
from suture.core.files import atomic_write
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import unusable
from suture.core.validation import STRICT, parse
from suture.data.config import ServerConfig, SiteConfig, StorageConfig, TrainingConfig, write_site_config
from suture.data.readers import DataConfig
from suture.data.table import Split, Table
from suture.execution.study import SERVER, StudySites
from suture.methods.base import Method


@runtime_checkable
class Simulation(Protocol):
    """Simulated sites: a frozen dataclass, whose fields are the settings ``simulation.…`` of a job.

    Sites with tasks for fine-tuning name them in a field `targets`; those whose images are drawn, and show no
    patients, have `synthetic` true.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write the folder of each site, and the server's; return the names of the sites.

        Args:
            folder: gets a folder for each site; see `suture.execution.sites`.
            runs: where the server keeps its experiments.
            seed: of the job.
            method: the sites permit it what it needs to see.

        Raises:
            SutureError: the data are missing, or do not fit the settings.
        """


SIMULATIONS: Registry[type[Simulation]] = Registry(
    "suture.simulations",
    "kind of simulated sites",
    {"StudySites": StudySites},
    "a dataclass with a method `prepare`",
    lambda kind: isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "prepare"),
)
"""The kinds of simulated sites, by the name of their class."""

TARGETS = "targets"
"""The folder, beside those of the simulated sites, with the data of each learning task for fine-tuning."""

Validation = Literal["sites", "server"]
"""Who holds the validation images: each site its own, or the server all of them. A model that stays at its
site is selected there, so that the sites of a personal method hold their own either way."""


@validated(frozen=True, config=STRICT)
class SimulatedSites:
    """What every kind of simulated sites has.

    Attributes:
        learning_rates: by name of the site, for sites with one of their own.
    """

    learning_rates: dict[str, float] = Field(default_factory=dict)


TEXT = "text"
"""The column of documents of a simulated site."""

ATTRIBUTE = "attribute"
"""The column of a simulated site by which figures are broken down."""

_CELLS = {1.0: "1", 0.0: "0"}


@dataclass(frozen=True)
class Destination:
    """Where the sites of a simulation are written, and for which method.

    Attributes:
        folder: gets one folder for each site.
        runs: where the server keeps its experiments.
        method: the sites permit it what it needs to see.
        learning_rates: by name of the site, for sites with one of their own.
        validation: who holds the validation images.
    """

    folder: Path
    runs: Path
    method: Method
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    validation: Validation = "sites"

    @property
    def tests_at_sites(self) -> bool:
        """Whether the sites hold test images too, for models that stay there."""
        return self.method.sharing.personal != "nothing" or self.method.sharing.keep_local

    @property
    def server_splits(self) -> tuple[Split, ...]:
        """The splits that the server holds."""
        at_sites = self.method.sharing.personal != "nothing" or self.validation == "sites"
        return ("test",) if at_sites else ("validation", "test")


def write_sites(to: Destination, sites: Mapping[str, DataConfig]) -> list[str]:
    """Write the suture.toml of each site and of the server; they take turns on the `devices` of this machine.

    The data are public, so that no count is withheld.

    Args:
        sites: the data of each site, and of the server where it has some.

    Returns:
        the names of the sites, without the server's.

    Raises:
        ConfigError: a learning rate names no site, or this machine has no such device.
    """
    for name in to.learning_rates:
        if name not in sites:
            raise unknown("site of simulation.learning_rates", name, sites)
    own = on_devices([name for name in sites if name != SERVER])
    for name, data in sites.items():
        training = this_machine() if name == SERVER else own[name]
        write_site_config(to.folder / name / "suture.toml", _site_config(to, name, data, training))
    if SERVER not in sites:
        storage = StorageConfig(state=to.runs, cache=to.folder / SERVER / "cache")
        write_site_config(to.folder / SERVER / "suture.toml", ServerConfig(storage=storage))
    return [name for name in sites if name != SERVER]


def _site_config(to: Destination, name: str, data: DataConfig, training: TrainingConfig) -> SiteConfig:
    folder = to.folder / name
    prior = to.method.sharing.prior
    settings = {
        "lr": to.learning_rates.get(name),
        "prior": Path(prior.path).expanduser().absolute() if prior and prior.path else None,
    }
    return SiteConfig(
        data=data,
        training=training.model_copy(update=settings),
        privacy=PrivacyConfig.of_public_data(to.method.labels.view),
        storage=StorageConfig(
            state=to.runs if name == SERVER else folder / "state",
            cache=cache_folder(folder, data.root),
            features=feature_folder(folder, data.root),
            diagnostics=name != SERVER,
        ),
    )


def cache_folder(site: Path, images: Path) -> Path:
    """Return the cache of a simulated site: SUTURE_CACHE, if that is set, for all sites of all runs.

    The name of an entry depends on its content, so that sites can share a folder. A site whose images were
    made for this run alone has a cache of its own, because no other run could use it.
    """
    shared = os.environ.get("SUTURE_CACHE")
    if shared and not images.is_relative_to(site):
        return Path(shared).expanduser().resolve()
    return site / "cache"


def shared_features() -> Path:
    """Return the folder of features that this user's runs of simulated sites share.

    Raises:
        RuntimeError: the user has no home.
    """
    if own := os.environ.get("SUTURE_CACHE"):
        return Path(own).expanduser().resolve() / "features"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / caches) / "suture" / "features"


def feature_folder(site: Path, images: Path) -> Path | None:
    """Return the folder of a simulated site's features: `shared_features`.

    None leaves them in `cache_folder`: of a site whose images were made for this run alone, or where the user
    has no home to write to.
    """
    if images.is_relative_to(site):
        return None
    try:
        folder = shared_features()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def write_site(folder: Path, table: Table, labels: LabelSet, name: str = "labels.csv") -> Path:
    """Write `folder/name` as a hospital has it; the images stay where they are.

    The columns are image, patient, split, `TEXT` (for documents), the classes of `labels`, and `ATTRIBUTE`
    (where the table has attributes). An unknown label is a blank cell.

    Returns:
        the file.

    Raises:
        OSError: the folder cannot be made or written.
    """
    y = table.restrict(labels).y
    columns: list[tuple[str, Sequence[str]]]
    columns = [("image", table.images), ("patient", table.patients), ("split", table.split)]
    if table.texts is not None:
        columns.append((TEXT, table.texts))
    for label, values in zip(labels, y.T.tolist(), strict=True):
        columns.append((label, [_CELLS.get(value, "") for value in values]))
    if table.attributes is not None:
        columns.append((ATTRIBUTE, table.attributes))
    headers, cells = zip(*columns, strict=True)
    atomic_write(folder / name, as_csv(headers, zip(*cells, strict=True)).encode())
    return folder / name


_VARIABLES = {"device": "SUTURE_DEVICE", "threads": "SUTURE_THREADS", "amp": "SUTURE_AMP"}
"""The variable of each setting of a suture.toml's [training] that simulated parties share."""

_BOOLEANS = {"true": True, "false": False}


def devices() -> tuple[str, ...]:
    """The devices that simulated sites share, of SUTURE_DEVICE (``cuda:0,cuda:1``), else the CPU."""
    return tuple(_environment().get("device", "cpu").split(","))


def this_machine() -> TrainingConfig:
    """The [training] of a simulated party on the first device: the values of `_VARIABLES`, else the defaults.

    Raises:
        ConfigError: torch does not know a device or cannot use it here, or a value does not fit.
    """
    return _training(_environment())


def on_devices(sites: Sequence[str]) -> dict[str, TrainingConfig]:
    """`this_machine` for each site; the devices are assigned in turn, in the order of the sites.

    Raises:
        ConfigError: as `this_machine`.
    """
    training = this_machine()
    return {
        site: training.model_copy(update={"device": device})
        for site, device in zip(sites, cycle(devices()), strict=False)
    }


def compute_on(device: str | None, threads: int | None = None, amp: bool = False) -> None:
    """Set the variables for this process and those that it starts; what is not given stays as it is.

    Raises:
        ConfigError: as `this_machine`; the environment is then as it was.
    """
    given = {"device": device, "threads": threads, "amp": amp or None}
    settings = _environment() | {key: str(value) for key, value in given.items() if value is not None}
    _training(settings)
    os.environ.update({_VARIABLES[key]: value for key, value in settings.items()})


def _environment() -> dict[str, str]:
    return {key: os.environ[name] for key, name in _VARIABLES.items() if os.environ.get(name)}


def _training(settings: Mapping[str, str]) -> TrainingConfig:
    """The settings as a [training] on the first of the devices, once all of them were tried."""
    names = settings.get("device", "cpu").split(",")
    for name in names:
        if reason := unusable(name):
            raise ConfigError(
                f"device {name!r} cannot be used here: {reason}; choose cpu, cuda, cuda:1 or, for several "
                f"sites, cuda:0,cuda:1 with --device, or correct {_VARIABLES['device']}"
            )
    where = ", ".join(_VARIABLES[key] for key in settings)
    typed = {key: _BOOLEANS.get(value.lower(), value) for key, value in settings.items()}
    return parse(TrainingConfig, {**typed, "device": names[0]}, where)
