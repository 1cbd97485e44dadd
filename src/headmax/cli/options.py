"""The kinds of options that commands share: how they are named, written and checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

COMMA_SEPARATED = "comma-separated"
"""Marks options whose values stand in one word, as in `--tasks a,b`."""


def shown_default(default: str) -> str:
    return "" if default in ("None", "", "''") else f"(default: {default})"


def metavar(name: str, *aliases: str) -> Any:
    return tyro.conf.arg(metavar=name, aliases=aliases, help_behavior_hint=shown_default)


def separated(kind: Callable[[str], Any], name: str) -> Any:
    """A list in one word: `--batches 1,8,64`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=name,
        instance_from_str=lambda given: tuple(kind(word.strip()) for word in given[0].split(",") if word.strip()),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


def count(text: str, least: int = 1) -> int:
    """A number of tokens: 500000, 15e9, 0.5M or 15B."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        raise ValueError(f"must be a number such as 500000, 15e9, 0.5M or 15B, got {text!r}") from None
    if not least <= number < 1e18:
        raise ValueError(f"must be between {least} and 1e18, got {text}")
    return round(number)


def counted(least: int) -> Any:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=lambda given: count(given[0], least),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


COUNT, COUNT_OR_ZERO = counted(1), counted(0)
UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)} | {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}


def size(text: str) -> int:
    """An amount of memory: 500MB, 2GiB, 0."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?i?B?)", text.strip())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"must be an amount of memory such as 500MB or 2GiB, got {text!r}")
    return round(float(found[1]) * UNITS[found[2]])


def shown_size(amount: int) -> str:
    """As `size` reads it, in the largest unit that it is a multiple of."""
    units = [unit for unit, scale in UNITS.items() if unit.endswith("iB") and amount and amount % scale == 0]
    return f"{amount // UNITS[units[-1]]}{units[-1]}" if units else str(amount)


SIZE = PrimitiveConstructorSpec(
    nargs=1,
    metavar="SIZE",
    instance_from_str=lambda given: size(given[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [shown_size(value)],
)


def utf8(text: str) -> str:
    """A text given as bytes that are not UTF-8 reaches Python with half surrogate pairs in their place."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be UTF-8, got byte 0x{ord(text[error.start]) & 0xFF:02x} at character {error.start}") from None
    return text


TEXT = PrimitiveConstructorSpec(
    nargs=1,
    metavar="TEXT",
    instance_from_str=lambda given: utf8(given[0]),
    is_instance=lambda value: value is None or isinstance(value, str),
    str_from_instance=lambda value: [value],
)

Recipe = Annotated[str, metavar("RECIPE")]
Checkpoint = Annotated[str, metavar("CHECKPOINT")]
OptionalCheckpoint = Annotated[str | None, metavar("CHECKPOINT")]
Device = Annotated[str, metavar("{auto,cpu,cuda}")]
Text = Annotated[str | None, TEXT, metavar("TEXT")]
Name = Annotated[str | None, TEXT, metavar("NAME")]
Key = Annotated[str | None, TEXT, metavar("KEY")]
File = Annotated[Path | None, metavar("FILE")]
Folder = Annotated[Path | None, metavar("FOLDER")]
OutFile = Annotated[Path, metavar("FILE")]
OutFolder = Annotated[Path, metavar("FOLDER")]
Number = Annotated[int | None, metavar("INT")]
Seconds = Annotated[float, metavar("SECONDS")]
OptionalSeconds = Annotated[float | None, metavar("SECONDS")]
Count = Annotated[int, COUNT, metavar("TOKENS")]
OptionalCount = Annotated[int | None, COUNT, metavar("TOKENS")]
Size = Annotated[int, SIZE, metavar("SIZE")]
Words = Annotated[tuple[str, ...], separated(str, "A,B"), metavar("A,B"), COMMA_SEPARATED]
Numbers = Annotated[tuple[int, ...], separated(int, "N,N"), metavar("N,N"), COMMA_SEPARATED]


def find_device(name: str, needed_by: str = "") -> str:
    """The device that "auto" stands for, or the one named; ValueError where this machine has no such device."""
    from headmax.train.parallel import find_device

    return str(find_device(name, f"{needed_by} needs a CUDA GPU" if needed_by else ""))


def at_least(least: int, **numbers: float | tuple[int, ...] | None) -> None:
    """ValueError names the first option that is below, or beyond any machine; one that was not given is neither."""
    for name, given in numbers.items():
        several = given if isinstance(given, tuple) else () if given is None else (given,)
        if not all(least <= number < 2**40 for number in several):
            bound = "below 2^40" if any(number >= 2**40 for number in several) else f"at least {least}"
            raise ValueError(f"--{name.replace('_', '-')} must be {bound}, got {','.join(map(str, several))}")


def one_of(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """ValueError names the first word that is not known."""
    from headmax.ops.registry import suggest

    if not given:
        raise ValueError(f"--{option}: give at least one of {', '.join(known)}")
    for word in given:
        if word not in known:
            raise ValueError(f"--{option}: unknown {word!r}{suggest(word, known)}")
