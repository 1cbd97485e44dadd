"""Pure functions on [batch, time, heads, dim]: the gate over heads and the recurrences it modulates."""

from headmax.ops.gated_delta_rule import gated_delta_rule
from headmax.ops.gla import gla
from headmax.ops.head_gate import head_gate
from headmax.ops.kda import kda
from headmax.ops.linear_attention import linear_attention
from headmax.ops.packing import Packing
from headmax.ops.step import step

__all__ = ["Packing", "gated_delta_rule", "gla", "head_gate", "kda", "linear_attention", "step"]
