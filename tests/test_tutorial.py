"""The tutorial, block by block, and the pictures of the guides."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_every_block_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    blocks = re.findall(r"```(python)?\n(.*?)```", (DOCS / "tutorial.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 8
    for language, block in blocks:
        if language:
            exec(block, scope)
        else:
            command = shlex.split(block)
            assert command[0] == "headmax"
            subprocess.run([sys.executable, "-m", *command], check=True)
    assert len(scope["found"].tokens) == 40
    assert '"tokens":["ann"," has"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_of_the_guides_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
