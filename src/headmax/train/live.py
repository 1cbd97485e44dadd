"""Progress of a training run: a live line on a terminal, printed lines elsewhere."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headmax.train.metrics import Line


class Live:
    def __init__(self, steps: int, print_every: int) -> None:
        self.steps, self.print_every = steps, print_every
        self.console = Console()
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar = self.progress.add_task("", total=steps, text="")

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, line: Line) -> None:
        text = format_line(line, self.steps)
        self.progress.start()  # only now, as lines reach the first rank alone
        self.progress.update(self.bar, completed=line["step"], text=text)
        print_now = line["step"] % self.print_every == 0 or line["step"] in (1, self.steps)
        if not self.console.is_terminal and print_now:
            self.console.print(f"step {line['step']}/{self.steps}  {text}", highlight=False, soft_wrap=True)
        if line["skipped"]:
            self.console.print(f"step {line['step']}: skipped, as the loss or the gradient is not finite", highlight=False)
        if "validation" in line:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in line["validation"].items())
            self.console.print(f"step {line['step']}  validation {numbers}", highlight=False)
        for gate, health in line.get("gates", {}).items():
            if health["dead"]:
                self.console.print(f"step {line['step']}  {gate} gate: dead heads {health['dead']}", highlight=False)


def format_line(line: Line, steps: int) -> str:
    left = timedelta(seconds=round((steps - line["step"]) * line["seconds"]))
    parts = [f"loss {line['loss']:.4f}", f"{line['tokens_per_s']:,.0f} tokens/s"]
    parts += [f"MFU {line['mfu']:.1%}"] if "mfu" in line else []
    return "  ".join([*parts, f"{line['memory'] / 2**30:.1f} GiB", f"{left} left"])
