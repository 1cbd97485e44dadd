"""Kernels that agree with the oracle but have not been timed on a card. What is faster there moves to headmax.ops; what is not goes."""
