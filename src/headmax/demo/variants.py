"""The variants that both demos compare."""

from __future__ import annotations

from headmax import HeadGateConfig

VARIANTS = {"plain": None, "uniform": HeadGateConfig(kind="uniform"), "softmax": HeadGateConfig.paper()}
"""No gates; uniform gates, the control; softmax gates, as in the paper."""
RIVALS = ("plain", "uniform")
"""What softmax gates are compared with."""
COLOURS = {"plain": "#7d7f86", "uniform": "#e69f00", "softmax": "#0072b2"}
