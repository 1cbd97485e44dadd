"""The record set of our pages: every measurement they show, made by one command at one commit.

A part is a command that writes records and fits the ten minutes for which a card may be had at a time. Parts that are done stay done:
rerun to resume. `state.json` names the commit; another one is refused, so that no table can mix two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headmax import durable, records
from lab import RESULTS, ROOT

STATE = "state.json"
PEER = ("--peer", "fla")
WITH_PEER = ("gla-340m", "retnet-340m", "gdn-340m")
"""Recipes whose whole model is timed beside flash-linear-attention's, and those whose is not."""
ALONE = ("kda-340m", "mamba2-340m")
DELTA_SHAPES = {
    "16-32": (16, 32, 8, 4096, ()),
    "16-48": (16, 48, 8, 4096, ()),
    "16-64": (16, 64, 8, 4096, ()),
    "8-32": (8, 32, 8, 4096, ()),
    "2-8": (2, 8, 8, 4096, ()),
    "16-32-long": (16, 32, 1, 32768, ()),
    "2-8-long": (2, 8, 1, 32768, ()),
    "16-32-4x8192": (16, 32, 4, 8192, ()),
    "16-32-4x2048": (16, 32, 4, 2048, ()),
    "16-32-packed": (16, 32, 1, 32768, (16384, 16384)),
}
"""Shapes of the delta rule in released models: key heads, value heads, batch, length, packed sequences; all with heads of 128."""


@dataclass(frozen=True)
class Part:
    """One command, without its --out."""

    name: str
    results: str
    """File of lab/results that its records go to."""
    command: tuple[str, ...]
    """After `python -m`."""
    seconds: int = 300
    """About how long it takes, compilation included. It may take twice as long, then it is stopped."""


def kernels(name: str, *options: str) -> Part:
    command = ("headmax", "bench", "kernels", "--device", "cuda", *PEER, "--limit", "280", "--rounds", "60", *options)
    return Part(f"kernels-{name}", "kernels_h200.jsonl", command, 240)


def delta(name: str) -> Part:
    key_heads, value_heads, batch, length, packed = DELTA_SHAPES[name]
    sizes = {"heads": key_heads, "value-heads": value_heads, "batch": batch, "length": length, "key": 128, "value": 128}
    options = [text for option, size in sizes.items() for text in (f"--{option}", str(size))]
    if packed:
        options += ["--packed", ",".join(map(str, packed))]
    return kernels(f"delta-{name}", "--ops", "gated_delta_rule", *options)


def record_set() -> list[Part]:
    """In the order in which they are run: what a reader asks for first comes first."""
    decode = ("headmax", "bench", "decode", "--limit", "280")
    return [
        *(kernels(op, "--ops", op, "--gates") for op in ("linear_attention", "gla", "gated_delta_rule")),
        *(Part(f"train-{name}", "train_h200.jsonl", ("lab", "bench", "train", "--recipe", name), 540) for name in WITH_PEER),
        *(Part(f"train-{name}", "train_h200.jsonl", ("headmax", "bench", "train", "--recipe", name), 300) for name in ALONE),
        *(Part(f"eager-{name}", "eager_h200.jsonl", ("lab", "bench", "eager", *PEER, "--recipe", name)) for name in WITH_PEER),
        *map(delta, DELTA_SHAPES),
        *(kernels(f"kda-{heads}", "--ops", "kda", "--gates", "--heads", str(heads)) for heads in (16, 32)),
        *(Part(f"decode-{name}", "decode_h200.jsonl", (*decode, "--recipe", name), 240) for name in WITH_PEER + ALONE),
        *(
            Part(f"decode-{peer}", "decode_peers_h200.jsonl", (*decode, "--recipe", "gla-340m", "--batches", "1", "--peer", peer), 280)
            for peer in ("fla", "hf")
        ),
        Part("released", "released_h200.jsonl", ("lab", "bench", "released"), 280),
        Part("serve", "serve_h200.jsonl", ("lab", "bench", "serve"), 280),
        Part("drift", "drift_h200.jsonl", ("lab", "bench", "drift", "--device", "cuda"), 60),
        Part("long", "long_h200.jsonl", ("lab", "bench", "long", "--device", "cuda"), 280),
    ]


@dataclass
class State:
    """What is done, of which commit."""

    commit: str
    done: dict[str, float] = field(default_factory=dict)
    """Parts, and the seconds that each took."""

    @classmethod
    def at(cls, folder: Path, commit: str) -> State:
        """That of `folder`, empty if there is none; refused if it is of another commit or the working tree has changes."""
        if commit.endswith("+"):
            raise ValueError(f"the working tree differs from commit {commit[:-1]}: commit or stash first, records name their commit")
        if not (folder / STATE).exists():
            return cls(commit)
        state = cls(**durable.read_json(folder / STATE))
        if state.commit != commit:
            raise ValueError(f"{folder} holds records of commit {state.commit}, this is {commit}: give another folder")
        return state

    def save(self, folder: Path) -> None:
        durable.write(folder / STATE, json.dumps(asdict(self), indent=2) + "\n")


def run(
    parts: Sequence[Part],
    folder: Path,
    commit: str,
    budget: float | None,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Runs what is not done yet, as far as the `budget` in seconds goes; whether all is done. Compiled kernels stay in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state, begin = State.at(folder, commit), time.monotonic()
    state.save(folder)
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    for number, part in enumerate(parts, 1):
        if part.name in state.done:
            continue
        left = None if budget is None else budget - (time.monotonic() - begin)
        if left is not None and left < part.seconds:
            say(f"{part.name} takes about {part.seconds} s, {max(left, 0):.0f} s are left: rerun to resume")
            return False
        say(f"[{number}/{len(parts)}] {part.name}")
        started = time.monotonic()
        made = measure(part, folder, min(2 * part.seconds, left or float("inf")), os.environ | caches | dict(environment or {}))
        if not made:
            say(f"{part.name}: no records, see above; rerun to try again")
            continue
        state.done[part.name] = time.monotonic() - started
        state.save(folder)
    return all(part.name in state.done for part in parts)


def measure(part: Part, folder: Path, limit: float, environment: Mapping[str, str]) -> bool:
    """Runs a part's command; whether it ended well and wrote records. What an earlier try left is discarded."""
    out = folder / f"{part.name}.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", *part.command, "--out", str(out.resolve())]
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=limit)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return any(records.read(out))


def publish(parts: Sequence[Part], folder: Path, results: Path = RESULTS) -> list[Path]:
    """Replaces the files of lab/results by the records of a complete set."""
    state = State(**durable.read_json(folder / STATE))
    if missing := [part.name for part in parts if part.name not in state.done]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: rerun to resume, then publish")
    files: dict[str, list[records.Record]] = {}
    for part in parts:
        found = list(records.read(folder / f"{part.name}.jsonl"))
        if others := {record.commit for record in found} - {state.commit}:
            raise ValueError(f"{part.name}.jsonl has records of commit {', '.join(sorted(others))}, not {state.commit}")
        files.setdefault(part.results, []).extend(found)
    for name, found in files.items():
        records.write(results / name, found)
    return [results / name for name in files]
