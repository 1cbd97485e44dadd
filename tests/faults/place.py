"""A folder with one of everything that commands read, made once, and copies of it to be damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tests.data.corpus import byte_level, documents, write
from tests.faults.called import headmax
from tests.generate.checkpoint import make_model, save

TRAIN = ["train", "mqar-softmax-linear", "--task.num-pairs", "4", "--batch-tokens", "392", "--model.hidden-size", "32", "--device", "cpu"]
TRAIN += ["--eval.every", "0", "--max-steps", "4", "--checkpoint-every", "2"]
PREPARE = ["data", "prepare", "texts", "--tokenizer", "tokenizer.json", "--document-token", "<|endoftext|>", "--workers", "1"]
PREPARE += ["--shard-tokens", "400", "--valid-fraction", "0.2"]
SPEAK = ["train", "softmax-gla-tiny", "--sequence-length", "64", "--batch-tokens", "128", "--device", "cpu", "--eval.every", "0"]
SPEAK += ["--max-steps", "1", "--data", "chats.jsonl"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
EVAL = ["eval", "model", "--tasks", "mqar_4", "--limit", "2", "--device", "cpu"]


def make(folder: Path) -> Path:
    """model, one that was taught to speak, run, data, parts of data, texts, conversations, a prefix, records: all small."""
    folder.mkdir(parents=True)
    save(folder / "model")
    save(folder / "speaker")
    (folder / "speaker/chat_template.jinja").write_text(TEMPLATE)
    said = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "Nobody."}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 3)
    make_model(head_gate=None).save_pretrained(folder / "plain")
    for name, texts in (("a", documents(12, lines=4)), ("b", documents(9, lines=3))):
        write(folder / f"texts/{name}.jsonl", texts)
    byte_level(folder / "tokenizer.json")
    (folder / "prompt.txt").write_text("Once upon a time")
    (folder / "options.yaml").write_text("max-new-tokens: 3\n")
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("mine")
    (folder / "mine.html").write_text("mine")
    for words in (
        [*TRAIN, "--out", "run"],
        [*PREPARE, "--out", "data"],
        *([*PREPARE, "--part", f"{part}/2", "--out", f"part{part}"] for part in (1, 2)),
        ["generate", "model", "--prompt", "Once", "--save-prefix", "prefix", "--device", "cpu"],
        ["convert", "plain", "fla", "--to", "fla"],
        [*EVAL, "--work", "work", "--out", "records.jsonl"],
    ):
        done = headmax(folder, *words)
        assert done.code == 0, done
    return folder


def copy(template: Path, folder: Path) -> Path:
    return Path(shutil.copytree(template, folder, symlinks=True))


def contents(folder: Path) -> dict[str, str]:
    """What every file holds; unfinished ones are nobody's."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".tmp" not in str(path.relative_to(folder)))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
