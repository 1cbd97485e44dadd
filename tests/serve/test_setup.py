"""How a server is set up: its options, its address, and what states in a folder belong to."""

import socket
from pathlib import Path

import pytest

from headmax.cli.options import shown_size, size
from headmax.serve.batch import SeparateSteps, SharedBatch
from headmax.serve.config import ServerConfig
from headmax.serve.server import listen, make_batch, make_cache, origin
from tests.generate.checkpoint import make_model


@pytest.mark.parametrize(
    ("text", "amount"), [("0", 0), ("123", 123), ("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("500MB", 5 * 10**8), ("7B", 7)]
)
def test_amounts_of_memory(text: str, amount: int) -> None:
    assert size(text) == amount
    assert size(shown_size(amount)) == amount
    for wrong in ("", "-1", "2Gib", "1e9", "GiB", "two"):
        with pytest.raises(ValueError, match="must be an amount of memory such as 500MB or 2GiB"):
            size(wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"chunk": 100}, "chunk must be a multiple of 128, the longest chunk of the recurrences, got 100"),
        ({"prefix_cache": -1}, "prefix_cache must not be negative, got -1"),
        ({"timeout": 0.0}, "timeout must be positive, got 0.0"),
        ({"timeout": float("nan")}, "timeout must be positive, got nan"),
        ({"api_key": ""}, "api_key is empty: leave it out"),
        ({"prefix_cache": 0, "prefix_folder": Path("x")}, "prefix_folder needs prefix_cache"),
    ],
)
def test_settings_that_cannot_be(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(**{"name": "tiny"} | changes)


def test_an_address_that_is_taken_or_not_ours_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match="port must be 0 to 65535, got 99999"):
        listen("127.0.0.1", 99999)


def test_lanes_and_states_by_kind_of_server(tmp_path: Path) -> None:
    """On a CPU each text is stepped by itself under --deterministic, whose states are not mixed with others in a folder."""
    model = make_model()
    plain, exact = ServerConfig("tiny", prefix_folder=tmp_path), ServerConfig("tiny", deterministic=True)
    assert isinstance(make_batch(model, plain), SharedBatch)
    assert isinstance(make_batch(model, exact), SeparateSteps)
    origins = {origin(model, config) for config in (plain, exact, ServerConfig("tiny", chunk=128))}
    assert len({*origins, origin(make_model(bos_token_id=2), plain)}) == 4
    other = make_model(backend="reference")
    assert (origin(other, plain) == origin(model, plain), origin(other, exact) == origin(model, exact)) == (True, False)
    cache = make_cache(model, plain)
    assert cache is not None
    assert cache.folder is not None
    cache.close()
    assert make_cache(model, ServerConfig("tiny", prefix_cache=0)) is None
