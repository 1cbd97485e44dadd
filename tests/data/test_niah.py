"""Needles: in their place, once, and within the length."""

import re

import pytest

from headmax.data.niah import ANSWER_TOKENS, DEPTHS, NOISE, Needles, Sample, generated_prose, sentences

pytest.importorskip("wonderwords")

PROSE = sentences("\n<|doc|>\n".join(f"The {n}th house stood by the river for {n * 7} years. Nobody lived in it!" for n in range(900)))


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("task", [1, 2, 3])
@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_needles_lie_where_they_should(task: int, length: int) -> None:
    made = list(Needles(task, length, PROSE).samples(200, count))
    assert len(made) == 200
    for n, sample in enumerate(made):
        assert sample.prompt.count(sample.needle) == 1
        assert sample.prompt.count(sample.value) == 1
        assert sample.tokens == count(sample.prompt) <= length - ANSWER_TOKENS
        assert sample.tokens > length - ANSWER_TOKENS - 60  # as long as fits, but for a sentence or two
        assert sample.depth == DEPTHS[n * 17 % 40]
        before, after = text_around(sample)
        units = [part.count(NOISE) if task == 1 else len(sentences(part)) for part in (before, after)]
        assert units[0] == int(sum(units) * sample.depth / 100)
        assert re.fullmatch(r"\d{7}" if task < 3 else r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", sample.value)
        assert re.fullmatch(r".+-.+", sample.key)
        assert sample.prompt.endswith(f"for {sample.key} mentioned in the provided text is")
    depths = [sample.depth for sample in made]
    assert {depth: depths.count(depth) for depth in DEPTHS} == dict.fromkeys(DEPTHS, 5)


def text_around(sample: Sample) -> tuple[str, str]:
    text = sample.prompt.split(" afterwards.\n", 1)[1].rsplit("\nWhat is the special magic", 1)[0]
    before, after = text.split(sample.needle)
    return before, after


def test_the_same_seed_gives_the_same_needles() -> None:
    first, again, other = (list(Needles(2, 1024, PROSE).samples(5, count, seed)) for seed in (1, 1, 2))
    assert first == again
    assert not {sample.value for sample in first} & {sample.value for sample in other}
    assert len({sample.key for sample in first}) == 5


def test_prose_is_repeated_where_it_does_not_suffice() -> None:
    (sample,) = Needles(3, 2048, ["One sentence.", "And another."]).samples(1, count)
    assert sample.prompt.count("And another.") > 100


def test_bad_needles_are_refused() -> None:
    with pytest.raises(ValueError, match="task must be 1, 2 or 3, got 4"):
        Needles(4, 1024)
    with pytest.raises(ValueError, match="haystack must be sentences of prose for task 2, got none"):
        Needles(2, 1024)
    with pytest.raises(ValueError, match="length 150 is too short for a question and 128 tokens of answer"):
        list(Needles(1, 150).samples(1, count))


def test_generated_prose_is_the_same_every_time_and_has_no_numbers() -> None:
    text = generated_prose(50)
    assert text == generated_prose(50) != generated_prose(50, seed=1)
    assert len(set(text)) == 50
    assert all(sentence.endswith(".") and not any(map(str.isdigit, sentence)) for sentence in text)
