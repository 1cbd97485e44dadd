"""How long does a token take to decode, over batch, context and decoded length? Plain and with gates in turns, beside peers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.isolated import isolated
from headmax.bench.timing import Ceilings, median, paired, seconds
from headmax.generate import GREEDY, Engine, PrefixState, Request
from headmax.generate.sampling import Features
from headmax.records import Record, Recorder

STEPS = 32
"""Decoding steps of one timed stretch."""


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    recipe: str
    """The plain backbone's name; its twin is softmax-<recipe>."""
    group: str
    batches: Sequence[int]
    prompts: Sequence[int]
    decoded: Sequence[int]
    """Lengths of whole generations at batch 1, for engines of ours."""
    peer_tokens: int
    """Tokens a peer decodes."""
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
    """The least a step must move: every weight read once, every recurrent state read and written."""
    model = engine.model
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if not model.config.tie_word_embeddings:
        weights.pop(id(model.get_input_embeddings().weight))
    return sum(weights.values()) + 2 * engine.state_bytes(batch)


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


class Contender:
    """A model of ours and the engine it is measured in, with the memory both take."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self.plan = name, plan
        before = allocated(plan.device)
        self.model = ours(name, plan.device, plan.dtype)
        self.weights = self.own = allocated(plan.device) - before
        self.attends = any(self.model.model.uses_attention)
        self.engine: Any = None
        self.advance: Any = None
        self.size: tuple[int, int | None] = (0, None)
        self.prefix: PrefixState | None = None

    def ready(self, batch: int, context: int, new: int) -> None:
        """An engine for that batch with every sequence after the same prompt; attention gets no more room than it needs."""
        size = (batch, context + new if self.attends else None)
        if size != self.size:
            self.engine = self.advance = None  # first, so that memory is that of the new one
            before = allocated(self.plan.device)
            self.engine = Engine(self.model, max_batch=batch, state_dtype=self.plan.state_dtype, max_length=size[1])
            self.advance = self.engine.step.prepare(batch, Features())
            self.own, self.size = self.weights + allocated(self.plan.device) - before, size
        if self.prefix is None or len(self.prefix) != context:
            self.prefix = self.engine.prefill(random_tokens(self.model, context))
        self.engine.step.load([self.prefix] * batch)

    def stretch(self) -> None:
        for _ in range(STEPS):
            self.advance()


def latencies(plan: Plan, contenders: dict[str, Contender], make: Recorder, bandwidth: float | None) -> Iterator[Record]:
    """Time of a step over batches and contexts, the contenders taking turns."""
    for batch, context in itertools.product(plan.batches, plan.prompts):
        try:
            for contender in contenders.values():
                contender.ready(batch, context, STEPS * (plan.rounds + 1))
                contender.stretch()
        except torch.OutOfMemoryError:
            yield make(f"{contender.name} batch {batch} context {context}", "headmax", "out of memory", 1, "")
            continue
        if plan.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = allocated(plan.device)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(plan.rounds):
            for name, contender in contenders.items():
                times[name].append(seconds(contender.stretch, torch.device(plan.device)) / STEPS)
        grown = torch.cuda.max_memory_allocated() - before if plan.device == "cuda" else 0
        for name, contender in contenders.items():
            taken, case = median(times[name]), f"{contender.name} batch {batch} context {context}"
            extra: dict[str, Any] = {"rounds": plan.rounds, "steps": STEPS, "best": 1e3 * min(times[name])}
            extra |= {"dtype": str(plan.dtype).removeprefix("torch."), "state": str(plan.state_dtype).removeprefix("torch.")}
            if not contender.attends:
                moved = step_bytes(contender.engine, batch)
                extra |= {"GB moved": moved / 1e9} | ({} if bandwidth is None else {"of the bandwidth": moved / taken / bandwidth})
            yield make(case, "headmax", "latency per token", 1e3 * taken, "ms", **extra)
            yield make(case, "headmax", "tokens per second", batch / taken, "tokens/s")
            if plan.device == "cuda":
                yield make(case, "headmax", "memory", (contender.own + grown) / 2**30, "GiB")
        if set(contenders) == {"plain", "softmax"}:
            ratio, interval = paired(times["softmax"], times["plain"])
            case = f"{plan.recipe} batch {batch} context {context}"
            yield make(case, "headmax", "softmax over plain/latency", ratio, "ratio", interval=interval)


def generations(plan: Plan, contenders: dict[str, Contender], make: Recorder) -> Iterator[Record]:
    """Whole generations of one text, prompt included, as a user calls them; the first of two is to warm up."""
    for contender, count in itertools.product(contenders.values(), plan.decoded):
        contender.ready(1, plan.prompts[0], count)
        prompt = random_tokens(contender.model, plan.prompts[0])
        contender.engine.generate(Request(prompt, max_new_tokens=2, sampling=GREEDY))
        begin = time.perf_counter()
        contender.engine.generate(Request(prompt, max_new_tokens=count, sampling=GREEDY))
        taken, case = time.perf_counter() - begin, f"{contender.name} batch 1 context {plan.prompts[0]} decoded {count}"
        yield make(case, "headmax", "end to end", taken, "s", per_token=1e3 * taken / count)


def llama(recipe: str) -> Any:
    """transformers' Llama at the size of our Transformer++ recipe, with PyTorch's attention."""
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
    """(impl, what) → how to make the model, and options of its `generate`."""
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
    """A peer's time per token: that of a whole `generate` less that of one half as long."""
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
    """Everything one process measures, printed as it comes."""
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
    contenders = {kind: Contender(name, plan) for kind, name in names.items()}
    yield from latencies(plan, contenders, make, None if ceilings is None else ceilings.bytes)
    yield from generations(plan, contenders, make)


def bench(plan: Plan, limit: float | None, say: Callable[[str], None]) -> list[Record]:
    """One plan; with a `limit` in seconds in a process of its own."""
    say(f"{plan.recipe}: {plan.group}")
    return list(measure(plan)) if limit is None else isolated(measure, plan, limit=limit, say=say)
