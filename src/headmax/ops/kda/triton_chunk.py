"""Triton kernels of Kimi delta attention: see `headmax.ops.gated_delta_rule.triton_chunk`."""

from headmax.ops.gated_delta_rule.triton_chunk import gated_delta_rule

kda = gated_delta_rule

__all__ = ["kda"]
