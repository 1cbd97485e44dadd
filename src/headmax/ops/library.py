"""Custom operators at a third of the price of `torch.library.custom_op`, for ops that take a few microseconds themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Backward = Callable[..., Any]

LIBRARY = torch.library.Library("headmax", "FRAGMENT")


def define_op(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], *, tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverload:
    """The operator `headmax::name`: `function` on every device, `fake` for shapes alone; the schema is that of function's annotations.

    It has no gradient of its own. An op that has one is a plain `torch.autograd.Function` whose forward calls one operator and whose
    backward calls another: eager mode runs it and `torch.compile` traces it, the same lines. For both to take it

    - what the backward pass needs besides the inputs is saved by `ctx.save_for_backward` without being an output: Dynamo knows no
      `set_materialize_grads`, so the gradient of an output that nobody used arrives as zeros;
    - its backward is `once_differentiable`, the one below: a second derivative is an error, not a silent zero.
    """
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headmax::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.headmax, name).default


@torch.compiler.assume_constant_result
def _makes_a_graph() -> bool:
    """Whether a backward pass is under way that is to be differentiated itself (create_graph=True)."""
    return torch.is_grad_enabled() and torch._C._current_autograd_node() is not None


def once_differentiable(backward: Backward) -> Backward:
    """For the backward pass of an autograd function that has no gradient itself.

    torch's decorator of this name puts an error into the graph, where `torch.autograd.grad` passes it by: it runs what leads to the inputs
    it was asked for, and gives a part of the second derivative as the whole.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if _makes_a_graph():
            name = backward.__qualname__.removesuffix(".backward")
            whose = "backend='reference' of the ops and skip_logits=False of a model have one"
            raise RuntimeError(f"{name} has no second derivative: leave out create_graph=True; {whose}")
        with torch.no_grad():
            return backward(ctx, *gradients)

    return wrapper
