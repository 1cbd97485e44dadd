"""Text made for tests: several scripts, odd spacing, markup, of any length."""

import gzip
import json
import lzma
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = [
    *["the", "of", "and", "to", "in", "is", "was", "for", "that", "with", "as", "his", "on", "be", "at", "by", "which"],
    *["naïve", "Größe", "дом", "русский", "漢字", "日本語", "한국어", "नमस्ते", "مرحبا", "שלום", "ελληνικά"],
    *["🦙", "👩‍🔬", "e\u0301", "\u00a0", "\t", "  ", " " * 19, "...", "====", "----"],
    *["3.14159", "2026-01-02", "x=f(y)", "__init__", "<s>", "</s>", "<unk>", "<0x0A>", "[INST]"],
]


def document(seed: int, lines: int = 12) -> str:
    draw = random.Random(seed)
    ends = ["\n", "\n", "\n\n", "\n\n\n", " \n"]
    return "".join(" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) + draw.choice(ends) for _ in range(lines)).strip()


def documents(count: int, lines: int = 12) -> list[str]:
    return [f"{n}. {document(n, lines)}" for n in range(count)]


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    """A file of the kind that its name says."""
    kind, *packed = path.suffixes
    if kind == ".parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": list(range(len(texts))), key: texts}), sink, row_group_size=7)
        content = sink.getvalue().to_pybytes()
    elif kind == ".jsonl":
        content = "".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)).encode()
    else:
        content = "\n<|doc|>\n".join(texts).encode()
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": lambda x: pa.compress(x, "zstd", asbytes=True)}
    for suffix in packed:
        content = packers[suffix](content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def byte_level(path: Path, size: int = 400) -> Path:
    """A small GPT-2-like tokenizer.json, which puts nothing before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents(20), trainer)
    tokenizer.save(str(path))
    return path
