"""Type checks of JSON values and settings against the annotations of a dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Built = TypeVar("Built")


@dataclass(frozen=True)
class Range:
    """Bounds of a finite number, both included: `Annotated[int, Range(1, 100, "a positive integer")]`."""

    least: float
    most: float
    text: str
    """The bounds in words, for errors."""


Positive = Annotated[float, Range(math.ulp(0.0), math.inf, "a positive, finite number")]


def suggest(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the closest known one, or all of them."""
    options = list(known)
    close = difflib.get_close_matches(str(name), options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(repr, options))}"


def build(kind: type[Built], fields: Any) -> Built:
    """A dataclass from JSON fields; ValueError names the first that is unknown, missing or of the wrong type."""
    required = {x.name for x in dataclasses.fields(kind) if x.default is x.default_factory is dataclasses.MISSING}  # type: ignore[arg-type]
    check(fields, get_type_hints(kind), required)
    return kind(**fields)


def check(fields: Any, types: Mapping[str, Any], required: set[str], *, allow_unknown: bool = False) -> None:
    """ValueError names a field that is missing, of the wrong type or, unless `allow_unknown`, unknown."""
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {fields!r:.80}")
    for name in sorted(required):
        if name not in fields:
            raise ValueError(f"{name} is missing")
    for name, value in fields.items():
        if name not in types and not allow_unknown:
            raise ValueError(f"unknown field {name!r:.80}")
        if name in types and not is_of(value, types[name]):
            raise ValueError(f"{name} must be {getattr(types[name], '__name__', types[name])}, got {value!r:.80}")


def check_settings(owner: str, settings: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """ValueError, beginning with `owner`, names a setting of the wrong type."""
    for name, kind in types.items():
        value, kinds = settings[name], get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        if is_of(value, kind):
            continue
        names = [x for each in kinds if get_origin(each) is Literal for x in get_args(each) if isinstance(x, str)]
        if names and isinstance(value, str):
            raise ValueError(f"{owner}: unknown {name} {value!r:.80}{suggest(value, names)}")
        for each in kinds:
            most = each.__metadata__[0].most if get_origin(each) is Annotated else math.inf
            if isinstance(value, int | float) and value > most:
                raise ValueError(f"{owner}: {name} must be at most {most:,}, got {value:,}")
        raise ValueError(f"{owner}: {name} must be {' or '.join(map(type_name, kinds))}, got {value!r:.80}")


def type_name(kind: Any) -> str:
    """A type as an error names it."""
    if get_origin(kind) is Annotated:
        return kind.__metadata__[0].text
    if get_origin(kind) is list:
        return "a list of them"
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    return {NoneType: "None", bool: "True or False", int: "an integer", float: "a number", str: "text"}.get(kind, str(kind))


def is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type: integers count as floats, booleans do not, and integers must fit into 64 bits."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return any(value == x and type(value) is type(x) for x in arguments)
    if origin is Annotated:
        limit = kind.__metadata__[0]
        return is_of(value, arguments[0]) and math.isfinite(value) and limit.least <= value <= limit.most
    if origin in (Union, UnionType):
        return any(is_of(value, each) for each in arguments)
    if origin in (list, tuple):
        return isinstance(value, list) and all(is_of(x, arguments[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(x, arguments[1]) for x in value.values())
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)
