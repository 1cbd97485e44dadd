"""Runs a suite in a process of its own, where `tests` is that of the checkout, and says what was skipped and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
OPS = ("gla", "simple_gla", "linear_attn", "retention", "gdn", "kda")
"""Names of flash-linear-attention's files of tests for the recurrences that headmax has."""


def run_suite(library: str, checkout: Path, only: str = "") -> int:
    """pytest's exit code; what failed and the reasons of all skips are printed."""
    if not (checkout / "tests").is_dir():
        raise ValueError(f"{checkout}: no folder tests there; give a checkout of the library's repository")
    if library == "transformers":
        cases = [str(HERE / "transformers_cases.py")]
    else:
        cases = ["-p", "lab.ecosystem.fla_ops", *(f"tests/ops/test_{name}.py" for name in OPS)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-c",
            os.devnull,
            "--rootdir",
            ".",
            "--noconftest",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "-q",
            "-W",
            "ignore",
        ]
        command = [sys.executable, "-m", "pytest", *cases, *options, "--tb=short", f"--junitxml={report}", "-k", only]
        root = HERE.parents[1]
        path = os.pathsep.join([str(checkout.resolve()), str(root / "src"), str(root), *filter(None, sys.path[1:])])
        done = subprocess.run(command, cwd=checkout, env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, check=False)
        if report.is_file():
            print(summary(report))
    return done.returncode


def summary(report: Path) -> str:
    """How often each reason to skip was given, as a table."""
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        for skipped in case.findall("skipped"):
            reason = re.sub(r"\S+::\S+", "a test", skipped.get("message") or "")
            reason = re.sub(r"'?Headmax\w+'?|Test_\w+|<class '[\w.]+'>|`[\w-]+`", "…", reason)
            reasons[reason.splitlines()[0] if reason else ""] += 1
    rows = [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(["| skipped because | tests |", "|---|---|", *rows])
