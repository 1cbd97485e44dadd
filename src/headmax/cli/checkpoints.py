"""Commands on a checkpoint: convert it, continue a text with it, evaluate it, look at its gates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from headmax.cli.arguments import at_least, check_device


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

    from headmax import durable
    from headmax.generate import GREEDY, Engine, Sampling, terminal
    from headmax.generate.prefix import check_place

    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --file, not both")
    text = durable.read_text(file) if file is not None else prompt
    if save_prefix is not None and text is None:
        raise ValueError("--save-prefix needs --prompt or --file")
    if save_prefix is not None:
        durable.refuse_inputs(save_prefix, file, prefix)
        check_place(save_prefix)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    sampling = GREEDY if greedy else Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    settings = terminal.Settings(max_new_tokens, sampling, stop)
    terminal.load_config(checkpoint)  # says what is wrong with a folder, before its tokenizer is missed
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
    batch_tokens: int | None = None,
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
        batch_tokens: most tokens in one forward pass; 65,536 on a GPU and 16,384 on a CPU unless given.
        seed: of needles and recall sequences.
    """
    from headmax.eval import terminal
    from headmax.eval.run import Settings

    settings = Settings(data_dir, limit, max_length, seed)
    place = terminal.Place(checkpoint, tokenizer or checkpoint, work or Path("runs/eval") / checkpoint.resolve().name, name)
    if device is not None:
        check_device(device)
    failures = terminal.run(place, tasks, settings, stage, out, device, dtype, batch_tokens)
    for line in failures:
        print(f"headmax: {line}", file=sys.stderr)
    if failures:
        sys.exit(2)


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

    from headmax import durable
    from headmax.analysis import gates, report

    if (text is None) == (file is None):
        raise ValueError("give the text with --text or --file, one of the two")
    at_least(1, max_tokens=max_tokens)
    check_device(device)
    report.check_place(out, file)
    words = durable.read_text(file) if file is not None else text or ""
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
