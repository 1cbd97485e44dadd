"""The command line: thin, one function a command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal


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


def train_command(arguments: list[str]) -> Callable[..., None]:
    """`headmax train`, its defaults those of the recipe that the arguments name."""
    import tyro

    from headmax import HeadmaxConfig
    from headmax import recipes as book
    from headmax.train import TrainConfig

    named = book.get(next((word for word in arguments if word in book.names()), "softmax-gla-340m"))
    # All fields of the model; a plain backbone gets its gates by taking the softmax recipe.
    fields = {name: getattr(named.model, name) for name in HeadmaxConfig.__annotations__}
    hints = HeadmaxConfig.__annotations__ | {"head_gate": type(fields["head_gate"])}
    options = make_dataclass(
        "Model", [(name, hints[name], value) for name, value in fields.items() if value is not None or name != "head_gate"]
    )

    def train(recipe: str, /, out: Path, data: Path | None, config: TrainConfig, model: Any, task: Any) -> None:
        """Train a recipe's model, on all processes under torchrun; the same command again goes on from the last checkpoint.

        Args:
            recipe: a model and how it is trained, of those that `headmax recipes` lists.
            out: the run's folder, for checkpoints, metrics.jsonl and summary.json.
            data: the folder that `headmax data prepare` wrote; recall tasks need none.
            task: what to recall; the model's vocabulary and the numbers of tokens follow.
        """
        from headmax.train.live import Live
        from headmax.train.trainer import fit

        chosen = replace(book.get(recipe), model=HeadmaxConfig(**vars(model)), train=config)
        if task is not None and task != chosen.task:
            chosen = chosen.on(task)
        source, validation = chosen.sources(data)
        with Live(chosen.train.steps, config.log.print_every) as live:
            fit(chosen.model, chosen.train, source, out, validation=validation, tokenizer=data, show=live)

    train.__defaults__ = (None, named.train, options(), named.task)
    train.__annotations__ |= {
        "config": Annotated[TrainConfig, tyro.conf.arg(name="")],
        "model": options,
        "task": type(named.task) if named.task else Annotated[None, tyro.conf.Suppress],
    }
    return train


def _check_device(device: str) -> None:
    from headmax.train.parallel import find_device

    find_device(device)


def bench_kernels(
    device: str = "cpu",
    peer: Literal["none", "hf", "fla"] = "none",
    ops: tuple[Literal["linear_attention", "gla", "gated_delta_rule"], ...] = ("linear_attention", "gla", "gated_delta_rule"),
    batch: int | None = None,
    length: int = 4096,
    heads: int = 4,
    key: int | None = None,
    value: int | None = None,
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    lengths: tuple[int, ...] = (),
    gates: bool = False,
    rounds: int = 7,
    threads: int = 2,
    limit: float | None = None,
    out: Path | None = None,
) -> None:
    """Time the ops forward and backward beside a peer, after checking both against the float64 oracle.

    Args:
        device: cpu or cuda.
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
    from headmax.ops.spec import Case

    for name, number in {"batch": batch, "length": length, "heads": heads, "key": key, "value": value}.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    if rounds < 1 or threads < 1:
        raise ValueError(f"--rounds and --threads must be at least 1, got {rounds} and {threads}")
    _check_device(device)
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
        line = f"{record.case:28} {record.impl:8} {record.metric:36} {record.value:12.4g} {record.unit}"
        same = peers.get(record.metric) or peers.get(f"gated_delta_rule/{record.metric.split('/')[1]}")
        if same and record.impl == "headmax" and record.unit == "ms":
            line += f"   {same / record.value:.2f}x as fast as {peer}"
        if "roofline" in record.extra:
            line += (
                f"   {record.extra['TFLOP/s']:.0f} TFLOP/s, {record.extra['GB/s']:.0f} GB/s, {record.extra['roofline']:.0%} of the roofline"
            )
        if "interval" in record.extra:
            line += "   95% interval {:.4f} to {:.4f}".format(*record.extra["interval"])
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        records.append(out, measured)


def bench_train(
    recipe: str = "softmax-gla-340m",
    peer: Literal["none", "fla"] = "none",
    grid: tuple[str, ...] = ("2048x16", "4096x8", "8192x4", "16384x2"),
    rounds: int = 12,
    limit: float = 900.0,
    out: Path | None = None,
) -> None:
    """Time whole training steps on this GPU: plain backbone and softmax twin in turns, a peer, and a Transformer.

    Args:
        recipe: which model, by the name of its softmax twin or of its plain backbone.
        peer: fla measures flash-linear-attention's model, plain and with gates put on by hand.
        grid: length x batch.
        rounds: timed steps of each model, interleaved.
        limit: seconds for each peer's process.
        out: append the records to this file.
    """
    from rich.console import Console

    from headmax import recipes as book
    from headmax import records
    from headmax.bench import train

    plain = book.get(recipe).name.removeprefix("softmax-")
    _check_device("cuda")
    sizes = [tuple(int(n) for n in point.split("x")) for point in grid]
    if any(len(size) != 2 for size in sizes):
        raise ValueError(f"--grid takes length x batch, such as 4096x8, got {' '.join(grid)}")
    groups = ("headmax", "fla", "fla-gates", "transformer") if peer == "fla" else ("headmax", "transformer")
    console = Console()
    measured = train.bench(plain, groups, sizes, rounds, limit, console.print)  # type: ignore[arg-type]
    for record in measured:
        console.print(
            f"{record.case:24} {record.impl:8} {record.metric:28} {record.value:12.5g} {record.unit}", highlight=False, soft_wrap=True
        )
    if out is not None:
        records.append(out, measured)


def bench_tune(
    ops: tuple[Literal["linear_attention", "gla", "gated_delta_rule"], ...] = ("linear_attention", "gla", "gated_delta_rule"),
    widths: tuple[Literal["narrow", "wide"], ...] = ("narrow", "wide"),
    processes: int = 8,
) -> None:
    """Find the fastest block shapes on this GPU and write them to the table the kernels read (ops/tiles.json).

    Args:
        ops: which ops.
        widths: classes of heads, narrow (keys to 128) and wide.
        processes: how many compile at the same time.
    """
    from rich.console import Console

    from headmax.bench import tune

    _check_device("cuda")
    console = Console()
    tune.tune([(op, width) for op in ops for width in widths], processes, lambda text: console.print(text, highlight=False))
    tune.write()


def convert(source: Path, out: Path | None = None, /, to: Literal["headmax", "fla", "hf"] = "headmax") -> None:
    """Turn a run of `headmax train`, or a checkpoint folder of flash-linear-attention, into a model folder; weights stay bit for bit.

    Args:
        source: the folder to read: a run, or config.json and safetensors files.
        out: the folder to write, new or empty; SOURCE/hf for a run.
        to: hf takes a run's last checkpoint; headmax reads flash-linear-attention's RetNet, GLA, Gated DeltaNet or Transformer;
            fla writes them.
    """
    from headmax.models.convert import from_fla, to_fla
    from headmax.train.export import to_hf

    if out is None:
        if to != "hf":
            raise ValueError(f"convert --to {to} needs a second folder, the one to write")
        out = source / "hf"
    {"headmax": from_fla, "fla": to_fla, "hf": to_hf}[to](source, out)
    print(f"headmax: wrote {out}")


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
    app.command(convert)
    app.command(train_command(sys.argv[1:]))
    bench = tyro.extras.SubcommandApp()
    bench.command(name="kernels")(bench_kernels)
    bench.command(name="train")(bench_train)
    bench.command(name="tune")(bench_tune)
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
    except Exception as error:
        if (status := getattr(error, "exit_status", None)) is None:
            raise
        print(f"headmax: {error}", file=sys.stderr)
        sys.exit(status)
