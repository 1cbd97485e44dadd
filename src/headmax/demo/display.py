"""Live display of training: a progress bar per variant on a terminal, lines of text elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headmax.demo.variants import VARIANTS
from headmax.train.metrics import Line

PRINTED_LINES = 10
"""Per variant, if the output is not a terminal."""


class Display:
    """A context manager; `describe` formats a step's metrics."""

    def __init__(self, console: Console, steps: int, describe: Callable[[Line], str]) -> None:
        self.console, self.steps, self.describe = console, steps, describe
        self.progress = Progress(
            TextColumn("{task.description:8}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self.bars = {variant: self.progress.add_task(variant, total=steps, text="") for variant in VARIANTS}
        self.latest: dict[str, Line] = {variant: {} for variant in VARIANTS}

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, variant: str, line: Line) -> None:
        """Shows a step; metrics that are not measured at every step stay until the next measurement."""
        self.latest[variant] |= line
        step, text = line["step"], self.describe(self.latest[variant])
        self.progress.update(self.bars[variant], completed=step, text=text)
        if step % max(1, self.steps // PRINTED_LINES) == 0 or step in (1, self.steps):
            self._print(f"{variant:8} step {step}/{self.steps}  {text}")

    def reused(self, variant: str, line: Line) -> None:
        """Shows the last step of a variant from an earlier run."""
        text = f"{self.describe(line)}, reused"
        self.progress.update(self.bars[variant], completed=self.steps, text=text)
        self._print(f"{variant:8} {text}")

    def _print(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, highlight=False, soft_wrap=True)
