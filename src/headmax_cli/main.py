"""From the arguments to a command, and from what it raises to an exit code and one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from headmax_cli.commands import COMMANDS, FAMILIES, GROUPS, Command, members

USAGE = "usage: headmax COMMAND [OPTIONS]"
GENERAL = {
    "-h, --help": "print this text; after a command, its options",
    "--version": "print the version",
    "--completion SHELL": 'print completions for bash, zsh or fish: eval "$(headmax --completion bash)"',
    "--config FILE": "after a command: read its options from a YAML file; options on the command line win",
    "--dump-config": "after a command: print its options as such a YAML file and exit",
    "--debug": "show the traceback of an error",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `headmax` and exits: 0, 2 on bad input, 130 when interrupted, 1 on an error of headmax's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    first = arguments[0] if arguments else "--help"
    if first == "help" and len(arguments) > 1:
        return run([*arguments[1:], "--help"])
    if first in ("-h", "--help", "help"):
        print(overview())
    elif first == "--version":
        from importlib.metadata import version

        print(f"headmax {version('headmax')}")
    elif first == "--completion":
        from headmax.cli.run import completion

        return completion(*arguments[1:2])
    else:
        command, rest = find(arguments)
        if command is None:
            return help_family(first, rest)
        return execute(command, rest, debug)
    return 0


def find(arguments: list[str]) -> tuple[Command | None, list[str]]:
    """The command that the first one or two words name, and the arguments after them."""
    for words in (2, 1):
        if (name := " ".join(arguments[:words])) in COMMANDS and len(arguments) >= words:
            return COMMANDS[name], arguments[words:]
    return None, arguments[1:]


def help_family(first: str, rest: list[str]) -> int:
    """Help of a family such as `bench`, or a line about a command that does not exist."""
    if first in FAMILIES and rest[:1] in ([], ["-h"], ["--help"]):
        lines = "\n".join(f"  {command.name:18} {command.about}" for command in members(first))
        print(f"usage: headmax {first} COMMAND [OPTIONS]\n\n{FAMILIES[first]}\n\n{lines}")
        return 0
    if first.startswith("-"):
        print(f"headmax: unknown option {first!r}; see `headmax --help`", file=sys.stderr)
        return 2
    import difflib

    wrong = f"{first} {rest[0]}" if first in FAMILIES else first
    known = [*COMMANDS, *FAMILIES]
    close = difflib.get_close_matches(wrong, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "see `headmax --help`"
    print(f"headmax: unknown command {wrong!r}; {hint}", file=sys.stderr)
    return 2


def execute(command: Command, arguments: list[str], debug: bool) -> int:
    """Calls the command's function and returns the exit code; an error becomes one line on standard error."""
    waiting = sys.stderr.isatty() and "--help" not in arguments
    if waiting:
        print("headmax: loading ...", end="\r", file=sys.stderr, flush=True)  # torch and transformers take seconds
    from headmax.cli.run import explain, read_call

    if waiting:
        print("\033[K", end="", file=sys.stderr, flush=True)
    try:
        function = read_call(command, arguments)
        function()
    except SystemExit as end:  # from --help, or a command that has said what is wrong
        return end.code if isinstance(end.code, int) else 0
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        status, line = explain(error)
        print(f"headmax: {line}", file=sys.stderr)
        return status
    return 0


def overview() -> str:
    """What `headmax --help` prints: families by their first word, in groups."""
    lines = [USAGE, "", "Softmax Linear Attention: a softmax over heads that makes the heads of a linear-attention layer compete."]
    for title, commands in GROUPS.items():
        lines += ["", title]
        shown: dict[str, str] = {}
        for command in commands:
            family = command.name.split()[0]
            shown.setdefault(family, FAMILIES.get(family, command.about))
        lines += [f"  {name:12} {about}" for name, about in shown.items()]
    lines += ["", "Options", *(f"  {option:20} {about}" for option, about in GENERAL.items())]
    lines += ["", "Run `headmax COMMAND --help` for the options of a command."]
    return "\n".join(lines)
