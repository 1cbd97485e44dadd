"""Bad inputs as data: command lines, and files damaged before a command reads them; most are drawn by hypothesis."""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tyro.constructors import PrimitiveConstructorSpec

from headmax.cli.run import load
from headmax_cli.commands import COMMANDS
from tests.faults.place import EVAL, PREPARE, SPEAK, TRAIN

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Bad:
    command: str
    about: str
    words: tuple[object, ...]
    damage: Damage | None = None
    """Done to a copy of the place before the command runs."""
    must: bool = True
    """Whether there is nothing to do but to refuse; a number changed in a file may happen to be as good as the one before."""
    stdin: bytes = b""
    environment: tuple[tuple[str, str], ...] = ()


def drawn(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """So many different values, the same for a seed."""
    found: dict[str, Any] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=3 * count,
        database=None,
        derandomize=False,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.setdefault(repr(value), value)

    collect()
    return list(found.values())[-count:]  # the first are the simplest


GENERATE = ("generate", "model", "--prompt", "Once", "--device", "cpu", "--max-new-tokens", "2")
CALLS: dict[str, tuple[object, ...]] = {
    "train": (*TRAIN, "--out", "out"),
    "data prepare": (*PREPARE, "--out", "out"),
    "data merge": ("data", "merge", "part1", "part2", "--out", "out"),
    "data check": ("data", "check", "data"),
    "curves": ("curves", "run", "--out", "out"),
    "generate": GENERATE,
    "chat": ("chat", "model", "--device", "cpu"),
    "serve": ("serve", "model", "--device", "cpu", "--port", "0"),
    "eval": (*EVAL, "--work", "out"),
    "eval tables": ("eval", "tables", "records.jsonl"),
    "inspect": ("inspect", "model", "--prompt", "Once", "--out", "out.html"),
    "convert": ("convert", "run", "out"),
    "recipes": ("recipes",),
    "plan": ("plan", "softmax-gla-340m"),
    "bench kernels": (
        "bench",
        "kernels",
        "--device",
        "cpu",
        "--length",
        "16",
        "--key",
        "8",
        "--value",
        "8",
        "--ops",
        "gla",
        "--rounds",
        "1",
    ),
    "bench train": ("bench", "train", "--rounds", "1"),
    "bench decode": ("bench", "decode", "--device", "cpu", "--recipe", "softmax-gla-tiny"),
    "bench serve": ("bench", "serve", "model", "--device", "cpu", "--conversations", "1"),
    "bench eval": ("bench", "eval", "model", "--device", "cpu"),
    "bench tune": ("bench", "tune"),
    "demo": ("demo", "--out", "out"),
    "demo recall": ("demo", "recall", "--out", "out"),
    "env": ("env",),
}
"""Every command as it works, or would with a GPU."""

NO_NUMBER = st.sampled_from(["", "x", "1e", "--", "0x10", "1,5", "½", "1 2", "None", "\x00", "9" * 5000 + "x"]) | st.text(
    st.characters(categories=["L", "S"]), min_size=1, max_size=9
)
NO_NUMBER = NO_NUMBER.filter(
    lambda text: text.lower() not in ("nan", "inf", "infinity") and not text.startswith("-") and not text.isnumeric()
)
OUT_OF_RANGE = st.sampled_from(["-1", "-9223372036854775809", "1" + "0" * 30, "nan", "inf", "-inf", "-0.5", "1e309"])
NO_WHOLE_NUMBER = {"nan", "inf", "-inf", "-0.5", "1e309"}


def typed(command: str) -> Iterator[tuple[str, str]]:
    """The options of a command that take a number or one of a few words, and which: int, float, count or word."""
    function = load(COMMANDS[command], [str(word) for word in CALLS[command][len(command.split()) :]])
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        marks = getattr(parameter.annotation, "__metadata__", ())
        plain = parameter.annotation.__origin__ if marks else parameter.annotation
        kinds = {plain, *get_args(plain)}
        made = any(isinstance(mark, PrimitiveConstructorSpec) for mark in marks)
        few = "Literal" in str(plain) or name == "device"
        kind = "count" if made and int in kinds else "int" if int in kinds else "float" if float in kinds else "word" if few else None
        if kind is not None and parameter.kind is not parameter.POSITIONAL_ONLY and bool not in kinds:
            yield f"--{name.replace('_', '-')}", kind


TRAINING = [
    "--sequence-length",
    "--seed",
    "--max-steps",
    "--checkpoint-every",
    "--max-skipped-steps",
    "--compute.micro-batch",
    "--checkpoint.keep-last",
]
TRAINING += [
    "--model.hidden-size",
    "--model.num-hidden-layers",
    "--model.num-heads",
    "--model.vocab-size",
    "--parallel.context",
    "--eval.every",
]
RATES = [
    "--optim.lr",
    "--optim.eps",
    "--optim.grad-clip",
    "--optim.weight-decay",
    "--gate-balance",
    "--schedule.final-lr",
    "--schedule.decay-fraction",
]
RATES += [
    "--model.rotary-base",
    "--model.norm-eps",
    "--model.initializer-range",
    "--model.head-gate.temperature",
    "--model.head-gate.init-std",
]
STARTS_A_SERVER = ("serve", "bench serve", "demo", "demo recall", "bench decode", "bench eval")
"""Or what takes minutes: only what must be refused."""


def options(seed: int, each: int) -> Iterator[Bad]:
    """Values that no option of that type takes, and numbers that few do."""
    for command, words in CALLS.items():
        found = (
            list(typed(command)) if command != "train" else [*((name, "int") for name in TRAINING), *((name, "float") for name in RATES)]
        )
        for place, (option, kind) in enumerate(found):
            for value in drawn(NO_NUMBER, each, seed + place):
                yield Bad(command, f"{option} {value[:20]!r}", (*words, f"{option}={value}"))
            if kind not in ("int", "float"):
                continue
            for value in drawn(OUT_OF_RANGE, each, seed + place):
                must = kind == "int" and value in NO_WHOLE_NUMBER
                if must or command not in STARTS_A_SERVER:
                    yield Bad(command, f"{option} {value[:20]}", (*words, f"{option}={value}"), must=must)
        yield Bad(command, "unknown option", (*words, "--no-such-option", "1"))
        yield Bad(
            command,
            "a word too many",
            (*words, *("extra",) * (1 if command not in ("data prepare", "data merge", "eval tables", "convert") else 0), "--x"),
        )
        for name in ("missing.yaml", "mine", "mine.html", "run/config.json", "model/model.safetensors"):
            yield Bad(command, f"--config {name}", (*words, "--config", name))


NOTHING = ["missing", "mine", "mine.html", "x" * 300, "mine.html/below", "a\nb", "", "run/metrics.jsonl", "data"]
"""What is no model, no run, no data, no text."""


def places() -> Iterator[Bad]:
    """What is not there, or something else; outputs that are not one's own, or are an input."""
    inputs: dict[str, list[tuple[object, ...]]] = {
        "train": [(*TRAIN[:2], "--out", "out", "--data", None), (*TRAIN, "--out", "out", "--from", None)],
        "data prepare": [
            ("data", "prepare", None, "--out", "out", "--tokenizer", "tokenizer.json"),
            (*PREPARE, "--out", "out", "--tokenizer", None),
        ],
        "data merge": [("data", "merge", "part1", None, "--out", "out")],
        "data check": [("data", "check", None)],
        "curves": [("curves", None, "--out", "out")],
        "generate": [
            ("generate", None, "--prompt", "x"),
            ("generate", "model", "--prompt", "x", "--prefix", None),
            (*GENERATE, "--tokenizer", None),
        ],
        "chat": [("chat", None), ("chat", "model", "--tokenizer", None)],
        "serve": [("serve", None), ("serve", "model", "--tokenizer", None)],
        "eval": [("eval", None, "--tasks", "mqar_4", "--work", "out"), ("eval", "model", "--tasks", None, "--work", "out")],
        "eval tables": [("eval", "tables", None)],
        "inspect": [("inspect", None, "--prompt", "x"), ("inspect", "model", "--prompt", "x", "--compare", None)],
        "convert": [("convert", None, "out"), ("convert", None, "out", "--to", "fla")],
        "plan": [("plan", None), ("plan", "softmax-gla-340m", "--gpu", None)],
    }
    for command, calls in inputs.items():
        for call in calls:
            for name in NOTHING:
                if (command, name) not in (("train", "data"), ("eval tables", "")) and not (command == "data check" and name == "data"):
                    words = tuple(name if word is None else word for word in call)
                    at = call[call.index(None) - 1]
                    text = command == "data prepare" and name in ("mine", "run/metrics.jsonl", "data", "mine.html")
                    words_of_data = at == "--tokenizer" and name in ("", "data")  # the former is not given, or this folder
                    if command != "serve" or not words_of_data:
                        yield Bad(command, f"{at} {name[:20]!r}", words, must=not (text or words_of_data))
    folders = {"train": (*TRAIN, "--out"), "data prepare": (*PREPARE, "--out"), "data merge": ("data", "merge", "part1", "part2", "--out")}
    folders |= {"curves": ("curves", "run", "--out"), "eval": (*EVAL, "--work"), "convert": ("convert", "run")}
    folders |= {"demo": ("demo", "--out"), "demo recall": ("demo", "recall", "--out")}
    for command, words in folders.items():
        for name in ("mine", "model", "mine.html", "mine.html/below", "x" * 300, "/proc/none"):
            yield Bad(command, f"output {name[:20]}", (*words, name))
    files: dict[str, tuple[object, ...]] = {
        "inspect": ("inspect", "model", "--prompt", "x", "--out"),
        "eval": (*EVAL, "--work", "out", "--out"),
    }
    files |= {
        "generate": (*GENERATE, "--save-prefix"),
        "bench kernels": (*CALLS["bench kernels"], "--out"),
        "curves": ("curves", "run", "--out", "out", "--record"),
    }
    for command, words in files.items():
        for name in ("mine", "mine.html", "model/config.json", "mine.html/below", "x" * 300, "/dev/null", "/proc/none/x"):
            yield Bad(command, f"output {name[:20]}", (*words, name))
    yield Bad("inspect", "output is input", ("inspect", "model", "--file", "mine.html", "--out", "mine.html"))
    yield Bad("eval tables", "output is input", ("eval", "tables", "records.jsonl", "--out", "records.jsonl"))
    yield Bad("generate", "output is input", ("generate", "model", "--file", "prompt.txt", "--save-prefix", "prompt.txt"))
    yield Bad("generate", "standard input not UTF-8", ("generate", "model", "--device", "cpu"), stdin=b"\xff\xfe\n")


def torn(path: str, share: float) -> Damage:
    return lambda folder: _rewrite(folder / path, lambda content: content[: int(len(content) * share)])


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def overwritten(path: str, content: bytes) -> Damage:
    return lambda folder: (folder / path).write_bytes(content)


def gone(path: str) -> Damage:
    return lambda folder: (folder / path).unlink()


def a_pipe(path: str) -> Damage:
    """That nobody writes to."""
    return lambda folder: ((folder / path).unlink(), os.mkfifo(folder / path))


def a_link(path: str, target: str) -> Damage:
    return lambda folder: ((folder / path).unlink(), (folder / path).symlink_to(target))


def a_folder(path: str) -> Damage:
    return lambda folder: ((folder / path).unlink(), (folder / path).mkdir())


def flipped(path: str, share: float, bit: int) -> Damage:
    def flip(content: bytes) -> bytes:
        place = min(int(len(content) * share), len(content) - 1)
        return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]

    return lambda folder: _rewrite(folder / path, flip)


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ():
        yield from _leaves(value[key], (*at, key))


ODD = st.sampled_from(
    [None, -1, 0, 1e308, 10**30, 2**63, float("nan"), True, "", "x", "../x", "/etc/passwd", "\ud800", [], {}, [[]], [None], {"a": 1}]
)
ODD |= st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(-2, 2), max_size=3)


def changed(path: str, share: float, value: Any) -> Damage:
    """One field of a JSON file, or of a line of JSON, has another value."""

    def change(content: bytes) -> bytes:
        first, *rest = content.splitlines() if path.endswith("jsonl") else [content]
        whole = json.loads(first)
        places = list(_leaves(whole))[1:]
        *above, last = places[int(share * len(places)) % len(places)]
        within = whole
        for key in above:
            within = within[key]
        within[last] = value
        return b"\n".join([json.dumps(whole).encode(), *rest, *([b""] * path.endswith("jsonl"))])

    return lambda folder: _rewrite(folder / path, change)


STEP = "run/checkpoints/step-00000004"
CHATS = (*SPEAK, "--from", "speaker", "--out", "out")
TALK = ("chat", "speaker", "--device", "cpu", "--max-new-tokens", "2")
READERS: list[tuple[str, str, tuple[object, ...]]] = [
    ("generate", "model/config.json", GENERATE),
    ("generate", "model/model.safetensors", GENERATE),
    ("generate", "model/tokenizer.json", GENERATE),
    ("generate", "prefix", (*GENERATE, "--prefix", "prefix")),
    ("chat", "model/config.json", CALLS["chat"]),
    ("serve", "model/model.safetensors", CALLS["serve"]),
    ("inspect", "model/config.json", CALLS["inspect"]),
    ("inspect", "model/model.safetensors", CALLS["inspect"]),
    ("eval", "model/config.json", CALLS["eval"]),
    ("eval", "model/model.safetensors", CALLS["eval"]),
    ("eval", "work/requests.jsonl", (*EVAL, "--work", "work", "--stage", "score")),
    ("eval", "work/scores.jsonl", (*EVAL, "--work", "work", "--stage", "metrics")),
    ("eval tables", "records.jsonl", CALLS["eval tables"]),
    ("convert", "fla/config.json", ("convert", "fla", "out")),
    ("convert", "fla/model.safetensors", ("convert", "fla", "out")),
    ("convert", "plain/config.json", ("convert", "plain", "out", "--to", "fla")),
    ("convert", "run/config.json", CALLS["convert"]),
    ("convert", f"{STEP}/manifest.json", CALLS["convert"]),
    ("convert", f"{STEP}/.metadata", CALLS["convert"]),
    ("train", "run/config.json", (*TRAIN, "--max-steps", "5", "--out", "run")),
    ("train", f"{STEP}/train.json", (*TRAIN, "--max-steps", "5", "--out", "run")),
    ("train", "run/metrics.jsonl", (*TRAIN, "--max-steps", "5", "--out", "run")),
    ("train", "chats.jsonl", CHATS),
    ("train", "speaker/config.json", CHATS),
    ("train", "speaker/model.safetensors", CHATS),
    ("train", "speaker/tokenizer.json", CHATS),
    ("train", "speaker/tokenizer_config.json", CHATS),
    ("train", "speaker/chat_template.jinja", CHATS),
    ("chat", "speaker/model.safetensors", TALK),
    ("curves", "run/summary.json", CALLS["curves"]),
    ("curves", "run/metrics.jsonl", CALLS["curves"]),
    ("data check", "data/index.json", CALLS["data check"]),
    ("data check", "data/train-00000.tokens", CALLS["data check"]),
    ("data merge", "part1/index.json", CALLS["data merge"]),
    ("data merge", "part1/train-00000.tokens", CALLS["data merge"]),
    ("data prepare", "tokenizer.json", CALLS["data prepare"]),
    ("data prepare", "texts/a.jsonl", CALLS["data prepare"]),
    ("plan", "options.yaml", (*CALLS["plan"], "--config", "options.yaml")),
]
"""A command and a file that it reads."""
MENDED = (f"{STEP}/", "run/metrics.jsonl", "work/scores.jsonl")
"""What is damaged here may be read again from elsewhere, such as the checkpoint before."""
LINES = (
    "run/metrics.jsonl",
    "work/requests.jsonl",
    "work/scores.jsonl",
    "records.jsonl",
    "options.yaml",
    "texts/a.jsonl",
    "chats.jsonl",
    "run/config.json",
    "run/summary.json",
)
"""What ends after one line may be whole; and `train` writes its settings anew."""


def damaged(seed: int, each: int) -> Iterator[Bad]:
    """Every file that a command reads: torn, empty, garbage, gone, a folder; JSON with one odd value."""
    shares = st.floats(0.02, 0.98)
    for number, (command, path, words) in enumerate(READERS):
        certain = not path.startswith(MENDED)
        for share in drawn(shares, each, seed + number):
            yield Bad(command, f"{path} torn at {share:.2f}", words, torn(path, share), certain and path not in LINES)
        for about, content in (("empty", b""), ("garbage", b"\xff\x00\xfe" * 50)):
            must = certain and not (about == "empty" and path in LINES) and not (command == "train" and path == "run/config.json")
            yield Bad(command, f"{path} {about}", words, overwritten(path, content), must)
        yield Bad(command, f"{path} gone", words, gone(path), certain and not (command == "train" or path == "model/tokenizer.json"))
        yield Bad(command, f"{path} a folder", words, a_folder(path), certain and command != "train")
        if path.endswith((".json", ".jsonl")):
            for share, value in drawn(st.tuples(st.floats(0, 0.999), ODD), 3 * each, seed + number):
                yield Bad(command, f"{path} changed at {share:.3f} to {value!r}", words, changed(path, share, value), must=False)
        elif path.endswith((".tokens", "safetensors", "prefix")) and command not in STARTS_A_SERVER:
            for share, bit in drawn(st.tuples(st.floats(0, 0.999), st.integers(0, 7)), each, seed + number):
                yield Bad(command, f"{path} bit {bit} at {share:.3f}", words, flipped(path, share, bit), must=command == "data check")


def without_end() -> Iterator[Bad]:
    """Every file that a command reads: a pipe, a device, a link to nowhere, a link to itself."""
    for command, path, words in READERS:
        kinds = {"a pipe": a_pipe(path), "a device": a_link(path, "/dev/zero"), "a link to nowhere": a_link(path, "nowhere")}
        kinds["a link to itself"] = a_link(path, Path(path).name)
        certain = not path.startswith(MENDED) and not (command == "train" and path.startswith("run/"))
        certain = certain and path not in ("model/tokenizer.json", "speaker/tokenizer_config.json", "speaker/chat_template.jinja")
        for about, damage in kinds.items():
            yield Bad(command, f"{path} {about}", words, damage, certain)


NINE = [(name, ", ".join([f"*{before}"] * 9)) for before, name in itertools.pairwise("abcdefghijkl")]
OPTIONS = {
    "aliases": "a: &a [x]\n" + "".join(f"{name}: &{name} [{several}]\n" for name, several in NINE),
    "an option twice": "debug: true\ndebug: false\n",
    "an object": "seed: !!python/object/apply:os.getpid []\n",
}
ODD_WORLDS = ({"WORLD_SIZE": "x"}, {"WORLD_SIZE": "-1"}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "9" * 30, "RANK": "0"})


def surroundings() -> Iterator[Bad]:
    """Files of options that are none; narrow terminals; environments that no torchrun made."""
    for command, words in CALLS.items():
        for about, text in OPTIONS.items():
            yield Bad(command, f"options with {about}", (*words, "--config", "options.yaml"), overwritten("options.yaml", text.encode()))
        for columns in ("1", "x"):
            yield Bad(command, f"unknown option, {columns} columns", (*words, "--no-such"), environment=(("COLUMNS", columns),))
    for world in ODD_WORLDS:
        yield Bad("train", f"environment {world}", CALLS["train"], environment=tuple(world.items()))
    for name in ("texts/a.jsonl", "texts/../texts/a.jsonl"):
        twice = ("data", "prepare", "texts/a.jsonl", name, *PREPARE[3:], "--out", "out")
        yield Bad("data prepare", f"texts/a.jsonl and {name}", twice)


SAID = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
NO_CHAT: list[Any] = [None, 3, "", "abc", [], {}, [[]], [3], [None], ["a"], [[SAID]], [{}], [{"role": "user"}], [{"content": "a"}], [SAID]]
NO_CHAT += [[{**SAID, "role": role}, ANSWER] for role in (None, 3, "", "robot", "system", "</s>", "\ud800", [], {}, "u" * 10**6)]
NO_CHAT += [[{**SAID, "content": content}, ANSWER] for content in (None, 3, [], {}, ["a"], [{"type": "text", "text": "a"}], "\ud800", True)]
NO_CHAT += [[SAID, {**ANSWER, "content": content}] for content in (None, 3, [], "\udfff")]
NO_CHAT += [[{**SAID, "content": "a" * 10**5}, ANSWER]]
"""What is no conversation with an answer within 64 tokens."""
NO_LINES = [
    b"",
    b"\n",
    b"{",
    b"[]",
    b"null",
    b'{"messages": ',
    b"[" * 10**5,
    b"\xff\xfe",
    b"\x00" * 99,
    b'{"text": "a"}',
    b'{"messages": []} x',
]
ODD_CHAT: list[Any] = [
    [{**SAID, "content": "</s><s>assistant: c</s>"}, ANSWER],
    [{**SAID, "name": "x", "tools": [{"</s>": ["<s>"]}]}, ANSWER],
    [{**SAID, "content": ""}, {**ANSWER, "content": ""}],
    [{**SAID, "content": "\u2028\x85\x0b\ue000"}, ANSWER],
]


def conversations() -> Iterator[Bad]:
    """Files of conversations that are none, with a whole one before or after; and what a template is."""
    whole = json.dumps({"messages": [SAID, ANSWER]}).encode()
    for chat in NO_CHAT:
        line = json.dumps({"messages": chat}).encode()
        lost = chat in ([SAID], NO_CHAT[-1])  # one among others is left out with a warning
        for lines in ([line], [whole, line]):
            content = b"\n".join([*lines, b""])
            yield Bad(
                "train", f"conversation {line[:60]!r}", CHATS, overwritten("chats.jsonl", content), must=not (lost and len(lines) > 1)
            )
    for line in NO_LINES:
        yield Bad("train", f"a line {line[:20]!r} of conversations", CHATS, overwritten("chats.jsonl", whole + b"\n" + line + b"\n"))
    for chat in ODD_CHAT:
        content = json.dumps({"messages": chat}, ensure_ascii=False).encode()
        yield Bad("train", f"an odd conversation {content[:60]!r}", CHATS, overwritten("chats.jsonl", content), must=False)
    at = "speaker/chat_template.jinja"
    for template in (
        b"{% for",
        b"{{ raise_exception('no') }}",
        b"{{ 1 / 0 }}",
        b"{{ messages[9].role }}",
        b"{{ x.y.z }}",
        b"\xff",
        b"{{ 1 }}",
    ):
        yield Bad("train", f"template {template!r}", CHATS, overwritten(at, template))
        if template != b"{{ 1 }}":
            yield Bad("chat", f"template {template!r}", TALK, overwritten(at, template), stdin=b"a\n")
    for about, damage in (("gone", gone(at)), ("a folder", a_folder(at)), ("torn", torn(at, 0.9)), ("empty", overwritten(at, b""))):
        yield Bad("chat", f"template {about}", TALK, damage, stdin=b"a\n")
    for words in ((), ("--tokenizer", "mine"), ("--tokenizer", "model")):
        yield Bad("train", f"conversations with {words}", (*SPEAK, *words, "--out", "out"))
    yield Bad("train", "conversations and --mix", (*CHATS, "--mix", "data=0.1"))


MIXES = (
    "data",
    "data=",
    "=0.5",
    "=",
    "data=x",
    "data=0",
    "data=-1",
    "data=1",
    "data=nan",
    "data=inf",
    "data=1e-9",
    "data=0.5=0.5",
    "data=1e309",
)
MIXES += (
    "missing=0.1",
    "mine=0.1",
    "model=0.1",
    "run=0.1",
    "mine.html=0.1",
    "../data=0.1",
    "/dev/null=0.1",
    "x" * 300 + "=0.1",
    "part1/..=0.1",
)
PARTS = (
    "",
    "0/2",
    "3/2",
    "1",
    "1/",
    "/2",
    "1/0",
    "-1/2",
    "1/2/3",
    "x/2",
    "1.0/2",
    "1/" + "9" * 30,
    "9" * 5000 + "/2",
    "½/2",
    "1 /2",
    "nan/2",
)
MERGES = ((), ("part1",), ("part2",), ("part1", "part1"), ("part1", "data"), ("data",), ("part1", "part2", "data"), ("part1", "mine"))
MERGES += (("part1", "part2", "part2"), ("part1", "model"), ("part1", "missing"), ("part1", "mine.html"), ("part1", "/dev/null"))


def composed() -> Iterator[Bad]:
    """Shares, parts, models to go on from."""
    words = ("train", "gla-tiny", "--data", "data", "--sequence-length", "64", "--batch-tokens", "128", "--max-steps", "1", "--out", "out")
    for mix in MIXES:
        yield Bad("train", f"--mix {mix[:20]}", (*words, "--device", "cpu", "--mix", mix))
    for mix in (("data=0.1", "data=0.2"), ("data=0.1", "./data=0.2"), ("part1=0.5", "part2=0.5"), ("part1=0.1", "data=0.1")):
        yield Bad("train", f"--mix {mix}", (*words, "--device", "cpu", "--mix", *mix), must=mix != ("part1=0.1", "data=0.1"))
    for part in PARTS:
        yield Bad("data prepare", f"--part {part[:20]!r}", (*PREPARE, "--out", "out", f"--part={part}"))
    for folders in MERGES:
        for out in ("out", "data", "part1"):
            yield Bad("data merge", f"{folders} to {out}", ("data", "merge", *folders, "--out", out))
    for out in ("part1", "part1/x", "part2", "data", "texts"):
        yield Bad("data merge", f"to {out}", ("data", "merge", "part1", "part2", "--out", out), must=out != "part1/x")
    for source in ("model", "plain", "fla", "run", "data", "mine", "mine.html", "/dev/null", "../model", "speaker/config.json", "x" * 300):
        yield Bad("train", f"--from {source[:20]}", (*TRAIN, "--out", "out", "--from", source), must=source != "run")
        if source != "run":
            yield Bad("train", f"--from {source[:20]} to itself", (*TRAIN, "--out", source, "--from", source))


def all_of(seed: int, each: int) -> list[Bad]:
    return [*options(seed, each), *places(), *damaged(seed, each), *conversations(), *composed(), *without_end(), *surroundings()]
