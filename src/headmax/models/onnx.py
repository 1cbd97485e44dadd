"""A model as ONNX: a prompt of a fixed length, and one token with the states in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_structure, tree_unflatten

from headmax.layers.mixers.attention import AttentionState, attend
from headmax.layers.mixers.state import RecurrentState
from headmax.models.cache import HeadmaxCache
from headmax.models.modeling import HeadmaxForCausalLM


def chunk_scan(update: Tensor, decay: Tensor, initial: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """headmax::chunk_scan of one sequence in each row."""
    states, state = [], initial
    for n in range(update.shape[1]):
        states.append(state)
        state = update[:, n] + decay[:, n] * state
    return torch.stack(states, 1), state


def delta_scan(
    fresh: Tensor, erase: Tensor, key_to_end: Tensor, decay: Tensor, initial: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """headmax::delta_scan of one sequence in each row."""
    states, written, state = [], [], initial
    for n in range(decay.shape[1]):
        states.append(state)
        written.append(fresh[:, n] - erase[:, n] @ state)
        state = decay[:, n] * state + key_to_end[:, n].mT @ written[n]
    return torch.stack(states, 1), torch.stack(written, 1), state


def packed_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int | None) -> Tensor:
    """headmax::packed_attention of rows of one length."""
    q, k, v = (x.unflatten(0, (bounds.shape[1] - 1, -1)).transpose(1, 2) for x in (q, k, v))
    at = torch.arange(k.shape[2], device=q.device)
    age = at[k.shape[2] - q.shape[2] :, None] - at
    o = attend(q, k, v, age >= 0 if window is None else (age >= 0) & (age < window))
    return o.transpose(1, 2).flatten(0, 1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + L)^-1 for the part L of a [..., n, n] below its diagonal, n a power of two: all blocks of a size at once, then of twice that."""
    inverse, half = torch.ones_like(a[..., :1, None]), 1
    while half < a.shape[-1]:
        blocks = a.unflatten(-1, (-1, 2 * half)).unflatten(-3, (-1, 2 * half))
        blocks = torch.diagonal(blocks, dim1=-4, dim2=-2).movedim(-1, -3)
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        below = -second @ blocks[..., half:, :half] @ first
        inverse = torch.cat([torch.cat([first, torch.zeros_like(below)], -1), torch.cat([below, second], -1)], -2)
        half *= 2
    return inverse.squeeze(-3)


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """aten::linalg_solve_triangular as the delta rules call it."""
    if upper or not left or not unitriangular:
        raise ValueError("ONNX: linalg_solve_triangular is known for unit lower triangles on the left only")
    return unit_lower_inverse(a) @ b


DECOMPOSITIONS = {
    torch.ops.headmax.chunk_scan.default: chunk_scan,
    torch.ops.headmax.delta_scan.default: delta_scan,
    torch.ops.headmax.packed_attention.default: packed_attention,
    torch.ops.aten.linalg_solve_triangular.default: solve_triangular,
}
"""Operators in the chunkwise forms that ONNX does not have."""


class Prefill(nn.Module):
    """A prompt [batch, time] → the next token's logits, and the states."""

    def __init__(self, model: HeadmaxForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self.model(input_ids, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1], *tree_leaves(states(output.past_key_values))


class Step(nn.Module):
    """A token [batch, 1], its position [batch, 1] and the states → the next token's logits, and the states."""

    def __init__(self, model: HeadmaxForCausalLM, cache: HeadmaxCache) -> None:
        super().__init__()
        self.model, self.structure = model, tree_structure(states(cache))

    def forward(self, input_ids: Tensor, position_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        layers = tree_unflatten(past, self.structure)
        cache = HeadmaxCache(len(layers))
        for layer, state in zip(cache.layers, layers, strict=True):
            if "keys" in state:
                layer.advance(AttentionState(**state), state["keys"].shape[2])
            else:
                layer.advance(RecurrentState(**state), 1)
        output = self.model(input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        return output.logits[:, -1], *tree_leaves(states(output.past_key_values))


def states(cache: HeadmaxCache) -> list[dict[str, Any]]:
    """Of each layer, by name."""
    kept = [layer.to_keep() for layer in cache.layers]
    return [{name: x for name, x in state._asdict().items() if x is not None} for state in kept]  # type: ignore[union-attr]


def names(cache: HeadmaxCache) -> list[str]:
    """Of the states' tensors: "layers.0.recurrent", "layers.0.conv.1", "layers.1.keys"."""
    paths = [path for path, _ in tree_flatten_with_path(states(cache))[0]]
    return [".".join(["layers", *(str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)]) for path in paths]


@torch.no_grad()
def export_onnx(model: HeadmaxForCausalLM, folder: Path, length: int, batch: int = 1) -> tuple[Path, Path]:
    """Writes prefill.onnx, for prompts of `length` tokens, and step.onnx, for one token.

    The step takes a token, its position and the states that either graph returned, under the same names. Needs the packages onnx and
    onnxscript.
    """
    ids = torch.zeros(batch, length, dtype=torch.int64)
    cache = model.eval()(ids, use_cache=True).past_key_values
    labels, past = names(cache), tree_leaves(states(cache))
    growing = [{2: torch.export.Dim.DYNAMIC} if name.endswith((".keys", ".values")) else {} for name in labels]
    given: Any = {"input_names": ["input_ids"], "output_names": ["logits", *labels]}
    _write(Prefill(model), (ids,), None, folder / "prefill.onnx", given)
    given["input_names"] = ["input_ids", "position_ids", *labels]
    given["output_names"] = ["logits", *(f"new.{name}" for name in labels)]
    _write(Step(model, cache), (ids[:, :1], ids[:, :1], past), ({}, {}, growing), folder / "step.onnx", given)
    return folder / "prefill.onnx", folder / "step.onnx"


def _write(module: nn.Module, inputs: tuple[Any, ...], dynamic: Any, file: Path, given: dict[str, Any]) -> None:
    program = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False).run_decompositions(DECOMPOSITIONS)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(program, dynamo=True, verbose=False, **given).save(file)  # type: ignore[union-attr]
