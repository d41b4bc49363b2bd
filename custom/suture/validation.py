"""Turning plain values into typed ones, with an error that a person can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from suture.errors import ConfigError, LabelError, nearest
from suture.labels import canonical

T = TypeVar("T")


class Section(BaseModel):
    """A section of a configuration: nothing unknown in it, and nothing changes it."""

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


def parse(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """`values` as a `kind` (a pydantic model or dataclass).

    Args:
        where: names the source, for errors.

    Raises:
        ConfigError: the first problem: its place, what is wrong and, for an unknown key, the nearest one.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt key also leaves its place empty; the misspelling is what to mend.
        problem = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
        path = [str(part) for part in problem["loc"]]
        place = ".".join(path)
        if problem["type"] in _UNKNOWN:
            known = _fields(kind, path[:-1])
            raise ConfigError(f"{where}: unknown key {place!r}; {nearest(path[-1], known)}") from None
        raise ConfigError(
            f"{where}: {place or 'value'}: {problem['msg']} (got {problem['input']!r})"
        ) from None


def _fields(kind: Any, path: list[str]) -> list[str]:
    """The valid keys at a place inside a nested type."""
    for part in path:
        fields = kind.model_fields if _is_model(kind) else kind.__pydantic_fields__
        kind = fields[part].annotation
    if _is_model(kind):
        return list(kind.model_fields)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
