"""The study's data: token shards, needle texts and questions in one folder, and that folder in pieces small enough to be carried."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headmax import durable, fields
from headmax.data.dataset import TokenShards
from headmax.data.niah import Needles, sentences
from headmax.data.prepare import PrepareConfig, prepare
from headmax.data.shards import INDEX, Index, verify
from headmax.eval import names, requests
from headmax.eval.local import read_text
from headmax.eval.requests import Request
from headmax.train.loading import load_tokenizer
from lab.study import needles, trials

CORPUS, PIECES, MANIFEST = "corpus", "pieces", "pieces.json"
QUESTIONS, ANSWERS = "requests.jsonl", "answers.json"
SHARD_TOKENS = 8_000_000
"""Shards are compressed and unpacked side by side."""
NEEDLE_QUESTIONS, SQUAD_QUESTIONS = 80, 1000
"""For each task and length; and of the SQuAD subset."""
SQUAD_TOKENS = 48
"""Of an answer, at most."""
HAYSTACK = 100
"""Sequences of the training tokens that needles to train on lie in."""


@dataclass(frozen=True)
class Packed:
    """A file of the corpus, compressed in a piece."""

    name: str
    piece: int
    sha256: str
    """Of the file itself."""


def build(config: PrepareConfig, squad: Path, haystack: Path, out: Path, say: Callable[[str], object]) -> Index:
    """Writes out/corpus: shards, needle texts, questions; what is there is kept, so that an interrupted call is made again."""
    corpus = out / CORPUS
    index = prepare(config, corpus)
    say(f"{index.tokens('train'):,} training tokens, {index.tokens('valid'):,} to validate on")
    tokenizer = load_tokenizer(corpus)
    if not (corpus / needles.NEEDLES).exists():
        text = TokenShards(corpus, length=trials.LENGTH, seed=needles.SEED)
        tokens = text.batch(range(min(HAYSTACK, text.num_samples))).input_ids
        training_text = sentences(tokenizer.decode(np.ravel(tokens), skip_special_tokens=True))
        needles.write(corpus / needles.NEEDLES, trials.NEEDLE_STEPS * trials.BATCH, trials.LENGTH, training_text, tokenizer)
        say("needle texts")
    if not (corpus / QUESTIONS).exists():
        asked, answers = questions(squad, haystack, tokenizer)
        durable.write(corpus / ANSWERS, json.dumps(answers))
        requests.write(corpus / QUESTIONS, asked)
        say(", ".join(f"{task}: {len(each)}" for task, each in asked.items()))
    return index


def questions(squad: Path, haystack: Path, tokenizer: Any) -> tuple[dict[str, list[Request]], dict[str, list[str]]]:
    """What models are asked, by task, and the answers of those that answer in words, by the request's id."""
    prose, asked = sentences(read_text(haystack)), dict[str, list[Request]]()
    for task, (kind, length) in names.NIAH.items():
        made = Needles(kind, length, prose if kind > 1 else ()).samples(NEEDLE_QUESTIONS, lambda text: len(tokenizer.encode(text)))
        asked[task] = [needle_request(sample.prompt, sample.value, tokenizer) for sample in made]
    rows = [json.loads(line) for line in read_text(squad).splitlines()]
    rows = random.Random(0).sample(rows, min(SQUAD_QUESTIONS, len(rows)))
    texts = [f"{row['context']}\nQuestion: {row['question']}\nAnswer:" for row in rows]
    asked["squad"] = [Request("generate", tuple(tokenizer.encode(text)), until=("\n",), max_new_tokens=SQUAD_TOKENS) for text in texts]
    return asked, {request.id: row["answers"] for request, row in zip(asked["squad"], rows, strict=True)}


def needle_request(prompt: str, value: str, tokenizer: Any) -> Request:
    """Answered when every token of the value is the likeliest one: what greedy decoding would write."""
    context, whole = (tuple(tokenizer.encode(text)) for text in (prompt, f"{prompt} {value}"))
    return Request("loglikelihood", context, whole[len(context) :])


def pack(out: Path, piece_bytes: int, say: Callable[[str], object]) -> list[Path]:
    """Writes out/pieces/1, 2, ...: the corpus, each file compressed with xz, in as few pieces of at most `piece_bytes` as it takes."""
    paths = sorted(path for path in (out / CORPUS).iterdir() if path.is_file())
    with ThreadPoolExecutor() as pool:
        packed = dict(zip(paths, pool.map(lambda path: lzma.compress(path.read_bytes()), paths), strict=True))
    sizes = [0] * -(-sum(map(len, packed.values())) // piece_bytes)
    piece: dict[Path, int] = {}
    for path in sorted(paths, key=lambda path: -len(packed[path])):
        piece[path] = sizes.index(min(sizes))
        sizes[piece[path]] += len(packed[path])
    if max(sizes) > piece_bytes:
        raise ValueError(f"{out}: the files do not fit into {len(sizes)} pieces of {piece_bytes:,} bytes; allow larger ones")
    manifest = json.dumps([asdict(Packed(path.name, piece[path] + 1, sha256(path))) for path in paths], indent=1)
    for n, size in enumerate(sizes):
        folder = out / PIECES / str(n + 1)
        durable.write(folder / MANIFEST, manifest)
        for path in paths:
            if piece[path] == n:
                durable.write(folder / f"{path.name}.xz", packed[path])
        say(f"{folder}: {size / 2**20:.1f} MiB")
    return [out / PIECES / str(n + 1) for n in range(len(sizes))]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(data: Path) -> Path:
    """data/corpus, made from data/pieces where it is not there yet, every file as its checksum says."""
    corpus = data / CORPUS
    if (corpus / INDEX).is_file():
        return corpus
    manifest = next(iter(sorted((data / PIECES).glob(f"*/{MANIFEST}"))), None)
    if manifest is None:
        raise FileNotFoundError(f"{data}: neither {CORPUS}/{INDEX} nor {PIECES}/N/{MANIFEST}; make them with `python -m lab study data`")
    files = [fields.build(Packed, entry) for entry in json.loads(manifest.read_text())]
    if missing := sorted({file.piece for file in files if not source(data, file).is_file()}):
        raise FileNotFoundError(f"{data / PIECES}: piece {', '.join(map(str, missing))} is not here; bring all pieces")
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda file: restore(data, file), sorted(files, key=lambda file: file.name == INDEX)[:-1]):
            pass
    restore(data, next(file for file in files if file.name == INDEX))  # last: it says that all is there
    verify(corpus)
    return corpus


def source(data: Path, file: Packed) -> Path:
    return data / PIECES / str(file.piece) / f"{durable.file_name(file.name, MANIFEST)}.xz"


def restore(data: Path, file: Packed) -> None:
    path = data / CORPUS / file.name
    durable.write(path, lzma.decompress(source(data, file).read_bytes()))
    if sha256(path) != file.sha256:
        path.unlink()
        raise ValueError(f"{path}: not what was packed (its checksum differs); bring the pieces again")


def answered(tokens: Sequence[str], text: str) -> bool:
    """Whether a text contains one of the answers, whatever the case."""
    return any(answer.strip().lower() in text.lower() for answer in tokens if answer.strip())
