"""Measurements for our own pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headmax.cli.bench import say, sizes
from headmax.cli.options import (
    Count,
    Device,
    File,
    Numbers,
    OptionalCount,
    OptionalSeconds,
    OutFolder,
    Recipe,
    Seconds,
    Words,
    at_least,
    find_device,
    metavar,
    one_of,
)

if TYPE_CHECKING:
    from headmax.records import Record

DTYPES = ("bfloat16", "float32")
PARTS = ("static", "scheduler", "deterministic", "http", "hit", "prefill")


def keep(measured: Iterator[Record], out: Path | None, width: int = 28, extra: bool = False) -> None:
    """Prints each record as it is measured, with its further numbers if `extra`, and appends it to `out`."""
    from headmax import records

    if out is not None:
        records.check(out)
    for record in measured:
        further = (f"   {name} {value:.4g}" for name, value in record.extra.items() if extra)
        say(record.line(width) + "".join(further))
        if out is not None:
            records.append(out, [record])


def train(
    recipe: Recipe = "softmax-gla-340m",
    grid: Words = ("2048x16", "4096x8", "8192x4", "16384x2"),
    rounds: int = 20,
    limit: Seconds = 900.0,
    out: File = None,
) -> None:
    """Time training steps beside flash-linear-attention in all its ways, first steps, and kernels by kind.

    Args:
        recipe: the model, named by its softmax twin or its plain backbone.
        grid: sequence lengths x batch sizes.
        rounds: timed steps of each model, interleaved.
        limit: time limit of each process.
        out: append the records to this file.
    """
    from headmax import recipes
    from headmax.bench.train import Plan
    from lab.bench.train import bench

    plain = recipes.get(recipe).name.removeprefix("softmax-")
    at_least(1, rounds=rounds, limit=limit)
    find_device("cuda", "python -m lab bench train")
    keep(bench(Plan(plain, sizes(grid), rounds), limit, say), out)


def eager(
    recipe: Recipe = "softmax-gla-340m",
    grid: Words = ("512x1", "4096x8"),
    rounds: int = 8,
    peer: Literal["none", "fla"] = "none",
    device: Device = "auto",
    limit: Seconds = 280.0,
    out: File = None,
) -> None:
    """Time training steps that are not compiled, by the wall clock, and the host's time of one op call.

    Args:
        recipe: the model, named by its softmax twin or its plain backbone.
        grid: sequence lengths x batch sizes.
        rounds: rounds of three steps of each model, interleaved.
        peer: what to compare with: fla is flash-linear-attention's model without gates.
        device: where to run; auto takes a GPU if there is one.
        limit: time limit of each process.
        out: append the records to this file.
    """
    from headmax import recipes
    from lab.bench.eager import Plan, bench

    plain = recipes.get(recipe).name.removeprefix("softmax-")
    at_least(1, rounds=rounds, limit=limit)
    keep(bench(Plan(plain, sizes(grid), rounds, find_device(device)), peer == "fla", limit, say), out, width=40)


def record_set(
    out: OutFolder,
    /,
    budget: OptionalSeconds = None,
    parts: Words = (),
    publish: bool = False,
) -> None:
    """Make all records of our pages at one commit, part by part; rerun to resume.

    Args:
        out: folder for the records, the peers' compiled kernels, and what is done; it belongs to one commit.
        budget: start no part that would not end within this many seconds.
        parts: run only parts whose names begin like this.
        publish: replace the records in lab/results by this set, which must be complete.
    """
    from headmax.records import current_commit
    from lab.bench import record_set

    at_least(1, budget=budget)
    chosen = [part for part in record_set.record_set() if not parts or part.name.startswith(parts)]
    if not chosen:
        raise ValueError(
            f"--parts {','.join(parts)}: no part begins like this; there are {', '.join(p.name for p in record_set.record_set())}"
        )
    if publish:
        for path in record_set.publish(record_set.record_set(), out):
            say(f"wrote {path}")
        return
    find_device("cuda", "python -m lab bench all")
    if not record_set.run(chosen, out, current_commit(), budget, say):
        sys.exit(1)


def drift(
    recipe: Recipe = "softmax-gla-340m",
    tokens: Count = 16_384,
    piece: OptionalCount = None,
    device: Device = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    out: File = None,
) -> None:
    """Measure how far logits move when states are kept in bfloat16.

    Args:
        recipe: the model, at random weights.
        tokens: tokens that are fed.
        piece: read them as a prompt in pieces of this many, through one prefix state, against float64; one by one unless given.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights where tokens come one by one.
        out: append the records to this file.
    """
    import torch

    from lab.bench.drift import measure, measure_prefix

    at_least(32, tokens=tokens)
    place = find_device(device)
    found = measure(recipe, tokens, place, getattr(torch, dtype)) if piece is None else measure_prefix(recipe, tokens, piece, place)
    keep(found, out, width=58)


def endure(
    seconds: Seconds = 3600.0,
    kills: int = 30,
    parts: Words = ("train", "serve", "eval"),
    every: Seconds = 60.0,
    rest: Seconds = 0.0,
    device: Device = "auto",
    seed: int = 0,
    out: File = None,
) -> None:
    """Kill a training run again and again beside one left alone, and watch the memory of training, serving and evaluation.

    Args:
        seconds: how long.
        kills: how often the run is killed.
        parts: what to run: train, serve, eval.
        every: seconds between two readings of memory.
        rest: seconds between two evaluations, and between two rounds of conversations.
        device: where to run; auto takes a GPU if there is one.
        seed: of the moments of the kills and of the prompts.
        out: append the records to this file.
    """
    from lab.bench.endure import PARTS, Plan, measure

    one_of("parts", parts, PARTS)
    at_least(1, seconds=seconds, every=every)
    at_least(0, kills=kills, rest=rest)
    keep(measure(Plan(seconds, kills, find_device(device), parts, every, rest, seed), say), out, width=24)


def long(
    recipe: Recipe = "softmax-gla-80m",
    tokens: Count = 2**20,
    segment: Count = 2**16,
    chunk: Count = 2**13,
    device: Device = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    out: File = None,
) -> None:
    """Train on a sequence of a million tokens by segments; exit code 1 if the loss is another.

    Args:
        recipe: the model, with random weights.
        tokens: tokens of the sequence.
        segment: tokens of a pass; states go forward between passes, and their gradients back.
        chunk: tokens of a pass of the evaluation that the loss is compared with.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the products.
        out: append the records to this file.
    """
    import torch

    from lab.bench.long import Plan, measure

    keep(measure(Plan(recipe, tokens, segment, chunk, find_device(device), getattr(torch, dtype))), out, width=40)


def released(
    layers: int = 8,
    train: Words = ("8192x4",),
    prefill: Count = 32_768,
    rounds: int = 10,
    peers: Words = ("headmax", "headmax-softmax", "transformers-fla", "transformers"),
    limit: Seconds = 600.0,
    device: Device = "auto",
    tiny: bool = False,
    out: File = None,
) -> None:
    """Time a layer stack in the shape of Qwen3.5 on headmax's ops and as transformers runs it.

    Args:
        layers: layers of the stack, a multiple of 4: three of linear attention, one of attention.
        train: sequence length x batch size of a training step.
        prefill: tokens of the sequence that is prefilled.
        rounds: timed runs of each.
        peers: which of headmax, headmax-softmax, transformers-fla and transformers.
        limit: time limit of each peer's process.
        device: where to run; auto takes a GPU if there is one.
        tiny: narrow layers, to try the command.
        out: append the records to this file.
    """
    from lab.bench.released import PEERS, Plan, bench

    at_least(1, rounds=rounds, limit=limit, layers=layers, prefill=prefill)
    one_of("peers", peers, PEERS)
    shapes = sizes(train)
    if layers % 4 or len(shapes) != 1:
        raise ValueError("--layers must be a multiple of 4" if layers % 4 else f"--train takes one shape, got {len(shapes)}")
    keep(bench(Plan(layers, shapes[0], prefill, rounds, find_device(device), tiny), peers, limit, say), out, width=40)


def fit(
    capability: Annotated[Literal[80, 86, 89, 90, 100, 120], metavar("CAPABILITY")], /, dtypes: Words = DTYPES, once: bool = False
) -> None:
    """Compile the kernels for a GPU that is not at hand; exit code 1 if they do not fit.

    Args:
        capability: the GPU's compute capability, such as 89 for sm_89.
        dtypes: precisions of what is computed.
        once: every kernel for one shape alone.
    """
    one_of("dtypes", dtypes, DTYPES)
    import torch

    from lab.bench.fit import check

    if not check(capability, [getattr(torch, name) for name in dtypes], once):
        sys.exit(1)


def serve(
    recipe: Recipe = "softmax-gla-340m",
    parts: Words = PARTS,
    batches: Numbers = (64, 256),
    prompt: int = 128,
    new_tokens: int = 512,
    waves: int = 4,
    piece: int = 8192,
    hit: int = 32_768,
    device: Device = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    out: File = None,
) -> None:
    """Time the server's scheduler beside the static engine, first tokens after a prefix hit, and decoding while others read.

    Args:
        recipe: the model, with random weights.
        parts: what to measure: static, scheduler, deterministic, http, hit, prefill.
        batches: batch sizes; the first is also that of decoding while others read.
        prompt: tokens of each prompt.
        new_tokens: tokens of each answer.
        waves: requests of a run, in batches.
        piece: most tokens of prompts to read between two steps.
        hit: tokens that a prompt shares with an earlier one.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights.
        out: append the records to this file.
    """
    import torch

    from lab.bench.serve import Plan, measure

    one_of("parts", parts, PARTS)
    at_least(1, batches=batches, prompt=prompt, new_tokens=new_tokens, waves=waves, piece=piece, hit=hit)
    plan = Plan(recipe, batches, prompt, new_tokens, waves, piece, hit, find_device(device), getattr(torch, dtype))
    keep(measure(plan, parts), out, width=48, extra=True)
