"""Tunes block shapes: times every kernel with every candidate and writes the table that kernels read."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmax import durable
from headmax.bench.kernels import SPECS, TOLERANCE, error, ours
from headmax.bench.timing import kernel_times
from headmax.ops.kernels import tiles as tile_table
from headmax.ops.kernels.tiles import Tiles
from headmax.ops.spec import Case
from headmax.records import current_commit

WIDTHS = {"narrow": (128, 256), "wide": (256, 512)}
"""Key and value width to represent a class of heads."""


def read_candidates() -> dict[str, dict[str, dict[str, list[Tiles]]]]:
    """candidates.json: tiles by name ("whole": for scans with all key channels in one block), and the names for each kernel."""
    content = json.loads(Path(__file__).with_name("candidates.json").read_text())

    def lists(uses: dict[str, list[str]]) -> dict[str, list[Tiles]]:
        return {use: [tiles for name in names for tiles in content["tiles"][name]] for use, names in uses.items()}

    return {op: {kernel: lists(uses) for kernel, uses in kernels.items()} for op, kernels in content["ops"].items()}


CANDIDATES = read_candidates()
"""For each op the kernels it decides on, their names in the table, one for each use, and what to try; the delta rule shares the others."""
STANDING = copy.deepcopy(tile_table.TABLE)
"""The table as it was read."""


def here() -> dict[str, dict[str, Tiles]]:
    """The part of the table that this GPU reads."""
    return tile_table.TABLE[tile_table.entry_for(torch.device("cuda"))]["kernels"]


def options(op: str, width: str) -> dict[str, list[tuple[str, Tiles]]]:
    """What to try for each kernel `op` decides on, one name in the table after the other: the candidates, and what stands there."""
    standing, found = STANDING[tile_table.entry_for(torch.device("cuda"))]["kernels"], {}
    for kernel, names in CANDIDATES[op].items():
        tried = {name: [*tiles, *[standing[name][width]] * (standing[name][width] not in tiles)] for name, tiles in names.items()}
        found[kernel] = [(name, tiles) for name in names if standing[name][width] is not None for tiles in tried[name]]
    return found


def case_of(op: str, width: str, time: int) -> Case:
    key, value = WIDTHS[width]
    return Case(batch=1, time=time, heads=4, key=key, value=value, gates="both", decay="head" if op == "linear_attention" else "soft")


@functools.lru_cache(maxsize=1)
def step(op: str, width: str, time: int) -> Callable[[], object]:
    """A forward and backward pass of `op` in bfloat16 for heads of a class."""
    batch, case = 8, case_of(op, width, time=64)
    inputs = {
        name: x.repeat(batch, time // 64, *[1] * (x.ndim - 2)) if isinstance(x, Tensor) and x.ndim > 1 else x
        for name, x in SPECS[op].inputs(case, torch.bfloat16, "cuda").items()
    }
    inputs["log_decay"] = inputs["log_decay"] / 16
    leaves = [x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim > 1]
    d_output = torch.randn(batch, time, case.heads, case.value, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(SPECS[op].function(**inputs, backend="triton")[0], leaves, d_output)


def choose(op: str, width: str, n: int, only: str | None = None) -> dict[str, tuple[str, Tiles]]:
    """Puts the n-th candidate of each kernel (or of `only` one) into the table; returns (name, tiles) by kernel."""
    put = {}
    for kernel, tried in options(op, width).items():
        if n < len(tried) and only in (None, kernel):
            name, tiles = put[kernel] = tried[n]
            here()[name][width] = tiles
    tile_table.forget()
    return put


def warm(job: tuple[str, str, int]) -> tuple[tuple[str, str, int], dict[str, str]]:
    """Compiles a job's kernels into the cache; returns the problem of each kernel that does not fit or gives wrong results.

    Results are checked as the compiler's software pipelining is not always correct: for one shape, it overwrote an operand of a product
    that was still being read.
    """
    op, width, n = job
    wrong = {}
    for kernel in CANDIDATES[op]:
        before = copy.deepcopy(tile_table.TABLE)
        if choose(op, width, n, only=kernel):
            try:
                step(op, width, time=256)()
                for dtype, time in itertools.product((torch.bfloat16, torch.float32), (176, 200)):  # these lengths compile different code
                    off = error(ours(op, "triton"), case_of(op, width, time), dtype, torch.device("cuda"))
                    if not off <= TOLERANCE[dtype]:
                        wrong[kernel] = f"is {off:.1e} from the oracle in {dtype}"
            except Exception as failure:  # such as out of resources, or a compiler error
                wrong[kernel] = f"fails: {repr(failure).splitlines()[0]}"
        tile_table.TABLE.update(before)
    return job, wrong


def times(op: str, width: str, rounds: int = 5) -> dict[str, float]:
    """Microseconds each kernel takes in one forward and backward pass of B=8 T=4096 H=4."""
    tile_table.forget()
    run = step(op, width, time=4096)
    run()
    return {kernel: 1e6 * taken for kernel, (taken, _) in kernel_times(run, rounds).items() if kernel in CANDIDATES[op]}


def tune(pairs: Iterable[tuple[str, str]], processes: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times all candidates of (op, width) pairs and leaves the fastest in `tile_table.TABLE`; returns every time measured."""
    jobs = [(op, width, n) for op, width in pairs for n in range(max(map(len, options(op, width).values())))]
    failures: dict[tuple[str, str, int], dict[str, str]] = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (job, wrong) in enumerate(pool.imap_unordered(warm, jobs), 1):
            failures[job] = wrong
            say(f"compiled {done} of {len(jobs)}")
    standing = copy.deepcopy(here())
    measured: list[dict[str, Any]] = []
    for job in sorted(jobs):
        op, width, n = job
        here().update(copy.deepcopy(standing))
        put = choose(op, width, n)
        for kernel, why in failures[job].items():
            name, tiles = put.pop(kernel)
            say(f"{name} {width}: {tiles} {why}")
            here()[name][width] = standing[name][width]
        for kernel, micro in times(op, width).items():
            if kernel in put:
                name, tiles = put[kernel]
                measured.append({"kernel": name, "width": width, "op": op, "tiles": tiles, "us": micro})
                say(f"{op} {name} {width}: {tiles} {micro:.0f} us")
    for (name, width), best in fastest(measured).items():
        standing[name][width] = best
    here().update(copy.deepcopy(STANDING[tile_table.entry_for(torch.device("cuda"))]["kernels"]))
    long = tile_table.TABLE[tile_table.entry_for(torch.device("cuda"))]["long chunks"]
    made = {"from": f"{torch.cuda.get_device_name()}, commit {current_commit()}", "long chunks": long, "kernels": standing}
    tile_table.TABLE[str(tile_table.shared_memory(torch.device("cuda")))] = made
    return measured


def fastest(measured: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Tiles]:
    """The best tiles of each kernel and width: least time, summed over the ops that share the kernel."""
    totals: dict[tuple[str, str], dict[str, list[float]]] = {}
    for m in measured:
        totals.setdefault((m["kernel"], m["width"]), {}).setdefault(json.dumps(m["tiles"]), []).append(m["us"])
    best = {}
    for key, options in totals.items():
        ops = max(map(len, options.values()))
        best[key] = json.loads(min((tiles for tiles, us in options.items() if len(us) == ops), key=lambda tiles: sum(options[tiles])))
    return best


def write(path: Path) -> None:
    """Writes the table."""
    entries = []
    for size, entry in tile_table.TABLE.items():
        rows = ",\n".join(f"      {json.dumps(name)}: {json.dumps(tiles)}" for name, tiles in entry["kernels"].items())
        head = "".join(f"    {json.dumps(name)}: {json.dumps(entry[name])},\n" for name in ("from", "long chunks"))
        entries.append(f'  "{size}": {{\n{head}    "kernels": {{\n{rows}\n    }}\n  }}')
    durable.write(path, "{\n" + ",\n".join(entries) + "\n}\n")
