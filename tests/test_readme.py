"""The README tells the truth: its code runs, its commands exist, its figures are the records', its tree is the tree."""

import glob
import re
import shlex
from pathlib import Path

import pytest

from headmax.cli.reproduce import PAGES
from headmax.cli.run import load, parse
from headmax.reproduce import readme
from headmax_cli.main import find
from tests.command_line import Called

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_its_code_runs() -> None:
    scope: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, scope)
    assert scope["y"].shape == (2, 64, 128)
    assert scope["read"].shape == (1, 64, 4)
    assert scope["output"].loss.isfinite()


def test_its_command_lines_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Called) -> None:
    """From text files to a model that speaks, as the README has it; the text is the project's own documentation."""
    (tmp_path / "corpus").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (tmp_path / "corpus" / f"{page.stem}.txt").write_text(page.read_text())
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```\n(headmax data prepare.*?)```", TEXT, flags=re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    said = {}
    for words in lines:
        arguments = [file for word in words for file in (sorted(glob.glob(word)) if "*" in word else [word])]
        done = called(*arguments)
        assert done.returncode == 0, (words, done.stderr)
        said[words[0]] = done.stdout
    assert [words[0] for words in lines] == ["data", "train", "generate", "inspect", "curves", "convert", "eval"]
    assert said["generate"].strip()
    assert "mqar_4" in said["eval"]
    for name in ("report.html", "curves/tiny.png", "tiny/model.safetensors", "runs/tiny/summary.json", "eval/records.jsonl"):
        assert (tmp_path / name).stat().st_size > 0


def test_its_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert target in targets


def test_its_figures_are_those_of_the_records() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES]
    assert [readme.render(text) for text in texts] == texts
    assert "".join(texts).count("<!-- generated: ") == len(readme.SECTIONS)
    assert readme.kernels().count("x as fast") == 1, "only the peer's own op is compared with it"


def test_the_tree_of_contributing_is_the_tree() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("```")[1]
    for name in re.findall(r"^  (?:  )?([a-z_]+(?:\.py|/))", tree, flags=re.MULTILINE):
        assert list((ROOT / "src/headmax").rglob(name.rstrip("/"))), name
    for path in (ROOT / "src/headmax").iterdir():
        if path.name != "__pycache__" and (path.is_dir() or path.suffix == ".py"):
            assert path.name in tree or path.name in ("__init__.py", "__main__.py"), f"{path.name} is not in the tree"


def commands_in(text: str) -> list[str]:
    """The lines of code blocks that call headmax, but those that stand for several or feed another program."""
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    return [
        line for line in re.findall(r"^(?:torchrun .* -m )?headmax (.*)", blocks, flags=re.MULTILINE) if not re.search(r"\.\.\.|\|", line)
    ]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem)
def test_its_command_lines_are_understood(path: Path) -> None:
    for line in commands_in(path.read_text()):
        command, options = find(shlex.split(line, comments=True))
        assert command is not None, line
        parse(load(command, options), command.name, options)


def test_command_lines_are_found() -> None:
    assert len(commands_in(TEXT)) >= 7


def run_guide(name: str) -> dict:
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL):
        exec(block, scope)
    return scope


def test_the_code_of_the_guides_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"adapted", "packing", "log_decay"} <= set(run_guide("ecosystem.md"))
    assert [len(answer.tokens) for answer in run_guide("generation.md")["answers"]] == [5, 5, 5]
    assert run_guide("choosing-gates.md")["after_norm"].read_position == "after_norm"
