"""The command line: thin, one function a command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Literal


def recipes() -> None:
    """List the recipes with parameter counts, gate parameters and the state carried per sequence."""
    from rich.console import Console
    from rich.table import Table

    from headmax import recipes as book
    from headmax.recipes.summary import summarize

    table = Table(
        "recipe", "layers x hidden", *("heads", "parameters", "without embeddings", "gate parameters", "state per sequence"), box=None
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for name in book.names():
        recipe = book.get(name)
        model, summary = recipe.model, summarize(recipe)
        state = f"{summary.state_bytes / 2**10:,.0f} KiB" + " per token" * summary.grows
        counts = (f"{n:,}" for n in (summary.parameters, summary.body_parameters, summary.gate_parameters))
        table.add_row(name, f"{model.num_hidden_layers} x {model.hidden_size}", str(model.num_heads), *counts, state)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def demo(
    seed: int = 0,
    heads: int = 4,
    pairs: int = 16,
    key: int = 8,
    steps: int = 600,
    out: Path = Path("runs/demo"),
    record: Path | None = None,
) -> None:
    """Train one tiny backbone three times on associative recall: plain, with uniform gates, with softmax gates.

    Args:
        seed: of initialisation and data.
        heads: of the linear-attention layers.
        pairs: key-value pairs to remember.
        key: width of a head's query and key.
        steps: training steps of each model.
        out: where the picture and the records go.
        record: also append the records to this file.
    """
    from headmax.demo.recall import run

    run(seed=seed, heads=heads, pairs=pairs, key=key, steps=steps, out=out, record=record)


def bench_kernels(
    device: str = "cpu",
    peer: Literal["none", "hf"] = "none",
    batch: int = 1,
    length: int = 4096,
    heads: int = 4,
    key: int = 128,
    value: int = 256,
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
    lengths: tuple[int, ...] = (),
    rounds: int = 7,
    threads: int = 2,
    out: Path | None = None,
) -> None:
    """Time the ops forward and backward beside a peer, after checking both against the float64 oracle.

    Args:
        device: cpu or cuda.
        peer: hf is transformers' own chunked gated delta rule.
        batch: sequences.
        length: tokens per sequence.
        heads: heads.
        key: width of a head's query and key.
        value: width of a head's value.
        dtype: of q, k and v.
        lengths: more lengths at which to measure time and memory per token.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import records
    from headmax.bench import kernels
    from headmax.ops.spec import Case

    for name, number in {"batch": batch, "length": length, "heads": heads, "key": key, "value": value}.items():
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    if rounds < 1 or threads < 1:
        raise ValueError(f"--rounds and --threads must be at least 1, got {rounds} and {threads}")
    if device.split(":")[0] not in ("cpu", "cuda") or (device.startswith("cuda") and not torch.cuda.is_available()):
        raise ValueError(f"--device {device}: this machine has cpu{' and cuda' * torch.cuda.is_available()}")
    torch.set_num_threads(threads)
    console = Console()
    case = Case(batch=batch, time=length, heads=heads, key=key, value=value)
    with console.status("checking") as status:
        measured = kernels.bench(
            case=case,
            lengths=lengths,
            peer=peer,
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            rounds=rounds,
            say=status.update,
        )
    peers = {record.metric: record.value for record in measured if record.impl != "headmax"}
    for record in measured:
        line = f"{record.case:28} {record.impl:8} {record.metric:36} {record.value:12.4g} {record.unit}"
        base = peers.get("gated_delta_rule/forward+backward")
        if base and record.impl == "headmax" and record.metric.endswith("forward+backward"):
            line += f"   {base / record.value:.2f}x as fast as {peer}'s gated_delta_rule"
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        records.append(out, measured)


def reproduce_readme(path: Path = Path("README.md")) -> None:
    """Render the README's figures anew from the committed records.

    Args:
        path: the file whose generated sections are rewritten.
    """
    from headmax.bench.readme import update

    update(path)


def main() -> None:
    try:
        import tyro
        from rich.console import Console  # noqa: F401
    except ImportError as missing:
        sys.exit(f"headmax: the command line needs {missing.name}: pip install 'headmax[train,plot]'")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headmax").setLevel(logging.INFO)
    app = tyro.extras.SubcommandApp()
    app.command(recipes)
    app.command(demo)
    bench = tyro.extras.SubcommandApp()
    bench.command(name="kernels")(bench_kernels)
    app.command(bench, name="bench")
    reproduce = tyro.extras.SubcommandApp()
    reproduce.command(name="readme")(reproduce_readme)
    app.command(reproduce, name="reproduce")
    try:
        app.cli(prog="headmax", description="Softmax Linear Attention: a softmax over heads.")
    except (ValueError, FileNotFoundError) as error:
        print(f"headmax: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
