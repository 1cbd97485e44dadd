"""In front of several servers: who answers what, and what callers are told of a server that is lost."""

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
import uvicorn

from headmax.generate import Sampling
from headmax.serve.app import make_app
from headmax.serve.gateway import BEGINNING, Gateway, affinity, answers, ranked
from headmax.serve.server import listen
from tests.generate.checkpoint import tokens

from .calling import SECONDS, Alone, Running, openai_client, serving, soon


class Lost(Exception):
    pass


def chat(*said: str, system: str = "Be brief.") -> bytes:
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]
    return json.dumps({"messages": [{"role": "system", "content": system}, *turns], "max_tokens": len(said)}).encode()


def test_a_conversation_keeps_its_key() -> None:
    assert affinity(chat("Hello")) == affinity(chat("Hello", "Hi", "and then?")) != affinity(chat("Bye"))
    assert affinity(chat("Hello")) != affinity(chat("Hello", system="Be long."))
    ids, text = tokens(BEGINNING), "a" * BEGINNING
    for prompt in (ids, text):
        longer = json.dumps({"prompt": prompt + prompt}).encode()
        assert affinity(json.dumps({"prompt": prompt}).encode()) == affinity(longer)
        assert affinity(json.dumps({"prompt": [prompt, "other"]}).encode()) == affinity(longer)
    named = json.dumps({"prompt": "a", "prompt_cache_key": "me"}).encode()
    assert affinity(named) == affinity(json.dumps({"messages": [], "prompt_cache_key": "me"}).encode()) == "me"
    for odd in (b"", b"[]", b"\xff", b'{"prompt": 5}', b'{"messages": [5]}', b"[" * 100_000, b'{"prompt": null}', b'{"messages": [{}]}'):
        assert affinity(odd) == ""


def test_keys_spread_and_stay_when_servers_come_and_go() -> None:
    servers, keys = [f"s{n}" for n in range(5)], [f"k{n}" for n in range(2000)]
    before = {key: ranked(key, servers, str) for key in keys}
    assert all(300 < count < 500 for count in Counter(order[0] for order in before.values()).values())
    for key, order in before.items():
        assert ranked(key, [s for s in servers if s != "s2"], str) == [s for s in order if s != "s2"]
    assert len({order[1] for order in before.values() if order[0] == "s2"}) == 4, "what a lost one had goes to all others"


@contextlib.contextmanager
def gateway(*running: Running, lose: set[int] = frozenset(), after: int = 0) -> Iterator[tuple[str, list[int]]]:  # type: ignore[assignment]
    """The address of a gateway before servers of this process, and which of them was called; those in `lose` end after so many messages."""
    apps, called = [make_app(server.service) for server in running], list[int]()

    async def call(key: str, request: dict, body: bytes) -> AsyncIterator:
        number = ranked(key, range(len(apps)), str)[0]
        called.append(number)
        count = 0
        async with contextlib.aclosing(answers(apps[number], request, body)) as messages:  # type: ignore[type-var]
            async for message in messages:
                if number in lose and count >= after:
                    raise Lost("its process ended")
                count += 1
                yield message

    address = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(Gateway(call, (Lost,), 10_000), lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread.start()
    try:
        assert soon(lambda: server.started)
        yield f"http://127.0.0.1:{address.getsockname()[1]}", called
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_requests_are_answered_by_whoever_has_their_beginning() -> None:
    """Whole answers, streams and errors come through as they are; turns find their states."""
    alone = Alone()
    with serving(deterministic=True) as a, serving(deterministic=True) as b, gateway(a, b) as (url, called), openai_client(url) as client:
        for n in range(6):
            text = f"Conversation {n}: " + "so " * 200
            cached = []
            for _ in range(3):
                stream = client.completions.create(
                    model="tiny", prompt=text, max_tokens=9, seed=n, stream=True, stream_options={"include_usage": True}
                )
                chunks = list(stream)
                said = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
                assert said == alone(text, 9, Sampling(seed=n)).text
                cached.append(chunks[-1].usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
                text += said + " and then? "
            assert cached[0] < cached[1] <= cached[2]
        assert [len(set(called[n : n + 3])) for n in range(0, 18, 3)] == [1] * 6
        assert set(called) == {0, 1}
        assert client.models.list().data[0].id == "tiny"
        wrong = httpx2.post(f"{url}/v1/completions", json={"model": "other", "prompt": "a"}, trust_env=False)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        large = httpx2.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a" * 20_000}, trust_env=False)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        assert "each server's own" in httpx2.get(f"{url}/metrics", trust_env=False).json()["error"]["message"]
        assert a.idle()
        assert b.idle()


def test_a_caller_that_goes_frees_its_slot_behind_the_gateway() -> None:
    with serving(max_length=10**6) as server, gateway(server) as (url, _):
        body = json.dumps({"model": "tiny", "prompt": [5], "max_tokens": 900_000, "ignore_eos": True, "stream": True}).encode()
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(head.encode() + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            assert soon(lambda: server.scheduler.decoding.running)
        assert server.idle()


@pytest.mark.parametrize("after", [0, 3])
def test_a_server_that_is_lost_is_said_so_that_callers_can_try_again(after: int) -> None:
    """With 503 before the answer has begun, later as the last event of the stream."""
    with serving() as server, gateway(server, lose={0}, after=after) as (url, _):
        body = {"model": "tiny", "prompt": [5], "max_tokens": 50, "ignore_eos": True, "stream": True}
        answer = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False)
        if after:
            events = [line for line in answer.text.splitlines() if line]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "server_lost"
            assert 1 <= len(events) < 50
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "server_lost"
        assert server.idle()


def test_an_application_that_is_left_is_ended() -> None:
    ended = []

    async def app(scope: dict, receive: object, send: object) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})  # type: ignore[operator]
        finally:
            ended.append(True)

    async def leave() -> None:
        async with contextlib.aclosing(answers(app, {"path": "/"}, b"")) as messages:  # type: ignore[arg-type, type-var]
            async for _ in messages:
                break

    asyncio.run(asyncio.wait_for(leave(), 30))
    assert ended == [True]
