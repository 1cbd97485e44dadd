"""The README's figures, rendered from the committed records between `<!-- generated: name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from headmax import records
from headmax.demo.recall import VARIANTS, mean, seed_scores


def kernels() -> str:
    """Forward + backward of the ops on the CPU beside transformers' gated delta rule, and time per token over length."""
    found = list(records.read(records.RESULTS / "kernels_cpu.jsonl"))
    times = {(r.impl, r.metric.removesuffix("/forward+backward")): r for r in found if r.metric.endswith("/forward+backward")}
    per_token = {(r.metric.split("/")[0], r.case): r.value for r in found if r.metric.endswith("/time per token")}
    peer = times["hf", "gated_delta_rule"]
    lines = [
        "| op, forward + backward | ms | beside transformers' `torch_chunk_gated_delta_rule` | time per token, T=32,768 / T=4,096 |",
        "|---|---|---|---|",
        f"| transformers gated_delta_rule | {peer.value:.0f} | 1 | |",
    ]
    for (impl, op), record in times.items():
        if impl == "headmax":
            short, long = (per_token[op, f"B1T{time}H4K128V256-soft"] for time in (4096, 32768))
            lines.append(f"| headmax {op} | {record.value:.0f} | {peer.value / record.value:.1f}x as fast | {long / short:.2f} |")
    return "\n".join([*lines, "", f"B=1 T=4096 H=4 K=128 V=256 float32, {peer.device}, commit {peer.commit}."])


def demo() -> str:
    """What all recorded seeds of the demo gave."""
    lines = ["| setting | seeds | " + " | ".join(VARIANTS) + " | softmax ahead of plain | of uniform |", "|---" * (4 + len(VARIANTS)) + "|"]
    for case, scores in seed_scores(records.RESULTS / "demo.jsonl").items():
        means = " | ".join(f"{mean([s[variant] for s in scores]):.3f}" for variant in VARIANTS)
        wins = " | ".join(str(sum(s["softmax"] > s[rival] for s in scores)) for rival in ("plain", "uniform"))
        lines.append(f"| {case} | {len(scores)} | {means} | {wins} |")
    return "\n".join([*lines, "", "Held-out accuracy, averaged over training (so that faster learning counts) and over seeds."])


SECTIONS: dict[str, Callable[[], str]] = {"kernels": kernels, "demo": demo}


def render(text: str) -> str:
    """`text` with every generated section rendered anew."""

    def section(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n{SECTIONS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", section, text, flags=re.DOTALL)


def update(path: Path) -> None:
    path.write_text(render(path.read_text()))
