"""`headmax chat`, with a checkpoint and with a server: the same replies, and only what is new is read."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headmax.cli.chat import chat
from headmax.generate import Sampling
from headmax.generate.terminal import Settings
from headmax.serve.client import Lines, address_of, explained, read_event
from headmax.serve.conversation import Local, Partner, Usage, show_reply
from tests.generate.checkpoint import make_tokenizer, save

from .calling import TEMPLATE, Alone, serving

LINES = ["Hello there", "and then?", "", "why"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    save(made)
    (made / "template.jinja").write_text(TEMPLATE)
    return made


def expected(lines: list[str], system: str | None, new: int, seed: int) -> list[str]:
    """The engine's replies, each to the whole conversation before it."""
    alone = Alone()
    text, replies = "" if system is None else f"<s>system: {system}</s>\n", []
    for line in lines:
        text += f"<s>user: {line}</s>\n"
        reply = alone(make_tokenizer()(f"{text}<s>assistant:")["input_ids"], new, Sampling(seed=seed)).text
        assert reply
        text += f"<s>assistant: {reply}</s>\n"
        replies.append(reply)
    return replies


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return lambda *lines: monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_checkpoint_answers_turn_by_turn(folder: Path, typed: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    typed(*LINES, "/new", LINES[0])
    chat(str(folder), system="Be brief", max_new_tokens=12, seed=3, chat_template=folder / "template.jinja", device="cpu")
    out, err = capsys.readouterr()
    first, second, third = expected([line for line in LINES if line], "Be brief", 12, 3)
    assert out == f"{first}\n{second}\n{third}\n{first}\n"
    counts = [(int(known), int(read)) for known, read in re.findall(r"headmax: (\d+) tokens cached, read (\d+) tokens", err)]
    lengths = [known + read for known, read in counts]
    assert [known for known, _ in counts] == [0, lengths[0], lengths[1], lengths[0]], "each turn goes on after the prompt before it"


def test_a_server_answers_alike(typed: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(deterministic=True, api_key="sesame") as server:
        typed(*LINES)
        chat(server.url, max_new_tokens=12, seed=3, api_key="sesame")
        assert capsys.readouterr().out == "".join(f"{reply}\n" for reply in expected([line for line in LINES if line], None, 12, 3))
        with pytest.raises(ValueError, match="the API key is missing or wrong"):
            chat(server.url)
        typed("a")
        with pytest.raises(ValueError, match="model 'other' is not served here"):
            chat(server.url, model="other", api_key="sesame")
        typed("a" * 5000)
        with pytest.raises(ValueError, match="exceed the limit of 4000"):
            chat(server.url, api_key="sesame")


def test_options_and_addresses_that_do_not_fit(folder: Path, typed: Callable) -> None:
    with pytest.raises(ValueError, match="--tokenizer is for a checkpoint"):
        chat("http://127.0.0.1:1", tokenizer="x")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1: .*refused|http://127.0.0.1:1: .*connection"):
        chat("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="--api-key and --model are for a server"):
        chat(str(folder), model="x")
    typed("a")
    with pytest.raises(ValueError, match="no chat template: continue texts instead"):
        chat(str(folder), device="cpu")


class Interrupted(Partner):
    def reply(self, messages: list, show: Callable[[str], None]) -> Usage:
        show("so ")
        raise KeyboardInterrupt


def test_a_reply_can_be_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_reply(Interrupted(), []) == "so "
    assert capsys.readouterr().out == "so \n"


def test_a_prompt_that_differs_is_read_from_the_longest_beginning() -> None:
    engine = Alone().engine
    engine.tokenizer.chat_template = TEMPLATE
    local = Local(engine, Settings(3, Sampling(), ()))
    start = [{"role": "user", "content": "a"}]
    talk = [*start, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert [local.reply(messages, lambda text: None).cached > 0 for messages in (start, talk, talk, start)] == [False, True, True, True]
    assert local.reply([{"role": "user", "content": "z"}], lambda text: None).cached == 0


def test_lines_end_at_line_feeds_alone() -> None:
    lines = Lines()
    assert lines.push("a\u2028\x85b\nc") == ["a\u2028\x85b"]
    assert lines.push("d\n\ne\n") == ["cd", "", "e"]


def test_events_and_addresses() -> None:
    assert {address_of(text) for text in ("http://a", "http://a/", "http://a/v1", "http://a/v1/")} == {"http://a/v1/"}
    assert read_event('data: {"a": 1}') == read_event('data:{"a": 1}') == {"a": 1}
    assert read_event("data: [DONE]") == read_event("") == read_event(": ping") == {}
    with pytest.raises(ValueError, match="broken"):
        read_event('data: {"error": {"message": "broken"}}')
    assert [explained(x) for x in ('{"error": "so"}', b"<html>\nno", "")] == [
        "so",
        "<html> no",
        "the server gave an error without a message",
    ]
