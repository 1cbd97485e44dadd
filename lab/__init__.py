"""What only this repository runs: the study of the paper's claims, its theory as experiments, and the pages and records of both.

Not part of the package: `python -m lab` in a checkout.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the checkout."""
RESULTS = ROOT / "lab" / "results"
"""What was measured, as records with device and commit."""
EVALUATIONS = RESULTS / "eval.jsonl"
