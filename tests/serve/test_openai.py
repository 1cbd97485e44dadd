"""The official client against a real server: every answer is the one that the engine gives alone."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from headmax.generate import GREEDY, Sampling
from tests.generate.checkpoint import make_tokenizer, tokens

from .calling import SECONDS, Alone, Running, openai_client, serving, soon

CHAT = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Deterministic, so that answers are equal to the bit."""
    with serving(deterministic=True) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").owned_by == "headmax"
    with pytest.raises(openai.NotFoundError, match="model 'large' is not served here; 'tiny' is"):
        server.client.models.retrieve("large")


def test_completions_by_text_and_by_tokens(server: Running, alone: Alone) -> None:
    expected = alone("Hello", 12, Sampling(seed=3))
    ids = make_tokenizer()("Hello")["input_ids"]
    for prompt in ("Hello", ids, ["Hello"], [ids]):
        answer = server.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=3)
        assert answer.choices[0].text == expected.text
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected.tokens))
    several = server.client.completions.create(model="tiny", prompt=["Hello", "Bye"], max_tokens=12, n=2, seed=3)
    wanted = [alone(prompt, 12, Sampling(seed=seed)).text for prompt in ("Hello", "Bye") for seed in (3, 4)]
    assert [choice.text for choice in several.choices] == wanted
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_rules_reach_the_sampler(server: Running, alone: Alone) -> None:
    more = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2}
    answer = server.client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=20,
        seed=9,
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        extra_body=more,
    )
    rules = Sampling(0.8, 4, 0.9, 0.1, 1.2, 9, presence_penalty=0.5, frequency_penalty=0.3)
    assert answer.choices[0].text == alone("Hello", 20, rules).text
    greedy = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=20, temperature=0)
    assert greedy.choices[0].text == alone("Hello", 20, GREEDY).text
    free = [server.client.completions.create(model="tiny", prompt="Hello", max_tokens=20).choices[0].text for _ in range(2)]
    assert free[0] != free[1], "without a seed each call draws anew"


def test_streams_say_the_same_in_pieces(server: Running, alone: Alone) -> None:
    texts, reasons, ids = ["", ""], [None, None], [[], []]
    usage, counted = None, []
    stream = server.client.completions.create(
        model="tiny", prompt="Hello", max_tokens=30, seed=5, n=2, stream=True,
        stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        counted.append(chunk.usage if "usage" in chunk.model_fields_set else "missing")
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = [alone("Hello", 30, Sampling(seed=seed)) for seed in (5, 6)]
    assert texts == [completion.text for completion in expected]
    assert ids == [completion.tokens for completion in expected]
    assert reasons == ["stop" if completion.finish == "stop_token" else "length" for completion in expected]
    assert usage is not None
    assert usage.completion_tokens == sum(len(completion.tokens) for completion in expected)
    assert counted[-1] is usage
    assert set(counted[:-1]) == {None}


def test_stop_strings_and_the_end_of_text(server: Running, alone: Alone) -> None:
    free = alone("Hello", 60, Sampling(seed=11), eos=False)
    assert free.text is not None
    stop = free.text[20:23]
    expected = alone("Hello", 60, Sampling(seed=11), (stop, "never"), eos=False)
    for stream in (False, True):
        answer = server.client.completions.create(
            model="tiny", prompt="Hello", max_tokens=60, seed=11, stop=[stop, "never"], stream=stream, extra_body={"ignore_eos": True}
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            assert "".join(choice.text for choice in chunks) == expected.text
            assert chunks[-1].finish_reason == "stop"
        else:
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")
            assert answer.usage.completion_tokens == len(expected.tokens)
    token = free.tokens[4]
    cut = server.client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=60,
        seed=11,
        extra_body={"stop_token_ids": [token], "ignore_eos": True, "return_token_ids": True},
    )
    assert cut.choices[0].token_ids == free.tokens[: free.tokens.index(token) + 1]  # type: ignore[attr-defined]
    ends = next(seed for seed in range(300) if alone("Hello", 60, Sampling(seed=seed)).finish == "stop_token")
    answer = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=60, seed=ends)
    assert answer.choices[0].finish_reason == "stop"
    assert server.idle()


def test_log_probabilities(server: Running, alone: Alone) -> None:
    expected = alone("Hello", 10, Sampling(seed=2), eos=False)
    answer = server.client.completions.create(
        model="tiny", prompt="Hello", max_tokens=10, seed=2, logprobs=3, extra_body={"ignore_eos": True}
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == expected.logprobs
    assert found.top_logprobs is not None
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert found.text_offset is not None
    assert found.tokens is not None
    for name, offset in zip(found.tokens, found.text_offset, strict=True):
        assert name.startswith("bytes:") or answer.choices[0].text[offset:].startswith(name)
    chat = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=10, seed=2, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content
    assert entries is not None
    assert len(entries) == chat.usage.completion_tokens  # type: ignore[union-attr]
    raw = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert raw.decode("utf-8", "replace").startswith(chat.choices[0].message.content[:3])  # type: ignore[index]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_echo_and_the_prompts_own_log_probabilities(server: Running, alone: Alone) -> None:
    answer = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=3, seed=1, echo=True, logprobs=1)
    generated = alone("Hello", 3, Sampling(seed=1))
    assert answer.choices[0].text == f"Hello{generated.text}"
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[5:] == generated.logprobs
    only = server.client.completions.create(model="tiny", prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "Hello"
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[:5]  # type: ignore[union-attr]


def test_chats(server: Running, alone: Alone) -> None:
    text = "<s>user: Hello there</s>\n<s>assistant:"
    ids = make_tokenizer()(text)["input_ids"]
    assert ids.count(0) == 2
    expected = alone(ids, 15, Sampling(seed=4))
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=15, seed=4)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(ids)  # type: ignore[union-attr]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
    stream = server.client.chat.completions.create(model="tiny", messages=parts, max_tokens=15, seed=4, stream=True)  # type: ignore[call-overload]
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text


def test_repeated_prompts_say_how_much_was_cached(server: Running) -> None:
    prompt = tokens(600, seed=77)
    cached = []
    for more in ([], [5], [6]):
        answer = server.client.completions.create(model="tiny", prompt=prompt + more, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 512, 512]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": -1}, "max_tokens: input should be greater than or equal to 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"prompt": [258]}, "prompt: ids must be from 0 to 257, got 258 to 258"),
        ({"prompt": [1, -1]}, "prompt: ids must be"),
        ({"prompt": [1, "a"]}, "prompt: must be a text, a list of token ids, or a list of either"),
        ({"prompt": ""}, "prompt: empty; give at least one token"),
        ({"prompt": [5] * 4001}, "prompt: 4001 tokens exceed the limit of 4000"),
        ({"max_tokens": 4000}, "exceed the limit of 4000 tokens"),
        ({"n": 0}, "n: input"),
        ({"n": 129}, "n: input"),
        ({"prompt": ["a"] * 100, "n": 100}, "at most 256 prompts, and 1024 choices"),
        ({"stop": ["a"] * 17}, "stop: must be at most 16 strings"),
        ({"stop": ""}, "stop: must be at most"),
        ({"model": "other"}, "model 'other' is not served here; 'tiny' is"),
        ({"extra_body": {"logit_bias": {"5": 1}}}, "logit_bias: not supported by this server"),
        ({"suffix": "x"}, "suffix: not supported by this server"),
        ({"extra_body": {"temperatur": 1}}, "temperatur: unknown field"),
        ({"extra_body": {"stop_token_ids": [999]}}, "stop_token_ids: 999 is not in the vocabulary"),
        ({"best_of": 3}, "best_of: must be n = 1"),
        ({"extra_body": {"x" * 10**6: 1}}, r"x{1000}\.\.\.$"),
    ],
)
def test_mistakes_are_named(server: Running, fields: dict, said: str) -> None:
    with pytest.raises(openai.APIStatusError, match=said) as error:
        server.client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 2} | fields)
    assert error.value.status_code == (404 if "model" in fields else 400)
    assert set(error.value.response.json()["error"]) == {"message", "type", "param", "code"}


def test_mistakes_in_chats_are_named(server: Running) -> None:
    for messages, said in (
        ([], "messages: list should have at least 1 item"),
        ([{"role": "robot", "content": "a"}], r"messages.0.role: input should be 'system'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content: must be text"),
        ([{"role": "user", "content": "a", "audio": {"id": "x"}}], "messages.0.audio: not supported by this server"),
        ([{"role": "user", "content": "a", "colour": "red"}], "messages.0.colour: unknown field"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            server.client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]
    function = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for field, value, said in (
        ("tools", [function], "tools: not supported by this server"),
        ("tool_choice", "required", "tool_choice: not supported by this server"),
        ("modalities", ["text", "audio"], "modalities: not supported by this server"),
        ("response_format", {"type": "json_object"}, "response_format.type: input should be 'text'"),
        ("messages", [{"role": "tool", "content": "a", "tool_call_id": "b"}], "messages.0.tool_call_id: not supported by this server"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as error:
            server.client.chat.completions.create(**{"model": "tiny", "messages": CHAT, field: value})  # type: ignore[call-overload]
        assert error.value.code == (None if field == "response_format" else "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="top_logprobs: needs logprobs"):
        server.client.chat.completions.create(model="tiny", messages=CHAT, top_logprobs=2)


def test_texts_that_are_too_long_in_any_case_do_not_reach_the_tokenizer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would keep it from others' requests: the longest of its tokens has 4 characters."""
    monkeypatch.delattr(server.service.tokenizer, "thread")
    for path, fields in (
        ("completions", {"prompt": "a" * 16_001}),
        ("chat/completions", {"messages": [CHAT[0] | {"content": "a" * 16_001}]}),
    ):
        answer = httpx2.post(f"{server.url}/v1/{path}", json={"model": "tiny"} | fields, trust_env=False)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "16001 characters exceed the limit of 4000 tokens" in answer.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    """What clients send by default, and a conversation with an earlier answer in it."""
    nothing = {"logit_bias": {}, "tool_choice": "none", "tools": [], "modalities": ["text"], "verbosity": "medium"}
    more = nothing | {"user": "a", "store": True} | {"response_format": {"type": "text"}, "stop": None, "audio": None}
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, extra_body=more)
    messages = [*CHAT, answer.choices[0].message.model_dump() | {"annotations": []}, *CHAT]
    assert server.client.chat.completions.create(model="tiny", messages=messages, max_tokens=3).usage is not None


def test_a_call_that_is_cancelled_frees_its_slot(server: Running) -> None:
    """The official asynchronous client, cancelled in mid-stream and while it waits for a whole answer."""

    async def call() -> None:
        http = httpx2.AsyncClient(trust_env=False, timeout=SECONDS)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
            options = {"model": "tiny", "prompt": "Hello", "max_tokens": 3900, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(**options, stream=True)  # type: ignore[call-overload]
            async for chunk in stream:
                assert chunk.choices
                break
            assert soon(lambda: server.scheduler.decoding.running)
            await stream.close()
            whole = asyncio.create_task(client.completions.create(**options))  # type: ignore[call-overload]
            await asyncio.sleep(0.2)
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)

    asyncio.run(call())
    assert server.idle()
    assert server.scheduler.decoding.batch.free() == 8


def test_a_key(alone: Alone) -> None:
    with serving(api_key="sesame") as server:
        for key in (b"Bearer none", b"Bearer \xff", b"Bearer", b"sesame", b"Basic sesame"):
            headers = {b"authorization": key}
            for path in ("/v1/models", "/metrics", "/docs", "/nowhere"):
                answer = httpx2.get(server.url + path, headers=headers, trust_env=False)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        assert httpx2.get(f"{server.url}/v1/models", headers={"authorization": "bearer sesame"}, trust_env=False).status_code == 200
        with openai_client(server.url, "sesame") as client:
            assert client.models.list().data[0].id == "tiny"
        assert httpx2.get(f"{server.url}/health", trust_env=False).json() == {"status": "ok"}


def test_without_a_template_or_a_tokenizer() -> None:
    with serving(template=None) as server, pytest.raises(openai.BadRequestError, match="no chat template: continue texts instead"):
        server.client.chat.completions.create(model="tiny", messages=CHAT)


def test_pages(server: Running) -> None:
    document = httpx2.get(f"{server.url}/openapi.json", trust_env=False).json()
    assert set(document["paths"]) >= {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"}
    assert "max_tokens" in document["components"]["schemas"]["CompletionBody"]["properties"]
    page = httpx2.get(f"{server.url}/docs", trust_env=False).text
    assert "repetition_penalty" in page
    assert "//" not in page.replace("<!doctype", ""), "it loads nothing from elsewhere"
    for path, status, allowed in (("/nowhere", 404, None), ("/v1/completions", 405, "POST")):
        answer = httpx2.get(server.url + path, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["param"], answer.headers.get("allow")) == (status, None, allowed)


def test_metrics_count_what_happens(alone: Alone) -> None:
    def value(text: str, name: str) -> float:
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))

    with serving() as server:
        for _ in range(2):
            server.client.completions.create(model="tiny", prompt=tokens(200), max_tokens=5, n=2, extra_body={"ignore_eos": True})
        assert server.idle()
        text = httpx2.get(f"{server.url}/metrics", trust_env=False).text
    assert value(text, "headmax_generated_tokens_total") == 20
    assert value(text, "headmax_prompt_tokens_total") == 200 + 72
    assert value(text, "headmax_cached_tokens_total") == 128
    assert value(text, "headmax_prefix_cache_hits_total") == value(text, "headmax_prefix_cache_misses_total") == 1
    assert value(text, "headmax_time_to_first_token_seconds_count") == 4
    assert value(text, "headmax_inter_token_latency_seconds_count") == 16
    assert value(text, "headmax_request_seconds_count") == 2
    assert value(text, "headmax_batch") == value(text, "headmax_queue") == 0
    assert value(text, 'headmax_prefix_cache_bytes{place="cpu"}') > 0
    assert value(text, "headmax_prefix_cache_stores_total") == 1
    assert all(line.split()[3] == "counter" for line in text.splitlines() if line.startswith("# TYPE") and "_total " in line)
    assert value(text, 'headmax_requests_total{path="/v1/completions",status="200"}') == 2


def test_many_clients_each_get_their_own_answer(server: Running, alone: Alone) -> None:
    """24 clients at once, streams and whole answers, greedy and drawn, short and beyond a chunk."""
    prompts = [f"Client {n} asks: " + "what is " * (n % 5) for n in range(24)]
    expected = [alone(prompt, 20, Sampling(seed=n)) for n, prompt in enumerate(prompts)]
    client = server.client

    def call(n: int) -> list[str]:
        texts = []
        for stream in (False, True):
            answer = client.completions.create(model="tiny", prompt=prompts[n], max_tokens=20, seed=n, stream=stream)
            texts.append("".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text)
        return texts

    with ThreadPoolExecutor(24) as pool:
        for n, texts in enumerate(pool.map(call, range(24))):
            assert texts == [expected[n].text] * 2
    assert soon(lambda: server.scheduler.decoding.batch.free() == 8)
