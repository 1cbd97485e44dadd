"""Clients that go or do not read, servers that are told to end or are killed, limits that are reached."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from headmax.generate import Sampling
from tests.generate.checkpoint import save, tokens

from .calling import SECONDS, Alone, Running, openai_client, process, serving, soon

LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3900, "ignore_eos": True, "stream": True}


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def raw(body: dict, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    got = b""
    while part := connection.recv(65536):
        got += part
    return got


def answers(server: Running, alone: Alone) -> None:
    """Another request is answered, and rightly."""
    answer = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=10, seed=3)
    assert answer.choices[0].text == alone("Hello", 10, Sampling(seed=3)).text


def test_clients_that_go_in_mid_stream_leave_nothing_behind() -> None:
    alone = Alone()
    with serving(deterministic=True, max_batch=4) as server:
        for end in ("close", "reset", "half"):
            connections = [connect(server) for _ in range(4)]
            for connection in connections:
                connection.sendall(raw(LONG))
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            assert soon(lambda: len(server.scheduler.decoding.running) == 4)
            for connection in connections:
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if end == "half":
                    connection.shutdown(socket.SHUT_WR)
                connection.close()
            answers(server, alone)
            assert server.idle(), end
            assert server.scheduler.decoding.batch.free() == 4


def test_a_client_that_does_not_read_holds_nobody_up_and_ends() -> None:
    """It gets its tokens as fast as they come until buffers are full; then its time is up."""
    alone = Alone()
    with serving(deterministic=True, timeout=1.0, max_length=10**6) as server:
        connection = connect(server)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(raw(LONG | {"max_tokens": 900_000, "logprobs": 20, "n": 3}))
        for _ in range(3):
            answers(server, alone)
        assert soon(lambda: not server.scheduler.decoding.running)
        connection.close()


def test_a_reader_that_lags_gets_all_of_it_in_fewer_pieces() -> None:
    with serving() as server:
        more = {"ignore_eos": True, "return_token_ids": True}
        stream = server.client.completions.create(model="tiny", prompt=[5], max_tokens=300, stream=True, extra_body=more)
        got, chunks = 0, 0
        for chunk in stream:
            if not chunks:
                assert server.idle()
            got, chunks = got + len(chunk.choices[0].token_ids), chunks + 1
        assert got == 300


def test_what_takes_too_long_is_ended_and_said() -> None:
    with serving(timeout=0.3, body_timeout=0.3, max_length=10**6) as server:
        with pytest.raises(openai.InternalServerError, match=r"the request took longer than 0\.3 seconds") as error:
            server.client.completions.create(model="tiny", prompt=[5], max_tokens=900_000, extra_body={"ignore_eos": True})
        assert error.value.status_code == 503
        with pytest.raises(openai.APIError, match=r"the request took longer than 0\.3 seconds"):
            for _ in server.client.completions.create(
                model="tiny", prompt=[5], max_tokens=900_000, stream=True, extra_body={"ignore_eos": True}
            ):
                pass
        with connect(server) as connection:
            connection.sendall(raw(LONG)[:-10])
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        assert server.idle()


def test_a_full_queue_is_said_with_503() -> None:
    async def call(server: Running) -> None:
        body = LONG | {"max_tokens": 900_000, "stream": False}
        async with httpx2.AsyncClient(trust_env=False, timeout=SECONDS, base_url=server.url) as client:
            calls = []
            for waiting in range(3):
                calls.append(asyncio.create_task(client.post("/v1/completions", json=body)))
                while not (server.scheduler.decoding.running and len(server.scheduler.waiting) == waiting):
                    await asyncio.sleep(0.005)
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "full"
            many = await client.post("/v1/completions", json=body | {"prompt": [[5], [6], [7]]})
            assert many.status_code == 400, "more prompts than the queue holds will never fit"
            for held in calls:
                held.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    with serving(max_batch=1, queue=2, max_length=10**6) as server:
        asyncio.run(asyncio.wait_for(call(server), 30))
        assert server.idle()


def test_a_model_that_fails_is_said_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone()
    with serving(deterministic=True) as server:
        run, fail = server.scheduler.decoding.batch.run, [True]

        def failing(wanted: object) -> object:
            if fail:
                fail.pop()
                raise RuntimeError("broken")
            return run(wanted)  # type: ignore[arg-type]

        monkeypatch.setattr(server.scheduler.decoding.batch, "run", failing)
        with pytest.raises(openai.InternalServerError, match="the model failed: broken"):
            server.client.completions.create(model="tiny", prompt=[5], max_tokens=5)
        answers(server, alone)
        fail.append(True)
        with pytest.raises(openai.APIError, match="the model failed: broken"):
            list(server.client.completions.create(model="tiny", prompt=[5], max_tokens=5, stream=True))


def test_closing_under_load_tells_everyone() -> None:
    """Not drained: those that run and those that wait are told so, and health says 503."""
    with serving(max_batch=1, max_length=10**6) as server, ThreadPoolExecutor(3) as pool:

        def call(n: int) -> object:
            try:
                return server.client.completions.create(model="tiny", prompt=[5], max_tokens=900_000, extra_body={"ignore_eos": True})
            except openai.APIStatusError as error:
                return error.status_code

        calls = [pool.submit(call, n) for n in range(3)]
        assert soon(lambda: len(server.scheduler.waiting) == 2)
        server.scheduler.close(timeout=SECONDS)
        assert [call.result(timeout=SECONDS) for call in calls] == [503] * 3
        health = httpx2.get(f"{server.url}/health", trust_env=False)
        assert (health.status_code, health.json()["error"]["message"]) == (503, "the server is shutting down")
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            server.client.completions.create(model="tiny", prompt=[5], max_tokens=5)


def streams(client: openai.OpenAI, number: int, end: Callable[[], object]) -> list[int]:
    """So many streams of 150 tokens at once; `end` is called when all have begun. How many tokens each got."""
    begun = threading.Barrier(number + 1)

    def call(seed: int) -> int:
        count = 0
        more = {"ignore_eos": True, "return_token_ids": True}
        with client.completions.create(model="tiny", prompt=[5, seed], max_tokens=150, seed=seed, stream=True, extra_body=more) as stream:
            begun.wait(30)
            for chunk in stream:
                count += len(chunk.choices[0].token_ids)  # type: ignore[attr-defined]
        return count

    with ThreadPoolExecutor(number) as pool:
        calls = [pool.submit(call, seed) for seed in range(number)]
        begun.wait(30)
        end()
        return [call.result(timeout=SECONDS) for call in calls]


def test_sigterm_under_load_lets_streams_finish_and_takes_no_more(tmp_path: Path) -> None:
    """More streams than slots."""
    save(tmp_path)
    with process(tmp_path, "--max-batch", 4) as (server, url), openai_client(url) as client:
        assert streams(client, 6, lambda: server.send_signal(signal.SIGTERM)) == [150] * 6
        assert server.wait(SECONDS) == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health", trust_env=False)


@pytest.mark.slow
def test_killed_and_started_again_with_a_folder(tmp_path: Path) -> None:
    """The second server has the first one's states and gives the same bits."""
    save(tmp_path / "model")
    options = ["--deterministic", "--prefix-folder", tmp_path / "states", "--max-batch", 4, "--chunk", 128]
    question = {"model": "tiny", "prompt": tokens(700), "max_tokens": 5, "seed": 1, "logprobs": 2}
    with process(tmp_path / "model", *options) as (server, url), openai_client(url) as client:
        first = client.completions.create(**question)  # type: ignore[call-overload]
        assert soon(lambda: len(list((tmp_path / "states").glob("*.safetensors"))) == 1)
        server.send_signal(signal.SIGKILL)
        server.wait(SECONDS)
    (tmp_path / "states" / "torn.safetensors").write_bytes(b"\0" * 50)
    with process(tmp_path / "model", *options) as (server, url), openai_client(url) as client:
        again = client.completions.create(**question)  # type: ignore[call-overload]
        assert (first.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens_details.cached_tokens) == (0, 640)
        assert again.choices == first.choices


@pytest.mark.slow
def test_draining_has_a_limit_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    save(tmp_path)
    for signals, least, most in ((1, 1.5, 10), (2, 0.0, 5)):
        body = LONG | {"max_tokens": 10**6}
        with (
            process(tmp_path, "--drain", 2, "--max-length", 10**7) as (server, url),
            httpx2.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=SECONDS) as answer,
        ):
            parts = answer.iter_raw()  # kept, since the connection closes with it
            next(parts)
            begun = time.monotonic()
            for _ in range(signals):
                server.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            assert server.wait(SECONDS) == 0
            assert least < time.monotonic() - begun < most


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    save(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "headmax_cli", "serve", str(tmp_path), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"headmax: cannot listen on 127.0.0.1 port \d+: .*in use.*\n", done.stderr)
