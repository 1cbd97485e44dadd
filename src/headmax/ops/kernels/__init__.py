"""Triton kernels, by subject, each file with the functions that launch its kernels; see docs/kernels.md."""
