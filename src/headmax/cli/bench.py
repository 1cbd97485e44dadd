"""Timings, of kernels, training, decoding and evaluation."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from headmax.cli.options import (
    Checkpoint,
    Device,
    File,
    Folder,
    Number,
    Numbers,
    Recipe,
    Seconds,
    Words,
    at_least,
    find_device,
    metavar,
    one_of,
)

OPS = ("linear_attention", "gla", "gated_delta_rule")


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
    key: Number = None,
    value: Number = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float64"] | None, metavar("float32|bfloat16|float64")] = None,
    lengths: Numbers = (),
    gates: bool = False,
    rounds: int = 7,
    threads: int = 2,
    limit: Seconds = None,
    out: File = None,
) -> None:
    """Time the ops, forward and backward, beside a peer.

    Both are checked against the float64 oracle first.

    Args:
        device: where to run; auto takes a GPU if there is one.
        peer: hf is transformers' own chunked gated delta rule, fla is flash-linear-attention.
        ops: which ops.
        batch: sequences; 1 on a CPU, 8 on a GPU unless given.
        length: tokens per sequence.
        heads: heads.
        key: width of a head's query and key; 128 on a CPU, the 340m recipes' on a GPU unless given.
        value: width of a head's value; 256 on a CPU, the 340m recipes' on a GPU unless given.
        dtype: of q, k and v; float32 on a CPU, bfloat16 on a GPU unless given.
        lengths: more lengths at which to measure time and memory per token.
        gates: also measure what the gates cost, in at least 50 interleaved pairs.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        limit: run each op in a process of its own, for at most so many seconds (flash-linear-attention tunes for minutes).
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import records
    from headmax.bench import kernels
    from headmax.bench.terminal import line
    from headmax.ops.spec import Case

    at_least(1, batch=batch, length=length, heads=heads, key=key, value=value, rounds=rounds, threads=threads, lengths=lengths, limit=limit)
    one_of("ops", ops, OPS)
    if out is not None:
        records.check(out)
    device = find_device(device)
    torch.set_num_threads(threads)
    gpu = device.startswith("cuda")
    base = kernels.RECIPE_CASES if gpu else dict.fromkeys(kernels.SPECS, Case(batch=1, key=128, value=256))
    given: dict[str, Any] = {"batch": batch, "time": length, "heads": heads, "key": key, "value": value}
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
    peers = {record.metric: record.value for record in measured if record.impl != "headmax"}
    for record in measured:
        text = line(record)
        theirs = record.metric if peer == "fla" else f"gated_delta_rule/{record.metric.split('/')[1]}"  # transformers has that op alone
        if theirs in peers and record.impl == "headmax" and record.unit == "ms":
            whose = f"'s {theirs}" if theirs != record.metric else ""
            text += f"   {peers[theirs] / record.value:.2f}x as fast as {peer}{whose}"
        print(text)
    if out is not None:
        records.append(out, measured)


def train(
    recipe: Recipe = "softmax-gla-340m",
    peer: Literal["none", "fla"] = "none",
    grid: Words = ("2048x16", "4096x8", "8192x4", "16384x2"),
    rounds: int = 12,
    limit: float = 900.0,
    out: File = None,
) -> None:
    """Time whole training steps on this GPU, beside a peer.

    The plain backbone and its softmax twin run in turns, then a peer, then a Transformer.

    Args:
        recipe: which model, by the name of its softmax twin or of its plain backbone.
        peer: fla measures flash-linear-attention's model, plain, compiled, with bfloat16 parameters, and with gates put on by hand.
        grid: length x batch.
        rounds: timed steps of each model, interleaved.
        limit: seconds for each process.
        out: append the records to this file.
    """
    from headmax import recipes as book
    from headmax import records
    from headmax.bench import train
    from headmax.bench.terminal import line

    if book.get(recipe).model.mixer == "attention":
        raise ValueError(f"recipe {recipe}: a Transformer has no softmax twin; it is measured beside any other recipe")
    plain = recipe.removeprefix("softmax-")
    find_device("cuda", "headmax bench train")
    at_least(1, rounds=rounds, limit=limit)
    if out is not None:
        records.check(out)
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", point) for point in grid):
        raise ValueError(f"--grid takes length x batch, such as 4096x8, got {' '.join(grid)}")
    sizes = [tuple(int(n) for n in point.split("x")) for point in grid]
    groups = (
        "cold eager",
        "cold compiled",
        "headmax",
        *(("fla", "fla-compiled", "fla-bfloat16", "fla-gates") if peer == "fla" else ()),
        "transformer",
    )
    for record in train.bench(plain, groups, sizes, rounds, limit, say):  # type: ignore[arg-type]
        say(line(record))
        if out is not None:
            records.append(out, [record])


def decode(
    recipe: Recipe = "softmax-gla-340m",
    peer: Literal["none", "fla", "hf"] = "none",
    batches: Numbers = (1, 8, 64, 256),
    prompts: Numbers = (1024, 65_536),
    decoded: Numbers = (512, 16_384),
    drift: int = 0,
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
    """Time decoding, beside a peer.

    The plain backbone and its softmax twin run in turns, then peers, each in a process of its own.

    Args:
        recipe: which model, by the name of its softmax twin or of its plain backbone.
        peer: fla is flash-linear-attention through generate; hf is the softmax model through generate, compiled, and Llama likewise.
        batches: sequences at a time.
        prompts: tokens of context before the timed steps; the first is also the prompt of whole generations.
        decoded: lengths of whole generations of one text, prompt included.
        drift: also compare a bfloat16 state with a float32 one over so many given tokens.
        ours: measure the engine with the recipe's two models.
        transformer: measure the engine with the Transformer++ of the recipe's size: PyTorch's attention on a static key-value cache.
        peer_tokens: tokens a peer decodes for each figure.
        rounds: timed stretches of 32 steps of each model, interleaved.
        device: where to run; auto takes a GPU if there is one.
        dtype: of the weights.
        state_dtype: of the recurrent states.
        limit: seconds for each process.
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
    at_least(0, drift=drift)
    if out is not None:
        records.check(out)
    groups = ["headmax"] * ours + ["transformer"] * transformer + {"none": [], "fla": ["fla"], "hf": ["generate", "llama"]}[peer]
    sizes = {"batches": batches, "prompts": prompts, "decoded": decoded, "drift": drift, "peer_tokens": peer_tokens, "rounds": rounds}
    kinds = {"dtype": getattr(torch, dtype), "state_dtype": getattr(torch, state_dtype), "device": device}
    for group in groups:
        measured = decode.bench(decode.Plan(plain, group, **sizes, **kinds), limit, say)  # type: ignore[arg-type]
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
    dtype: Annotated[Literal["float32", "bfloat16"] | None, metavar("float32|bfloat16")] = None,
    out: File = None,
) -> None:
    """Time evaluation beside lm-evaluation-harness's own Hugging Face class.

    The same model, in turns.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        tasks: tasks of log-likelihoods.
        data_dir: a folder with the tasks' files; without it they come from the hub.
        limit: only the first so many documents of each task.
        batch_sizes: of the harness's class, each measured.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        device: where to run; auto takes a GPU if there is one.
        dtype: of the weights; bfloat16 on a GPU, float32 on a CPU unless given.
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
    ops: Words = OPS,
    widths: Words = ("narrow", "wide"),
    processes: int = 8,
    out: File = None,
) -> None:
    """Find the fastest kernel block sizes on this GPU.

    They go into the table that the kernels read, ops/tiles.json.

    Args:
        ops: which ops.
        widths: classes of heads, narrow (keys to 128) and wide.
        processes: how many compile at the same time.
        out: write the table to this file instead.
    """
    one_of("ops", ops, OPS)
    one_of("widths", widths, ("narrow", "wide"))
    at_least(1, processes=processes)
    find_device("cuda", "headmax bench tune")
    from headmax.bench import tune
    from headmax.ops import triton_tiles

    path = out or triton_tiles.PATH
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {path}: cannot be written to; name another file")
    tune.tune([(op, width) for op in ops for width in widths], processes, say)
    tune.write(path)
    print(f"headmax: wrote {path}")
