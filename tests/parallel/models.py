"""Whole models over the ranks of a context group, beside one process."""

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM, Packing
from headmax.data.source import Batch
from headmax.layers.mixers.attention import AttentionConfig
from headmax.layers.mixers.mamba2 import Mamba2Config
from headmax.ops.spec import distance
from headmax.train.feed import next_labels, piece_of
from headmax.train.parallel import World
from tests.parallel.processes import everywhere

MIXERS: dict[str, Any] = {
    "linear": "linear",
    "retnet": "retnet",
    "gla": "gla",
    "gated_deltanet": "gated_deltanet",
    "kda": "kda",
    "mamba2": Mamba2Config(num_groups=4, head_k_dim=8),
    "attention": "attention",
    "hybrid": ["gated_deltanet", AttentionConfig(num_kv_heads=2, qk_norm=True, output_gate=True, rotary_dim=4)],
    "window": ["gla", AttentionConfig(window=7)],
}
SOFTMAX = HeadGateConfig(init_std=0.5)
GATES = {
    "after-norm": HeadGateConfig(read_position="after_norm", source="hidden", init_std=0.5),
    "hidden-heads": HeadGateConfig(source="hidden_heads", init_std=0.5, temperature=2.0),
    "sigmoid": HeadGateConfig(kind="sigmoid", scale="heads", init_std=0.5),
    "uniform": HeadGateConfig(kind="uniform"),
    "write": HeadGateConfig(read=False, init_std=0.5),
}


def build(mixer: Any, gate: HeadGateConfig = SOFTMAX, **settings: Any) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 40, "intermediate_size": 32}
    sizes |= {"head_gate": None if mixer == "attention" else gate}
    return HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **sizes | settings)).double().train()


def batches() -> dict[str, Batch]:
    """Rows, and a packed row whose sequences cross ranks."""
    ids = torch.randint(0, 40, (2, 48), generator=torch.Generator().manual_seed(1))
    row = ids.flatten()[None]
    return {"rows": Batch(ids, ids, None), "packed": Batch(row, row, Packing([0, 2, 30, 31, 50, 95, 96]))}


def results(model: HeadmaxForCausalLM, batch: Batch, shared: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of the tokens: logits and gates; of the whole: loss and gradients, summed over ranks where these share it."""
    model.zero_grad()
    options = {"cu_seqlens": batch.packing, "position_ids": batch.position_ids, "return_gates": True}
    options |= {"labels": batch.labels, **({"shift_labels": next_labels(batch)} if shared else {})}
    output = model(batch.input_ids, skip_logits=False, **options)
    loss = model(batch.input_ids, **options).loss
    loss.backward()
    whole = {"loss": loss.detach()} | {f"d_{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    whole["float32_loss"] = output.loss.detach()  # Hugging Face's, of logits in float32
    if shared:
        for x in whole.values():
            dist.all_reduce(x)
    tokens = {"logits": output.logits.detach()}
    for n, pair in enumerate(output.gates):
        tokens |= {f"gate_{n}_{kind}": x.detach() for kind, x in zip("rw", pair or (), strict=False) if x is not None}
    return tokens, whole


def errors(model: HeadmaxForCausalLM, batch: Batch, compiled: bool = False) -> dict[str, float]:
    """Of pieces, with compiled blocks if so, from the whole, which runs eagerly."""
    expected, total = results(model, batch, shared=False)
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), None, dist.group.WORLD)
    split = copy.deepcopy(model)
    split.model.set_context_group(world.context_group)
    if compiled:
        split.model.compile_blocks("aot_eager")
    tokens, whole = results(split, piece_of(batch, world), shared=True)
    time = batch.input_ids.shape[1]
    start, stop = list(pairwise(time * n // world.size for n in range(world.size + 1)))[world.rank]
    found = {name: distance(x, expected[name][:, start:stop]) for name, x in tokens.items()}
    return found | {name: distance(x, total[name]) for name, x in whole.items()}


def main(names: list[str], compiled: bool) -> dict[str, Any]:
    found = {}
    if compiled:
        for name in names:
            torch._dynamo.reset()
            found |= {f"{name}-{layout}": errors(build(MIXERS[name]), batch, compiled=True) for layout, batch in batches().items()}
        return {"errors": everywhere(found)}
    for name in names:
        kinds = {"softmax": SOFTMAX} | (GATES if name == "gla" else {})
        for kind, gate in kinds.items():
            for layout, batch in batches().items():
                settings = {"conv_size": 4} if name in ("gla", "retnet") and kind == "softmax" and layout == "rows" else {}
                found[f"{name}-{kind}-{layout}"] = errors(build(MIXERS[name], gate, **settings), batch)
    found["fused"] = errors(build("gated_deltanet", fused=True), batches()["packed"])
    return {"errors": everywhere(found)}
