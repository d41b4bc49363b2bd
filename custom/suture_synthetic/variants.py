"""The hyperparameters of a method by dotted name, and the method with other values of one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from suture.core.errors import SutureError
from suture.execution.job import leaves, with_setting
from suture.methods.base import Method
from suture.models import ModelSpec


def names(method: Method) -> list[str]:
    """The hyperparameters by dotted name."""
    return list(leaves(method))


def within(name: str, groups: Collection[str]) -> bool:
    """Whether a hyperparameter is one of `groups`, or in one of them."""
    return any(f"{name}.".startswith(f"{group}.") for group in groups)


def numbers(method: Method) -> Iterator[tuple[str, float]]:
    """The hyperparameters that are floating-point numbers, and their values."""
    for name in names(method):
        value = attrgetter(name)(method)
        if isinstance(value, float):
            yield name, value


def alternatives(
    method: Method, name: str, model: ModelSpec, variants: Mapping[str, Any]
) -> Iterator[Method]:
    """The method with other values of one hyperparameter, as far as they are valid and can train the model.

    Args:
        variants: by dotted name, values that cannot be guessed.
    """
    given = [variants[name]] if name in variants else _candidates(method, name)
    for value in given:
        other = with_value(method, name, value)
        if other is not None and other != method and _fits(other, model):
            yield other


def _fits(method: Method, model: ModelSpec) -> bool:
    try:
        method.adapted(model)
    except SutureError:
        return False
    return True


def _candidates(method: Method, name: str) -> Sequence[Any]:
    """Values to try instead of a hyperparameter's own, from its type and value."""
    group, _, last = name.rpartition(".")
    value, owner = attrgetter(name)(method), attrgetter(group)(method) if group else method
    hint = get_type_hints(type(owner), include_extras=False)[last]
    words = [
        word for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for word in get_args(kind)
    ]
    if words:
        return [word for word in words if word != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 1, max(value // 2, 1)]
    kinds: list[Any] = [kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)]
    if value is None and kinds:
        return [kind() for kind in kinds]
    if isinstance(value, float) or value is None:
        start = value or 1.0
        return [10 * start, start / 10, start + 0.5, 0.5, 0.0, 1.0]
    return []


def with_value(method: Method, name: str, new: Any) -> Method | None:
    """The method with one other value; None where that is not valid."""
    try:
        other: Method = with_setting(method, tuple(name.split(".")), new, name)
    except SutureError:
        return None
    return other


def change_values(value: Any, **changes: Any) -> Any:
    """A validated copy of a dataclass."""
    return dataclasses.replace(value, **changes)
