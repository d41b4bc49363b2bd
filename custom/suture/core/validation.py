"""Conversion of plain values into typed ones, with errors that say what to correct."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from suture.core.errors import ConfigError, LabelError, as_word, nearest, shown
from suture.core.labels import canonical
from suture.core.plain import check_plain

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
"""Configuration of validated dataclasses: unknown fields are errors, and numbers are finite."""

OPEN = ConfigDict(extra="ignore", arbitrary_types_allowed=True)
"""Configuration of those that read a part of what another version may extend: unknown fields are ignored."""


LIMIT = 10**6
"""Largest whole number in a job, of rounds, epochs, images and the like: a larger one is a slip."""

LARGEST_SEED = 2**63 - 1
"""Largest seed: numbers in a message have 64 bits."""

MOST_ATTRIBUTES = 20
"""Largest number of values of an attribute; a column with more is no attribute."""


class Section(BaseModel):
    """A section of a configuration: unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _a_label(name: str) -> str:
    try:
        canonical(name)
    except LabelError as error:
        raise ValueError(str(error)) from None
    return name


LabelName = Annotated[str, AfterValidator(_a_label)]
"""Any spelling of a label."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def flat(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of nested settings by their dotted names; an empty table is a leaf."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in flat(f"{name}.{key}", inner).items()}


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """Return pydantic's validator of a type. It is made once, because that takes milliseconds."""
    found: TypeAdapter[T] = _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    return found


def parse(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Convert `values` into a `kind` (a pydantic model or dataclass).

    Args:
        where: name of the source, for errors.

    Raises:
        ConfigError: names the place of the first problem and, for an unknown key, the nearest valid one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: write a table of keys and values (got {shown(values)})")
    try:
        check_plain(values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        return adapter_of(kind).validate_python(dict(values))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt key is missing too; the misspelling is the problem to report.
        problem = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
        path = [str(part) for part in problem["loc"]]
        place = ".".join(map(as_word, path))
        if problem["type"] in _UNKNOWN:
            known = _fields(kind, path[:-1])
            raise ConfigError(
                f"{where}: unknown key '{place}'; {why_removed(place) or nearest(path[-1], known)}"
            ) from None
        raise ConfigError(
            f"{where}: {place or 'value'}: {in_words(problem)} (got {shown(problem['input'])})"
        ) from None


REMOVED: dict[str, Any] = {
    "dominance": 0.9,
    "labels_from": "apache",
    "margin.deferred": True,
    "federated_features.head_batch": 32,
    "retrain.momentum": 0.9,
    "retrain.weight_decay": 5e-4,
    "views.tone_chance": 0.8,
    "views.gray_chance": 0.2,
    "views.blur": [0.1, 2.0],
    "views.blur_chance": 0.5,
}
"""Settings of earlier versions by the end of their dotted names, with the value that always holds now."""


def _removed(key: str) -> str | None:
    """Return the entry of `REMOVED` that a setting's dotted name ends with."""
    return next((end for end in REMOVED if f".{key}".endswith(f".{end}")), None)


def lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run of an earlier version, but for removed ones with the value that holds."""
    ends = {key: _removed(key) for key in settings}
    return {k: v for k, v in settings.items() if (end := ends[k]) is None or REMOVED[end] != v}


def why_removed(key: str) -> str:
    """Return what to do about a setting that was removed; empty for any other."""
    if not (end := _removed(key)):
        return ""
    more = "; write start=1 in place of false" if end == "margin.deferred" else ""
    return f"it was removed, and {shown(REMOVED[end])} always holds: remove it{more}"


_OURS = {
    "Value error, ": "",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid dictionary": "a table",
    "a valid list": "a list",
    "a valid tuple": "a list",
}


def in_words(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says of a value, in the words of a person: ``must be at least 2``."""
    text, *_ = re.split(", (?:unable to|got a number)", problem["msg"])
    for theirs, ours in _OURS.items():
        text = text.replace(theirs, ours, 1)
    return text


def _fields(kind: Any, path: list[str]) -> list[str]:
    """Return the valid keys at a place inside a nested type; none where they cannot be determined."""
    for part in path:
        kind = _at(bare(kind), part)
    kind = bare(kind)
    if _is_model(kind):
        return list(kind.model_fields)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _at(kind: Any, part: str) -> Any:
    """Return the type of a field, or of the entries of a table or list."""
    if _is_model(kind):
        return kind.model_fields[part].annotation
    if fields := getattr(kind, "__pydantic_fields__", None):
        return fields[part].annotation
    inner = [one for one in get_args(kind) if one is not Ellipsis]
    return inner[-1] if inner else None


def bare(kind: Any) -> Any:
    """Return a type without its constraints, and without None where it is optional."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        first, *others = (one for one in get_args(kind) if one is not NoneType)
        if others and get_origin(kind) is not Annotated:
            return None  # one of several
        kind = first
    return kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def attribute_texts(kind: Any) -> dict[str, str]:
    """Return the entries of `Attributes:` in a docstring; "mean, std: ..." counts for both."""
    _, found, rest = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    block = re.split(r"\n(?=\S)", rest)[0] if found else ""
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", block):
        names, colon, text = entry.partition(": ")
        if colon and re.fullmatch(r"[\w, ]+", names.strip()):
            plain = " ".join(text.split()).replace("``", "`")
            texts |= dict.fromkeys(re.split(r",\s*", names.strip()), plain)
    return texts
