"""`python -m lab`: as documented as the package's own commands."""

import inspect
import re
import subprocess
import sys

import pytest

from headmax.cli.run import load
from lab import ROOT
from lab.__main__ import LAB
from tests.command_line import Called


@pytest.mark.parametrize("name", LAB.commands)
def test_every_command_does_what_its_line_says(name: str, lab: Called) -> None:
    command = LAB.commands[name]
    function = load(command, [])
    documentation = inspect.getdoc(function) or ""
    assert documentation.splitlines()[0] == command.about
    assert set(re.findall(r"^    (\w+): ", documentation, flags=re.MULTILINE)) == set(inspect.signature(function).parameters)
    assert f"usage: python -m lab {name}" in lab(*name.split(), "--help").stdout


def test_help_imports_neither_torch_nor_headmax() -> None:
    code = "import runpy, sys; sys.argv = ['lab', '--help']\ntry:\n    runpy.run_module('lab', run_name='__main__')\nfinally:\n"
    code += "    print({'torch', 'headmax', 'tyro'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    assert all(f"\n{title}\n" in done.stdout for title in LAB.groups)


def test_errors_are_one_line_that_names_the_lab(lab: Called) -> None:
    for arguments, said in (
        (["reprot"], "lab: unknown command 'reprot'; did you mean 'report'?"),
        (["--completion", "bash"], "lab: unknown option '--completion'; see `python -m lab --help`"),
        (["bench", "drift", "--tokens", "1"], "lab: --tokens must be at least 32, got 1"),
        (["bench", "fit"], "lab: bench fit: missing CAPABILITY (see `python -m lab bench fit --help`)"),
        (["study", "run", "--out", "x", "--share", "2/2"], "lab: --share must be i/n with i below n, such as 0/4, got 2/2"),
        (["bench", "fit", "90", "--dtypes", "float8"], "lab: --dtypes: unknown 'float8'; did you mean 'float32'?"),
    ):
        done = lab(*arguments)
        assert (done.returncode, done.stderr) == (2, f"{said}\n")
