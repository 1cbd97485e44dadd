"""A backbone from outside headmax: an op in a folder, a mixer in a file, and this line."""

from headmax.layers import MIXERS

from .mixer import ValueDecayConfig

MIXERS["value_decay"] = ValueDecayConfig
