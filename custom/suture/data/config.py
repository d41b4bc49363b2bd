"""A site's own `suture.toml`: read where the data lies, never part of a job.

    [data]
    dataset = "hospital"
    root = "images"
    table = "labels.csv"

Everything else has a default. Relative paths start at the folder of the file. Which keys ``[data]`` has
depends on `dataset`: see the configuration classes in `suture.data.readers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from suture.core.errors import ConfigError, as_word, nearest, show_value
from suture.core.files import atomic_write, read_toml
from suture.core.privacy import PrivacyConfig
from suture.core.validation import Section, in_words, with_numbers
from suture.data.dataset import DatasetConfig, SitePath
from suture.data.readers import DATASETS, DataConfig


class TrainingConfig(Section):
    """How this site trains.

    Attributes:
        batch_size: images or documents in each step, instead of the job's; at least 2, because batch norm
            needs more than one. Methods that take it from the job (MetaFL, PMFL) refuse it, and refuse `amp`
            and `compile`.
        lr: learning rate, instead of the job's.
        device: ``cpu``, ``cuda`` or one of several GPUs, such as ``cuda:1``.
        amp: train in mixed precision; a recurrent network (LSTM, GRU) stays in single precision.
        half: the 16-bit type of `amp`: ``bf16``, or ``fp16`` for GPUs without it, with scaling of the loss.
        compile: compile the backbone: to ``kernels``, or to ``cuda_graphs`` on a GPU. Refused if this changes
            the loss or gradient of a batch.
        prefetch: number of training batches that a thread prepares in advance; 0 for none. Does not change
            results.
        threads: number of torch threads. Another number changes results in the last digits.
        prior: file or folder of the frozen prior at this site, instead of the path in the job.
    """

    batch_size: int | None = Field(default=None, ge=2)
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    device: str = "cpu"
    amp: StrictBool = False
    half: Literal["bf16", "fp16"] = "bf16"
    compile: Literal["no", "kernels", "cuda_graphs"] = "no"
    prefetch: int = Field(default=2, ge=0, le=64)
    threads: int = Field(default=1, ge=1)
    prior: SitePath | None = None

    @property
    def precision(self) -> str:
        """The type in which backbones compute: ``float32``, or with `amp` that of `half`."""
        return self.half if self.amp else "float32"

    @property
    def computation(self) -> dict[str, str | int]:
        """What the last digits of a result depend on: the same in all rounds of an experiment."""
        kind = self.device.partition(":")[0]
        return {"threads": self.threads, "device": kind, "precision": self.precision, "compile": self.compile}


class StorageConfig(Section):
    """Folders at the site.

    Attributes:
        state: the site's state between rounds and jobs.
        ledger: folder of the ledger of all that the site has released; by default that of the state.
        cache: decoded images.
        features: what a prior or a frozen encoder has computed of them, for all runs that share the folder;
            by default the folder of that name in `cache`.
        files: folder of the files that a job may name: a prior, or pretrained weights at the server. A job
            gives the bare name, and cannot name other files.
        diagnostics: also write a method's diagnostics of each class beside the state. They are never sent.
    """

    state: SitePath = Path("state")
    ledger: SitePath | None = None
    cache: SitePath = Path("cache")
    features: SitePath | None = None
    files: SitePath = Path("files")
    diagnostics: StrictBool = False

    @property
    def feature_folder(self) -> Path:
        """The folder of features."""
        return self.features or self.cache / "features"


class SiteConfig(Section):
    """All of a `suture.toml`."""

    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    storage: StorageConfig = StorageConfig()


class ServerConfig(Section):
    """The server's `suture.toml`, which needs no data.

    Attributes:
        held_out: the whole file, where it has a ``[data]`` section.
    """

    storage: StorageConfig
    held_out: SiteConfig | None = Field(default=None, exclude=True)


S = TypeVar("S", bound=Section)

_SECTIONS: dict[str, type[Section]] = {
    "data": DatasetConfig,
    "training": TrainingConfig,
    "privacy": PrivacyConfig,
    "storage": StorageConfig,
}

_MOST_FAULTS = 10

CONFIG = "suture.toml"


def site_files(folder: Path) -> list[Path]:
    """Return the suture.toml of a site's folder, or those of the sites of a study's folder; else none."""
    own = folder / CONFIG
    sites = (path for path in sorted(folder.glob(f"*/{CONFIG}")) if path.parent.name != "server")
    return [own] if own.is_file() else list(sites)


def load_site_config(path: Path) -> SiteConfig:
    """Reads a site's configuration; relative paths in it become absolute.

    Args:
        path: of the file, or of its folder; that of a study does where it has one site.

    Raises:
        ConfigError: the file is missing or not TOML (with its line), or a key is unknown (with the nearest
            valid word), missing or out of range.
    """
    if path.is_dir():
        path, *others = site_files(path) or [path / CONFIG]
        if others:
            several = ", ".join(map(str, (path, *others)))
            raise ConfigError(f"{path.parent.parent} is a study with several sites; give one of {several}")
    raw = _read(path)
    if "method" in raw and "data" not in raw:
        raise ConfigError(f"{path} is a job, not a site's data; give the {CONFIG} of a site")
    return _validate(SiteConfig, raw, path)


def load_server_config(path: Path) -> ServerConfig:
    """Reads the server's configuration: that of a site, or ``[storage]`` alone.

    Raises:
        ConfigError: as `load_site_config`.
    """
    raw = _read(path)
    if raw.keys() <= {"storage"}:
        return _validate(ServerConfig, raw, path)
    config = _validate(SiteConfig, raw, path)
    return ServerConfig(storage=config.storage, held_out=config)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_toml(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write the site's suture.toml there") from error
    # An absent section is an empty one: its default folders, too, start at the folder of the file.
    return {"storage": {}} | raw


def _validate(kind: type[S], raw: dict[str, Any], path: Path) -> S:
    try:
        return with_numbers(kind.model_validate(raw, context={"folder": path.absolute().parent}), raw)
    except ValidationError as error:
        raise ConfigError(_explain_error(path, error.errors(), raw.get("data"))) from error


def find_site_config(site: str, workspace: Path | None) -> Path:
    """Find the `suture.toml` of a site.

    `$SUTURE_SITES/<site>/suture.toml` where that variable is set (a simulation: several sites on one
    machine), else in the site's FLARE workspace `local/sites/<site>/suture.toml` (FLARE's simulator gives
    all parties one `local`), `local/suture.toml` or `suture.toml`.

    Raises:
        ConfigError: none of these files exists; the message lists them.
    """
    sites = os.environ.get("SUTURE_SITES")
    if sites:
        paths = [Path(sites) / site / "suture.toml"]
    else:
        folders = [workspace / "local" / "sites" / site, workspace / "local", workspace] if workspace else []
        paths = [folder / "suture.toml" for folder in folders]
    for path in paths:
        if path.is_file():
            return path
    looked = ", ".join(map(str, paths)) or "no folder (SUTURE_SITES is not set and there is no workspace)"
    raise ConfigError(f"site {site!r} has no suture.toml; looked at {looked}")


def write_site_config(path: Path, config: SiteConfig | ServerConfig) -> None:
    """Writes a configuration that reads back the same; the file is whole or not there.

    Its paths are written as they are, and a relative one will start at the folder of `path`.

    Raises:
        OSError: the folder does not exist or is not writable.
    """
    atomic_write(path, tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)).encode())


def parse_data(values: Mapping[str, Any], where: str) -> DataConfig:
    """The configuration of one data set from plain values, such as those of a table's file.

    Args:
        where: names the source, for errors.

    Raises:
        ConfigError: as `load_site_config`.
    """
    try:
        config: DataConfig = with_numbers(TypeAdapter(DataConfig).validate_python(dict(values)), values)
    except ValidationError as error:
        faults = [{**fault, "loc": ("data", *fault["loc"])} for fault in error.errors()]
        raise ConfigError(_explain_error(where, faults, values)) from None
    return config


def _explain_error(source: Path | str, faults: Sequence[Any], data: Any) -> str:
    """The first faults of pydantic, one a line, and how many more there are.

    Args:
        data: the section ``[data]``, whatever it is.
    """
    dataset = data.get("dataset") if isinstance(data, Mapping) else None
    # A list whose entries are at fault counts as too short as well: the entries are what to report.
    outer = {fault["loc"][:n] for fault in faults for n in range(len(fault["loc"]))}
    faults = [fault for fault in faults if fault["loc"] not in outer]
    lines = [_explain(source, fault, dataset) for fault in faults[:_MOST_FAULTS]]
    more = len(faults) - len(lines)
    return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def _explain(source: Path | str, fault: Any, dataset: str | None) -> str:
    """One fault of pydantic in the words of the file."""
    section, *rest = map(as_word, fault["loc"])
    if section != "data":
        dataset = None
    key = f"[{section}] {'.'.join(rest)}".strip() if section in _SECTIONS else section
    value = f" = {show_value(fault['input'])}" if rest else ""
    if fault["type"] == "extra_forbidden":
        return f"{source}: {_unknown_key(section, rest, dataset)}"
    if fault["type"] == "value_error" and not rest:
        return f"{source}: {key} {fault['ctx']['error']}"
    if fault["type"] == "missing":
        return f"{source}: {key} is missing; write it"
    if fault["type"] == "no_dataset":
        return f"{source}: [data] dataset is missing; write it"
    if fault["type"] == "unknown_dataset":
        word = str(dataset)
        return f"{source}: unknown [data] dataset = {show_value(word)}; {nearest(word, DATASETS.names())}"
    if fault["type"] == "literal_error":
        words = [word.strip("'") for word in fault["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        word = str(fault["input"])
        if dataset and word in _words_elsewhere(rest[-1]):
            known = " or ".join(map(repr, words))
            return f"{source}: {key}{value} does not apply to dataset {dataset!r}; use {known}"
        return f"{source}: unknown {key}{value}; {nearest(word, words)}"
    return f"{source}: {key}{value}: {in_words(fault)}"


def _unknown_key(section: str, rest: list[str], dataset: str | None) -> str:
    """What to do about a section, or a key of one, that does not exist."""
    if not rest:
        return f"unknown key {section}; {nearest(section, _SECTIONS)}"
    name = rest[-1]
    if dataset is None:
        return f"unknown key [{section}] {name}; {nearest(name, _SECTIONS[section].model_fields)}"
    if (dataset, name) == ("hospital", "uncertain"):
        meanings = 'values = { "-1" = "unknown" }, or 0, or 1'
        return f'[data] uncertain has no effect for dataset = "hospital"; write {meanings}'
    own = DATASETS.find(dataset).config.model_fields
    others = [word for word, other in DATASETS.items() if name in other.config.model_fields]
    if others:
        sets = ", ".join(map(repr, others))
        hint = nearest(name, own)
        close = f", or {hint}" if hint.startswith("did you mean") else ""
        return f"[data] {name} is a key of dataset {sets}, not of {dataset!r}; remove it{close}"
    return f"unknown key [data] {name} of dataset {dataset!r}; {nearest(name, own)}"


def _words_elsewhere(key: str) -> set[str]:
    """The values that a key of ``[data]`` can have, in any data set."""
    fields = [entry.config.model_fields.get(key) for entry in DATASETS.values()]
    return {word for field in fields if field for word in get_args(field.annotation)}


def find_server_config(workspace: Path) -> ServerConfig:
    """Read the server's own suture.toml; without one, experiments lie in suture/ of the workspace.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        path = find_site_config("server", workspace)
    except ConfigError:
        files = workspace / "local" / "files"
        return ServerConfig(storage=StorageConfig(state=workspace / "suture", files=files))
    return load_server_config(path)
