"""What the configurations of all data sets have in common; each reader module extends it by its own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, StrictBool, ValidationInfo, model_validator

from suture.core.errors import LabelError
from suture.core.labels import MOST_SYNONYMS, Synonyms, canonical
from suture.core.ontology import Settle, stated_codes
from suture.core.validation import LabelName, Section
from suture.core.vocabulary import AREAS
from suture.data.split import FrequencyGroup


def _resolve(path: Path, info: ValidationInfo) -> Path:
    try:
        path = path.expanduser()
    except RuntimeError as error:  # of the home folder of a user that does not exist
        raise ValueError(str(error)) from None
    if "\0" in str(path):
        raise ValueError("a path must not contain a NUL character")
    return info.context["folder"] / path if info.context else path


def _resolve_atlas(where: str, info: ValidationInfo) -> str:
    return where if where in AREAS else str(_resolve(Path(where), info))


SitePath = Annotated[Path, AfterValidator(_resolve)]
"""A path of a suture.toml; a relative one starts at the folder of the file."""


def _not_empty(labels: tuple[str, ...]) -> tuple[str, ...]:
    if not labels:
        raise ValueError("name the columns that are findings; comments in the file may ask which")
    return labels


class DatasetConfig(Section):
    """The keys of ``[data]`` that every data set has.

    Attributes:
        dataset: the format of the data, on which the other keys depend.
        root: the folder of the images, a tar archive, or a folder of tar archives. Not needed if the
            documents are in `table` itself.
        table: the file with the labels.
        labels: the classes that this site annotates; by default all classes of `table`.
        synonyms: maps spellings in the table to names of labels.
        codes: codes of classes, by class name: ``"SCT:36118008"`` (SNOMED CT), ``"I10:J93.9"`` (WHO ICD-10),
            ``"I10C:J93.9"`` (ICD-10-CM), ``"RADLEX:RID5352"``, or a list of several. Classes with the same
            code are the same class, whatever sites call them. Codes are not verified.
        atlas: relations of classes: a built-in area, such as ``chest``, or a file, such as the labels.toml of
            the study. What the known labels of an image imply of this site's other classes becomes known too.
        ancestors: also train the ancestors of this site's classes that other sites annotate, by the images
            that show one of its classes below. Needs `atlas`.
        contradictions: labels of an image that contradict the atlas: ``refuse`` reports an error, ``child
            wins`` corrects the parents, and ``leave out`` makes all labels of the image unknown.
        seed: random seed of splits.
        color: read images as RGB; by default as gray.
        bits: true bit depth of images stored with 16 bits, such as 12 of a detector: values from 0 to 2^bits
            - 1 become the gray levels. By default 16. A TIFF with tags for fewer bits uses those, and DICOM
            the range of each image.
        partial: allow `table` to list images (or reports) that are missing from `root`, or blank documents;
            their rows are left out and counted. Otherwise a missing image counts as unreadable.
        follow_links: read images (or reports) through links that lead out of `root`. By default they count as
            missing. `root` itself may be a link.
        target: the class that this site trains, for methods in which each site trains one class.
        truth: in a simulation, a table with the true labels of all images, to check pseudo-labels. Training
            never reads it, and the result stays at the site.
        groups: in the server's file: classes grouped by how often they occur in training (head, medium,
            tail). The server also reports figures for each group.
    """

    names_known: ClassVar[bool] = False
    """Whether the format or the configuration states all names of classes: `synonyms` then need `labels`."""

    dataset: str
    root: SitePath
    table: SitePath
    labels: Annotated[tuple[str, ...], AfterValidator(_not_empty)] | None = None
    synonyms: Annotated[dict[str, LabelName], Field(max_length=MOST_SYNONYMS), AfterValidator(Synonyms)] = (
        Field(default_factory=dict)
    )
    codes: dict[LabelName, str | tuple[str, ...]] = Field(default_factory=dict)
    atlas: Annotated[str, AfterValidator(_resolve_atlas)] | None = None
    ancestors: StrictBool = False
    contradictions: Settle = "refuse"
    seed: int = Field(default=1337, ge=0)
    color: StrictBool = False
    bits: int | None = Field(default=None, ge=8, le=16)
    partial: StrictBool = False
    follow_links: StrictBool = False
    target: LabelName | None = None
    truth: SitePath | None = None
    groups: dict[FrequencyGroup, tuple[LabelName, ...]] = Field(default_factory=dict)

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:  # noqa: ARG003
        """Whether the documents are in `table`, so that `root` can be left out."""
        return False

    @property
    def holds_text(self) -> bool:
        """Whether these are documents rather than images."""
        return self.text_in_table(self.__dict__)

    def stated_codes(self) -> dict[str, tuple[str, ...]]:
        """The codes by the canonical names of the classes."""
        return stated_codes(self.codes, self.synonyms)

    @model_validator(mode="after")
    def _names_can_be_used(self) -> Self:
        key = "labels"
        try:
            for name in self.labels or ():
                canonical(name, self.synonyms)
            key = "codes"
            self.stated_codes()
        except LabelError as error:
            raise ValueError(f"{key}: {error}") from None
        return self

    def idle(self) -> dict[str, str]:
        """The keys that have no effect beside the others, each with the reason and the remedy."""
        idle: dict[str, str] = {}
        if self.names_known and not (self.labels or self.groups or self.target):
            idle["synonyms"] = "without labels, because the release's own names are known; remove it"
        if self.atlas is None:
            idle |= dict.fromkeys(("contradictions", "ancestors"), "without atlas; remove it")
        if self.holds_text:
            idle |= dict.fromkeys(("color", "bits", "partial", "follow_links"), "for texts; remove it")
        if self.text_in_table(self.__dict__) and self.root != self.table:
            idle["root"] = "where the table itself has the texts; remove it"
        return idle

    @model_validator(mode="after")
    def _every_key_has_an_effect(self) -> Self:
        for key, why in self.idle().items():
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect {why}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _root_of_texts(cls, values: Any) -> Any:
        if isinstance(values, dict) and "table" in values and cls.text_in_table(values):
            return {"root": values["table"]} | values
        return values


class ReleaseConfig(DatasetConfig):
    """A data set whose release has more files than one table.

    Attributes:
        lists: the folder of the other files. By default, the folder of `table`.
    """

    names_known: ClassVar[bool] = True
    lists: SitePath | None = None

    @property
    def lists_folder(self) -> Path:
        """`lists`, or its default."""
        return self.lists or self.table.parent
