"""A self-contained HTML file that shows the gates of one model, or of two side by side."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

from headmax import durable
from headmax.analysis.gates import Gate, Trace, compare

UNIT = 10_000
"""Shares are stored as integer multiples of 1 / UNIT, the four digits that the page shows, so that they are rounded once."""
TIE = 255
MAX_HEADS = TIE


def write(path: Path, traces: Sequence[Trace]) -> None:
    """Writes the report of one or two traces of the same text."""
    durable.write(path, page(traces))


def check_place(path: Path, *inputs: Path | None) -> None:
    """ValueError if a report would replace an input, a folder, or a file that is not HTML."""
    durable.refuse_inputs(path, *inputs)
    if path.exists():
        with durable.writing(path), path.open("rb") as file:
            start = file.read(64).strip().lower()
        if start and not start.startswith(b"<!doctype html"):
            raise ValueError(f"{path}: exists and is not an HTML page; choose another file to write")


def page(traces: Sequence[Trace]) -> str:
    if len(traces) not in (1, 2):
        raise ValueError(f"a report shows one or two models, got {len(traces)}")
    differences = [asdict(d) for d in compare(*traces)] if len(traces) == 2 else None
    content = {"unit": UNIT, "tie": TIE, "tokens": traces[0].tokens, "models": [model(t) for t in traces], "differences": differences}
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = files("headmax.analysis") / "page"
    html = (parts / "index.html").read_text(encoding="utf-8")
    for mark, text in {"style.css": None, "heads.js": None, "script.js": None, "data.json": data}.items():
        before, after = html.split(f"{{{{{mark}}}}}")
        html = before + ((parts / mark).read_text(encoding="utf-8") if text is None else text) + after
    return html


def model(trace: Trace) -> dict[str, Any]:
    layers = [{"index": x.index, "mixer": x.mixer, "read": gate(x.read), "write": gate(x.write)} for x in trace.layers]
    return {"name": trace.name, "kind": trace.kind, "readPosition": trace.read_position, "layers": layers}


def gate(x: Gate | None) -> dict[str, Any] | None:
    if x is None:
        return None
    if x.heads > MAX_HEADS:
        raise ValueError(f"a report shows up to {MAX_HEADS} heads, got {x.heads}")
    return {
        "heads": x.heads,
        "shares": compress((x.shares.double() * UNIT).round(), ">u2"),
        "winners": compress(x.winners % (TIE + 1), "u1"),  # -1, a tie, becomes TIE
        "entropy": round(float(x.entropy.mean()), 4),
        "load": [round(share, 4) for share in x.load.tolist()],
        "wins": [round(share, 4) for share in x.wins.tolist()],
        "dead": x.dead.nonzero().flatten().tolist(),
    }


def compress(values: Tensor, dtype: str) -> str:
    """Deflated and base64-encoded, high bytes before low ones, as similar bytes next to each other compress better."""
    numbers = values.numpy().astype(dtype)
    planes = numbers.view("u1").reshape(-1, numbers.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes())).decode()
