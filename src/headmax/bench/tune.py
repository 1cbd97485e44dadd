"""Which block shapes are fastest? Times every kernel with every candidate and writes the table the kernels read."""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headmax.bench.kernels import SPECS
from headmax.ops import triton_tiles
from headmax.ops.spec import Case
from headmax.ops.triton_tiles import Tiles, width_class
from headmax.records import current_commit

WIDTHS = {"narrow": (128, 256), "wide": (256, 512)}
"""Key and value width that stand for a class of heads."""
CANDIDATES: list[Tiles] = [
    [key, value, warps, stages, registers]
    for key, value, warps, registers in (
        (64, 64, 4, 0),
        (64, 64, 8, 0),
        (64, 128, 4, 0),
        (64, 128, 8, 0),
        (128, 64, 4, 0),
        (128, 64, 8, 0),
        (128, 128, 8, 0),
        (64, 64, 4, 168),
        (64, 64, 8, 128),
        (64, 128, 8, 128),
    )
    for stages in (1, 2, 3)
    if not (registers and stages == 3)
]
DELTA_SCANS: list[Tiles] = [[256, value, warps, stages, 0] for value in (64, 128) for warps in (4, 8) for stages in (1, 2, 3)]
"""A scan of the delta rule holds all key channels of the state."""
SHARED = {"scan_kernel": "scan", "combine_kernel": "combine"}
OWN = {
    "linear_attention": SHARED | {"prepare_kernel": "prepare", "query_key_gradients_kernel": "query_key_gradients"},
    "gla": SHARED | {"prepare_kernel": "prepare_channel", "query_key_gradients_kernel": "query_key_gradients_channel"},
    "gated_delta_rule": {
        "delta_writes_kernel": "delta_writes",
        "delta_states_kernel": "delta_scan",
        "delta_state_gradients_kernel": "delta_scan_back",
        "delta_write_gradients_kernel": "delta_write_gradients",
    },
}
"""The kernels an op's run decides on, and their names in the table. The delta rule shares the rest with linear attention."""


@dataclass(frozen=True)
class Job:
    """One run of an op with the n-th candidate for each of its kernels."""

    op: str
    width: str
    candidate: int

    def tiles(self, name: str) -> Tiles | None:
        options = DELTA_SCANS if name.startswith("delta_scan") else CANDIDATES
        return options[self.candidate] if self.candidate < len(options) else None


@functools.lru_cache(maxsize=1)
def step(op: str, width: str, time: int) -> Callable[[], object]:
    """A forward and backward pass of `op` for heads of that class."""
    key, value = WIDTHS[width]
    case = Case(batch=8, time=time, heads=4, key=key, value=value, gates="both", decay="head" if op == "linear_attention" else "soft")
    inputs = SPECS[op].inputs(case, torch.bfloat16, "cuda")
    if isinstance(inputs["log_decay"], Tensor):
        inputs["log_decay"] /= 16
    leaves = [x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor) and (name != "log_decay" or x.ndim > 1)]
    d_output = torch.randn(8, time, 4, value, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(SPECS[op].function(**inputs, backend="triton")[0], leaves, d_output)


def apply(job: Job, skip: Iterable[str] = ()) -> None:
    """Puts the job's candidates into the table, but for kernels named in `skip`."""
    kernels = triton_tiles.TABLE[triton_tiles.entry_for(torch.device("cuda"))]["kernels"]
    for name in OWN[job.op].values():
        tiles = job.tiles(name)
        if tiles is not None and name not in skip:
            kernels[name][width_class(WIDTHS[job.width][0])] = tiles


def warm(job: Job) -> tuple[Job, list[str]]:
    """Compiles the job's kernels, so that the cache has them; names those that ask for more than the GPU has."""
    before = json.loads(json.dumps(triton_tiles.TABLE))
    failed: list[str] = []
    for kernel, name in OWN[job.op].items():
        triton_tiles.TABLE.update(json.loads(json.dumps(before)))
        apply(job, skip=[other for other in OWN[job.op].values() if other != name])
        try:
            step(job.op, job.width, time=256)()
            torch.cuda.synchronize()
        except Exception as error:  # out of resources, or a compiler that gives up: not a candidate
            failed.append(name)
            print(f"{job} {kernel}: {str(error)[:80]}", flush=True)
    triton_tiles.TABLE.update(before)
    return job, failed


def times(job: Job, rounds: int = 5) -> dict[str, float]:
    """Microseconds each kernel takes in one forward and backward pass."""
    run = step(job.op, job.width, time=4096)
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    return {OWN[job.op][event.key]: event.device_time_total / rounds for event in trace.key_averages() if event.key in OWN[job.op]}


def tune(ops: Iterable[str], widths: Iterable[str], processes: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times all candidates and leaves the fastest in `triton_tiles.TABLE`; returns every time measured."""
    jobs = [Job(op, width, n) for op in ops for width in widths for n in range(len(CANDIDATES))]
    say(f"compiling {len(jobs)} candidates in {processes} processes")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        failures = {job: failed for job, failed in pool.imap_unordered(warm, jobs)}
    entry = triton_tiles.entry_for(torch.device("cuda"))
    standing = json.loads(json.dumps(triton_tiles.TABLE[entry]["kernels"]))
    measured: list[dict[str, Any]] = []
    for job in jobs:
        triton_tiles.TABLE[entry]["kernels"] = json.loads(json.dumps(standing))
        apply(job, skip=failures[job])
        for name, micro in times(job).items():
            if name not in failures[job] and job.tiles(name) is not None:
                measured.append({"kernel": name, "width": job.width, "op": job.op, "tiles": job.tiles(name), "us": micro})
    for name, by_width in standing.items():
        for width in by_width:
            found = [m for m in measured if (m["kernel"], m["width"]) == (name, width)]
            totals = {str(m["tiles"]): sum(x["us"] for x in found if x["tiles"] == m["tiles"]) for m in found}
            runs = {tiles: sum(str(x["tiles"]) == tiles for x in found) for tiles in totals}
            complete = {tiles: total for tiles, total in totals.items() if runs[tiles] == max(runs.values())}
            if complete:
                best = min(complete, key=lambda tiles: complete[tiles])
                by_width[width] = json.loads(best)
                say(f"{name} {width}: {best} {complete[best]:.0f} us")
    triton_tiles.TABLE[entry] = {"from": f"{torch.cuda.get_device_name()}, commit {current_commit()}", "kernels": standing}
    return measured


def write() -> None:
    """Writes the table to where it was read from."""
    entries = []
    for size, entry in triton_tiles.TABLE.items():
        rows = ",\n".join(f"      {json.dumps(name)}: {json.dumps(tiles)}" for name, tiles in entry["kernels"].items())
        entries.append(f'  "{size}": {{\n    "from": {json.dumps(entry["from"])},\n    "kernels": {{\n{rows}\n    }}\n  }}')
    triton_tiles.PATH.write_text("{\n" + ",\n".join(entries) + "\n}\n")
