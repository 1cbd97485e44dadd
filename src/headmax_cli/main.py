"""Runs the command that the arguments name, and turns its errors into an exit code and a line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from headmax_cli.commands import HEADMAX, Command, Program


def main(arguments: Sequence[str] | None = None, program: Program = HEADMAX) -> NoReturn:
    """Runs `program` and exits: 0 on success, 2 on bad input, 130 if interrupted, 1 on an internal error."""
    given, status = list(sys.argv[1:] if arguments is None else arguments), 0
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - closed by `<&-`; in their order, to have their numbers
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        status = run(given, program)
        sys.stdout.flush()
    except BrokenPipeError:  # such as by `| head`
        _discard_output()
        status = 141
    except OSError as error:  # `> file` on a full disk
        _discard_output()
        if status == 0:
            print(f"{program.short}: standard output cannot be written to: {error.strerror}", file=sys.stderr)
        status = status or 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _discard_output() -> None:
    """What is still to be written, which Python would try once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: list[str], program: Program) -> int:
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    first = arguments[0] if arguments else "--help"
    if first == "help" and len(arguments) > 1:
        return run([*arguments[1:], "--help"], program)
    if first in ("-h", "--help", "help"):
        print(overview(program))
    elif first == "--version":
        from importlib.metadata import version

        print(f"headmax {version('headmax')}")
    elif first == "--completion" and program is HEADMAX:
        from headmax.cli.run import completion

        return completion(*arguments[1:2])
    else:
        command, rest = find(arguments, program)
        if command is None:
            return help_family(first, rest, program)
        return execute(command, rest, program, debug)
    return 0


def find(arguments: list[str], program: Program) -> tuple[Command | None, list[str]]:
    """The command that the first one or two words name, and the arguments after them."""
    for count in (2, 1):
        if (name := " ".join(arguments[:count])) in program.commands and len(arguments) >= count:
            return program.commands[name], arguments[count:]
    return None, arguments[1:]


def help_family(first: str, rest: list[str], program: Program) -> int:
    """Prints the help of a family such as `bench`, or an error about an unknown command."""
    families, name = program.families, program.name
    if first in families and rest[:1] in ([], ["-h"], ["--help"]):
        lines = "\n".join(f"  {command.name:18} {command.about}" for command in program.members(first))
        print(f"usage: {name} {first} COMMAND [OPTIONS]\n\n{families[first]}\n\n{lines}")
        return 0
    if first.startswith("-"):
        print(f"{program.short}: unknown option {first!r}; see `{name} --help`", file=sys.stderr)
        return 2
    import difflib

    unknown = f"{first} {rest[0]}" if first in families else first
    known = [*program.commands, *families]
    close = difflib.get_close_matches(unknown, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"see `{name} --help`"
    print(f"{program.short}: unknown command {unknown!r}; {hint}", file=sys.stderr)
    return 2


def execute(command: Command, arguments: list[str], program: Program, debug: bool) -> int:
    """Calls the command's function and returns the exit code; an error becomes one line on standard error."""
    show_loading = sys.stderr.isatty() and "--help" not in arguments
    if show_loading:
        print(f"{program.short}: loading ...", end="\r", file=sys.stderr, flush=True)  # importing torch and transformers takes seconds
    from headmax.cli.run import explain, read_call

    if show_loading:
        print("\033[K", end="", file=sys.stderr, flush=True)
    try:
        function = read_call(command, arguments, program)
        function()
    except SystemExit as end:  # from --help, or a command that has printed its error
        return end.code if isinstance(end.code, int) else 0
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        status, line = explain(error)
        print(f"{program.short}: {printable(line)}", file=sys.stderr)
        return status
    return 0


def printable(line: str) -> str:
    """Escapes line ends and control characters, which file names and contents may have."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


def overview(program: Program) -> str:
    """The output of `--help`: commands and families, in groups."""
    lines = [f"usage: {program.name} COMMAND [OPTIONS]", "", program.about]
    for title, commands in program.groups.items():
        lines += ["", title]
        shown: dict[str, str] = {}
        for command in commands:
            family = command.name.split()[0]
            shown.setdefault(family, program.families.get(family, command.about))
        lines += [f"  {name:12} {about}" for name, about in shown.items()]
    lines += ["", "Options", *(f"  {option:20} {about}" for option, about in program.options.items())]
    lines += ["", f"Run `{program.name} COMMAND --help` for the options of a command."]
    return "\n".join(lines)
