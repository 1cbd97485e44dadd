"""Whole models whose heads, columns and vocabulary are shared by ranks, beside one process."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from headmax import HeadmaxForCausalLM
from headmax.data.source import Batch
from headmax.layers.mixers.attention import AttentionConfig
from headmax.layers.mixers.gated_deltanet import GatedDeltaNetConfig
from headmax.layers.mixers.gla import GLAConfig
from headmax.layers.mixers.mamba2 import Mamba2Config
from headmax.ops.head_gate import head_gate, split_gates
from headmax.ops.spec import distance
from tests.parallel.models import GATES, SOFTMAX, batches, build
from tests.parallel.processes import everywhere

MIXERS: dict[str, Any] = {
    "linear": ("linear", {}),
    "retnet": ("retnet", {"conv_size": 4}),
    "gla": ("gla", {}),
    "gated_deltanet": ("gated_deltanet", {}),
    "value heads": (GatedDeltaNetConfig(num_v_heads=8, output_norm="joint"), {}),
    "kda": ("kda", {}),
    "mamba2": (Mamba2Config(num_groups=4, head_k_dim=8), {}),
    "attention": ("attention", {}),
    "hybrid": (["gated_deltanet", AttentionConfig(num_kv_heads=4, qk_norm=True, output_gate=True, rotary_dim=4)], {"fused": True}),
    "tied": ("gla", {"tie_word_embeddings": True}),
    "padded vocabulary": ("gla", {"pad_token_id": 3, "fused": True}),
}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def results(model: HeadmaxForCausalLM, batch: Batch) -> dict[str, torch.Tensor]:
    """Loss by pieces and its gradients; logits, the loss from these and gates, and the gradients of gates and logits."""
    found: dict[str, torch.Tensor] = {}
    options = {"cu_seqlens": batch.packing, "labels": batch.labels, "return_gates": True}
    for kind, skip in (("by_pieces", True), ("logits", False)):
        model.zero_grad()
        output = model(batch.input_ids, skip_logits=skip, **options)
        gates = [gate for pair in output.gates for gate in pair or () if gate is not None]
        (output.loss + sum((gate.square().sum() for gate in gates), 0.0)).backward()
        found |= {f"{kind}_gate_{n}": gate.detach() for n, gate in enumerate(gates)}
        found[f"{kind}_loss"] = output.loss.detach()
        bound = "float32_" if kind == "logits" else ""  # Hugging Face's loss is of logits in float32
        found |= {f"{bound}d_{name}": whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"logits": output.logits.detach()}


def errors(model: HeadmaxForCausalLM, mesh: DeviceMesh, batch: Batch, compiled: bool = False) -> dict[str, float]:
    spread = copy.deepcopy(model)
    spread.set_tensor_mesh(mesh)
    assert {type(p) for p in spread.model.layers[0].mixer.parameters()} == {DTensor}
    if compiled:
        spread.model.compile_blocks("aot_eager")
    expected, found = results(model, batch), results(spread, batch)
    assert expected.keys() == found.keys()
    return {name: distance(found[name], expected[name]) for name in expected}


def gate_errors(kind: str, group: dist.ProcessGroup) -> dict[str, float]:
    """Of the op, on some heads each; and of two gates from scores that were given."""
    generator = torch.Generator().manual_seed(0)
    x, weight, d_gate = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 8, 6), (8, 6), (2, 5, 8)))
    x = (3 * x).requires_grad_()
    weight.requires_grad_()
    options = {"temperature": 1.5, "scale": 8.0, "kind": kind}
    expected = head_gate(x, weight, **options)
    both = split_gates(torch.cat([x[..., 0], x[..., 1]], -1), 2, **options)
    d_x, d_weight = torch.autograd.grad((expected * d_gate).sum() + (both[0] * both[1] * d_gate).sum(), (x, weight))
    own = slice(group.rank() * (width := 8 // group.size()), (group.rank() + 1) * width)
    mine, my_weight = x[:, :, own].detach().requires_grad_(), weight[own].detach().requires_grad_()
    gate = head_gate(mine, my_weight, **options, tensor_group=group)
    pair = split_gates(torch.cat([mine[..., 0], mine[..., 1]], -1), 2, **options, tensor_group=group)
    loss = (gate * d_gate[..., own]).sum() + (pair[0] * pair[1] * d_gate[..., own]).sum()
    d_mine, d_my_weight = torch.autograd.grad(loss, (mine, my_weight))
    found = {"gate": distance(gate, expected[..., own]), "d_x": distance(d_mine, d_x[:, :, own])}
    found |= {f"split_{n}": distance(one, of_all[..., own]) for n, (one, of_all) in enumerate(zip(pair, both, strict=True))}
    return found | {"d_weight": distance(d_my_weight, d_weight[own])}


def numbers_sent(model: HeadmaxForCausalLM, mesh: DeviceMesh, batch: Batch) -> int:
    """By forward and backward of one rank, a token."""
    sent, gather, reduce = 0, dist.all_gather_into_tensor, dist.all_reduce

    def count_gather(everyone: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> object:
        nonlocal sent
        sent += x.numel()
        return gather(everyone, x, group)

    def count_reduce(x: torch.Tensor, *arguments: Any, **options: Any) -> object:
        nonlocal sent
        sent += x.numel()
        return reduce(x, *arguments, **options)

    model.set_tensor_mesh(mesh)
    with mock.patch.object(dist, "all_gather_into_tensor", count_gather), mock.patch.object(dist, "all_reduce", count_reduce):
        model(batch.input_ids, labels=batch.labels).loss.backward()
    return sent


def refusals(mesh: DeviceMesh) -> list[str]:
    """What a model says that cannot be shared by the ranks."""
    said = []
    for mixer, settings in (
        ("gla", {"num_heads": 1}),
        (Mamba2Config(num_groups=1, head_k_dim=8), {}),
        (AttentionConfig(num_kv_heads=1), {}),
        ("gla", {"vocab_size": 41}),
        ("gla", {"intermediate_size": 33}),
    ):
        try:
            build(mixer, None, **settings).set_tensor_mesh(mesh)
        except ValueError as error:
            said.append(str(error))
    model = build("gla")
    model.set_tensor_mesh(mesh)
    try:
        model.eval()(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    except ValueError as error:
        said.append(str(error))
    return said


def main(compiled: bool) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    of = batches()
    if compiled:
        for name in ("gla", "kda", "hybrid"):
            mixer, settings = MIXERS[name]
            found[name] = errors(build(mixer, **settings), mesh, of["rows"], compiled=True)
        return {"errors": everywhere(found)}
    for name, (mixer, settings) in MIXERS.items():
        gate = None if name == "attention" else SOFTMAX
        model = build(mixer, gate, **settings)
        if (padding := model.config.pad_token_id) is not None:  # a converted model may have trained it as another token
            assert (of["rows"].input_ids == padding).any()
            nn.init.ones_(model.model.embed_tokens.weight[padding])
        found[name] = errors(model, mesh, of["packed" if name == "kda" else "rows"])
    for name, gate in GATES.items():
        joint = GLAConfig(output_norm="joint", conv_size=4)
        found[f"gla-{name}"] = errors(build("gla", gate), mesh, of["rows"])
        found[f"joint-{name}"] = errors(build(joint, gate, fused=True), mesh, of["packed"])
    found |= {f"op-{kind}": gate_errors(kind, mesh.get_group()) for kind in ("softmax", "sigmoid")}
    kinds = {"plain": (GLAConfig(output_norm="none"), None), "joint": (GLAConfig(output_norm="joint"), None)}
    kinds |= {kind: (GLAConfig(output_norm="none"), gate) for kind, gate in {"softmax": SOFTMAX, **GATES}.items()}
    sent = {kind: numbers_sent(build(*given), mesh, of["rows"]) for kind, given in kinds.items()}
    return {"errors": everywhere(found), "refusals": refusals(mesh), "sent": sent}
