"""Decoding latency by batch size, context and decoded length: interleaved, plain and with gates, and of peers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.isolated import isolated
from headmax.bench.timing import Ceilings, paired, seconds
from headmax.generate import GREEDY, Engine, PrefixState, Request
from headmax.generate.sampling import Features
from headmax.records import Record, Recorder

STEPS = 32
"""Decoding steps per timing."""


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    recipe: str
    """The plain backbone's recipe; with gates, it is softmax-<recipe>."""
    group: str
    batches: Sequence[int]
    prompts: Sequence[int]
    decoded: Sequence[int]
    """Lengths of whole generations at batch size 1, with headmax only."""
    peer_tokens: int
    """Tokens that a peer decodes."""
    rounds: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: str


def ours(name: str, device: str, dtype: torch.dtype) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = HeadmaxForCausalLM(recipes.get(name).model)
    return model.to(dtype).eval()  # type: ignore[arg-type]


def random_tokens(model: Any, count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def step_bytes(engine: Engine, batch: int) -> int:
    """Fewest bytes that a step must move: all weights read once, all recurrent states read and written."""
    model = engine.model
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if not model.config.tie_word_embeddings:
        weights.pop(id(model.get_input_embeddings().weight))
    return sum(weights.values()) + 2 * engine.state_bytes(batch)


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


class TimedEngine:
    """A headmax model and its engine, with their memory."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, plan
        before = allocated(plan.device)
        self.model = ours(name, plan.device, plan.dtype)
        self.weight_bytes = self.total_bytes = allocated(plan.device) - before
        self.has_attention = any(self.model.model.uses_attention)
        self.engine: Any = None
        self.advance: Any = None
        self.size: tuple[int, int | None] = (0, None)
        self.prefix: PrefixState | None = None

    def load(self, batch: int, context: int, new: int) -> None:
        """Loads a batch of sequences after the same prompt, with room for `new` tokens each."""
        size = (batch, context + new if self.has_attention else None)
        if size != self.size:
            self.engine = self.advance = None  # freed first, so that memory is measured without the old engine
            before = allocated(self.plan.device)
            self.engine = Engine(self.model, max_batch=batch, state_dtype=self.plan.state_dtype, max_length=size[1])
            self.advance = self.engine.step.prepare(batch, Features())
            self.total_bytes, self.size = self.weight_bytes + allocated(self.plan.device) - before, size
        if self.prefix is None or len(self.prefix) != context:
            self.prefix = self.engine.prefill(random_tokens(self.model, context))
        self.engine.step.load([self.prefix] * batch)

    def run_steps(self) -> None:
        for _ in range(STEPS):
            self.advance()


def latencies(plan: Plan, engines: dict[str, TimedEngine], make: Recorder, bandwidth: float | None) -> Iterator[Record]:
    """Time of a step by batch size and context, with engines interleaved."""
    for batch, context in itertools.product(plan.batches, plan.prompts):
        try:
            for engine in engines.values():
                engine.load(batch, context, STEPS * (plan.rounds + 1))
                engine.run_steps()
        except torch.OutOfMemoryError:
            yield make(f"{engine.name} batch {batch} context {context}", "headmax", "out of memory", 1, "")
            continue
        if plan.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = allocated(plan.device)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(plan.rounds):
            for name, engine in engines.items():
                times[name].append(seconds(engine.run_steps, torch.device(plan.device)) / STEPS)
        grown = torch.cuda.max_memory_allocated() - before if plan.device == "cuda" else 0
        for name, engine in engines.items():
            taken, case = median(times[name]), f"{engine.name} batch {batch} context {context}"
            extra: dict[str, Any] = {"rounds": plan.rounds, "steps": STEPS, "best": 1e3 * min(times[name])}
            extra |= {"dtype": str(plan.dtype).removeprefix("torch."), "state": str(plan.state_dtype).removeprefix("torch.")}
            if not engine.has_attention:
                moved = step_bytes(engine.engine, batch)
                extra |= {"GB moved": moved / 1e9} | ({} if bandwidth is None else {"of the bandwidth": moved / taken / bandwidth})
            yield make(case, "headmax", "latency per token", 1e3 * taken, "ms", **extra)
            yield make(case, "headmax", "tokens per second", batch / taken, "tokens/s")
            if plan.device == "cuda":
                yield make(case, "headmax", "memory", (engine.total_bytes + grown) / 2**30, "GiB")
        if set(engines) == {"plain", "softmax"}:
            ratio, interval = paired(times["softmax"], times["plain"])
            case = f"{plan.recipe} batch {batch} context {context}"
            yield make(case, "headmax", "softmax over plain/latency", ratio, "ratio", interval=interval)


def generations(plan: Plan, engines: dict[str, TimedEngine], make: Recorder) -> Iterator[Record]:
    """End-to-end time of generating one text, including the prompt, after a short generation to warm up."""
    for engine, count in itertools.product(engines.values(), plan.decoded):
        engine.load(1, plan.prompts[0], count)
        prompt = random_tokens(engine.model, plan.prompts[0])
        engine.engine.generate(Request(prompt, max_new_tokens=2, sampling=GREEDY))
        begin = time.perf_counter()
        engine.engine.generate(Request(prompt, max_new_tokens=count, sampling=GREEDY))
        taken, case = time.perf_counter() - begin, f"{engine.name} batch 1 context {plan.prompts[0]} decoded {count}"
        yield make(case, "headmax", "end to end", taken, "s", per_token=1e3 * taken / count)


def llama(recipe: str) -> Any:
    """transformers' Llama with the sizes of our Transformer++ recipe and PyTorch's attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = recipes.get(recipe).model
    config = LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_width(model.mixers[0]),
        vocab_size=model.vocab_size,
        tie_word_embeddings=True,
        max_position_embeddings=2**17,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def peers(plan: Plan) -> dict[tuple[str, str], tuple[Callable[[], Any], dict[str, Any]]]:
    """(impl, name) → (builder of the model, options of its `generate`)."""
    from headmax.bench.train import fla

    def compiled() -> HeadmaxForCausalLM:
        model = ours(f"softmax-{plan.recipe}", plan.device, plan.dtype)
        model.model.compile_blocks()
        return model

    transformer = f"transformer-{plan.recipe.split('-')[-1]}"
    groups: dict[str, Any] = {
        "fla": {("fla", plan.recipe): (lambda: fla(plan.recipe), {})},
        "generate": {("hf", f"softmax-{plan.recipe}, compiled"): (compiled, {})},
        "llama": {("hf", f"{transformer}, static cache"): (lambda: llama(transformer), {"cache_implementation": "static"})},
    }
    return groups[plan.group]


def through_generate(plan: Plan, make: Recorder) -> Iterator[Record]:
    """A peer's time per token, from the difference between `generate` of all and of half the tokens."""
    for (impl, name), (build, options) in peers(plan).items():
        model = build().to(plan.device, plan.dtype).eval()
        for batch, prompt in itertools.product(plan.batches, plan.prompts):
            ids = torch.tensor([random_tokens(model, prompt)] * batch, device=plan.device)

            def run(count: int, model: Any = model, ids: Tensor = ids, options: dict[str, Any] = options) -> float:
                exact = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
                begin = time.perf_counter()
                model.generate(ids, attention_mask=torch.ones_like(ids), **exact, **options)
                if plan.device == "cuda":
                    torch.cuda.synchronize()
                return time.perf_counter() - begin

            if plan.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            first = run(plan.peer_tokens)
            whole, half = run(plan.peer_tokens), run(plan.peer_tokens // 2)
            taken, case = (whole - half) / (plan.peer_tokens - plan.peer_tokens // 2), f"{name} batch {batch} context {prompt}"
            extra: dict[str, Any] = {"tokens": plan.peer_tokens, "first run": first, "end to end": whole}
            yield make(case, impl, "latency per token", 1e3 * taken, "ms", **extra)
            yield make(case, impl, "tokens per second", batch / taken, "tokens/s")
            if plan.device == "cuda":
                yield make(case, impl, "memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def measure(plan: Plan) -> Iterator[Record]:
    """Yields all records of a process, and prints each."""
    for record in _measure(plan):
        print(record.line(width=58), flush=True)
        yield record


def _measure(plan: Plan) -> Iterator[Record]:
    make, device = Recorder("decode", plan.device), torch.device(plan.device)
    if plan.group not in ("headmax", "transformer"):
        yield from through_generate(plan, make)
        return
    ceilings = Ceilings.of(device)
    if ceilings is not None:
        yield make("1 GiB", "torch", "copy", ceilings.bytes / 1e12, "TB/s")
    names = {"plain": plan.recipe, "softmax": f"softmax-{plan.recipe}"}
    if plan.group == "transformer":
        names = {"transformer": f"transformer-{plan.recipe.split('-')[-1]}"}
    engines = {kind: TimedEngine(name, plan) for kind, name in names.items()}
    yield from latencies(plan, engines, make, None if ceilings is None else ceilings.bytes)
    yield from generations(plan, engines, make)


def bench(plan: Plan, limit: float | None, say: Callable[[str], None]) -> list[Record]:
    """Measures a plan; with a `limit` in seconds, in a separate process."""
    say(f"{plan.recipe}: {plan.group}")
    return list(measure(plan)) if limit is None else isolated(measure, plan, limit=limit, say=say)
