"""Custom operators at a third of the price of `torch.library.custom_op`, for ops that take a few microseconds themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("headmax", "FRAGMENT")


def define_op(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], *, tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverload:
    """The operator `headmax::name`: `function` on every device, `fake` for shapes alone; the schema is that of function's annotations.

    It has no gradient of its own. An op that has one is a plain `torch.autograd.Function` whose forward calls one operator and whose
    backward calls another: eager mode runs it and `torch.compile` traces it, the same lines. For both to take it

    - what the backward pass needs besides the inputs is saved by `ctx.save_for_backward` without being an output: Dynamo knows no
      `set_materialize_grads`, so the gradient of an output that nobody used arrives as zeros;
    - its backward is `once_differentiable`: a second derivative is an error, not a silent zero.
    """
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headmax::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.headmax, name).default
