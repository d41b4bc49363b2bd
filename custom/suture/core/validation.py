"""Conversion of plain values into typed ones, with errors that say what to correct."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from suture.core.errors import ConfigError, LabelError, as_word, nearest, show_value
from suture.core.files import check_plain
from suture.core.labels import canonical

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


def check_with(check: Callable[[str], object]) -> AfterValidator:
    """Return a check of a name as one of pydantic's: it says what a `LabelError` says."""

    def named(name: str) -> str:
        try:
            check(name)
        except LabelError as error:
            raise ValueError(str(error)) from None
        return name

    return AfterValidator(named)


LabelName = Annotated[str, check_with(canonical)]
"""Any spelling of a label."""

JOB_PATH = "a path"
"""Marks a setting of a job that is a path; in a job's file, a relative one starts at its folder."""

NAMED_FILE = "a file by its name"
"""Marks one that is a word, a path as `JOB_PATH`, or the bare name of a file that each party of a federation
has in a folder of its own (see `named_file`); a bare name is a path where the file lies beside the job."""


def with_paths(settings: T, change: Callable[[str, str, str], str], prefix: str = "") -> T:
    """Return nested settings with other paths.

    Args:
        change: gives the new value of a setting for its dotted name, its value and its mark, `JOB_PATH` or
            `NAMED_FILE`.
        prefix: of the dotted names.
    """
    known = getattr(settings, "__pydantic_fields__", {})
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        marks = {JOB_PATH, NAMED_FILE}.intersection(known[field.name].metadata if field.name in known else ())
        if marks and isinstance(value, str):
            changes[field.name] = change(f"{prefix}{field.name}", value, marks.pop())
        elif dataclasses.is_dataclass(value):
            changes[field.name] = with_paths(value, change, f"{prefix}{field.name}.")
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


_POSITIONAL = "unexpected_positional_argument"
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", _POSITIONAL)
_BRANCHES = {"bool", "int", "float", "str"}


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


def changed(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from its defaults, as values for `parse`."""
    values: dict[str, Any] = adapter_of(type(settings)).dump_python(
        settings, exclude_defaults=True, mode="json"
    )
    return values


def parse(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Convert `values` into a `kind` (a pydantic model or dataclass).

    Args:
        where: name of the source, for errors.

    Raises:
        ConfigError: names the place of the first problem and, for an unknown key, the nearest valid one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: write a table of keys and values (got {show_value(values)})")
    try:
        check_plain(values)
        return with_numbers(adapter_of(kind).validate_python(dict(values)), values)
    except ValidationError as error:
        raise refusal(error, where, kind) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def with_numbers(found: T, values: object) -> T:
    """Return what pydantic has made of plain values, unless it took true or false for a number: 1 or 0.

    Raises:
        ValidationError: it did; names the places.
    """
    places, faults = list[tuple[Any, Any, Any]]([((), found, values)]), list[InitErrorDetails]()
    for place, made, value in places:
        if isinstance(value, Mapping):
            own = made if isinstance(made, Mapping) else getattr(made, "__dict__", {})
            places += [((*place, key), own.get(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)) and isinstance(made, (list, tuple)):
            places += [((*place, i), *pair) for i, pair in enumerate(zip(made, value, strict=False))]
        elif isinstance(value, bool) and type(made) in (int, float):
            faults.append({"type": f"{type(made).__name__}_type", "loc": place, "input": value})
    if faults:
        raise ValidationError.from_exception_data(type(found).__name__, faults)
    return found


def refusal(error: ValidationError, where: str, kind: Any = None) -> ConfigError:
    """Return what to correct of values that pydantic refused: the first problem.

    Args:
        where: name of the source.
        kind: the type that they should be, for the nearest valid key.
    """
    problems = error.errors(include_url=False)
    # A misspelt key is missing too; the misspelling is the problem to report.
    problem = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
    path = [str(part) for part in problem["loc"]]
    said = in_words(problem)
    if path and path[-1] in _BRANCHES:  # of a value that may be of several types: its type is no key
        *path, _ = path
        alike = [p for p in problems if p["loc"][:-1] == problem["loc"][:-1]]
        said = " or ".join([said, *(in_words(p).removeprefix("must be ") for p in alike[1:])])
    place = ".".join(map(as_word, path))
    if problem["type"] == _POSITIONAL:
        return ConfigError(
            f"{where}: {error.title} takes its settings by name: write {error.title}(name=..., ...) in place "
            f"of {error.title}({show_value(problem['input'])}, ...)"
        )
    if problem["type"] in _UNKNOWN:
        hint = nearest(path[-1], _fields(kind, path[:-1])) if kind else "correct it"
        return ConfigError(f"{where}: unknown key '{place}'; {hint}")
    if problem["type"] == "missing":  # what it is missing from may be the whole file
        return ConfigError(f"{where}: {place} is missing; write it")
    if not re.search(rf"[ .]{re.escape(place)}$", where):  # it names the place as --set model.train does
        where = f"{where}: {place or 'value'}"
    return ConfigError(f"{where}: {said} (got {show_value(problem['input'])})")


_OURS = {
    "Value error, ": "",
    "Field required": "is missing",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid dictionary": "a table",
    "a dictionary": "a table",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "Tuple should have at least 1 item after validation, not 0": "name at least one",
}


def in_words(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says of a value, in the words of a person: ``must be at least 2``."""
    text, *_ = re.split(", (?:unable to|got a number)| or (?:an )?instance of", problem["msg"])
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
