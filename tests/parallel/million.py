"""A long sequence of which every rank holds a piece, beside one process that has all of it, segment by segment (tests/lab/test_long.py)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers import loss as last_layer
from headmax.layers.loss import IGNORED
from headmax.ops.spec import distance
from lab.bench.long import add_gradients


def main(length: int) -> dict[str, Any]:
    """How far loss and gradients of the ranks' pieces, summed, are from those of the whole sequence, in float32."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last_layer.LOGITS_AT_ONCE = 2**22  # eight processes share the memory
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 8, "vocab_size": 256}
    model = HeadmaxForCausalLM(HeadmaxConfig(mixer=["gla", "gated_deltanet"], head_gate=HeadGateConfig(), **sizes)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))
    following = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    piece = slice(length * rank // ranks, length * (rank + 1) // ranks)
    model.model.set_context_group(dist.group.WORLD)
    places = torch.arange(length)[None, piece]
    items = torch.tensor(length - 1)
    options = {"position_ids": places, "shift_labels": following[:, piece], "num_items_in_batch": items}
    loss = model(ids[:, piece], labels=ids[:, piece], **options).loss
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for x in found.values():
        dist.all_reduce(x)
    errors: dict[str, float] = {}
    if rank == 0:
        model.zero_grad()
        model.model.set_context_group(None)
        loss = add_gradients(model, ids, 2**16)
        errors = {"loss": distance(found["loss"], loss)}
        errors |= {name: distance(found[name], p.grad) for name, p in model.named_parameters() if p.grad is not None}
    dist.barrier()
    return {"errors": errors, "loss": loss.item()}
