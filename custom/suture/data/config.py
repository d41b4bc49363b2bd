"""A site's own `suture.toml`: read where the data lies, never part of a job.

    [data]
    dataset = "hospital"
    root = "images"
    table = "labels.csv"

Everything else has a default. Relative paths start at the folder of the file.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from suture.core.errors import ConfigError, nearest
from suture.core.files import atomic_write
from suture.core.labels import LabelType
from suture.core.validation import LabelName, Section
from suture.data.datasets import EICU_TEXTS, SPLIT_RULES, TASKS, Dataset, EicuText, SplitRule
from suture.protocol.privacy import PrivacyConfig

Frequency = Literal["head", "medium", "tail"]


def _resolve(path: Path, info: ValidationInfo) -> Path:
    path = path.expanduser()
    return info.context["folder"] / path if info.context else path


SitePath = Annotated[Path, AfterValidator(_resolve)]


class DataConfig(Section):
    """What the site's data are.

    Attributes:
        dataset: the format of `table`.
        root: the image folder, a tar archive, or a folder of tar archives. Text that stands in `table` needs
            none.
        table: the CSV with one row per image or document.
        image_column: the hospital's column of image names within `root`, or of what names its documents.
        text_column: the hospital's column of documents, where its data are text rather than images.
        patient_column: the hospital's column of patient identifiers.
        attribute_column: the hospital's column of what figures are told apart by, such as skin tone; it is
            no label, and training does not see it.
        labels: the classes that this site annotates; by default every label that `table` has.
        synonyms: the table's spelling of a label, and the name it stands for.
        label_type: of a hospital's own table: any subset of the classes is true of an image (multilabel, the
            default), or exactly one of them, or of those that other sites know (multiclass).
        split: who decides which rows train: a column of the table, the official lists or folds, or a 70/10/20
            cut of the patients, or of ISIC's lesions or images; or ``test``, every row is for testing. By
            default the first that the data set has.
        split_column: the hospital's column of train, validation, test or blank (unused).
        fold: of a data set with folds, the one for testing, counted from 0.
        seed: of every random division.
        color: read images as RGB rather than gray.
        lists: folder of the official split: NIH's train_val_list.txt and test_list.txt, CheXpert's valid.csv;
            and of MIMIC's metadata, ISIC's lesions, HyperKvasir's folds and the other tables of eICU. By
            default the folder of `table`.
        uncertain: what -1 means in CheXpert and MIMIC: absent (U-Zeros), present (U-Ones) or unknown.
        views: frontal images of CheXpert and MIMIC, or the lateral ones too.
        partial: the table lists more images (or reports) than `root` holds; the rows without are left out.
        target: the class that this site trains, for methods in which each site has a task of its own.
        labels_from: where the labels of eICU come from: PMFL's words in `apacheadmissiondx`, or the first two
            levels of `diagnosisstring`.
        texts: the tables that eICU's documents are made of.
        leaking_text: whether eICU's documents include `admitdxpath`, which names the label.
        admission_paths: all that a stay has of these, or the last one.
        groups: of the server: classes by how often they occur in training, for figures of the common and the
            rare ones. Who knows the counts can name them; the sites are not asked.
        truth: a simulation's table of every label. Training never reads it: it says how many pseudo-labels
            were right, and that stays at the site.
    """

    dataset: Dataset
    root: SitePath
    table: SitePath
    image_column: str = "image"
    text_column: str | None = None
    patient_column: str = "patient"
    attribute_column: str | None = None
    labels: Annotated[tuple[LabelName, ...], Field(min_length=1)] | None = None
    synonyms: dict[str, LabelName] = Field(default_factory=dict)
    label_type: LabelType | None = None
    split: SplitRule | None = None
    split_column: str = "split"
    fold: int = Field(default=0, ge=0)
    seed: int = Field(default=1337, ge=0)
    color: bool = False
    lists: SitePath | None = None
    uncertain: Literal["zeros", "ones", "ignore"] = "zeros"
    views: Literal["frontal", "all"] = "frontal"
    partial: bool = False
    target: LabelName | None = None
    labels_from: Literal["apache", "diagnosis"] = "apache"
    texts: Annotated[tuple[EicuText, ...], Field(min_length=1)] = EICU_TEXTS
    leaking_text: bool = False
    admission_paths: Literal["all", "last"] = "all"
    groups: dict[Frequency, tuple[str, ...]] = Field(default_factory=dict)
    truth: SitePath | None = None

    @property
    def split_rule(self) -> SplitRule:
        """`split`, or the data set's default."""
        return self.split or SPLIT_RULES[self.dataset][0]

    @property
    def label_task(self) -> LabelType:
        """`task`, or the data set's default."""
        return self.label_type or TASKS[self.dataset][0]

    @model_validator(mode="before")
    @classmethod
    def _root_of_texts(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "table" not in values:
            return values
        in_table = values.get("text_column") or values.get("dataset") in ("openi", "eicu", "mtsamples")
        return {"root": values["table"]} | values if in_table else values

    @model_validator(mode="after")
    def _split_fits(self) -> DataConfig:
        rules = SPLIT_RULES[self.dataset]
        if self.split_rule not in rules:
            known = " or ".join(map(repr, rules))
            raise ValueError(f"split = {self.split!r} is not for dataset {self.dataset!r}; use {known}")
        if self.fold and self.split_rule != "folds":
            raise ValueError(f"fold = {self.fold} needs a data set with folds and split = 'folds'; remove it")
        return self

    @model_validator(mode="after")
    def _task_fits(self) -> DataConfig:
        tasks = TASKS[self.dataset]
        if self.label_task not in tasks:
            known = " or ".join(map(repr, tasks))
            raise ValueError(
                f"label_type = {self.label_type!r} is not for dataset {self.dataset!r}; use {known}"
            )
        return self


class TrainingConfig(Section):
    """How this site's machine trains.

    Attributes:
        batch_size: replaces the job's; at least 2, because batch norm has no variance of one image. Methods
            whose batches the job settles (MetaFL, PMFL) refuse it, and `amp`.
        learning_rate: replaces the job's.
        device: a torch device.
        amp: train in mixed precision.
        threads: torch threads; another number gives other sums.
        prior: file or folder of the frozen prior at this site, where the job's path is not the place.
    """

    batch_size: int | None = Field(default=None, ge=2)
    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    device: str = "cpu"
    amp: bool = False
    threads: int = Field(default=1, ge=1)
    prior: SitePath | None = None


class StorageConfig(Section):
    """Folders at the site.

    Attributes:
        state: the site's state between rounds and jobs.
        cache: decoded images.
        diagnostics: write a method's findings about each class beside the state, as a simulation does for its
            report. They are in no message.
    """

    state: SitePath = Path("state")
    cache: SitePath = Path("cache")
    diagnostics: bool = False


class SiteConfig(Section):
    """All of a `suture.toml`."""

    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    storage: StorageConfig = StorageConfig()


class ServerConfig(Section):
    """The server's `suture.toml`, which needs no data.

    Attributes:
        held_out: the whole file, where it has data.
    """

    storage: StorageConfig
    held_out: SiteConfig | None = Field(default=None, exclude=True)


S = TypeVar("S", bound=Section)

_SECTIONS: dict[str, type[Section]] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "privacy": PrivacyConfig,
    "storage": StorageConfig,
}


def load_site_config(path: Path) -> SiteConfig:
    """Reads a site's configuration; relative paths in it become absolute.

    Raises:
        ConfigError: the file is missing or not TOML (with its line), or a key is unknown (with the nearest
            valid word), missing or out of range.
    """
    return _validated(SiteConfig, _read(path), path)


def load_server_config(path: Path) -> ServerConfig:
    """Reads the server's configuration: that of a site, or ``[storage]`` alone.

    Raises:
        ConfigError: as `load_site_config`.
    """
    raw = _read(path)
    if raw.keys() <= {"storage"}:
        return _validated(ServerConfig, raw, path)
    config = _validated(SiteConfig, raw, path)
    return ServerConfig(storage=config.storage, held_out=config)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a site needs a suture.toml there") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    # An absent section is an empty one: its default folders, too, start at the folder of the file.
    return {"storage": {}} | raw


def _validated(kind: type[S], raw: dict[str, Any], path: Path) -> S:
    try:
        return kind.model_validate(raw, context={"folder": path.absolute().parent})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, fault) for fault in error.errors())) from error


def find_site_config(site: str, workspace: Path | None) -> Path:
    """Where the `suture.toml` of a site is.

    `$SUTURE_SITES/<site>/suture.toml` where that variable is set (a simulation: several sites on one
    machine), else `local/suture.toml` or `suture.toml` in the site's FLARE workspace.

    Raises:
        ConfigError: it is in none of these places; the message lists them.
    """
    sites = os.environ.get("SUTURE_SITES")
    if sites:
        places = [Path(sites) / site / "suture.toml"]
    else:
        folders = [workspace / "local", workspace] if workspace else []
        places = [folder / "suture.toml" for folder in folders]
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(map(str, places)) or "no folder (SUTURE_SITES is not set and there is no workspace)"
    raise ConfigError(f"site {site!r} has no suture.toml; looked at {looked}")


def write_site_config(path: Path, config: SiteConfig | ServerConfig) -> None:
    """Writes a configuration that reads back the same; the file is whole or not there.

    Its paths are written as they are, and a relative one will start at the folder of `path`.

    Raises:
        OSError: the folder does not exist or is not writable.
    """
    atomic_write(path, tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)).encode())


def _explain(path: Path, fault: Any) -> str:
    """One fault of pydantic in the words of the file."""
    section, *rest = (str(part) for part in fault["loc"])
    key = f"[{section}] {'.'.join(rest)}".strip() if section in _SECTIONS else section
    value = f" = {fault['input']!r}" if rest else ""
    if fault["type"] == "extra_forbidden":
        options = _SECTIONS[section].model_fields if rest else _SECTIONS
        return f"{path}: unknown key {key}; {nearest(rest[-1] if rest else section, options)}"
    if fault["type"] == "missing":
        return f"{path}: {key} is missing; write it"
    if fault["type"] == "literal_error":
        words = [word.strip("'") for word in fault["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return f"{path}: unknown {key}{value}; {nearest(str(fault['input']), words)}"
    return f"{path}: {key}{value}: {fault['msg']}"
