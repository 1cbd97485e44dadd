"""The README tells the truth: its code runs, its commands exist, its figures are the records', its tree is the tree."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headmax.cli.run import load, parse
from headmax_cli.commands import HEADMAX
from headmax_cli.main import find
from lab.__main__ import LAB
from lab.cli.pages import PAGES
from lab.pages import readme
from tests.models.released import build

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_its_code_runs() -> None:
    scope: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, scope)
    assert scope["y"].shape == (2, 64, 128)
    assert scope["read"].shape == (1, 64, 4)
    assert scope["output"].loss.isfinite()


ASK = """
import json, sys, time, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}"
for _ in range(600):
    try:
        urllib.request.urlopen(url + "/health")
        break
    except OSError:
        time.sleep(0.5)
body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
print("served", json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"], "tokens")
print("page", "<html" in urllib.request.urlopen(url).read().decode())
"""


def served(line: str) -> list[str]:
    """The line that starts a server, on a port that is free, with a caller; the server has to end well."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = shlex.join(shlex.split(line, comments=True))
    start = [f"{command} --port {port} & server=$!", "trap 'kill $server' EXIT"]
    return [*start, f"python -c {shlex.quote(ASK)} {port}", "kill $server", "trap - EXIT", "wait $server"]


@pytest.mark.timeout(1800)
def test_a_newcomer_gets_from_the_clone_to_a_server(tmp_path: Path) -> None:
    """Both shell blocks, line by line, in a clone with an environment of its own; the text is the project's documentation.

    The packages come from where the tests run, so that nothing is downloaded. `make demo` and `make test` have tests of their own.
    """
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git repository to clone")
    for package in ("lm_eval", "matplotlib", "mistral_common", "pyarrow", "setuptools", "starlette", "uvicorn"):
        pytest.importorskip(package)
    install, commands = re.findall(r"```\n((?:git clone|headmax data).*?)```", TEXT, flags=re.DOTALL)
    assert all(line in install for line in ("make demo ", "make test "))
    for page in (ROOT / "docs").glob("*.md"):
        folder = tmp_path / "corpus" / ("valid" if page.stem in ("ecosystem", "serving") else "train")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{page.stem}.txt").write_text(page.read_text())
    install = install.replace("<repository-url>", shlex.quote(str(ROOT)))
    lines = [line for line in install.splitlines() if not line.startswith("make ")]
    assert lines[0].startswith("git clone ")
    lines.insert(1, f"cp -r {shlex.quote(str(ROOT / 'src'))} {shlex.quote(str(ROOT / 'pyproject.toml'))} .")  # what is not committed yet
    *commands, serve = commands.splitlines()
    assert serve.startswith("headmax serve tiny ")
    lines += [f"cd {shlex.quote(str(tmp_path))}", *commands, *served(serve)]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: no isolation
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "step 20  validation loss" in done.stdout
    assert "mqar_4" in done.stdout
    assert "served 5 tokens\npage True\n" in done.stdout
    written = ("report.html", "curves/tiny.png", "tiny/model.safetensors", "runs/tiny/summary.json", "eval/records.jsonl")
    for name in ("headmax/venv/bin/headmax", *written):
        assert (tmp_path / name).stat().st_size > 0


def test_its_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert target in targets


def test_its_figures_are_those_of_the_records() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES]
    assert [readme.render(text) for text in texts] == texts
    assert "".join(texts).count("<!-- generated: ") == len(readme.SECTIONS)
    assert len(re.findall(r"\dx \|", readme.kernels())) == 1, "only the peer's own op is compared with it"


def test_the_tree_of_contributing_is_the_tree() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("```")[1]
    for name in re.findall(r"^  (?:  )?([a-z_]+(?:\.py|/))", tree, flags=re.MULTILINE):
        assert any(list((ROOT / folder).rglob(name.rstrip("/"))) for folder in ("src/headmax", "lab")), name
    for path in [*(ROOT / "src/headmax").iterdir(), *(ROOT / "lab").iterdir()]:
        if path.name != "__pycache__" and (path.is_dir() or path.suffix == ".py"):
            assert path.name in tree or path.name in ("__init__.py", "__main__.py"), f"{path.name} is not in the tree"


def commands_in(text: str) -> list[tuple[str, str]]:
    """The lines of code blocks that call headmax or the lab, but those that stand for several or feed another program."""
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(?:torchrun .* -m )?(headmax|python -m lab) (.*)", blocks, flags=re.MULTILINE)
    return [(program, line) for program, line in lines if not re.search(r"\.\.\.|\|", line)]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem)
def test_its_command_lines_are_understood(path: Path) -> None:
    for name, line in commands_in(path.read_text()):
        program = {"headmax": HEADMAX}.get(name, LAB)
        command, options = find(shlex.split(line, comments=True), program)
        assert command is not None, line
        parse(load(command, options), command.name, options, program)


def test_command_lines_are_found() -> None:
    assert len(commands_in(TEXT)) >= 7
    assert len(TEXT.splitlines()) <= 150


def run_guide(name: str) -> dict:
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL):
        exec(block, scope)
    return scope


def test_the_code_of_the_guides_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"adapted", "packing", "log_decay"} <= set(run_guide("ecosystem.md"))
    assert [len(answer.tokens) for answer in run_guide("generation.md")["answers"]] == [5, 5, 5]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: build("qwen3_5_text"))
    assert {"logits", "merged"} <= set(run_guide("released-models.md"))
    assert run_guide("parallel.md")["state"].shape == (1, 4, 16, 16)
    torch.distributed.destroy_process_group()
    assert run_guide("choosing-gates.md")["after_norm"].read_position == "after_norm"
