"""Generated bad requests: never a status of 5xx, never a hang, and no other request disturbed."""

import contextlib
import json
import random
import socket
import threading
import time
from typing import Any

import pytest

from headmax.generate import Sampling

from .calling import Alone, Running, serving

HEAD = "POST {path} HTTP/1.1\r\nhost: a\r\n"
WORDS = ("", "a", "\ud800", "\x00", "</s>", "🦜" * 50, "tiny", "user", "text", "a" * 3000)
NUMBERS = (0, -1, 1, 2, 257, 258, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.5, 1e308, 1e-320, True, False)
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": [5, 6],
    "max_tokens": 2,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logprobs": 1,
    "stream": False,
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 1.0}
FIELDS = [
    "echo",
    "top_p",
    "top_k",
    "min_p",
    "stream_options",
    "stop_token_ids",
    "presence_penalty",
    "best_of",
    "tools",
    "suffix",
    "top_logprobs",
]


def thing(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, most of them small and odd."""
    kind = chance.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return chance.choice(NUMBERS)
    if kind == 1:
        return chance.choice(WORDS)
    if kind == 2:
        return None
    if kind == 3:
        return [thing(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 4:
        return [chance.choice(NUMBERS[:7]) for _ in range(chance.choice([1, 3, 400]))]
    return {
        chance.choice([*WORDS, "role", "content", "type", "include_usage"]): thing(chance, depth + 1) for _ in range(chance.randrange(4))
    }


def body(chance: random.Random) -> bytes:
    """A body that is wrong somewhere, or by chance right."""
    fields = dict(chance.choice([COMPLETION, CHAT]))
    for _ in range(chance.randint(1, 3)):
        fields[chance.choice([*fields, *FIELDS])] = thing(chance)
    if chance.random() < 0.2:
        del fields[chance.choice(list(fields))]
    made = json.dumps(fields if chance.random() < 0.9 else thing(chance)).encode()
    spoil = chance.randrange(12)
    if spoil == 0:
        at = chance.randrange(len(made) + 1)
        return made[:at] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 9))) + made[at:]
    if spoil == 1:
        return made[: chance.randrange(len(made) + 1)]
    if spoil == 2:
        return chance.choice(
            [b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"NaN", b"\xff\xfe{}", b"", b'{"model":"tiny","temperature":1e999}']
        )
    return made


def message(chance: random.Random) -> tuple[bytes, bool]:
    """A whole request as bytes, and whether its frame is well-formed, so that an answer must come."""
    content = body(chance)
    path = chance.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/%ff", "/health?x=%00"])
    head = HEAD.format(path=path)
    kind = chance.choice(["application/json"] * 8 + ["text/plain", "application/json; charset=latin-1", "", "\xff"])
    head += f"content-type: {kind}\r\n"
    frame = chance.randrange(20)
    if frame == 0:
        return head.encode("latin-1") + b"content-length: -5\r\n\r\n" + content, False
    if frame == 1:
        return head.encode("latin-1") + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + content, False
    if frame == 2:
        return bytes(chance.randrange(256) for _ in range(200)) + b"\r\n\r\n", False
    if frame == 3:
        return head.encode("latin-1") + b"x: " + b"y" * 100_000 + b"\r\n\r\n", False
    if frame == 4:
        return head.encode("latin-1") + f"content-length: {len(content) + 9}\r\n\r\n".encode() + content, False
    if frame == 5:
        chunked = f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n" if content else b"0\r\n\r\n"
        return head.encode("latin-1") + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunked, True
    return head.encode("latin-1") + f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content, True


def send(server: Running, content: bytes, whole: bool) -> int | None:
    """The status that comes back, or None where the server closed without one, as it may for a frame that is none."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            connection.sendall(content)
            if not whole:
                with contextlib.suppress(OSError):  # the server may have closed already, with an answer to be read
                    connection.shutdown(socket.SHUT_WR)
            got = connection.recv(65536)
            while part := connection.recv(65536):  # a hang would time out here
                got += part
        except (ConnectionResetError, BrokenPipeError):
            return None
    return int(got.split(b" ")[1]) if got.startswith(b"HTTP/1.1 ") else None


def storm(count: int, seed: int, caplog: pytest.LogCaptureFixture) -> dict[int | None, int]:
    """So many bad requests, beside a good client whose every answer is checked."""
    alone, chance, statuses = Alone(), random.Random(seed), {}  # type: ignore[var-annotated]
    expected = alone("Hello", 6, Sampling(seed=3)).text
    wrong: list[object] = []
    with serving(deterministic=True, max_length=300, body_timeout=2.0, max_batch=4) as server:
        over = threading.Event()

        def good() -> None:
            while not over.is_set():
                answer = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=6, seed=3)
                if answer.choices[0].text != expected:
                    wrong.append(answer)
                time.sleep(0.02)

        beside = threading.Thread(target=good)
        beside.start()
        try:
            for _ in range(count):
                content, whole = message(chance)
                status = send(server, content, whole)
                assert status is None or status < 500 or status == 503, content[:2000]
                assert status is not None or not whole, content[:2000]
                statuses[status] = statuses.get(status, 0) + 1
        finally:
            over.set()
            beside.join(30)
        assert server.idle()
        assert server.scheduler.broken is None
    assert wrong == []
    assert "Exception" not in caplog.text
    return statuses


def test_five_hundred_bad_requests(caplog: pytest.LogCaptureFixture) -> None:
    statuses = storm(500, 0, caplog)
    assert statuses[400] > 100
    assert {404, 405, 415} <= set(statuses)


@pytest.mark.slow
def test_five_thousand_bad_requests(caplog: pytest.LogCaptureFixture) -> None:
    statuses = storm(5000, 1, caplog)
    assert sum(statuses.values()) == 5000
    print(statuses)


def test_a_body_of_ten_megabytes_is_refused_whole() -> None:
    with serving(max_length=300) as server:
        for content in (b'{"model":"tiny","prompt":"' + b"a" * 10 * 2**20 + b'"}', b"[" * (10 * 2**20)):
            head = (
                HEAD.format(path="/v1/completions")
                + f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            assert send(server, head.encode() + content, True) == 413
        fits = b'{"model":"tiny","prompt":"' + b"a" * 2**20 + b'"}'
        head = (
            HEAD.format(path="/v1/completions")
            + f"content-type: application/json\r\ncontent-length: {len(fits)}\r\nconnection: close\r\n\r\n"
        )
        assert send(server, head.encode() + fits, True) == 400
        assert server.idle()
