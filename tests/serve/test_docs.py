"""The examples of docs/serving.md against a server."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from headmax.cli.run import load, parse
from headmax.serve.scheduler import Scheduler
from headmax_cli.commands import COMMANDS

from .calling import ROOT, openai_client, serving

TEXT = (ROOT / "docs/serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def options(words: list[str]) -> dict[str, Any]:
    """What `headmax serve` takes of a command line."""
    assert words[:2] == ["headmax", "serve"]
    return parse(load(COMMANDS["serve"], []), "serve", words[2:])


def test_the_container_starts_a_server_that_there_is() -> None:
    """Nothing is built: that needs a network."""
    docker = (ROOT / "docker/Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", docker, flags=re.MULTILINE)[0])
    assert options([*entry, "/models/tiny"])["host"] == "0.0.0.0"
    for line in re.findall(r"^COPY (.*) \S+$", docker, flags=re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    (service,) = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values()
    given = options([*entry, *service["command"]])
    assert str(given["prefix_folder"]) == "/states"
    assert int(service["stop_grace_period"].removesuffix("s")) > given["drain"]
    assert service["ports"][0].startswith("127.0.0.1:")


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (bash,) = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    (python,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert python.count(ADDRESS) == 1
    with serving() as server:
        monkeypatch.setattr("openai.OpenAI", lambda base_url, api_key: openai_client(base_url.removesuffix("/v1"), api_key))
        scope: dict = {}
        exec(python.replace(ADDRESS, server.url), scope)
        scope["client"].close()
        assert len(scope["tokens"]) == 10
        if shutil.which("curl") is None:
            pytest.skip("no curl")
        command = bash.replace(ADDRESS, server.url).replace("curl ", "curl --noproxy '*' ")
        done = subprocess.run(["bash", "-e", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    whole, *events, health = [line for line in done.stdout.replace("}data:", "}\ndata:").splitlines() if line]
    assert json.loads(whole)["usage"]["completion_tokens"] == 20
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(health) == {"status": "ok"}


def test_the_files_that_a_request_passes_are_there() -> None:
    section = TEXT.partition("## Where to read the code")[2].partition("\n## ")[0]
    for name in re.findall(r"`(\w+\.py)`", section):
        assert (ROOT / "src/headmax/serve" / name).exists(), name
    for name in re.findall(r"`headmax\.([\w.]+)`", section):
        path = ROOT / "src/headmax" / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    assert hasattr(Scheduler, "_turn")
