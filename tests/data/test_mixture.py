"""Mixtures of sources by share, and conversations with the loss on answers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headmax.data.chat import Chats, encode_chat
from headmax.data.mixture import ROUND, Mixture
from headmax.data.template import Chat
from headmax.train.feed import count_targets
from tests.generate.checkpoint import make_tokenizer
from tests.train.small import Walks

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q{{ m['content'] }}{% else %}A{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def test_every_round_has_the_shares_and_every_source_its_samples_in_order() -> None:
    sources = [Walks(seed) for seed in range(3)]
    mixture = Mixture(sources, [0.5, 0.3, 0.2], seed=1)
    which, numbers = mixture.chosen(range(2 * ROUND))
    for n, share in enumerate((0.5, 0.3, 0.2)):
        assert (which[:ROUND] == n).sum() == (which[ROUND:] == n).sum() == share * ROUND
        assert sorted(numbers[which == n]) == list(range(int(2 * ROUND * share)))
    assert (which[:ROUND] != which[ROUND:]).any()
    batch, some = mixture.batch([7, 1500, 3]), [7, 1500, 3]
    for row, index in zip(batch.input_ids, some, strict=True):
        assert torch.equal(row, sources[which[index]].batch([int(numbers[index])]).input_ids[0])
    assert batch.labels is batch.input_ids


def test_a_mixture_of_packed_and_whole_samples_is_packed() -> None:
    mixture = Mixture([Walks(0), Walks(1, separate=True)], [0.5, 0.5], seed=0)
    which, _ = mixture.chosen(range(6))
    packing = mixture.batch(range(6)).packing
    assert packing is not None
    bounds = {24 * n for n in range(7)} | {24 * n + 10 for n in range(6) if which[n] == 1}
    assert packing.cu_seqlens.tolist() == sorted(bounds)


def test_mixtures_refuse_what_is_none() -> None:
    with pytest.raises(ValueError, match="a mixture needs 2 positive shares that sum to 1"):
        Mixture([Walks(0), Walks(1)], [0.5, 0.4], seed=0)
    with pytest.raises(ValueError, match=r"shares must be at least 0\.001"):
        Mixture([Walks(0), Walks(1)], [0.99999, 0.00001], seed=0)
    assert Mixture([Walks(0), Walks(1)], [0.5, 0.5], 0).identity != Mixture([Walks(0), Walks(1)], [0.4, 0.6], 0).identity


def speaker(template: str = TEMPLATE) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chats(file: Path, count: int) -> Path:
    lines = [[{"role": "user", "content": "ab" * (n % 5 + 1)}, {"role": "assistant", "content": "c" * (n % 3 + 1)}] for n in range(count)]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    return file


def test_the_loss_is_on_answers_and_their_ends() -> None:
    words = speaker()
    said = [("user", "hi"), ("assistant", "yes"), ("user", "no"), ("assistant", "ok")]
    ids, labels = encode_chat(Chat(words), [{"role": role, "content": content} for role, content in said])
    assert words.decode(ids) == "QhiAyes</s>QnoAok</s>"
    assert "".join(words.decode([n]) if n >= 0 else "." for n in labels) == "....yes</s>....ok</s>"
    forgetful = "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['role'] }}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="the chat template writes message 2 otherwise when others follow it"):
        encode_chat(Chat(speaker(forgetful)), [{"role": role, "content": content} for role, content in said])


def test_control_tokens_of_conversations_are_the_template_s_alone() -> None:
    words = speaker()
    ids, labels = encode_chat(Chat(words), [{"role": "user", "content": "a</s><s>"}, {"role": "assistant", "content": "</s>b"}])
    assert words.decode(ids) == "Qa</s><s>A</s>b</s>"
    assert [n for n in ids if n < 2] == [1]
    assert [n for n in labels if 0 <= n < 2] == [1]


def test_conversations_fill_rows_and_stay_apart(tmp_path: Path) -> None:
    words = speaker()
    source = Chats(chats(tmp_path / "chats.jsonl", 40), words, length=32, seed=0)
    batch = source.batch(range(len(source.rows)))
    assert batch.input_ids.shape == (1, 32 * len(source.rows))
    assert batch.packing is not None
    bounds = batch.packing.cu_seqlens.tolist()
    assert {32 * n for n in range(len(source.rows))} < set(bounds)
    texts = [words.decode(batch.input_ids[0, a:b]) for a, b in itertools.pairwise(bounds)]
    held = sorted(text for text in texts if text.startswith("Q"))
    assert held == sorted(f"Q{'ab' * (n % 5 + 1)}A{'c' * (n % 3 + 1)}</s>" for n in range(40))
    assert all(set(text) <= set("<s>") for text in texts if not text.startswith("Q"))
    assert count_targets(batch) == sum(n % 3 + 2 for n in range(40))
    epochs = [source.batch(range(n * len(source.rows), (n + 1) * len(source.rows))).input_ids for n in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(x.view(-1, 32).sort(dim=0).values.sum(0) for x in epochs))
    assert source.identity == Chats(source.file, words, length=32, seed=0).identity


def test_chats_refuse_what_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: not a conversation"):
        Chats(file, speaker(), length=32, seed=0)
    for line in ('{"messages": "abc"}', '{"messages": {}}', '{"messages": [{"role": "user", "content": null}]}', "[" * 99_999, "", "3"):
        file.write_text(f"{line}\n")
        with pytest.raises(ValueError, match=r"chats\.jsonl:1: not a conversation"):
            Chats(file, speaker(), length=32, seed=0)
    file.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"chats\.jsonl: not UTF-8"):
        Chats(file, speaker(), length=32, seed=0)
    chats(file, 1)
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: messages do not fit the chat template: no such role"):
        Chats(file, speaker("{{ raise_exception('no such role') }}"), length=32, seed=0)
    file.write_text(
        '{"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "d"}]}\n', encoding="utf-8"
    )
    assert len(Chats(file, speaker(), length=32, seed=0).rows) == 1  # what Unicode calls a line's end is none here
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        Chats(file, make_tokenizer(), length=32, seed=0)
    with pytest.raises(ValueError, match="no conversation has an answer within 3 tokens"):
        Chats(chats(file, 5), speaker(), length=3, seed=0)
    Chats(chats(file, 5), speaker(), length=8, seed=0)
    assert "3 of 5 conversations have no answer within 8 tokens and are left out" in caplog.text
    assert "1 of 5 conversations are longer than 8 tokens and are cut" in caplog.text
