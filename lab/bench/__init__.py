"""Kernels and measurements that only this repository makes."""
