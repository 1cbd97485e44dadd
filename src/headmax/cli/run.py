"""What a command line asks for, its options from the words or a file, and what an error says."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tyro

from headmax.cli.config_file import dump_config, expand
from headmax_cli.commands import COMMANDS, FAMILIES, HEADMAX, Command, Program

NARROWEST = 20
"""Columns of a terminal that help is wrapped for."""
Function = Callable[..., None]
EXTRAS = {
    **dict.fromkeys(("datasets", "mistral_common", "pyarrow", "sentencepiece", "zstandard"), "train"),
    **dict.fromkeys(("lm_eval", "wonderwords"), "eval"),
    "matplotlib": "plot",
    "fla": "fla",
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "pydantic", "httpx2"), "serve"),
}
"""Packages that come with an extra of the distribution."""


def read_call(command: Command, arguments: list[str], program: Program = HEADMAX) -> Function:
    """What a command line asks for, to be called without arguments."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headmax").setLevel(logging.INFO)
    function = load(command, arguments)
    given = expand(function, [argument for argument in arguments if argument != "--dump-config"])
    values = parse(function, command.name, given, program)
    if "--dump-config" in arguments:
        return functools.partial(print, dump_config(function, values), end="")
    bound = inspect.signature(function).parameters
    first = [values[name] for name, parameter in bound.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    named = {name: value for name, value in values.items() if bound[name].kind is not bound[name].POSITIONAL_ONLY}
    return functools.partial(function, *first, **named)


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and line of an error: 2 where the caller can mend it, 1 where headmax is at fault."""
    if hasattr(error, "exit_status"):
        return error.exit_status, str(error)
    if isinstance(error, ValueError):
        return 2, str(error)
    if isinstance(error, OSError):
        return 2, f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return 2, f"this command needs {error.name}: pip install '.[{EXTRAS[error.name]}]' in a checkout of headmax"
    text = " ".join(str(error).split())
    return 1, f"internal error, {type(error).__name__}: {text}; --debug shows where. Please report it with the output of `headmax env`"


def load(command: Command, arguments: list[str]) -> Function:
    """The function of a command."""
    module, name = command.target.split(":")
    function = getattr(importlib.import_module(module), name)
    return function(arguments) if command.built else function


def parse(function: Function, name: str, arguments: list[str], program: Program = HEADMAX) -> dict[str, Any]:
    """The function's arguments by name; ValueError in one line where the command line is wrong."""
    keep = functools.wraps(function)(lambda *args, **kwargs: (args, kwargs))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), wide_enough():
            args, kwargs = tyro.cli(keep, prog=f"{program.name} {name}", args=arguments, config=(tyro.conf.DisallowNone,))
    except SystemExit as end:
        if end.code:
            raise ValueError(f"{name}: {one_line(said.getvalue())} (see `{program.name} {name} --help`)") from None
        raise
    return dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs


@contextlib.contextmanager
def wide_enough() -> Iterator[None]:
    """tyro 1.0 wraps its help for ever where lines have less than six columns."""
    given = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        os.environ |= {} if given is None else {"COLUMNS": given}


def one_line(box: str) -> str:
    """What tyro says in a box, without the box, its title and its pointer to the help."""
    lines = [line.strip(" │╭╮╰╯") for line in box.splitlines()[1:]]  # without UTF-8 only the rules are drawn, as hyphens
    parts = [" ".join(part.split()) for part in re.split(r"^[─-]{3,}$", "\n".join(lines), flags=re.MULTILINE)]
    message = next(filter(None, parts))
    message = re.sub(
        r"^Error parsing (\S+): no type matching (\S+) could be instantiated from \['(.*?)'\]\..*", r"\1 must be \2, got '\3'", message
    )
    message = re.sub(r"^Error parsing (\S+): invalid literal for int\(\) with base 10: ", r"\1 must be INT, got ", message)
    message = re.sub(r"^Error parsing (\S+): could not convert string to float: ", r"\1 must be FLOAT, got ", message)
    message = re.sub(r"^Missing value for argument '(-\S+)'.*", r"\1 needs a value", message)
    message = re.sub(r"^Missing from [\w .-]+: (\S+( [A-Z]+)?).*", r"missing \1", message)
    message = re.sub(r"^Missing value for argument '(\w+)'.*", lambda found: f"missing {found[1].upper()}", message)
    message = message.removeprefix("Error parsing ").rstrip(".")
    if not message.startswith("Unrecognized options: "):
        return message
    words = message.removeprefix("Unrecognized options: ").split(", ")
    unknown = next((word.partition("=")[0] for word in words if word.startswith("-")), words[0])
    kind = "option" if unknown.startswith("-") else "argument"
    listed = re.findall(r"^(--[\w.-]+)", "\n".join(lines).partition("Perhaps you meant:")[2], flags=re.MULTILINE)
    similar = difflib.get_close_matches(unknown, listed, n=1, cutoff=0)
    return f"unknown {kind} {unknown}; did you mean {similar[0]}?" if similar else f"unknown {kind} {unknown}"


def completion(shell: str = "") -> int:
    """Prints a completion script for all commands."""
    shells = ("bash", "zsh", "fish")
    if shell not in shells:
        print(f"headmax: --completion needs a shell: {', '.join(shells)}", file=sys.stderr)
        return 2
    whole = tyro.extras.SubcommandApp()
    families = {family: tyro.extras.SubcommandApp() for family in FAMILIES if family not in COMMANDS}
    for command in COMMANDS.values():
        family, _, member = command.name.partition(" ")
        if family in families:
            families[family].command(name=member)(load(command, []))
        elif not member:
            whole.command(name=family)(load(command, []))
    for family, app in families.items():
        whole.command(app, name=family, help=FAMILIES[family])
    whole.cli(prog="headmax", args=["--tyro-print-completion", shell])
    return 0
