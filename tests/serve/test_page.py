"""The page, and the head gates that it shows: over HTTP, and in a real browser (pytest -m browser)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from headmax.analysis.gates import Layer, trace
from headmax.generate import Sampling
from tests.analysis.browser import Browser
from tests.generate.checkpoint import make_model, make_tokenizer

from .calling import SECONDS, Alone, Running, job, scheduling, serving, soon, submit

EVIL = """Hello <img src=x onerror="document.title='owned'"><script>document.title='owned'</script>&amp;\n\t"""
BODY = {"model": "tiny", "max_tokens": 40, "seed": 3, "echo": True, "logprobs": 0, "return_gates": True, "extra": None}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(deterministic=True) as running:
        yield running


def ask(server: Running, **changes: Any) -> httpx2.Response:
    fields = {name: value for name, value in (BODY | {"prompt": "Hello"} | changes).items() if value is not None}
    return httpx2.post(f"{server.url}/v1/completions", json=fields, trust_env=False, timeout=SECONDS)


def gates(ids: list[int]) -> list[Layer]:
    return list(trace(make_model(), torch.tensor(ids), [""] * len(ids), "it").layers)


def together(pieces: list[dict], layer: int, gate: str, what: str) -> list:
    """Of all tokens; the pieces follow one another."""
    assert [piece["start"] for piece in pieces] == [
        sum(len(p["layers"][0]["read"]["winners"]) for p in pieces[:n]) for n in range(len(pieces))
    ]
    return [row for piece in pieces for row in piece["layers"][layer][gate][what]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [5, 300])
def test_gates_come_with_the_tokens(server: Running, stream: bool, length: int) -> None:
    """Of the prompt, longer than a piece too, and of every new token up to the last; the tokens are those of a request without."""
    prompt = ("Hello" * length)[:length]
    answer = ask(server, prompt=prompt, stream=stream, return_token_ids=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.json()]
    choices = [event["choices"][0] for event in events]
    ids = make_tokenizer()(prompt)["input_ids"] + [token for choice in choices for token in choice["token_ids"]]
    assert ids[length:] == Alone()(prompt, 40, Sampling(seed=3)).tokens
    pieces = [piece for choice in choices for piece in choice["gates"]]
    if stream:
        assert len(pieces) > 5
        assert choices[-1]["finish_reason"] is not None
    for n, layer in enumerate(gates(ids)):
        for name, gate in (("read", layer.read), ("write", layer.write)):
            assert gate is not None
            shares = torch.tensor(together(pieces, n, name, "shares"))
            torch.testing.assert_close(shares, gate.shares, atol=2e-4, rtol=0)
            sure = (gate.shares.diff(dim=1).abs() > 1e-3)[:, 0]
            assert torch.equal(torch.tensor(together(pieces, n, name, "winners"))[sure], gate.winners[sure])
    assert server.idle()


def test_gates_of_chats_beside_others(server: Running) -> None:
    more = {"return_gates": True, "return_token_ids": True}
    chat = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=9, seed=1, extra_body=more
    )
    read = chat.usage.total_tokens  # type: ignore[union-attr]
    assert len(together(chat.choices[0].gates, 0, "read", "winners")) == read  # type: ignore[attr-defined]
    only = ask(server, max_tokens=0).json()["choices"][0]
    assert len(together(only["gates"], 1, "write", "winners")) == 5


def test_what_gates_cannot_be_asked_for(server: Running) -> None:
    for changes in ({"n": 2}, {"prompt": ["a", "b"]}, {"stop": "x"}):
        answer = ask(server, **changes)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_gates")
    with serving(make_model(head_gate=None)) as plain, pytest.raises(openai.BadRequestError, match="this model has no head gates"):
        plain.client.completions.create(model="tiny", prompt="a", extra_body={"return_gates": True})


def test_a_watched_job_that_is_cancelled_leaves_nothing() -> None:
    with scheduling(max_length=10**5) as scheduler:
        watched, other = submit(scheduler, job([5, 6], 10**4, watched=True), job([5, 6], 30))
        watched.wait(tokens=5)
        scheduler.cancel(watched.job)
        assert len(other.wait().tokens[0]) == 30
        assert soon(lambda: not scheduler.gates.under_way and scheduler.decoding.batch.free() == 4)


def test_the_page_is_one_of_its_own(server: Running) -> None:
    """Its parts come from here alone, a policy forbids any other script, and a key is asked for by the page."""
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = httpx2.get(server.url + path, trust_env=False)
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "http://" not in answer.text
        assert "https://" not in answer.text
        if path == "/":
            assert "<script>" not in answer.text
            assert " style=" not in answer.text
        if path == "/page.js":
            assert not any(word in answer.text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("))
    with serving(api_key="sesame") as locked:
        assert httpx2.get(locked.url, trust_env=False).status_code == 200


def colours(browser: Browser) -> list[str]:
    return browser("[...document.querySelectorAll('#words .t')].map(x => getComputedStyle(x).backgroundColor.split('/')[0])")


@pytest.mark.browser
def test_a_prompt_is_tried_in_a_browser(tmp_path: Path) -> None:
    """Typed, streamed, coloured by the winners; what looks like markup is text; layers and gates switch."""
    with serving(deterministic=True, api_key="sesame") as server, Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        assert "API key is missing" in browser("document.querySelector('#said').textContent")
        browser.errors.clear()  # the browser's own line about the status 401
        browser.type("#key", "sesame")
        browser.type("#prompt", EVIL)
        browser.type("#seed", "3")
        browser.type("#temperature", "1")
        browser.type("#count", "40")
        browser.click("#go")
        assert soon(lambda: browser("document.documentElement.dataset.state") == "done")
        assert "new ones in" in browser("document.querySelector('#said').textContent")
        expected = Alone()(EVIL, 40, Sampling(seed=3)).tokens
        ids = make_tokenizer()(EVIL)["input_ids"] + expected
        assert len(browser("[...document.querySelectorAll('#words .t')].map(x => 1)")) == len(ids)
        shown = browser("[...document.querySelectorAll('#words .t.prompt')].map(x => x.textContent).join('')")
        assert shown == EVIL.replace("\n", "↵\n").replace("\t", "⇥\t")
        assert browser("document.querySelectorAll('#words *:not(.t)').length") == 0
        assert browser("document.title") == "headmax serve"
        layers = gates(ids)
        for layer, gate in ((0, "read"), (1, "read"), (1, "write")):
            if (layer, gate) == (1, "read"):
                browser.click("#next")
            if gate == "write":
                browser.click('input[value="write"] + span')
            winners = browser("[...document.querySelectorAll('#words .t')].map(x => x.dataset.w)")
            found = layers[layer].read if gate == "read" else layers[layer].write
            assert found is not None
            sure = (found.shares.diff(dim=1).abs() > 1e-3)[:, 0].tolist()
            assert [w for w, ok in zip(winners, sure, strict=True) if ok] == [
                str(w) for w, ok in zip(found.winners.tolist(), sure, strict=True) if ok
            ]
            fills = [{fill for fill, w in zip(colours(browser), winners, strict=True) if w == head} for head in ("0", "1")]
            assert all(len(fill) == 1 for fill in fills), "one colour for each head"
            assert fills[0] != fills[1]
        browser.mouse('.t[data-i="3"]')
        values = browser("[...document.querySelectorAll('[data-gate=write] [data-head]')].map(x => +x.textContent)")
        assert values == pytest.approx(layers[1].write.shares[3].tolist(), abs=2e-4)  # type: ignore[union-attr]
        assert browser.errors == []


@pytest.mark.browser
def test_stopping_and_mistakes_in_a_browser(tmp_path: Path) -> None:
    with serving(max_length=10**6) as server, Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.type("#count", "100000")
        browser.click("#go")
        assert soon(lambda: browser("document.querySelectorAll('#words .t').length") > 30)
        browser.click("#stop")
        assert soon(lambda: browser("document.querySelector('#said').textContent") == "Stopped.")
        assert server.idle()
        browser.type("#seed", "1" * 30)
        browser.click("#go")
        assert soon(lambda: "seed" in browser("document.querySelector('#said').textContent"))
    with serving(make_model(head_gate=None)) as plain, Browser(tmp_path / "other") as browser:
        browser.open(plain.url)
        browser.click("#go")
        assert soon(lambda: "new ones in" in browser("document.querySelector('#said').textContent"))
        assert browser("document.querySelectorAll('#words .t').length") >= len("Once upon a time")
