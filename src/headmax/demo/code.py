"""The demonstration: one small language model trained three times on Python's own source, and what the gates made of it."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headmax import HeadmaxConfig, HeadmaxForCausalLM, durable, records
from headmax.data.dataset import TokenShards
from headmax.demo.corpus import Corpus, standard_library
from headmax.demo.display import Display
from headmax.demo.text import VOCABULARY, Text, bits_per_byte, make, predicted_bytes
from headmax.demo.variants import RECORDS, VARIANTS, seed_scores
from headmax.demo.verdict import recorded, verdict
from headmax.generate.engine import Engine, Request
from headmax.generate.sampling import Sampling
from headmax.train import CheckpointConfig, ComputeConfig, EvalConfig, OptimConfig, ScheduleConfig, TrainConfig
from headmax.train.loading import load_model, load_tokenizer
from headmax.train.metrics import Line, read_lines
from headmax.train.trainer import RUN, fit

STEPS = 190
"""A minute for each variant on two cores."""
LENGTH, BATCH, WARMUP, THREADS = 256, 16, 20, 2
METRIC = "held-out bits per byte"
PROMPT, NEW_TOKENS, TEMPERATURE = "def read_file(path", 60, 0.7


@dataclass(frozen=True)
class Result:
    """One trained variant."""

    model: HeadmaxForCausalLM
    lines: list[Line]
    """Its metrics, step by step."""
    bits: float
    """Per byte of the held-out files."""

    @property
    def speed(self) -> float:
        """Tokens per second, the median of the steps."""
        return statistics.median(line["tokens_per_s"] for line in self.lines)

    @property
    def entropy(self) -> float | None:
        """Of the gates on held-out text, a mean over layers: 1 where all heads share alike, 0 where one takes all; None without gates."""
        gates = self.lines[-1].get("gates", {})
        return statistics.fmean(gate["entropy"] for gate in gates.values()) if gates else None


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


def train_config(steps: int, seed: int, held_out: int) -> TrainConfig:
    """16 sequences of 256 tokens a step, a warm-up, then a cosine; all held-out windows measured at the end."""
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
        eval=EvalConfig(every=steps, sequences=held_out),
    )


def run(*, seed: int, steps: int, out: Path, record: Path | None, corpus: Corpus | None = None) -> None:
    """Trains the variants on the same tokens from the same start, then shows figures, continuations, a picture and a report.

    What an earlier call left in `out` is used: text and tokens as long as the text is the same, a variant as long as nothing
    that decides its result has changed. `corpus` takes the place of the standard library.
    """
    from headmax.analysis.style import require_matplotlib
    from headmax.demo.figure import draw_code, show_code

    require_matplotlib()
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    console = Console()
    with durable.sole_user(out), threads(THREADS):
        with console.status("reading the standard library, training a tokenizer, encoding"):
            text = make(corpus or standard_library(), out, lambda line: console.print(line, highlight=False, soft_wrap=True))
        results = train(text, steps, seed, out, console)
        made = list(recordings(results, text, steps, seed))
        (out / "records.jsonl").unlink(missing_ok=True)
        records.append(out / "records.jsonl", made)
        if record is not None:
            records.append(record, made)
        case = case_of(steps)
        print_results(results, case, seed, seed_scores(RECORDS, METRIC).get(case, []), console)
        stream(results, text, seed, console)
        draw_code(results, seed, out / "demo.png")
        show_code(results["softmax"].model, text, seed, out / "report.html")
    where = f"\nPicture: {out / 'demo.png'}\nWhich head wins which token of held-out code: open {out / 'report.html'} in a browser."
    console.print(where, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """So many of torch's: sums are in the same order on every machine, and the same seed gives the same figures."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(text: Text, steps: int, seed: int, out: Path, console: Console) -> dict[str, Result]:
    """All variants, one after the other; what they share starts as the same parameters."""
    source, held_out = text.source(LENGTH, seed), text.held_out(LENGTH)
    config = train_config(steps, seed, held_out.num_samples)
    torch.manual_seed(seed)
    start = HeadmaxForCausalLM(model_config("plain", text.index.document_token)).state_dict()
    tokens, text_bytes = predicted_bytes(held_out, text.token_bytes)
    results = {}
    with Display(console, steps, text.train_rate) as display:
        for variant in VARIANTS:  # beside its folder is a file of what decides its result
            model, folder = model_config(variant, text.index.document_token), out / variant
            display.begin(variant)
            if begin(folder, settings_of(model, config, source), steps):
                trained = load_model(folder)
                display.kept(variant, list(read_lines(folder / "metrics.jsonl"))[-1]["loss"])
            else:
                show = functools.partial(display.step, variant)
                trained = fit(model, config, source, folder, validation=held_out, tokenizer=text.folder, start=start, show=show)
            lines = list(read_lines(folder / "metrics.jsonl"))
            results[variant] = Result(trained, lines, bits_per_byte(lines[-1]["validation"]["loss"], tokens, text_bytes))
    return results


def settings_of(model: HeadmaxConfig, config: TrainConfig, source: TokenShards) -> dict[str, Any]:
    """All that decides what a variant's training gives, as JSON reads it back."""
    code = {"commit": records.current_commit(), "torch": torch.__version__}
    return json.loads(json.dumps({"model": model.to_dict(), "train": asdict(config), "data": source.identity, **code}))


def begin(folder: Path, settings: dict[str, Any], steps: int) -> bool:
    """Whether a variant is trained already. A run of other settings is removed; one of the same settings resumes."""
    written = folder.with_suffix(".json")
    if written.exists() and durable.read_json(written) == settings:
        lines = list(read_lines(folder / "metrics.jsonl")) if (folder / "summary.json").exists() else []
        return bool(lines) and lines[-1]["step"] == steps
    durable.claim(folder, RUN)
    shutil.rmtree(folder, ignore_errors=True)
    durable.write(written, json.dumps(settings, indent=2) + "\n")
    return False


def case_of(steps: int) -> str:
    return f"python-stdlib gla 3x128 heads=4 steps={steps}"


def recordings(results: dict[str, Result], text: Text, steps: int, seed: int) -> Iterator[records.Record]:
    """Bits per byte, speed and the gates' entropy of every variant."""
    make = records.Recorder("demo", "cpu")
    shared = {"steps": steps, "python": text.corpus.version, "corpus_sha256": text.corpus.sha256, "torch": torch.__version__}
    for variant, result in results.items():
        figures = [(METRIC, result.bits, "bits/byte"), ("tokens per second", result.speed, "tokens/s")]
        if result.entropy is not None:
            figures.append(("gate entropy", result.entropy, "of the most"))
        for metric, value, unit in figures:
            yield make(f"{case_of(steps)} {variant}", "headmax", metric, value, unit, seed, variant=variant, **shared)


def print_results(results: dict[str, Result], case: str, seed: int, seeds: list[dict[str, float]], console: Console) -> None:
    table = Table("", "bits per byte", "tokens/s", "gate entropy", title=f"Held-out files, seed {seed}", title_justify="left", box=None)
    for variant, result in results.items():
        entropy = "" if result.entropy is None else f"{result.entropy:.3f}"
        table.add_row(variant, f"{result.bits:.3f}", f"{result.speed:,.0f}", entropy)
    console.print(table)
    scores = {variant: result.bits for variant, result in results.items()}
    for line in [*verdict(scores, seeds), *recorded(case, seeds)]:
        console.print(line, highlight=False, soft_wrap=True)


def stream(results: dict[str, Result], text: Text, seed: int, console: Console) -> None:
    """Every variant continues the same beginning, shown token by token."""
    tokenizer = load_tokenizer(text.folder)
    ends = [text.index.document_token]
    request = Request(PROMPT, max_new_tokens=NEW_TOKENS, sampling=Sampling(temperature=TEMPERATURE, seed=seed), stop_tokens=ends)
    for variant, result in results.items():
        console.print(f"\n[bold]{variant}[/bold] goes on:")
        console.out(PROMPT, end="", highlight=False)
        Engine(result.model, max_batch=1, tokenizer=tokenizer).generate(
            request, on_token=lambda _number, _token, piece: console.out(piece, end="", highlight=False)
        )
        console.out("")
