"""A table as data: which runs make it, or a figure, and what the paper printed there."""

from __future__ import annotations

import re
from dataclasses import dataclass as plain
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool
from pydantic.dataclasses import dataclass

from suture.core.errors import check_known
from suture.core.validation import STRICT

DATA = "{data}"
"""Stands for the data root in a setting."""

Value = str | int | float | bool | None | list[Any] | dict[str, Any]
Settings = dict[str, Value]
Group = Literal["mean", "shared", "unique"]
Pairs = Literal["runs", "classes", "tuned"]


def _a_key(key: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key):
        raise ValueError(
            "must be a short name that can be a file name: use letters (a-z), digits, - and _ only"
        )
    return key


Key = Annotated[str, AfterValidator(_a_key)]
"""The key of a row, preset or test, which becomes a part of names of files."""


@dataclass(frozen=True, config=STRICT)
class Row:
    """A row of a table, or a line of a figure.

    Attributes:
        name: the name in the table.
        set: settings of the job, as of `suture run --set`.
        site: where the method leaves a model at each site, the site whose model is measured; by default the
            `home` of the test set, and without one the models of all sites.
        published: what the paper printed, by column; of a series, over all of its values.
        steady: whether the values of the series do not change the row; its run at the first value then stands
            at all of them.
    """

    name: str
    set: Settings = field(default_factory=dict)
    site: str | None = None
    published: dict[str, str] = field(default_factory=dict)
    steady: StrictBool = False


@dataclass(frozen=True, config=STRICT)
class ExternalTest:
    """A test set beside the test data that a run measures its model on.

    Attributes:
        data: as under [data] of a suture.toml; ``{data}`` in a text stands for the data root. Where that of
            ``nih`` has no `table`, `root` is the folder of the release, and both are found in it.
        home: the site whose training images have the same source.
    """

    data: dict[str, Any]
    home: str | None = None


@dataclass(frozen=True, config=STRICT)
class Column:
    """A mean AUROC, or another figure of a run.

    Attributes:
        name: the head of the column.
        test: one of the table's tests; None for the run's own test data.
        group: all classes (``mean``), those of several sites (``shared``), or those of one (``unique``).
        classes: the column is about these classes alone.
        metric: ``auroc``, the ``loss``, or a metric of multiclass labels. `group` and `classes` select among
            the classes of ``auroc`` and ``recall``, and `group` of the loss on a test; any other metric is
            over all classes.
        frequency: accuracy of the ``head``, ``medium`` or ``tail`` classes, or of ``all``, the mean of these.
        attribute: the test images with this value of an attribute, or ``mean``, the mean over all values.
        models: ``global`` or the sites' ``local`` ones, the mean over the sites at their own test data.
        task: a task that the model was fine-tuned on. The column shows those runs: a figure at the threshold
            of Youden's index, or ``epochs``, the number until the AUROC is that of the table's `goal`.
        spread: what stands beside a mean AUROC in presets of one seed: its SD, or its 95 % ``interval`` over
            the patients of the test set. With several seeds it is always the SD over the seeds.

    Raises:
        ValueError: two attributes exclude each other.
    """

    name: str
    test: str | None = None
    group: Group = "mean"
    classes: tuple[str, ...] | None = None
    metric: Literal[
        "auroc", "loss", "accuracy", "balanced_accuracy", "f1", "precision", "recall", "epochs"
    ] = "auroc"
    frequency: Literal["head", "medium", "tail", "all"] | None = None
    attribute: str | None = None
    models: Literal["global", "local"] | None = None
    task: str | None = None
    spread: Literal["sd", "interval"] = "sd"

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.test, self.task, *self.parts)) > 1:
            raise ValueError("a column takes one of test, task, frequency, attribute and models")
        if self.frequency is not None and self.metric != "accuracy":
            raise ValueError(f'frequency = {self.frequency!r} needs metric = "accuracy"; write that too')
        some = self.classes is not None or self.group != "mean"
        own_part = self.classes is not None or (self.test is None and self.group != "mean")
        if self.metric == "loss" and (own_part or any(self.parts)):
            raise ValueError(
                'metric = "loss" covers all test images and classes; only a test and its group can be chosen'
            )
        if self.spread == "interval" and (own_part or self.metric != "auroc" or not self.by_class):
            raise ValueError(
                'spread = "interval" is for the mean AUROC of all classes, or of the group of a test; '
                "remove classes and other figures"
            )
        if some and not self.by_class and self.metric != "loss":
            raise ValueError("group and classes are for auroc and recall only")
        if self.test is not None and self.metric not in ("auroc", "loss"):
            raise ValueError(f"a further test has no {self.metric}; choose auroc or loss, or no test")

    @property
    def by_class(self) -> bool:
        """Whether the column is a mean over classes; else it is one figure of a run."""
        return self.metric in ("auroc", "recall") and self.task is None and not any(self.parts)

    @property
    def parts(self) -> tuple[str | None, str | None, str | None]:
        """The attributes that select a part of a run's own figures."""
        return self.frequency, self.attribute, self.models


OWN_COLUMNS = (
    Column("AUROC, all classes"),
    Column("AUROC, classes of several sites", group="shared"),
    Column("AUROC, classes of one site", group="unique"),
)


@dataclass(frozen=True, config=STRICT)
class ByClass:
    """What the paper printed of single classes, which stands beside each row's mean over the runs.

    Attributes:
        source: the place of the table in the paper.
        published: by row and class.
    """

    source: str
    published: dict[str, dict[str, str]]


@dataclass(frozen=True, config=STRICT)
class Series:
    """A setting that takes several values: the x axis of a figure."""

    key: str
    values: Annotated[tuple[Value, ...], Field(min_length=1)]
    label: str


@dataclass(frozen=True, config=STRICT)
class Tuning:
    """A setting that is chosen for each row by its validation figure (`Result.validation`).

    Attributes:
        key: the setting.
        values: that are tried.
        seed: of the runs that try them.
    """

    key: str
    values: Annotated[tuple[Value, ...], Field(min_length=2)]
    seed: int = 1


@dataclass(frozen=True, config=STRICT)
class Preset:
    """A size of the table: the paper's, or one for a small machine.

    Attributes:
        note: what the preset costs and how it differs from the paper.
        seeds: of the runs of each row.
        set: settings of every run; ``{data}`` in a text stands for the data root.
        rows: further settings of single rows.
        skip: rows that this preset leaves out.
        tune: a setting to be tuned on validation data.
        series: values of the table's series, where they are fewer.
        columns: the names of the columns that the preset shows, where they are fewer; a test that none of
            them is about is then left out, too.
        pairs: what the paired t-test pairs in this preset, for example ``classes`` with a single seed.
    """

    note: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    set: Settings = field(default_factory=dict)
    rows: dict[str, Settings] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    tune: Tuning | None = None
    series: tuple[Value, ...] | None = None
    columns: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    pairs: Literal["runs", "classes"] | None = None


@dataclass(frozen=True, config=STRICT)
class TableSpec:
    """A table or figure.

    Attributes:
        title, source: what it shows, and its place in the paper.
        job: the job whose settings the rows change.
        rows: by a short name.
        presets: by name; the first one is the default.
        reference: the row that all others are compared with.
        pairs: what the paired t-test pairs: ``runs`` (over seeds, and over a series' values), ``classes``, or
            ``tuned``, fine-tuning runs of the same seed on the same random split, each column of a task.
        goal: for columns of epochs, the row whose mean AUROC after its last epoch is to be reached.
        columns: by default the mean over all classes, over those of several sites and over those of one.
        tests: test sets by name.
        by_class: what the paper printed of single classes.
        series: the x axis, for a figure.
        set: settings of every run.
        note: what a reader should know besides.
    """

    title: str
    source: str
    job: str
    rows: dict[Key, Row]
    presets: Annotated[dict[Key, Preset], Field(min_length=1)]
    reference: str
    pairs: Pairs = "runs"
    goal: str | None = None
    columns: tuple[Column, ...] = OWN_COLUMNS
    tests: dict[Key, ExternalTest] = field(default_factory=dict)
    by_class: ByClass | None = None
    series: Series | None = None
    set: Settings = field(default_factory=dict)
    note: str = ""

    def preset(self, name: str | None) -> Table:
        """Return the table at the size of the preset of that name, or of the first.

        Raises:
            ConfigError: unknown; names the nearest.
        """
        size = name or next(iter(self.presets))
        check_known("preset", size, self.presets)
        return Table(self, size)


@plain(frozen=True)
class Table:
    """A table at the size of one of its presets.

    Attributes:
        spec: the file's content.
        size: the name of the preset.
    """

    spec: TableSpec
    size: str

    @property
    def preset(self) -> Preset:
        """The preset."""
        return self.spec.presets[self.size]

    @property
    def rows(self) -> dict[str, Row]:
        """The rows that the preset does not skip."""
        return {key: row for key, row in self.spec.rows.items() if key not in self.preset.skip}

    @property
    def values(self) -> tuple[Value, ...]:
        """The values of the series, or a single None without a series."""
        return (self.preset.series or self.spec.series.values) if self.spec.series else (None,)

    @property
    def cells(self) -> list[tuple[str, Value]]:
        """Each row with each value of the series: all rows of the first value, then of the second."""
        return [(row, x) for x in self.values for row in self.rows]

    @property
    def pairs(self) -> Pairs:
        """What the paired t-test pairs."""
        return self.preset.pairs or self.spec.pairs

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the preset shows."""
        shown = self.preset.columns
        return tuple(c for c in self.spec.columns if shown is None or c.name in shown)

    @property
    def tests(self) -> dict[str, ExternalTest]:
        """All tests, or those of the columns that the preset names."""
        used = {column.test for column in self.columns}
        return {k: test for k, test in self.spec.tests.items() if self.preset.columns is None or k in used}
