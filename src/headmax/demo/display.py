"""What the demo shows while it trains: a bar for every variant on a terminal, a printed line now and then elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headmax.demo.text import bits_per_byte
from headmax.demo.variants import VARIANTS
from headmax.train.metrics import Line

PRINTED = 10
"""Lines of a variant where there is no terminal."""


class Display:
    def __init__(self, console: Console, steps: int, tokens_per_byte: float) -> None:
        self.console, self.steps, self.tokens_per_byte = console, steps, tokens_per_byte
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        self.progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal, refresh_per_second=4
        )
        self.bars = {name: self.progress.add_task(name, total=steps, text="", start=False) for name in VARIANTS}

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, variant: str) -> None:
        self.progress.start_task(self.bars[variant])

    def kept(self, variant: str, loss: float) -> None:
        """A run that an earlier call had completed."""
        self.progress.update(self.bars[variant], completed=self.steps, text=f"{self._describe(loss)}  trained before")
        if not self.console.is_terminal:
            self._print(f"{variant:8} {self._describe(loss)}, trained before")

    def step(self, variant: str, line: Line) -> None:
        text = f"{self._describe(line['loss'])}  {line['tokens_per_s']:,.0f} tokens/s"
        self.progress.update(self.bars[variant], completed=line["step"], text=text)
        due = line["step"] % max(1, self.steps // PRINTED) == 0 or line["step"] in (1, self.steps)
        if due and not self.console.is_terminal:
            self._print(f"{variant:8} step {line['step']}/{self.steps}  {text}")

    def _describe(self, loss: float) -> str:
        return f"loss {loss:.3f}, {bits_per_byte(loss, 1, 1) * self.tokens_per_byte:.2f} bits per byte"

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
