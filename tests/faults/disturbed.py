"""Commands that write, killed, without room on the disk, or two at a time: what they leave is whole, or mended by the next call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import safe_open

from headmax import records
from tests.faults.called import Called, Disturbance, Process, headmax
from tests.faults.place import EVAL, PREPARE, TRAIN, contents, copy
from tests.train.small import losses, parameters

State = dict[str, str]


def files(folder: Path) -> State:
    return contents(folder)


def trained(folder: Path) -> State:
    """Losses and parameters; times differ."""
    last = parameters(folder)
    return {
        "losses": str(losses(folder)),
        "parameters": str(last.double().sum().item()),
        "steps": json.loads((folder / "summary.json").read_text())["steps"],
    }


def recorded(folder: Path) -> State:
    """What was measured: a call that was killed behind its records may append them again."""
    return {f"{record.case} {record.metric}": "" for path in folder.glob("*.jsonl") for record in records.read(path)}


def evaluated(folder: Path) -> State:
    """Requests and records; scores lie in the order in which they came."""
    state = {path: content for path, content in contents(folder).items() if path == "requests.jsonl"}
    found = list(records.read(folder / "records.jsonl"))
    return state | {f"{record.case} {record.metric}": str(record.value) for record in found}


def prefixed(folder: Path) -> State:
    """Tensors and metadata, which safetensors writes in any order."""
    with safe_open(folder / "prefix", "pt") as file:
        return file.metadata() | {name: str(file.get_tensor(name).tolist()) for name in file.keys()}  # noqa: SIM118


def curved(folder: Path) -> State:
    return {path: content for path, content in contents(folder).items() if not path.endswith("jsonl")} | recorded(folder)


@dataclass(frozen=True)
class Writer:
    """A command that writes to out, and what of that must be the same each time."""

    words: tuple[str, ...]
    other: tuple[str, ...]
    """The same command with something else to write, to the same place."""
    state: Callable[[Path], State] = files
    resumes: bool = True
    """Whether a second call on what a first one finished goes on or replaces; the others refuse."""


BENCH = ("bench", "kernels", "--device", "cpu", "--length", "16", "--key", "8", "--value", "8", "--ops", "gla", "--rounds", "1")
WRITERS = {
    "train": Writer((*TRAIN, "--out", "out"), (*TRAIN, "--seed", "7", "--out", "out"), trained),
    "data prepare": Writer((*PREPARE, "--out", "out"), (*PREPARE[:-2], "--valid-fraction", "0.3", "--out", "out")),
    "data merge": Writer(
        ("data", "merge", "part1", "part2", "--out", "out"), ("data", "merge", "part2", "part1", "--out", "out"), resumes=False
    ),
    "curves": Writer(
        ("curves", "run", "--out", "out", "--record", "out/r.jsonl"),
        ("curves", "run", "--out", "out", "--name", "run", "--record", "out/r.jsonl"),
        curved,
    ),
    "generate": Writer(
        ("generate", "model", "--prompt", "Once upon", "--device", "cpu", "--save-prefix", "out/prefix"),
        ("generate", "model", "--prompt", "x", "--device", "cpu", "--save-prefix", "out/prefix"),
        prefixed,
    ),
    "inspect": Writer(
        ("inspect", "model", "--prompt", "Once upon a time", "--out", "out/r.html"),
        ("inspect", "model", "--prompt", "x", "--out", "out/r.html"),
    ),
    "eval": Writer((*EVAL, "--work", "out"), (*EVAL, "--work", "out"), evaluated),
    "eval tables": Writer(
        ("eval", "tables", "records.jsonl", "--out", "out/t.md"),
        ("eval", "tables", "records.jsonl", "--form", "latex", "--out", "out/t.md"),
    ),
    "convert": Writer(("convert", "run", "out"), ("convert", "plain", "out", "--to", "fla"), resumes=False),
    "convert --to fla": Writer(("convert", "plain", "out", "--to", "fla"), ("convert", "run", "out"), resumes=False),
    "bench kernels": Writer((*BENCH, "--out", "out/b.jsonl"), (*BENCH, "--out", "out/b.jsonl"), recorded),
}


@dataclass(frozen=True)
class Disturbed:
    kind: str
    """kill, no room, two at once"""
    command: str
    seed: int

    @property
    def about(self) -> str:
        return f"{self.kind}, seed {self.seed}"


@dataclass(frozen=True)
class Reference:
    """What a writer leaves that nobody disturbs."""

    state: State
    others: State
    seconds: float
    changes: int
    largest: int


@cache
def reference(template: Path, command: str) -> Reference:
    writer, states, seconds, changes, largest = WRITERS[command], [], 0.0, 0, 0
    for number, words in enumerate((writer.words, writer.other)):
        folder = copy(template, template.parent / f"reference-{command}-{number}".replace(" ", "-"))
        done = headmax(folder, *words)
        assert done.code == 0, done
        states.append(writer.state(folder / "out"))
        if number == 0:
            sizes = [path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file()]
            seconds, largest, changes = done.seconds, max(sizes), 3 * len(sizes) + 3
    return Reference(*states, seconds, changes, largest)


def problems(template: Path, folder: Path, writer: Writer, wanted: list[State], calls: list[Called]) -> Iterator[tuple[str, str]]:
    """What is wrong now that all is over: (kind, what was seen)."""
    for done in calls:
        if done.code is None:
            yield "hang", f"{done}"
        elif done.broke or (done.code in (1, 2) and not done.refused):
            yield "traceback", f"{done}"
    before, after = contents(template), contents(folder)
    for name in before:
        if after.get(name) != before[name]:
            yield "lost", f"{name} is not what it was"
    try:
        state = writer.state(folder / "out")
    except Exception as error:
        yield "lost", f"the output cannot be read: {error!r} after {calls}"
        return
    if state not in wanted:
        yield "wrong", f"{[{key for key in {*state, *other} if state.get(key) != other.get(key)} for other in wanted]} after {calls}"


def again(folder: Path, writer: Writer) -> Called:
    """The same call with nothing in its way; one that refuses what is finished has nothing left to do."""
    done = headmax(folder, *writer.words)
    return Called(done.words, 0, done.out, "", done.seconds) if not writer.resumes and "not empty" in done.errors else done


def disturb(case: Disturbed, template: Path, folder: Path) -> list[tuple[str, str]]:
    """Runs a case in a folder of its own: its problems, none where all was recovered."""
    draw, writer, found = random.Random(f"{case.command} {case.kind} {case.seed}"), WRITERS[case.command], reference(template, case.command)
    wanted = [found.state]
    if case.kind == "kill":
        if case.seed % 2:
            at = Disturbance(dies_at=draw.randint(1, found.changes))
            calls = [Process(folder, *writer.words, disturbance=at).kill(60)]
        else:
            calls = [Process(folder, *writer.words).kill(draw.uniform(0, found.seconds))]
        calls.append(again(folder, writer))
    elif case.kind == "no room":
        room = int(found.largest ** draw.uniform(0, 1)) - 1
        calls = [headmax(folder, *writer.words, disturbance=Disturbance(room=room))]
        calls.append(again(folder, writer))
    else:
        both = [
            Process(folder, *words, disturbance=Disturbance(hesitates=0.03, seed=draw.randrange(1000)))
            for words in draw.sample([writer.words, writer.other], 2)
        ]
        calls = [process.end() for process in both]
        if all(done.code for done in calls):
            calls.append(again(folder, writer))
        wanted.append(found.others)
    result = list(problems(template, folder, writer, wanted, calls))
    if case.kind != "two at once" and calls[-1].code != 0 and not result:
        result.append(("lost", f"the next call is refused: {calls[-1]}"))
    return result


def all_of(seed: int, each: int) -> list[Disturbed]:
    kinds = ("kill", "no room", "two at once")
    return [Disturbed(kind, command, seed * 1000 + number) for command in WRITERS for kind in kinds for number in range(each)]
