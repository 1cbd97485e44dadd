"""The Mistral tokenizer against sentencepiece, and as Hugging Face loads it."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from headmax.data.encoder import LONGEST, PART, Encoder
from headmax.data.tokenizer import load, mistral
from tests.data.corpus import WORDS, byte_level, document

mistral_common, sentencepiece = pytest.importorskip("mistral_common"), pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    tokenizer = mistral().tokenizer
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def theirs() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_mistral_gives_the_ids_of_sentencepiece_and_back(ours: Tokenizer, theirs: sentencepiece.SentencePieceProcessor) -> None:
    assert ours.get_vocab_size() == theirs.get_piece_size() == 32_000
    draw = random.Random(0)
    texts = ["", " ", "\n", "\x00", "\ufeffa", *(" " * n + "x" for n in range(70)), *("=" * n for n in range(70))]
    texts += ["".join(draw.choices([*WORDS, " ", "\n", "\r\n", "a", "the", "▁"], k=draw.randint(1, 12))) for _ in range(3000)]
    texts += [document(n, lines=30) for n in range(40)]
    for text in texts:
        assert ids(ours, text) == theirs.encode(text), repr(text)
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text.replace("▁", " ")


def test_a_hugging_face_folder_loads_it_right(tmp_path: Path, theirs: sentencepiece.SentencePieceProcessor) -> None:
    mistral().save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 32_000)
    text = "Two  spaces,\n\ta tab, дом, 漢字 and a 🦙 "
    assert tokenizer(text)["input_ids"] == [1, *theirs.encode(text)]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(text) == tokenizer(text)


@pytest.mark.parametrize("kind", ["mistral", "byte-level"])
def test_parts_give_the_ids_of_the_whole(kind: str, tmp_path: Path) -> None:
    loaded = mistral() if kind == "mistral" else load(str(byte_level(tmp_path / "tokenizer.json")))
    encoder = Encoder(loaded.tokenizer, 0, "uint16")
    assert encoder.prefix == (1 if kind == "mistral" else 0)
    for seed in range(12):
        text = document(seed, lines=600)
        parts = list(encoder.parts(text))
        assert len(parts) > 3
        assert "".join(parts) == text
        ((tokens, starts), (none, _)) = encoder.encode([(text, True, 0)])
        assert tokens.tolist() == [0, *ids(loaded.tokenizer, text)]
        assert starts.tolist() == [0]
        assert not len(none)


def test_a_tokenizer_that_joins_lines_is_not_cut_at_them(tmp_path: Path) -> None:
    definition = json.loads(byte_level(tmp_path / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"[^\s\w]+[\r\n]*|\w+|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    definition["model"]["vocab"][".Ċ"] = len(definition["model"]["vocab"])
    definition["model"]["merges"].insert(0, [".", "Ċ"])
    encoder = Encoder(Tokenizer.from_str(json.dumps(definition)), 0, "uint16")
    assert encoder.prefix is None
    text = "One.\nTwo.\n" * PART
    assert list(encoder.parts(text)) == [text]


def test_a_very_long_line_is_cut_for_memory(ours: Tokenizer) -> None:
    encoder = Encoder(ours, 1, "uint16")
    text = "word " * LONGEST
    parts = list(encoder.parts(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) == LONGEST
    assert list(encoder.parts("x" * LONGEST)) == ["x" * LONGEST]


def test_special_tokens_in_a_text_are_text(ours: Tokenizer) -> None:
    ((tokens, _), _) = Encoder(ours, 1, "uint16").encode([("<s> and </s>", True, 0)])
    assert tokens.tolist().count(1) == 1
    assert 2 not in tokens


def test_what_begins_a_document(tmp_path: Path) -> None:
    assert mistral().document_token() == 1
    assert mistral().document_token("</s>") == 2
    loaded = load(str(byte_level(tmp_path / "tokenizer.json")))
    assert loaded.document_token("<|endoftext|>") == 0
    with pytest.raises(ValueError, match=r"puts no token before a text; choose one of its special tokens: <\|endoftext\|>"):
        loaded.document_token()
    with pytest.raises(ValueError, match="there is no token '<doc>'"):
        loaded.document_token("<doc>")


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither 'mistral' nor a tokenizer\.json"):
        load(str(tmp_path / "no.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load(str(tmp_path))
