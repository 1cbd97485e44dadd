"""`headmax generate`: a checkpoint continues a text, shown as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headmax.generate.engine import Completion, Engine, Request
from headmax.generate.prefix import PrefixState
from headmax.generate.sampling import Sampling


@dataclass(frozen=True)
class Settings:
    """How texts are continued."""

    max_new_tokens: int
    sampling: Sampling
    stop_strings: Sequence[str]


class Shown:
    """Writes a text as it comes and counts."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write, self.times = write, [time.perf_counter()]

    def __call__(self, request: int, token: int, text: str) -> None:
        self.times.append(time.perf_counter())
        self.write(text)

    def summary(self, count: int, finish: str, read: int) -> str:
        """Of `count` new tokens after `read` ones that had to be read."""
        first = self.times[min(1, len(self.times) - 1)] - self.times[0]
        taken = self.times[-1] - self.times[0] - first
        rate = f"{(count - 1) / taken:,.1f} tokens/s" if count > 1 else "no rate"
        return f"read {read:,} tokens, first new token after {first:.2f} s, generated {count:,} tokens at {rate}; finish reason: {finish}"


def continue_text(engine: Engine, prompt: str, prefix: PrefixState | None, settings: Settings) -> Completion:
    """Shows the continuation on standard output and a line about it on standard error."""
    ends = engine.model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    request = Request(prompt, prefix, settings.max_new_tokens, settings.sampling, ends, settings.stop_strings)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    shown = Shown(write)
    completion = engine.generate(request, on_token=shown)[0]
    print(flush=True)
    print(
        f"headmax: {shown.summary(len(completion.tokens), completion.finish, len(engine.encode(prompt, prefix is None)))}", file=sys.stderr
    )
    return completion


def interact(engine: Engine, prefix: PrefixState | None, settings: Settings) -> None:
    """Each line continues the text so far, whose state is kept; an empty line or the end of input ends it."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line:
            return
        completion = continue_text(engine, line, prefix, settings)
        prefix = engine.prefill([*engine.encode(line, prefix is None).tolist(), *completion.tokens], prefix)


def keep(engine: Engine, prompt: str, prefix: PrefixState | None, path: Path) -> None:
    """Reads the prompt and keeps what the model then remembers in a file."""
    read = engine.prefill(prompt, prefix)
    read.save(path)
    print(f"headmax: wrote {path}: {len(read):,} tokens, {read.nbytes() / 2**10:,.1f} KiB", file=sys.stderr)
