"""Metrics of a run: a JSON line per step, optional trackers, and a summary at the end."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headmax import durable, fields
from headmax.records import Recorder
from headmax.train.config import LogConfig

WINDOW, SPIKE, PEAK = 100, 5.0, 3.0
STABILITY = {
    "loss_spikes": f"steps whose loss is more than {SPIKE:g} standard deviations above the mean of the {WINDOW} steps before",
    "gradient_peaks": f"steps whose gradient norm is more than {PEAK:g} times the median of the {WINDOW} steps before",
}
"""Definitions of the counts. The first WINDOW steps are not checked; skipped steps are counted separately."""

Line = dict[str, Any]
REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("step", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_s"), float),
    **dict.fromkeys(("loss", "grad_norm"), float | None),
    "skipped": bool,
}
"""Fields of every line."""
OPTIONAL: dict[str, Any] = {"validation": dict[str, float | None], "gates": dict[str, dict[str, Any]]}
"""Fields of steps with an evaluation."""
SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("steps", "tokens"), int),
    **dict.fromkeys(("date", "device", "commit"), str),
    "loss": float | None,
    "validation": dict[str, float | None] | None,
    "skipped_steps": list[int],
    "stability": dict[str, dict[str, Any]],
}
"""Fields of every summary.json."""


class Log:
    """RUN/metrics.jsonl, continued after step `after`: later lines are dropped, as these steps will run again."""

    def __init__(self, folder: Path, config: LogConfig, after: int) -> None:
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.trackers: list[TensorBoard | Wandb] = [TensorBoard(folder, after)] if config.tensorboard else []
        self.trackers += [Wandb(config.wandb, folder)] if config.wandb else []
        kept = "".join(json.dumps(line) + "\n" for line in read_lines(self.path) if line["step"] <= after)
        durable.write(self.path, kept)
        self.file = self.path.open("a")

    def write(self, line: Line) -> None:
        self.file.write(json.dumps(finite(line)) + "\n")
        self.file.flush()
        for tracker in self.trackers:
            tracker.write(line["step"], dict(scalars(line)))

    def sync(self) -> None:
        """Flushes to disk, so that a checkpoint is never ahead of the file."""
        durable.sync(self.file)

    def close(self) -> None:
        self.file.close()
        for tracker in self.trackers:
            tracker.close()


class TensorBoard:
    def __init__(self, folder: Path, after: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"--log.tensorboard needs {error.name or 'tensorboard'}: pip install tensorboard") from error
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=after + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, project: str, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--log.wandb needs wandb: pip install wandb") from error
        path = folder.resolve()  # one run per folder: elsewhere another may have the same name
        run_id = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        self.run = wandb.init(project=project, name=path.name, id=run_id, dir=folder, resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


def read_lines(path: Path) -> Iterator[Line]:
    """The complete lines of a metrics file; a killed process may have left an incomplete last one."""
    if not path.exists():
        return
    for number, text in enumerate(durable.read_text(path).splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            return
        try:
            line = durable.parse_json(text)
            fields.check(line, REQUIRED | OPTIONAL, set(REQUIRED), allow_unknown=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a line of metrics: {error}") from error
        yield line


def finite(value: Any) -> Any:
    """`value` with NaN and Inf replaced by null, which JSON can represent."""
    if isinstance(value, Mapping):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line, by names for trackers such as gates/3/read/entropy."""
    if isinstance(value, Mapping):
        for part, x in value.items():
            yield from scalars(x, f"{name}/{part}" if name else part)
    elif isinstance(value, int | float):
        yield name, float(value)


def stability(lines: Sequence[Line]) -> dict[str, list[int]]:
    """The steps that match each definition of `STABILITY`."""
    taken = [line for line in lines if not line["skipped"]]
    if len(taken) <= WINDOW:
        return {name: [] for name in STABILITY}
    steps, losses, norms = (torch.tensor([line[name] for line in taken], dtype=torch.float64) for name in ("step", "loss", "grad_norm"))
    before, before_norms = (x[:-1].unfold(0, WINDOW, 1) for x in (losses, norms))
    spikes = losses[WINDOW:] > before.mean(1) + SPIKE * before.std(1)
    peaks = norms[WINDOW:] > PEAK * before_norms.median(1).values
    return {name: steps[WINDOW:][where].long().tolist() for name, where in zip(STABILITY, (spikes, peaks), strict=True)}


def summarize(folder: Path, device: torch.device) -> Line:
    """Writes RUN/summary.json from RUN/metrics.jsonl, with device and commit."""
    recorder = Recorder("training", device)
    lines = list(read_lines(folder / "metrics.jsonl"))
    steps = stability(lines)
    validations = [line["validation"] for line in lines if "validation" in line]
    speeds = [line["tokens_per_s"] for line in lines]
    summary: Line = {
        "steps": lines[-1]["step"] if lines else 0,
        "tokens": lines[-1]["tokens"] if lines else 0,
        "loss": lines[-1]["loss"] if lines else None,
        "validation": validations[-1] if validations else None,
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "skipped_steps": [line["step"] for line in lines if line["skipped"]],
        "stability": {name: {"count": len(steps[name]), "steps": steps[name], "definition": text} for name, text in STABILITY.items()},
        "device": recorder.device,
        "commit": recorder.commit,
        "date": recorder.date,
    }
    durable.write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


@functools.cache
def matmul_rate(device: torch.device) -> float | None:
    """FLOP/s of a large bfloat16 product on this GPU, the reference for MFU; None on a CPU."""
    if device.type != "cuda":
        return None
    from torch.utils.benchmark import Timer

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    seconds = Timer("a @ a", globals={"a": a}).timeit(20).mean
    del a
    torch.cuda.reset_peak_memory_stats(device)
    return 2 * 8192**3 / seconds


def memory(device: torch.device) -> int:
    """Peak memory of this process in bytes, on the GPU if it has one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
