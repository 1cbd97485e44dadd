"""The command line: thin, one function a command."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from headmax.reproduce import command as reproduction


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
        if data is not None:
            chosen = chosen.speaking(data)
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


def _check_device(device: str, needed_by: str = "") -> None:
    from headmax.train.parallel import find_device

    find_device(device, f"{needed_by} needs a CUDA GPU" if needed_by else f"--device {device}")


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
        theirs = record.metric if peer == "fla" else f"gated_delta_rule/{record.metric.split('/')[1]}"  # transformers has that op alone
        if theirs in peers and record.impl == "headmax" and record.unit == "ms":
            line += f"   {peers[theirs] / record.value:.2f}x as fast as {peer}" + f"'s {theirs}" * (theirs != record.metric)
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

    if book.get(recipe).model.mixer == "attention":
        raise ValueError(f"recipe {recipe}: a Transformer has no softmax twin; it is measured beside any other recipe")
    plain = recipe.removeprefix("softmax-")
    _check_device("cuda", "headmax bench train")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", point) for point in grid):
        raise ValueError(f"--grid takes length x batch, such as 4096x8, got {' '.join(grid)}")
    sizes = [tuple(int(n) for n in point.split("x")) for point in grid]
    groups = ("cold eager", "cold compiled", "headmax", *("fla", "fla-gates") * (peer == "fla"), "transformer")
    console = Console()
    for record in train.bench(plain, groups, sizes, rounds, limit, console.print):  # type: ignore[arg-type]
        line = f"{record.case:24} {record.impl:8} {record.metric:28} {record.value:12.5g} {record.unit}"
        if "interval" in record.extra:
            line += "   95% interval {:.4f} to {:.4f}".format(*record.extra["interval"])
        console.print(line, highlight=False, soft_wrap=True)
        if out is not None:
            records.append(out, [record])


def bench_decode(
    recipe: str = "softmax-gla-340m",
    peer: Literal["none", "fla", "hf"] = "none",
    batches: tuple[int, ...] = (1, 8, 64, 256),
    prompts: tuple[int, ...] = (1024, 65_536),
    decoded: tuple[int, ...] = (512, 16_384),
    drift: int = 0,
    ours: bool = True,
    transformer: bool = False,
    peer_tokens: int = 64,
    rounds: int = 12,
    device: str = "cuda",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    state_dtype: Literal["float32", "bfloat16"] = "float32",
    limit: float | None = 900.0,
    out: Path | None = None,
) -> None:
    """Time decoding: plain backbone and softmax twin in turns, then peers, each in a process of its own; printed as it comes.

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
        device: cpu or cuda.
        dtype: of the weights.
        state_dtype: of the recurrent states.
        limit: seconds for each process.
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import recipes as book
    from headmax import records
    from headmax.bench import decode

    plain = book.get(recipe).name.removeprefix("softmax-")
    _check_device(device)
    for name, numbers in {"batches": batches, "prompts": prompts, "decoded": decoded, "peer-tokens": (peer_tokens - 1,)}.items():
        if any(number < 1 for number in numbers):
            raise ValueError(f"--{name} must be at least {2 if name == 'peer-tokens' else 1}, got {' '.join(map(str, numbers))}")
    groups = ["headmax"] * ours + ["transformer"] * transformer + {"none": [], "fla": ["fla"], "hf": ["generate", "llama"]}[peer]
    sizes = {"batches": batches, "prompts": prompts, "decoded": decoded, "drift": drift, "peer_tokens": peer_tokens, "rounds": rounds}
    kinds = {"dtype": getattr(torch, dtype), "state_dtype": getattr(torch, state_dtype), "device": device}
    for group in groups:
        measured = decode.bench(decode.Plan(plain, group, **sizes, **kinds), limit, Console().print)  # type: ignore[arg-type]
        if out is not None:
            records.append(out, measured)


def bench_eval(
    checkpoint: Path,
    /,
    tasks: tuple[str, ...] = ("hellaswag", "arc_easy", "arc_challenge"),
    data_dir: Path | None = None,
    limit: int | None = 200,
    batch_sizes: tuple[int, ...] = (1, 16),
    rounds: int = 3,
    threads: int = 2,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] | None = None,
    out: Path | None = None,
) -> None:
    """Time the evaluation beside lm-evaluation-harness's own Hugging Face class, in turns, with the same model.

    Args:
        checkpoint: a folder with config.json, safetensors files and a tokenizer.
        tasks: tasks of log-likelihoods.
        data_dir: a folder with the tasks' files; without it they come from the hub.
        limit: only the first so many documents of each task.
        batch_sizes: of the harness's class, each measured.
        rounds: interleaved repetitions; the median is reported.
        threads: CPU threads.
        device: cpu or cuda.
        dtype: of the weights; bfloat16 on a GPU, float32 on a CPU unless given.
        out: append the records to this file.
    """
    import torch
    from rich.console import Console

    from headmax import records
    from headmax.eval.run import Settings
    from headmax.eval.speed import compare
    from headmax.generate.terminal import load, load_tokenizer

    _check_device(device)
    torch.set_num_threads(threads)
    model = load(checkpoint, device, getattr(torch, dtype) if dtype else None)
    console = Console()
    with console.status("loading") as status:
        settings = Settings(data_dir, limit)
        measured = list(compare(model, load_tokenizer(checkpoint), settings, tasks, batch_sizes, rounds, status.update))
    for record in measured:
        ratio, apart, busy = (record.extra[key] for key in ("headmax as fast", "largest difference", "processor seconds"))
        line = f"{record.case:14} {record.impl:14} {record.value:9.3f} s ({busy:.3f} s of processor)"
        line += f"   headmax is {ratio:.2f}x as fast, answers differ by {apart:.1e}"
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        records.append(out, measured)


def bench_tune(
    ops: tuple[Literal["linear_attention", "gla", "gated_delta_rule"], ...] = ("linear_attention", "gla", "gated_delta_rule"),
    widths: tuple[Literal["narrow", "wide"], ...] = ("narrow", "wide"),
    processes: int = 8,
    out: Path | None = None,
) -> None:
    """Find the fastest block shapes on this GPU and write them to the table the kernels read (ops/tiles.json).

    Args:
        ops: which ops.
        widths: classes of heads, narrow (keys to 128) and wide.
        processes: how many compile at the same time.
        out: write the table to this file instead.
    """
    _check_device("cuda", "headmax bench tune")
    from rich.console import Console

    from headmax.bench import tune
    from headmax.ops import triton_tiles

    path = out or triton_tiles.PATH
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {path}: cannot be written to; name another file")
    console = Console()
    tune.tune([(op, width) for op in ops for width in widths], processes, lambda text: console.print(text, highlight=False))
    tune.write(path)
    console.print(f"wrote {path}")


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


def generate(
    checkpoint: Path,
    /,
    prompt: str | None = None,
    file: Path | None = None,
    max_new_tokens: int = 256,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    prefix: Path | None = None,
    save_prefix: Path | None = None,
    tokenizer: Path | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    state_dtype: Literal["float32", "bfloat16"] = "float32",
    max_length: int | None = None,
    compile: bool = False,
) -> None:
    """Continue a text with a model, shown as it comes; without --prompt and --file, line by line from standard input.

    Args:
        checkpoint: a folder with config.json, safetensors files and a tokenizer.
        prompt: the text to continue.
        file: a file with the text to continue.
        max_new_tokens: at most so many; the model's end-of-text token ends it too.
        greedy: always the most likely token.
        temperature: divides the logits.
        top_k: only the most likely tokens, so many.
        top_p: only the most likely tokens that together have this probability.
        min_p: only tokens at least this likely, as a share of the most likely one's probability.
        repetition_penalty: makes tokens that were there already less likely, if above 1.
        seed: of the draws; the same seed gives the same text.
        stop: strings that end the text.
        prefix: a file from --save-prefix: the prompt continues what was read then.
        save_prefix: read the prompt, keep what the model then remembers in this file, and generate nothing.
        tokenizer: a folder with the tokenizer, if it is not beside the model.
        device: cpu or cuda; cuda where there is one.
        dtype: of the weights; bfloat16 on a GPU, float32 on a CPU unless given.
        state_dtype: of the recurrent states.
        max_length: most tokens of a text; needed by models with attention layers, and by no others.
        compile: compile the model first, which takes its time; on a CPU every token is then faster.
    """
    import torch

    from headmax.generate import GREEDY, Engine, Sampling, terminal

    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --file, not both")
    text = file.read_text() if file is not None else prompt
    if save_prefix is not None and text is None:
        raise ValueError("--save-prefix needs --prompt or --file")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    sampling = GREEDY if greedy else Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    settings = terminal.Settings(max_new_tokens, sampling, stop)
    words = terminal.load_tokenizer(tokenizer or checkpoint)
    model = terminal.load(checkpoint, device, dtype and getattr(torch, dtype))
    if compile:
        model.model.compile_blocks()
    engine = Engine(model, max_batch=1, state_dtype=getattr(torch, state_dtype), max_length=max_length, tokenizer=words)
    before = None if prefix is None else engine.load_prefix(prefix)
    if text is None:
        terminal.interact(engine, before, settings)
    elif save_prefix is not None:
        terminal.keep(engine, text, before, save_prefix)
    else:
        terminal.continue_text(engine, text, before, settings)


def evaluate(
    checkpoint: Path,
    /,
    tasks: str = "commonsense,retrieval,niah,mqar",
    data_dir: Path | None = None,
    limit: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    max_length: int | None = None,
    stage: Literal["all", "requests", "score", "metrics"] = "all",
    work: Path | None = None,
    tokenizer: Path | None = None,
    name: str | None = None,
    batch_tokens: int = 16_384,
    seed: int = 42,
) -> None:
    """The paper's evaluation of a checkpoint: requests, then scores, then metrics; started again, it goes on where it was.

    Args:
        checkpoint: a folder with config.json, safetensors files and a tokenizer.
        tasks: tasks and groups, separated by commas; groups are commonsense, retrieval, niah and mqar.
        data_dir: a folder with the tasks' files; without it they come from the hub.
        limit: only the first so many documents of each task.
        out: append the records to this file; records.jsonl in the work folder unless given.
        device: cpu or cuda; cuda where there is one.
        dtype: of the weights; bfloat16 on a GPU, float32 on a CPU unless given.
        max_length: most tokens read at a time; what is beyond is cut, counted and reported. No limit unless given (retrieval: 4096).
        stage: only one of them; score needs torch, transformers and the work folder with requests.jsonl alone.
        work: the folder for requests.jsonl and scores.jsonl; runs/eval/ and the checkpoint's name unless given.
        tokenizer: a folder with the tokenizer, if it is not beside the model.
        name: what to call the model in records; the recipe's name or the folder's unless given.
        batch_tokens: most tokens in one forward pass.
        seed: of needles and recall sequences.
    """
    from headmax.eval import terminal
    from headmax.eval.run import Settings

    settings = Settings(data_dir, limit, max_length, seed)
    place = terminal.Place(checkpoint, tokenizer or checkpoint, work or Path("runs/eval") / checkpoint.resolve().name, name)
    if device is not None:
        _check_device(device)
    failures = terminal.run(place, tasks, settings, stage, out, device, dtype, batch_tokens)
    for line in failures:
        print(f"headmax: {line}", file=sys.stderr)
    if failures:
        sys.exit(2)


def reproduce_tables(
    records: tuple[Path, ...] = (),
    scale: str = "340m",
    form: Literal["markdown", "latex"] = "markdown",
    out: Path | None = None,
) -> None:
    """Render the paper's three tables: its figures, ours beside them where there are records, deltas to the backbone, chance.

    Args:
        records: files with records of `headmax eval`; the repository's own unless given.
        scale: which models are ours: those whose recipe or name ends with it.
        form: Markdown or LaTeX.
        out: write to this file instead of standard output.
    """
    from headmax.eval.tables import RECORDS, render

    text = render(records or (RECORDS,), scale, form)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)


def inspect(
    checkpoint: Path,
    /,
    text: str | None = None,
    file: Path | None = None,
    out: Path = Path("report.html"),
    compare: Path | None = None,
    tokenizer: Path | None = None,
    max_tokens: int = 10_000,
    device: str = "cpu",
) -> None:
    """Look at the gates of a model on a text: writes one HTML file that opens in a browser, without a network.

    Args:
        checkpoint: a folder with config.json, safetensors files and a tokenizer.
        text: the text.
        file: a file with the text.
        out: the file to write.
        compare: another checkpoint with the same tokenizer, shown beside the first.
        tokenizer: a folder with the tokenizer, if it is not beside the model.
        max_tokens: longer texts are cut there.
        device: cpu or cuda.
    """
    from rich.console import Console

    from headmax.analysis import gates, report

    if (text is None) == (file is None):
        raise ValueError("give the text with --text or --file, one of the two")
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {max_tokens}")
    _check_device(device)
    words = file.read_text() if file is not None else text or ""
    folders = [checkpoint] + ([] if compare is None else [compare])
    whole = len({folder.resolve().name for folder in folders}) < len(folders)  # two of the same name go by their paths
    traces = []
    console = Console(stderr=True)
    for folder in folders:
        name = str(folder) if whole else folder.resolve().name
        with console.status(f"reading with {name}"):
            traces.append(gates.of_checkpoint(folder, words, name=name, tokenizer=tokenizer, most=max_tokens, device=device))
    report.write(out, traces)
    cut = f", cut at --max-tokens {max_tokens:,}" * (len(traces[0].tokens) == max_tokens)
    print(f"headmax: wrote {out}: {len(traces[0].tokens):,} tokens{cut}, {out.stat().st_size / 2**20:.1f} MiB")


def data_prepare(
    inputs: tuple[str, ...],
    /,
    out: Path,
    valid: tuple[str, ...] = (),
    valid_fraction: float = 0.0,
    tokenizer: str = "mistral",
    document_token: str | None = None,
    text_key: str = "text",
    separator: str = "<|doc|>",
    max_tokens: str | None = None,
    shard_tokens: str = "100M",
    workers: int | None = None,
) -> None:
    """Turn text into token shards to train on. Run again after an interruption, it goes on after the last complete shard.

    Args:
        inputs: .txt, .jsonl, .parquet, each also .gz, .xz, .zst; folders of them; hub datasets as hf:owner/name[:configuration][@split].
        out: the folder to write.
        valid: inputs to validate on.
        valid_fraction: or the share of documents to hold out for that.
        tokenizer: mistral, a tokenizer.json, or a folder with one.
        document_token: the token before every document; what the tokenizer puts before a text unless given.
        text_key: the field of a JSON line, or the column of a table, that holds the text.
        separator: the line between two documents of a .txt.
        max_tokens: stop at so many to train on, such as 15B.
        shard_tokens: tokens per shard.
        workers: encoding processes; one per core unless given.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from headmax.data.documents import Options
    from headmax.data.prepare import Done, PrepareConfig, prepare

    config = PrepareConfig(
        inputs,
        valid,
        valid_fraction,
        tokenizer,
        document_token,
        Options(text_key, separator),
        max_tokens=None if max_tokens is None else _count("max-tokens", max_tokens),
        shard_tokens=_count("shard-tokens", shard_tokens),
    )
    tokens = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s")
    columns = (BarColumn(), DownloadColumn(), tokens, TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, tokens=0, rate=0.0)

        def report(done: Done) -> None:
            rate = (done.tokens - done.earlier) / max(progress.tasks[0].elapsed or 0.0, 1e-3)
            progress.update(bar, completed=done.bytes, total=done.total_bytes, tokens=done.tokens, rate=rate)

        index = prepare(config, out, workers=workers, report=report)
    for split, shards in index.splits.items():
        if shards:
            print(f"headmax: {out}: {split} {index.tokens(split):,} tokens, {index.documents(split):,} documents, {len(shards)} shards")


def data_check(folder: Path, /) -> None:
    """Read a prepared folder through and compare every file with its checksum.

    Args:
        folder: what `headmax data prepare` wrote.
    """
    from headmax.data.shards import verify

    index = verify(folder)
    print(f"headmax: {folder}: whole, {index.tokens('train'):,} tokens to train on, {index.tokens('valid'):,} to validate on")


def plan(
    recipe: str,
    /,
    gpu: str = "h100",
    gpus: int = 8,
    parallel: Literal["ddp", "fsdp"] | None = None,
    tokens: str | None = None,
    length: int | None = None,
    batch_tokens: str | None = None,
) -> None:
    """Estimate memory, step time, days and GPU-hours of a training run on 1 to 1024 GPUs.

    Args:
        recipe: which model.
        gpu: which card, such as a100, h100, h200, h20, b200.
        gpus: how many; the table has other numbers too.
        parallel: ddp copies the model to every GPU, fsdp shards it; both unless given.
        tokens: to train on, such as 15e9 or 15B; the recipe's unless given.
        length: tokens per sequence; the recipe's unless given.
        batch_tokens: tokens per step over all GPUs, such as 0.5M; the recipe's unless given.
    """
    from rich.console import Console

    from headmax import recipes as book
    from headmax.bench import plan_table
    from headmax.bench.plan import Run

    chosen = book.get(recipe)
    run = Run(
        chosen,
        gpu,
        chosen.train.token_budget if tokens is None else _count("tokens", tokens),
        chosen.train.sequence_length if length is None else length,
        chosen.train.batch_tokens if batch_tokens is None else _count("batch-tokens", batch_tokens),
    )
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for part in plan_table.render(run, gpus, ("ddp", "fsdp") if parallel is None else (parallel,)):
        console.print(part, soft_wrap=isinstance(part, str))


def _count(name: str, text: str) -> int:
    """A number of tokens: 500000, 15e9, 0.5M or 15B."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        number = float(text.rstrip("kKmMbB") if scale > 1 else text) * scale
    except ValueError as error:
        raise ValueError(f"--{name} must be a number such as 500000, 15e9, 0.5M or 15B, got {text!r}") from error
    if not 1 <= number < 1e18:
        raise ValueError(f"--{name} must be between 1 and 1e18, got {text}")
    return round(number)


def reproduce_readme(path: Path = Path("README.md")) -> None:
    """Render the README's figures anew from the committed records.

    Args:
        path: the file whose generated sections are rewritten.
    """
    from headmax.bench.readme import update

    update(path)


def reproduce_theory(out: Path = Path("runs/theory")) -> None:
    """Run the paper's proposition and theorems, and the norm's effect on the read gate, as experiments: pictures and records.

    Args:
        out: where they go.
    """
    from headmax.analysis.theory_figures import reproduce

    for record in reproduce(out):
        settings = ", ".join(f"{name} {value:g}" for name, value in record.extra.items())
        print(f"{record.case:44} {record.metric:36} {record.value:10.3g} {record.unit:6} {settings}".rstrip())
    print(f"headmax: wrote {out}")


def reproduce_figures(out: Path = Path("runs/figures"), results: Path | None = None) -> None:
    """Draw the paper's figures from records; one whose records are missing is named instead.

    Args:
        out: where they go.
        results: a folder with records (.jsonl); those of the repository unless given.
    """
    from headmax import records
    from headmax.analysis import figures

    for line in figures.reproduce(out, results or records.RESULTS):
        print(line)


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
    app.command(generate)
    app.command(name="eval")(evaluate)
    app.command(inspect)
    app.command(plan)
    data = tyro.extras.SubcommandApp()
    data.command(name="prepare")(data_prepare)
    data.command(name="check")(data_check)
    app.command(data, name="data")
    bench = tyro.extras.SubcommandApp()
    bench.command(name="kernels")(bench_kernels)
    bench.command(name="train")(bench_train)
    bench.command(name="decode")(bench_decode)
    bench.command(name="eval")(bench_eval)
    bench.command(name="tune")(bench_tune)
    app.command(bench, name="bench")
    reproduce = tyro.extras.SubcommandApp()
    reproduce.command(name="readme")(reproduce_readme)
    reproduce.command(name="tables")(reproduce_tables)
    reproduce.command(name="theory")(reproduce_theory)
    reproduce.command(name="figures")(reproduce_figures)
    reproduce.command(name="prepare")(reproduction.prepare)
    reproduce.command(name="run")(reproduction.run)
    reproduce.command(name="collect")(reproduction.collect)
    reproduce.command(name="report")(reproduction.report)
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
