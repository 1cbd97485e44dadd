"""AdamW, Muon, gradient clipping and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer

from headmax.models import HeadmaxForCausalLM
from headmax.train.config import OptimConfig, TrainConfig


def full_tensor(x: Tensor) -> Tensor:
    """A DTensor gathered from all ranks; any other tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def group_by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by device mesh, plain tensors separately: PyTorch's multi-tensor kernels cannot mix them."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


class Adam(AdamW):
    """AdamW whose groups may mix DTensors and plain tensors, so that checkpoints have the same groups on any number of ranks."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group | {"params": part} for group in groups for part in group_by_mesh(group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


class AdamWithMuon(Adam):
    """Muon for the groups with a momentum, AdamW for the others: one optimizer with one state."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        muon_groups = [{name: group[name] for name in ("params", "weight_decay", "momentum")} for group in groups if "momentum" in group]
        self.muon = Muon(muon_groups, lr=options["lr"], adjust_lr_fn="match_rms_adamw")  # one learning rate serves both

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Skips AdamW's own, which expects AdamW's state for Muon's parameters too."""
        Optimizer.__setstate__(self, state)

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        skip = getattr(self, "found_inf", None)  # AdamW reads it on the device; Muon does not support it
        if skip is None or not skip.item():
            self.muon.state = self.state
            for muon_group, group in zip(self.muon.param_groups, (group for group in groups if "momentum" in group), strict=True):
                muon_group |= {"params": group["params"], "lr": group["lr"]}
            self.muon.step()


def build_optimizer(model: HeadmaxForCausalLM, config: OptimConfig) -> AdamW:
    """AdamW, or Muon for the projections of blocks and AdamW for the rest.

    Weight decay applies to matrices only: norms, A_log, dt_bias and biases have fewer than two dimensions.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    projections: list[nn.Parameter] = []
    if config.name == "muon":
        linear = {id(module.weight) for module in model.model.layers.modules() if isinstance(module, nn.Linear)}
        projections = [p for p in matrices if id(p) in linear]
        matrices = [p for p in matrices if id(p) not in linear]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": projections, "weight_decay": config.weight_decay, "momentum": config.momentum},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamWithMuon(groups, **options) if projections else Adam(groups, **options)


def learning_rate(config: TrainConfig, tokens: int) -> float:
    """The learning rate after `tokens`: linear warm-up from start_lr to lr, then cosine decay, or at the end linear decay, to final_lr."""
    schedule, peak = config.schedule, config.optim.lr
    if tokens < schedule.warmup_tokens:
        return schedule.start_lr + (peak - schedule.start_lr) * tokens / schedule.warmup_tokens
    if schedule.shape == "wsd":
        left = max(0.0, 1 - tokens / config.token_budget)
        part = min(1.0, left / schedule.decay_fraction) if schedule.decay_fraction else 1.0
        return schedule.final_lr + (peak - schedule.final_lr) * part
    progress = min(1.0, (tokens - schedule.warmup_tokens) / max(1, config.token_budget - schedule.warmup_tokens))
    return schedule.final_lr + (peak - schedule.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clips the gradient norm, over all parameters and ranks, to `limit`; returns the norm before clipping."""
    parts = group_by_mesh([p for p in model.parameters() if p.grad is not None])
    norms = [full_tensor(get_total_norm([p.grad for p in part if p.grad is not None])) for part in parts]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    for part in parts:
        clip_grads_with_norm_(part, limit, norm)
    return norm


def step_unless(optimizer: AdamW, skip: Tensor, lr: float | Tensor) -> None:
    """One step at this learning rate, unless `skip` is 1.0: decided on the device, as by GradScaler, so that nothing waits."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = old  # checkpoints store a number, not a tensor
