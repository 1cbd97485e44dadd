"""`headmax demo`: a small language model trained three times on Python's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from headmax import HeadmaxConfig, HeadmaxForCausalLM, records
from headmax.demo import figure
from headmax.demo.corpus import Corpus, standard_library
from headmax.demo.display import Display
from headmax.demo.outputs import demo_folder, write_records
from headmax.demo.tokens import VOCABULARY, TokenizedCorpus, bits_per_byte, count_predicted, tokenize
from headmax.demo.training import Experiment, Trained, train
from headmax.demo.variants import VARIANTS
from headmax.demo.verdict import Metric, recorded_seeds, verdict
from headmax.generate.engine import Engine, Request
from headmax.generate.sampling import Sampling
from headmax.tables import Table
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig
from headmax.train.loading import load_tokenizer

LENGTH, BATCH, WARMUP = 256, 16, 20
METRIC = Metric("held-out bits per byte", "bits/byte", "bits per byte", lower_is_better=True)
PROMPT, NEW_TOKENS, TEMPERATURE = "def read_file(path", 60, 0.7


def run(*, seed: int, steps: int, out: Path, record: Path | None, corpus: Corpus | None = None) -> None:
    """Trains the variants on the same tokens from the same parameters, then shows results, continuations, a figure and a report.

    `corpus` replaces the standard library.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    config, console = train_config(steps, seed), Console()
    with demo_folder("headmax demo", out, record):
        with console.status("reading the standard library, training a tokenizer, encoding"):
            text = tokenize(corpus or standard_library(), out, lambda line: console.print(line, highlight=False, soft_wrap=True))
        held_out = text.held_out(LENGTH)
        config = replace(config, eval=EvalConfig(every=steps, sequences=held_out.num_samples))
        models = {variant: model_config(variant, text.index.document_token) for variant in VARIANTS}
        torch.manual_seed(seed)
        start = HeadmaxForCausalLM(models["plain"]).state_dict()
        experiment = Experiment(models, config, text.train(LENGTH, seed), held_out, start, text.folder)
        console.print(
            f"Training: {steps} steps of {BATCH * LENGTH:,} tokens per variant; lines show the loss of the latest step.", highlight=False
        )
        trained = train(experiment, out, Display(console, steps, lambda line: describe(line, text.tokens_per_byte)))
        predicted = count_predicted(held_out, text.token_bytes)
        bits = {variant: bits_per_byte(result.loss, *predicted) for variant, result in trained.items()}
        write_records(measurements(trained, bits, text, steps, seed), out, record)
        print_results(trained, bits, seed, console)
        for line in verdict(METRIC, bits, recorded_seeds(METRIC, case(steps))):
            console.print(line, highlight=False, soft_wrap=True)
        print_continuations(trained, text, seed, console)
        figure.plot_code(trained, bits, seed, out / "demo.png")
        figure.report_code(trained["softmax"].model, text, seed, out / "report.html")
    console.print(f"\nPicture: {out / 'demo.png'}", highlight=False, soft_wrap=True)
    console.print(f"Which head wins which token of held-out code: open {out / 'report.html'}", highlight=False, soft_wrap=True)


def model_config(variant: str, document_token: int) -> HeadmaxConfig:
    """3 layers x 128 with 4 heads."""
    return HeadmaxConfig(
        mixer="gla",
        hidden_size=128,
        num_hidden_layers=3,
        num_heads=4,
        vocab_size=VOCABULARY,
        bos_token_id=document_token,
        eos_token_id=document_token,
        head_gate=VARIANTS[variant],
    )


def train_config(steps: int, seed: int) -> TrainConfig:
    """16 sequences of 256 tokens per step; warm-up, then cosine decay."""
    tokens, lr = BATCH * LENGTH, 6e-3
    return TrainConfig(
        token_budget=steps * tokens,
        sequence_length=LENGTH,
        batch_tokens=tokens,
        seed=seed,
        checkpoint_every=50,
        device="cpu",
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(warmup_tokens=min(WARMUP, steps) * tokens, start_lr=lr / 20, final_lr=lr / 20),
        compute=ComputeConfig(precision="float32", micro_batch=BATCH),
        checkpoint=CheckpointConfig(keep_last=1),
    )


def case(steps: int) -> str:
    """The name of these settings in records."""
    return f"python-stdlib gla 3x128 heads=4 steps={steps}"


def describe(line: Mapping[str, float], tokens_per_byte: float) -> str:
    """Training loss as bits per byte, and speed."""
    return f"{bits_per_byte(line['loss'], tokens_per_byte, 1):.2f} bits/byte, {line['tokens_per_s']:,.0f} tokens/s"


def measurements(
    trained: Mapping[str, Trained], bits: Mapping[str, float], text: TokenizedCorpus, steps: int, seed: int
) -> Iterator[records.Record]:
    """Bits per byte, speed and gate entropy of every variant."""
    make = records.Recorder("demo", "cpu")
    shared = {"steps": steps, "python": text.corpus.version, "corpus_sha256": text.corpus.sha256, "torch": torch.__version__}
    for variant, result in trained.items():
        figures = [(METRIC.record, bits[variant], METRIC.unit), ("tokens per second", result.tokens_per_s, "tokens/s")]
        if result.gate_entropy is not None:
            figures.append(("gate entropy", result.gate_entropy, "of the most"))
        for metric, value, unit in figures:
            yield make(f"{case(steps)} {variant}", "headmax", metric, value, unit, seed, variant=variant, **shared)


def print_results(trained: Mapping[str, Trained], bits: Mapping[str, float], seed: int, console: Console) -> None:
    table = Table(["", "bits per byte", "tokens/s", "gate entropy"], title=f"Held-out files, seed {seed}")
    for variant, result in trained.items():
        entropy = "" if result.gate_entropy is None else f"{result.gate_entropy:.3f}"
        table.rows.append([variant, f"{bits[variant]:.3f}", f"{result.tokens_per_s:,.0f}", entropy])
    console.print(table.terminal())


def print_continuations(trained: Mapping[str, Trained], text: TokenizedCorpus, seed: int, console: Console) -> None:
    """Every variant continues the same prompt with the same seed, printed token by token."""
    tokenizer = load_tokenizer(text.folder)
    sampling = Sampling(temperature=TEMPERATURE, seed=seed)
    request = Request(PROMPT, max_new_tokens=NEW_TOKENS, sampling=sampling, stop_tokens=[text.index.document_token])
    for variant, result in trained.items():
        console.print(f"\n[bold]{variant}[/bold] continues:")
        console.out(PROMPT, end="", highlight=False)
        engine = Engine(result.model, max_batch=1, tokenizer=tokenizer)
        engine.generate(request, on_token=lambda _request, _token, piece: console.out(piece, end="", highlight=False))
        console.out("")
