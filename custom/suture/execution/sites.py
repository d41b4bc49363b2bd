"""Simulated sites: each gets a folder with a labels.csv and a suture.toml, as a hospital has.

All of them use the devices and the threads of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.entry_points import Registry
from suture.core.errors import ConfigError, unknown
from suture.core.escaping import as_csv
from suture.core.files import atomic_write, shared_features
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import unusable
from suture.core.validation import JOB_PATH, LARGEST_SEED, LIMIT, STRICT, parse
from suture.data.config import ServerConfig, SiteConfig, StorageConfig, TrainingConfig, write_site_config
from suture.data.readers import DataConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import long_tail_groups, training_counts
from suture.data.table import Split, Table
from suture.execution.partition import SERVER, Classes, class_lists, partition_table
from suture.execution.study import StudySites
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


@validated(frozen=True, config=STRICT)
class ReleasedSites(SimulatedSites):
    """Sites with the images of one public data set.

    Attributes:
        root: folder of the images; by default that of the data set in SUTURE_DATA.
        validation: the ``sites`` hold validation images, labelled for their own classes, or the ``server``
            does, labelled for all classes.
        seed: of every random split and of the partition.
    """

    root: Annotated[str | None, JOB_PATH] = None
    validation: Validation = "sites"
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1337

    def destination(self, folder: Path, runs: Path, method: Method) -> Destination:
        """Return where the sites are written; see `PhantomSites.prepare`."""
        return Destination(folder, runs, method, self.learning_rates, self.validation)


@validated(frozen=True, config=STRICT)
class PartitionedSites(ReleasedSites):
    """Sites of one data set, of whose classes each knows some.

    Attributes:
        clients: K.
        classes: which classes each site knows: ``published``, ``disjoint``, ``single`` (as many sites as
            classes), ``round_robin`` (as FedLSM) or ``all``; see `suture.execution.partition.class_lists`.
        per_client: number of classes of each site, for ``round_robin``.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 2
    classes: Classes = "published"
    per_client: Annotated[int, Field(ge=1, le=LIMIT)] = 3

    def write_partitioned(
        self,
        folder: Path,
        runs: Path,
        method: Method,
        pooled: Table,
        *,
        shared: int | None = None,
        color: bool = False,
    ) -> list[str]:
        """Partition a pooled data set by patients among sites that know different classes, and write them.

        A reference method that needs every label gets a column for each; for a method that guesses labels,
        the true ones lie beside the site's table, where only the diagnostics read them.

        Args:
            folder, runs, method: as of `PhantomSites.prepare`, whose value this returns.
            pooled: every image with all its labels and a split.
            shared: see `suture.execution.partition.class_lists`.
            color: read the images as RGB.
        """
        to = self.destination(folder, runs, method)
        lists = class_lists(self.classes, pooled.labels, self.clients, shared, self.seed, self.per_client)
        every, held_out = (pooled.labels,) * len(lists), to.server_splits
        known = every if to.method.labels.complete else lists
        sites = partition_table(pooled, known, self.seed, test=to.tests_at_sites, held_out=held_out)
        names = [name for name in sites if name != SERVER]
        # A reference method gets every label; the site still names the ones that it annotates.
        annotated = dict(zip(names, lists, strict=True)) if to.method.labels.complete else {}
        truth = (
            partition_table(pooled, every, self.seed, held_out=held_out) if to.method.labels.pseudo else {}
        )
        data: dict[str, DataConfig] = {}
        for name, table in sites.items():
            own_folder = to.folder / name
            written, texts = write_site(own_folder, table, table.labels), pooled.texts is not None
            data[name] = HospitalConfig(
                root=written if texts else pooled.root,
                table=written,
                text_column=TEXT if texts else None,
                labels=annotated[name].names if name in annotated else None,
                label_type=pooled.labels.label_type,
                color=color,
                truth=write_site(own_folder, truth[name], pooled.labels, "truth.csv")
                if name in truth and name != SERVER
                else None,
            )
        return write_sites(to, data)


TEXT = "text"
"""The column of documents of a simulated site."""

_ATTRIBUTE = "attribute"
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


def write_parts(to: Destination, pooled: Table, sites: Sequence[str]) -> list[str]:
    """Write the parts of a pooled data set of colour images as sites that all know every class.

    A site trains on the same images whoever holds the validation ones. Where models stay at the sites, each
    site holds its validation images, and test images: its own, and those that belong to no site. The server
    knows which classes are common or rare among the training images of all sites; see `long_tail_groups`.

    Args:
        pooled: every image with its class, a split and, for figures by attribute, its attribute.
        sites: the site of each row; the empty string for a test image of no site.

    Returns:
        the names of the sites, without the server's.
    """
    groups = {group: names for group, names in long_tail_groups(training_counts(pooled)).items() if names}
    data: dict[str, DataConfig] = {}
    for name, rows in _rows_of(to, pooled, sites).items():
        table = write_site(to.folder / name, pooled.rows(rows), pooled.labels)
        data[name] = HospitalConfig(
            root=pooled.root,
            table=table,
            attribute_column=None if pooled.attributes is None else _ATTRIBUTE,
            label_type=pooled.labels.label_type,
            color=True,
            groups=groups if name == SERVER else {},
            # Every label is known here: pseudo-labels are compared with the site's own table.
            truth=table if to.method.labels.pseudo and name != SERVER else None,
        )
    return write_sites(to, data)


def _rows_of(to: Destination, pooled: Table, sites: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """The rows of each site, and of the server, as masks."""
    site, split = np.array(sites), np.array(pooled.split)
    own_splits = [name for name in ("train", "validation") if name not in to.server_splits]
    own = np.isin(split, own_splits)
    test = (split == "test") & to.tests_at_sites
    rows = {name: ((site == name) & (own | test)) | ((site == "") & test) for name in sorted({*sites} - {""})}
    return rows | {SERVER: np.isin(split, to.server_splits)}


def write_site(folder: Path, table: Table, labels: LabelSet, name: str = "labels.csv") -> Path:
    """Write `folder/name` as a hospital has it; the images stay where they are.

    The columns are image, patient, split, `TEXT` (for documents), the classes of `labels`, and `_ATTRIBUTE`
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
        columns.append((_ATTRIBUTE, table.attributes))
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
