"""Options in a YAML file: `--config FILE` reads them, `--dump-config` prints them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
import yaml

from headmax import durable
from headmax.cli.options import COMMA_SEPARATED

Function = Callable[..., None]


class Plain(yaml.SafeLoader):
    """Each option once, and numbers as they are written: YAML 1.1 takes 010 for 8 and 1:30 for 90. No aliases: they can multiply."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{self.peek_event().anchor} is not read: write its value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{twice} is there twice")
        return super().construct_mapping(node, deep)


def config_file(arguments: list[str]) -> Path | None:
    """The file that `--config` names."""
    if "--config" not in arguments:
        return None
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ValueError("--config needs a YAML file")
    return Path(arguments[at + 1])


def expand(function: Function, arguments: list[str]) -> list[str]:
    """The arguments with those of `--config FILE` before them, so that the command line wins."""
    if (path := config_file(arguments)) is None:
        return arguments
    at = arguments.index("--config")
    options, rest = read_config(path), arguments[:at] + arguments[at + 2 :]
    positional = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    first = [word for name in positional for word in words(options.pop(name, None))]
    if rest and not rest[0].startswith("-"):
        first = []
    return [*first, *(flag for name, value in options.items() for flag in flags(function, name, value)), *rest]


def read_config(path: Path) -> dict[str, Any]:
    """A YAML mapping, nested ones flattened: {"optim": {"lr": 1}} is {"optim.lr": 1}."""
    try:
        content = yaml.load(durable.read_text(path), Plain)
        if not isinstance(content, dict):
            raise ValueError(f"--config {path}: must be a mapping of options to values, got {type(content).__name__}")
        return dict(flatten(content))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"--config {path}: nested too deep") from error


def flatten(mapping: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def words(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def flags(function: Function, name: str, value: Any) -> list[str]:
    """An option of a file as it would stand on the command line."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        group, dot, last = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{group}{dot}no-{last}"]
    if not isinstance(value, list):
        return [f"--{flag}", str(value)]
    marks = metadata(function, name)
    if COMMA_SEPARATED in marks:
        return [f"--{flag}", ",".join(map(str, value))]
    if tyro.conf.UseAppendAction in marks:
        return [word for item in value for word in (f"--{flag}", str(item))]
    return [f"--{flag}", *map(str, value)]


def metadata(function: Function, name: str) -> tuple[Any, ...]:
    """What Annotated says of a parameter."""
    hint = get_type_hints(function, include_extras=True).get(name)
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def dump_config(function: Function, values: dict[str, Any]) -> str:
    """The options as a file that `--config` reads."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            content = {key: item for key, item in simple(dataclasses.asdict(value)).items() if item is not None}
            unnamed = any(getattr(mark, "name", None) == "" for mark in metadata(function, name))
            plain |= content if unnamed else {name: content}
        elif value is not None:
            plain[name] = simple(value)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def simple(value: Any) -> Any:
    """Of what YAML knows: paths as text, tuples as lists, no None inside mappings."""
    if isinstance(value, dict):
        return {key: simple(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple | list):
        return [simple(item) for item in value]
    return str(value) if isinstance(value, Path) else value
