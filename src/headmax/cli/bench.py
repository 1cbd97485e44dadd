"""Timings, of kernels, training, decoding and evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headmax.cli.options import (
    Checkpoint,
    Device,
    File,
    Folder,
    Number,
    Numbers,
    OptionalSeconds,
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

OPS = ("linear_attention", "gla", "gated_delta_rule", "kda")
TUNED = ("linear_attention", "gla", "gated_delta_rule")
"""KDA's kernels take the block shapes of the others."""


def say(text: str) -> None:
    """At once, to a file too: what follows may take minutes."""
    print(text, flush=True)


def kernels(
    device: Device = "auto",
    peer: Literal["none", "hf", "fla"] = "none",
    ops: Words = OPS,
    batch: Number = None,
    length: int = 4096,
    heads: int = 4,
    value_heads: Number = None,
    key: Number = None,
    value: Number = None,
    packed: Numbers = (),
    dtype: Annotated[Literal["float32", "bfloat16", "float64"] | None, metavar("{float32,bfloat16,float64}")] = None,
    lengths: Numbers = (),
    gates: bool = False,
    rounds: int = 7,
    threads: int = 2,
    limit: OptionalSeconds = None,
    out: File = None,
) -> None:
    """Time the ops, forward and backward, against another library.

    All outputs are first checked against the float64 oracle.

    Args:
        device: where to run; auto takes a GPU if there is one.
        peer: what to compare with: hf is transformers' chunked gated delta rule, fla is flash-linear-attention.
        ops: ops to measure.
        batch: sequences per batch; 1 on a CPU and 8 on a GPU unless given.
        length: tokens per sequence.
        heads: number of heads.
        value_heads: heads of the values, a multiple of the heads of queries and keys; as many unless given.
        key: width of a head's query and key; 128 on a CPU and that of the 340m recipes on a GPU unless given.
        value: width of a head's value; 256 on a CPU and that of the 340m recipes on a GPU unless given.
        packed: lengths of packed sequences, which sum to the length; one sequence per row unless given.
        dtype: precision of q, k and v; float32 on a CPU and bfloat16 on a GPU unless given.
        lengths: further lengths at which to measure time and memory per token.
        gates: also measure the gate overhead, in at least 50 interleaved pairs.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        limit: run each op in its own process for at most this long (flash-linear-attention tunes for minutes).
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import records
    from headmax.bench import kernels
    from headmax.ops.spec import Case

    at_least(1, batch=batch, length=length, heads=heads, key=key, value=value, value_heads=value_heads, packed=packed)
    at_least(1, rounds=rounds, threads=threads, lengths=lengths, limit=limit)
    if packed and peer == "hf":
        raise ValueError("--packed: transformers' gated delta rule takes no packed sequences; leave --peer hf out")
    if packed and (sum(packed) != length or batch not in (None, 1)):
        raise ValueError(f"--packed lengths must sum to --length {length} in a batch of 1, got {sum(packed)}")
    one_of("ops", ops, OPS)
    if out is not None:
        records.check(out)
    device = find_device(device)
    torch.set_num_threads(threads)
    gpu = device.startswith("cuda")
    base = kernels.RECIPE_CASES if gpu else dict.fromkeys(kernels.SPECS, Case(batch=1, key=128, value=256))
    given: dict[str, Any] = {"batch": 1 if packed else batch, "time": length, "heads": heads, "key": key, "value": value}
    given |= {"value_heads": value_heads, "lengths": packed or None}
    given = {name: number for name, number in given.items() if number is not None}
    cases: dict[str, Case] = {op: replace(base[op], **given) for op in ops}
    console = Console()
    with console.status("checking") as status:
        measured = kernels.bench(
            cases=cases,
            lengths=lengths,
            peer=peer,
            dtype=getattr(torch, dtype or ("bfloat16" if gpu else "float32")),
            device=torch.device(device),
            rounds=rounds,
            gates=gates,
            limit=limit,
            say=status.update if console.is_terminal else console.print,
        )
    for line in beside_peer(measured, peer):
        print(line)
    if out is not None:
        records.append(out, measured)


def beside_peer(measured: Sequence[Record], peer: str) -> Iterator[str]:
    """A line for each record; times of ours with the speed-up over the peer's."""
    peers = {record.metric: record.value for record in measured if record.impl != "headmax"}
    for record in measured:
        theirs = record.metric if peer == "fla" else f"gated_delta_rule/{record.metric.split('/')[1]}"  # transformers has that op alone
        if record.impl != "headmax" or record.unit != "ms" or theirs not in peers:
            yield record.line()
        else:
            whose = peer if theirs == record.metric else f"{peer}'s {theirs}"
            yield f"{record.line()}   {peers[theirs] / record.value:.2f}x as fast as {whose}"


def sizes(grid: tuple[str, ...]) -> list[tuple[int, int]]:
    """Lengths and batch sizes, written 4096x8."""
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", point) for point in grid]
    if not matches or not all(matches):
        raise ValueError(f"--grid takes length x batch, such as 4096x8, got {' '.join(grid)}")
    return [(int(match[1]), int(match[2])) for match in matches if match]


def train(
    recipe: Recipe = "softmax-gla-340m",
    peer: Literal["none", "fla"] = "none",
    grid: Words = ("2048x16", "4096x8", "8192x4", "16384x2"),
    rounds: int = 12,
    limit: Seconds = 900.0,
    out: File = None,
) -> None:
    """Time whole training steps on this GPU, against another library.

    The plain backbone and its softmax twin take turns; then the other library, then a Transformer.

    Args:
        recipe: the model: its softmax recipe or its plain one.
        peer: what to compare with: fla is flash-linear-attention's model without gates, as it is and compiled.
        grid: sequence lengths x batch sizes.
        rounds: timed steps of each model, interleaved.
        limit: time limit of each process.
        out: append the records to this file.
    """
    from headmax import recipes as book
    from headmax import records
    from headmax.bench import train

    if book.get(recipe).model.mixer == "attention":
        raise ValueError(f"recipe {recipe}: a Transformer has no softmax twin; it is measured with any other recipe")
    plain = recipe.removeprefix("softmax-")
    find_device("cuda", "headmax bench train")
    at_least(1, rounds=rounds, limit=limit)
    if out is not None:
        records.check(out)
    for record in train.bench(train.Plan(plain, sizes(grid), rounds), train.groups(plain, peer), limit, say):
        say(record.line())
        if out is not None:
            records.append(out, [record])


def decode(
    recipe: Recipe = "softmax-gla-340m",
    peer: Literal["none", "fla", "hf"] = "none",
    batches: Numbers = (1, 8, 64, 256),
    prompts: Numbers = (1024, 65_536),
    decoded: Numbers = (512, 16_384),
    ours: bool = True,
    transformer: bool = False,
    peer_tokens: int = 64,
    rounds: int = 12,
    device: Device = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    state_dtype: Literal["float32", "bfloat16"] = "float32",
    limit: Seconds = 900.0,
    out: File = None,
) -> None:
    """Time decoding, against another library.

    The plain backbone and its softmax twin take turns; then the others, each in its own process.

    Args:
        recipe: the model: its softmax recipe or its plain one.
        peer: what to compare with, through generate: fla is flash-linear-attention; hf is the softmax model and Llama, both compiled.
        batches: batch sizes.
        prompts: context lengths before the timed steps; the first is also the prompt length of whole generations.
        decoded: total lengths of whole generations of one text, prompt included.
        ours: measure the engine with the recipe's two models.
        transformer: measure the engine with a Transformer++ of that size (PyTorch attention, static key-value cache).
        peer_tokens: tokens that a peer decodes per measurement.
        rounds: interleaved rounds of 32 timed steps of each model.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights.
        state_dtype: precision of the recurrent states.
        limit: time limit of each process.
        out: append the records to this file.
    """
    import torch

    from headmax import recipes as book
    from headmax import records
    from headmax.bench import decode

    plain = book.get(recipe).name.removeprefix("softmax-")
    device = find_device(device)
    at_least(1, batches=batches, prompts=prompts, decoded=decoded, rounds=rounds, limit=limit)
    at_least(2, peer_tokens=peer_tokens)
    if out is not None:
        records.check(out)
    groups = ["headmax"] * ours + ["transformer"] * transformer + {"none": [], "fla": ["fla"], "hf": ["generate", "llama"]}[peer]
    extent = {"batches": batches, "prompts": prompts, "decoded": decoded, "peer_tokens": peer_tokens, "rounds": rounds}
    kinds = {"dtype": getattr(torch, dtype), "state_dtype": getattr(torch, state_dtype), "device": device}
    for group in groups:
        measured = decode.bench(decode.Plan(plain, group, **extent, **kinds), limit, say)  # type: ignore[arg-type]
        if out is not None:
            records.append(out, measured)


def evaluation(
    checkpoint: Checkpoint,
    /,
    tasks: Words = ("hellaswag", "arc_easy", "arc_challenge"),
    data_dir: Folder = None,
    limit: Number = 200,
    batch_sizes: Numbers = (1, 16),
    rounds: int = 3,
    threads: int = 2,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16"] | None, metavar("{float32,bfloat16}")] = None,
    out: File = None,
) -> None:
    """Time evaluation against lm-evaluation-harness's own Hugging Face class.

    Both run the same model and take turns.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        tasks: log-likelihood tasks.
        data_dir: folder with the tasks' files; downloaded from the Hugging Face hub unless given.
        limit: evaluate only the first documents of each task, this many.
        batch_sizes: batch sizes of the harness's class, each measured.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights; bfloat16 on a GPU and float32 on a CPU unless given.
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import records
    from headmax.eval.run import Settings
    from headmax.eval.speed import compare
    from headmax.train.loading import load_model, load_tokenizer

    at_least(1, batch_sizes=batch_sizes, rounds=rounds, threads=threads)
    if out is not None:
        records.check(out)
    torch.set_num_threads(threads)
    model = load_model(checkpoint, find_device(device), getattr(torch, dtype) if dtype else None)
    with Console().status("loading") as status:
        settings = Settings(data_dir, limit)
        measured = list(compare(model, load_tokenizer(checkpoint), settings, tasks, batch_sizes, rounds, status.update))
    for record in measured:
        ratio, apart, busy = (record.extra[key] for key in ("headmax as fast", "largest difference", "processor seconds"))
        line = f"{record.case:14} {record.impl:14} {record.value:9.3f} s ({busy:.3f} s of processor)"
        line += f"   headmax is {ratio:.2f}x as fast, answers differ by {apart:.1e}"
        print(line)
    if out is not None:
        records.append(out, measured)


def tune(
    ops: Words = TUNED,
    widths: Words = ("narrow", "wide"),
    processes: int = 8,
    out: File = None,
) -> None:
    """Find the fastest kernel block sizes on this GPU.

    Writes the table that the kernels read, ops/kernels/tiles.json.

    Args:
        ops: ops to measure.
        widths: classes of head widths: narrow (keys up to 128) and wide.
        processes: parallel compilations.
        out: write the table to this file instead.
    """
    one_of("ops", ops, TUNED)
    one_of("widths", widths, ("narrow", "wide"))
    at_least(1, processes=processes)
    find_device("cuda", "headmax bench tune")
    from headmax.bench import tune
    from headmax.ops.kernels import tiles

    path = out or tiles.PATH
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {path}: cannot be written to; name another file")
    tune.tune([(op, width) for op in ops for width in widths], processes, say)
    tune.write(path)
    print(f"headmax: wrote {path}")
