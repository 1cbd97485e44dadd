"""Measurements, one file per question; results are records."""
