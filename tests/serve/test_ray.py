"""Ray Serve on this machine, two replicas, started by the documented command."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headmax.generate import Sampling
from tests.generate.checkpoint import make_tokenizer, save

from .calling import ROOT, SECONDS, Alone, soon

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
COMMAND = "serve run headmax.serve.ray:app"
LONG = 3000


def served(url: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/health", trust_env=False, timeout=SECONDS).status_code == 200
    return False


@dataclass
class Cluster:
    url: str
    process: subprocess.Popen

    def servers(self) -> list[int]:
        """The processes of the servers."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found = []
        for number in parents:
            above = [number]
            while above[-1] in parents and len(above) < 20:
                above.append(parents[above[-1]])
            with contextlib.suppress(OSError):
                if self.process.pid in above and b"ServeReplica:default:Model" in Path(f"/proc/{number}/cmdline").read_bytes():
                    found.append(number)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The command of docs/serving.md, which begins a cluster of its own."""
    assert f"\n{COMMAND} checkpoint=tiny replicas=2" in (ROOT / "docs/serving.md").read_text()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 8000), timeout=5):
        pytest.skip("port 8000, where Ray Serve listens, is taken")
    folder = tmp_path_factory.mktemp("ray")
    save(folder / "tiny")
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "NO_PROXY": "127.0.0.1"}
    settings = ["checkpoint=tiny", "replicas=2", "cpus=0.1", "max_batch=8", "deterministic=true", "chunk=128", "max_length=20000"]
    words = [sys.executable, "-m", "ray.serve.scripts", *COMMAND.split()[1:], *settings]
    url = "http://127.0.0.1:8000"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            assert soon(lambda: served(url) or process.poll() is not None, 240)
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            yield Cluster(url, process)
        finally:
            process.terminate()  # who runs tests may have it ignore SIGINT
            process.wait(2 * SECONDS)


def complete(url: str, prompt: str | list[int], new: int, seed: int) -> tuple[dict[str, Any], str]:
    """The answer, and who gave it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": new, "seed": seed}
    answer = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=SECONDS)
    answer.raise_for_status()
    return answer.json(), answer.headers["x-served-by"]


def test_requests_spread_and_a_conversation_sticks(cluster: Cluster) -> None:
    alone, seen, url = Alone(), set[str](), cluster.url
    for n in range(8):
        text, names, cached = f"Conversation {n}: " + "so " * 100, set(), []
        for _ in range(3):
            answer, name = complete(url, text, 9, n)
            names.add(name)
            said = answer["choices"][0]["text"]
            assert said == alone(text, 9, Sampling(seed=n)).text
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            text += said + " and then? " + "why " * 20
        assert len(names) == 1
        assert cached[0] < cached[1] <= cached[2]
        seen |= names
    assert len(seen) == 2


def stream(url: str, prompt: list[int], begun: threading.Barrier) -> tuple[str, int, str | None]:
    """Who answered, how many tokens came, and the code of the error that ended the stream, if any."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "stream": True, "return_token_ids": True}
    count, code = 0, None
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=SECONDS) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 0:
                begun.wait(SECONDS)
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                code = event["error"]["code"] if "error" in event else code
                count += sum(len(choice["token_ids"]) for choice in event.get("choices", []))
    return answer.headers["x-served-by"], count, code


def test_a_killed_server_is_replaced_and_only_what_it_held_is_lost(cluster: Cluster) -> None:
    """Those it held are told to try again, those of the other go on, and nobody who comes later notices."""
    url, prompts = cluster.url, [make_tokenizer()(f"Stream {n}")["input_ids"] for n in range(8)]
    before = {complete(url, prompt, 1, 0)[1] for prompt in prompts}
    assert len(before) == len(cluster.servers()) == 2
    begun = threading.Barrier(len(prompts) + 1)
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(stream, url, prompt, begun) for prompt in prompts]
        begun.wait(SECONDS)
        os.kill(cluster.servers()[0], signal.SIGKILL)
        ended = [call.result(timeout=3 * SECONDS) for call in calls]
    lost = {name for name, _, code in ended if code is not None}
    assert len(lost) == 1
    assert {name for name, _, _ in ended} == before
    for name, count, code in ended:
        assert (code, count < LONG) == (("server_lost", True) if name in lost else (None, False))
    alone = Alone()
    for n in range(8):
        answer, name = complete(url, f"Later {n}", 3, n)
        assert name not in lost
        assert answer["choices"][0]["text"] == alone(f"Later {n}", 3, Sampling(seed=n)).text
    assert soon(lambda: len({complete(url, f"Again {n}", 1, 0)[1] for n in range(8)} - lost) == 2, 120), "another takes its place"


def test_fields_that_there_are_not_are_named() -> None:
    from headmax.serve.ray import Fleet

    with pytest.raises(ValueError, match="replica: unknown; there are api_key, "):
        Fleet(checkpoint="x", replica=2).server()
    config = Fleet(checkpoint="owner/tiny", max_batch="8", deterministic="true").server()  # type: ignore[call-arg]
    assert (config.name, config.max_batch, config.deterministic) == ("tiny", 8, True)
