"""What a JSON file holds, compared with the types that a dataclass states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Built = TypeVar("Built")


def build(kind: type[Built], fields: Any) -> Built:
    """The dataclass of these fields; ValueError names the first that is unknown, missing or of another type."""
    required = {x.name for x in dataclasses.fields(kind) if x.default is x.default_factory is dataclasses.MISSING}  # type: ignore[arg-type]
    check(fields, get_type_hints(kind), required)
    return kind(**fields)


def check(fields: Any, types: Mapping[str, Any], required: set[str], *, others: bool = False) -> None:
    """ValueError where a field is missing or of another type, or, unless `others` are allowed, unknown."""
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {fields!r:.80}")
    for name in sorted(required):
        if name not in fields:
            raise ValueError(f"{name} is missing")
    for name, value in fields.items():
        if name not in types and not others:
            raise ValueError(f"unknown field {name!r:.80}")
        if name in types and not is_of(value, types[name]):
            raise ValueError(f"{name} must be {getattr(types[name], '__name__', types[name])}, got {value!r:.80}")


def is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type: integers are floats too, truth values are neither, and all fit 64 bits."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_of(value, each) for each in arguments)
    if origin in (list, tuple):
        return isinstance(value, list) and all(is_of(x, arguments[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(x, arguments[1]) for x in value.values())
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)
