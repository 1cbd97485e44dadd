"""The prefix cache: what is found, what goes first, what survives a restart, and what a damaged folder does."""

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headmax.generate import Engine
from headmax.generate.step import State
from headmax.layers.mixers.state import RecurrentState
from headmax.serve.cache import PrefixCache, Tree, nbytes
from headmax.serve.folder import Folder
from tests.generate.checkpoint import MODELS, make_model, tokens

from .calling import job, kept, scheduling, soon, submit

CHUNK = 4


def text(letters: str) -> torch.Tensor:
    """A chunk for each letter."""
    return torch.tensor([ord(letter) for letter in letters for _ in range(CHUNK)])


def states(number: float, size: int = 100) -> tuple[State, ...]:
    return (RecurrentState(torch.full((size,), number), ()),)


def content(found: object) -> float:
    assert isinstance(found, tuple)
    return float(found[0].recurrent[0])


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab", max_size=6), st.integers(0, CHUNK - 1))
@settings(max_examples=150)
def test_a_tree_finds_what_a_list_of_texts_would(kept: list[str], asked: str, more: int) -> None:
    tree = Tree(CHUNK)
    for letters in kept:
        tree.grow(text(letters)).saved = True
    question = torch.cat([text(asked), torch.full((more,), 7)])
    match = tree.match(question)
    fitting = [len(letters) for letters in kept if asked.startswith(letters) and len(letters) * CHUNK < len(question)]
    assert (match.node.depth if match.node is not None else 0) == max(fitting, default=0)
    common = [
        sum(all(a == b for a, b in zip(letters[: n + 1], asked, strict=False)) for n in range(min(len(letters), len(asked))))
        for letters in kept
    ]
    assert match.common == max(common)
    for letters in set(kept):
        node = tree.find(text(letters))
        assert node is not None
        assert node.tokens().tolist() == text(letters).tolist()
        node.saved = False
        tree.prune(node)
    assert tree.root.children == {}


def test_states_are_found_again_and_the_least_recently_used_go_first() -> None:
    size = nbytes(states(0)) + 4 * CHUNK
    cache = PrefixCache(CHUNK, {"cpu": 3 * size})
    for n, letter in enumerate("abc"):
        cache.put(text(letter), states(n))
    assert cache.tiers[0].used == 3 * size
    first = cache.match(text("ax")).node
    assert first is not None
    assert content(cache.fetch(first)) == 0
    cache.put(text("d"), states(3))
    assert [cache.has(text(letter)) for letter in "abcd"] == [True, False, True, True]
    assert cache.counts == {"stores": 4, "evictions": 1}
    assert cache.match(text("bx")) == (None, 0), "its path has gone as well"
    cache.put(text("e"), states(4, 10**4))
    assert not cache.has(text("e")), "more than there is room for"
    assert cache.tree.find(text("e")) is None
    assert cache.tiers[0].used <= 3 * size


def test_a_match_leaves_a_token_to_read_and_tells_where_texts_branch() -> None:
    cache = PrefixCache(CHUNK, {"cpu": 10**6})
    cache.put(text("ab"), states(2))
    assert cache.match(text("ab")).node is None
    node, common = cache.match(torch.cat([text("ab"), text("a")[:1]]))
    assert node is not None
    assert (node.depth, common) == (2, 2)
    assert cache.match(text("axy")) == (None, 1)
    with pytest.raises(ValueError, match="tokens must be whole chunks of 4 tokens, got 3 tokens"):
        cache.put(text("a")[:3], states(0))


def test_what_does_not_fit_moves_on_to_the_next_memory_and_back() -> None:
    """Two kinds of memory, stood for by two devices that a CPU has."""
    size = nbytes(states(0)) + 4 * CHUNK
    cache = PrefixCache(CHUNK, {"cpu": size, "cpu:0": 2 * size})
    for n, letter in enumerate("abcd"):
        cache.put(text(letter), states(n))
    assert [tier.used for tier in cache.tiers] == [size, 2 * size]
    assert [cache.has(text(letter)) for letter in "abcd"] == [False, True, True, True]
    node = cache.match(text("bx")).node
    assert node is not None
    assert content(cache.fetch(node)) == 1
    assert node in cache.tiers[0].sizes
    assert [tier.used for tier in cache.tiers] == [size, 2 * size]


def folder(path: Path, limit: int = 10**6, origin: str = "model a", size: int = 100) -> Folder:
    return Folder(path, limit, origin, states(0, size))


def test_a_folder_survives_a_restart(tmp_path: Path) -> None:
    cache = PrefixCache(CHUNK, {"cpu": 10**6}, folder(tmp_path))
    cache.put(text("ab"), states(2))
    cache.put(text("abc"), states(3))
    cache.close()
    again = PrefixCache(CHUNK, {"cpu": 10**6}, folder(tmp_path))
    node = again.match(text("abcd")).node
    assert node is not None
    promise = again.fetch(node)
    assert not isinstance(promise, tuple)
    assert content(again.arrived(node, promise)) == 3
    assert content(again.fetch(node)) == 3, "now in memory"
    again.close()
    other = PrefixCache(CHUNK, {"cpu": 10**6}, folder(tmp_path, origin="model b"))
    assert other.match(text("abcd")) == (None, 0)
    other.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2, "what is another model's stays"


def test_torn_files_are_ignored_and_one_that_breaks_later_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PrefixCache(CHUNK, {"cpu": 10**6}, folder(tmp_path))
    for letter in "abcd":
        cache.put(text(letter), states(ord(letter)))
    cache.close()
    named = {letter: tmp_path / f"{cache.folder.name(text(letter).numpy())}.safetensors" for letter in "abcd"}  # type: ignore[union-attr]
    whole = named["a"].read_bytes()
    named["a"].write_bytes(whole[: len(whole) // 2])
    named["b"].write_bytes(named["c"].read_bytes())
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "left.safetensors.tmp").touch()
    again = PrefixCache(CHUNK, {"cpu": 10**6}, folder(tmp_path))
    assert [again.has(text(letter)) for letter in "abcd"] == [False, False, True, True]
    assert not (tmp_path / "left.safetensors.tmp").exists()
    assert caplog.text.count("ignored, not whole") == 4
    for letter, damage in (("c", lambda file: file.unlink()), ("d", lambda file: file.write_bytes(whole[:-7]))):
        node = again.match(torch.cat([text(letter), text("z")])).node
        assert node is not None
        damage(named[letter])
        promise = again.fetch(node)
        assert not isinstance(promise, tuple)
        assert again.arrived(node, promise) is None
        assert not again.has(text(letter))
    assert again.counts["failed_reads"] == 2
    again.close()


def test_a_folder_has_a_limit_and_one_owner(tmp_path: Path) -> None:
    own = folder(tmp_path, limit=2000)
    cache = PrefixCache(CHUNK, {"cpu": 10**6}, own)
    with pytest.raises(ValueError, match="another process is writing to it"):
        folder(tmp_path)
    for n, letter in enumerate("abcdefgh"):
        cache.put(text(letter), states(n))
        time.sleep(0.002)
    own.thread.submit(int).result()
    assert own.nbytes <= 2000
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) == own.nbytes
    cache.match(text("a"))
    assert sum(node.saved for node in cache.on_disk.values()) == len(cache.on_disk) == len(list(tmp_path.glob("*.safetensors"))) > 0
    cache.close()


def test_states_that_wait_to_be_written_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may always wait, however large."""
    monkeypatch.setattr("headmax.serve.folder.MOST_WAITING", 5 * nbytes(states(0)))
    own, held = folder(tmp_path), threading.Event()
    own.thread.submit(held.wait)
    assert [own.save(text(letter).numpy(), states(0)) for letter in "abcdef"] == [True] * 5 + [False]
    held.set()
    own.thread.submit(int).result()
    assert own.save(text("g").numpy(), states(0, 10**4))
    own.close()
    assert (own.waiting, len(list(tmp_path.glob("*.safetensors")))) == (0, 6)


def test_a_folder_that_cannot_be_written_to_is_said_and_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = folder(tmp_path)
    (tmp_path / f"{own.name(text('a').numpy())}.safetensors").mkdir()
    cache = PrefixCache(CHUNK, {"cpu": 10**6}, own)
    cache.put(text("a"), states(1))
    own.thread.submit(int).result()
    node = cache.match(text("ab")).node
    assert node is not None
    assert not node.saved
    assert content(cache.fetch(node)) == 1
    assert "where a file is to be written" in caplog.text
    cache.close()


@pytest.mark.parametrize(("name", "exact"), [*((name, False) for name in MODELS), ("gla", True), ("hybrid", True)])
def test_prompts_turns_and_branches_are_reused(name: str, exact: bool) -> None:
    """The last chunk boundary of a prompt, of a turn, and where texts branch; a text that two ask for at once is read once."""
    document = tokens(300)
    with scheduling(make_model(name), deterministic=exact) as scheduler:
        (first,) = submit(scheduler, job(document + tokens(100, seed=1), 150))
        assert first.wait().cached == 0
        turn = document + tokens(100, seed=1) + first.tokens[0]
        assert soon(lambda: kept(scheduler, turn[:512]))
        (second,) = submit(scheduler, job(turn + tokens(5, seed=2), 3))
        assert second.wait().cached == 512, "the turn's last boundary, 550 tokens in"
        branches = [submit(scheduler, job(document + tokens(150, seed=3 + n), 3))[0].wait().cached for n in range(3)]
        assert branches == [0, 256, 256], "the first to branch leaves states where it does"
        at_once = submit(scheduler, *(job(tokens(300, seed=8) + tokens(150, seed=9 + n), 3) for n in range(3)))
        assert [caller.wait().cached for caller in at_once] == [0, 256, 256], "the others wait for the first to read what they share"
        (again,) = submit(scheduler, job(document + tokens(150, seed=3), 3))
        assert again.wait().cached == 384
    with scheduling(make_model(name), cache=0) as scheduler:
        assert submit(scheduler, job(turn, 3))[0].wait().cached == 0


@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_a_cache_too_small_for_anything_changes_nothing(name: str) -> None:
    model = make_model(name)
    prompts = [tokens(200) + tokens(100 + n, seed=n) for n in range(6)]
    results = []
    for limit in (0, 1, 3 * Engine(model, max_length=500).state_bytes(), 10**8):
        with scheduling(model, cache=limit, deterministic=True, max_length=500) as scheduler:
            callers = submit(scheduler, *(job(prompt, 8, logprobs=True) for prompt in prompts))
            results.append([(caller.wait().tokens, caller.logprobs) for caller in callers])
            assert scheduler.cache is None or scheduler.cache.tiers[0].used <= limit
    assert results[0] == results[1] == results[2] == results[3]


def test_states_from_the_folder_serve_prompts(tmp_path: Path) -> None:
    model, prompt = make_model("hybrid"), tokens(700)
    like = Engine(model, max_batch=1, max_length=1).prefill([0]).states
    answers = []
    for _ in range(2):
        own = Folder(tmp_path, 10**8, "origin", like)
        with scheduling(model, cache=PrefixCache(128, {"cpu": 10**8}, own), deterministic=True) as scheduler:
            callers = submit(scheduler, *(job([*prompt, n], 9, logprobs=True) for n in range(3)))
            answers.append([(caller.wait().tokens, caller.logprobs) for caller in callers])
            cached = [caller.cached for caller in callers]
    assert cached == [640, 640, 640]
    assert answers[0] == answers[1]
    wrong = Folder(tmp_path, 10**8, "origin", Engine(make_model("gla", hidden_size=64), max_batch=1).prefill([0]).states)
    cache = PrefixCache(128, {"cpu": 10**8}, wrong)
    with scheduling(model, cache=cache, deterministic=True) as scheduler:
        assert submit(scheduler, job([*prompt, 0], 9, logprobs=True))[0].wait().tokens == answers[0][0][0]
        assert cache.counts["failed_reads"] >= 1
