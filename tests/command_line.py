"""`headmax` in this process, and the help of every command. `python -m tests.command_line` prints it."""

import contextlib
import io
import os
import subprocess
from collections.abc import Callable
from unittest import mock

from headmax_cli import main
from headmax_cli.commands import COMMANDS, HEADMAX, Program

Called = Callable[..., subprocess.CompletedProcess]


def run(*arguments: object, program: Program = HEADMAX) -> subprocess.CompletedProcess:
    """`headmax`, or another program, in this process, which has imported everything."""
    words = [str(argument) for argument in arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words, program)
        except SystemExit as end:
            code = int(str(end.code or 0))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def help_texts() -> str:
    """`headmax --help`, and `--help` of every command, in lines of 110 characters."""
    with mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}):
        texts = [run(*name.split(), "--help").stdout for name in ("", *COMMANDS)]
    return f"\n{'=' * 110}\n".join(text.rstrip() for text in texts) + "\n"


if __name__ == "__main__":
    print(help_texts(), end="")
