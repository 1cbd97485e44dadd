"""Triton kernels of gated linear attention: see `headmax.ops.triton_decayed`."""

from headmax.ops.triton_decayed import decayed_attention

gla = decayed_attention

__all__ = ["gla"]
