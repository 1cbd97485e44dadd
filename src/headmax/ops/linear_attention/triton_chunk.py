"""Triton kernels of linear attention: see `headmax.ops.triton_decayed`."""

from headmax.ops.triton_decayed import decayed_attention

linear_attention = decayed_attention

__all__ = ["linear_attention"]
