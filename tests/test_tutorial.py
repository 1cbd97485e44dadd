"""The tutorial, block by block, and the pictures of the guides."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python)?\n(.*?)```", (DOCS / "tutorial.md").read_text(), flags=re.DOTALL)
    *code, (language, command) = blocks
    assert [language for language, _ in code] == ["python"] * 7
    assert (language, command.split()[0]) == ("", "headmax")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # as a reader runs it
    for arguments in (["-c", "\n".join(text for _, text in code)], ["-m", *shlex.split(command)]):
        subprocess.run([sys.executable, *arguments], check=True, cwd=tmp_path, env=environment)
    assert '"tokens":["ann"," has"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_of_the_guides_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
