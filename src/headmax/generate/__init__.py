"""Decoding with constant memory: the engine, requests, sampling and prefix states."""

from headmax.generate.engine import Completion, Engine, Request
from headmax.generate.prefix import PrefixState
from headmax.generate.sampling import GREEDY, Sampling

__all__ = ["GREEDY", "Completion", "Engine", "PrefixState", "Request", "Sampling"]
