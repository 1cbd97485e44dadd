"""Tokenizers: Mistral's, from the package mistral-common without a download; any tokenizer.json; or a newly trained one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headmax import durable

FILES = ("tokenizer.json", "tokenizer_config.json")
"""Files that `AutoTokenizer.from_pretrained` needs in a folder."""
SPACE = "▁"
"""Sentencepiece's symbol for a space."""


@dataclass(frozen=True)
class Loaded:
    """A tokenizer and its Hugging Face configuration."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """tokenizer_config.json."""

    def files(self) -> dict[str, bytes]:
        """The content of `FILES`."""
        return dict(zip(FILES, (self.tokenizer.to_str().encode(), json.dumps(self.config, indent=2).encode()), strict=True))

    def save(self, folder: Path) -> None:
        """Writes a folder that `AutoTokenizer.from_pretrained` loads."""
        for name, content in self.files().items():
            durable.write(folder / name, content)

    @property
    def vocab_size(self) -> int:
        return 1 + max(self.tokenizer.get_vocab().values())

    def document_token(self, name: str | None = None) -> int:
        """The token that begins a document: the one of this name, or the one that the tokenizer itself puts before a text."""
        if name is None:
            probe = self.tokenizer.encode("a")
            if probe.special_tokens_mask[0]:
                return probe.ids[0]
        elif (token_id := self.tokenizer.token_to_id(name)) is not None:
            return token_id
        special = [token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special]
        reason = "the tokenizer puts no token before a text" if name is None else f"there is no token {name!r}"
        choice = f"special tokens: {' '.join(special)}" if special else "tokens"
        raise ValueError(f"document_token: {reason}; choose one of its {choice}")


def load(name: str) -> Loaded:
    """The tokenizer of "mistral", a tokenizer.json, or a folder with one; a tokenizer_config.json in the same folder is read too."""
    if name == "mistral":
        return mistral()
    path = Path(name)
    path = path / FILES[0] if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer {name!r}: neither 'mistral' nor a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = path.with_name(FILES[1])
    return Loaded(tokenizer, durable.read_json(config) if config.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"})


def encode_text(tokenizer: Any, text: str, *, start: bool = True, offsets: bool = False) -> Any:
    """Encodes a text from a user with a Hugging Face tokenizer, to the ids of `headmax data prepare`.

    Control tokens in the text, such as "</s>", are encoded as plain characters; with `start`, the tokenizer puts its own before the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not Unicode: half a surrogate pair at character {error.start}; give text in UTF-8") from error
    given = {"return_offsets_mapping": True} if offsets else {}
    return tokenizer(text, add_special_tokens=start, split_special_tokens=True, **given)


def mistral() -> Loaded:
    """The 32,000 pieces of Mistral 7B (0.1), with byte fallback: the ids of sentencepiece, and `<s>` before a text."""
    if importlib.util.find_spec("mistral_common") is None or importlib.util.find_spec("sentencepiece") is None:
        raise ValueError("tokenizer 'mistral' needs mistral-common with sentencepiece: pip install '.[train]' in a checkout of headmax")
    import mistral_common
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"))
    names = [pieces.id_to_piece(n) for n in range(pieces.get_piece_size())]
    vocab = {piece: n for n, piece in enumerate(names)}
    # Sentencepiece merges the pair with the highest score, the leftmost on a tie; a list of merges needs a total order. Ties are different
    # splits of one piece, and matter for runs of spaces only: there, the longest left part first gives sentencepiece's result.
    merges = [
        (-pieces.get_score(n), -cut, (piece[:cut], piece[cut:]))
        for n, piece in enumerate(names)
        if not (pieces.is_byte(n) or pieces.is_control(n) or pieces.is_unknown(n))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, [pair for _, _, pair in sorted(merges)], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special.values()])
    return Loaded(
        tokenizer,
        {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False, "model_max_length": 10**30},
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Loaded:
    """A byte-level BPE trained on `texts`. It encodes any text and puts `<s>` before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "<s>"}
    return Loaded(tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False})


def byte_lengths(tokenizer: Tokenizer) -> list[int]:
    """Bytes of text per token of a byte-level tokenizer, by token id; 0 for special tokens."""
    special = tokenizer.get_added_tokens_decoder()
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    # In a byte-level vocabulary every character of a token stands for one byte.
    return [0 if number in special else len(names[number]) for number in range(len(names))]
