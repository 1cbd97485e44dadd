"""The paper's three panels at its 340M configuration, from the records of `python -m lab bench train` and `headmax bench decode`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headmax.records import Record
from headmax.tables import markdown
from lab.study.earlier import LINEAR, MISSING, TITLES, Results

SCALE = "340m"
PEER = "flash-linear-attention"
PAPER = (
    "The paper's panels are pictures, of an H20, and its text gives no figures: the gates cost marginally more memory, slightly but",
    "consistently less throughput, not much more so with length, and a mildly higher latency whose relative gap is stable for GDN.",
)


def efficiency(results: Results) -> Iterator[str]:
    yield from PAPER
    for title, lines in (("Training", training(results)), ("Decoding", decoding(results))):
        yield from ("", f"### {title}", "", *lines)


def training(results: Results) -> Iterator[str]:
    """Throughput and memory over length x batch."""
    found = {(r.case, r.impl, r.metric): r for r in results.records if r.suite == "train" and f"-{SCALE} " in r.case}
    cases = {b: sorted({case for case, _, _ in found if case.startswith(f"{b}-{SCALE} ")}, key=size) for b in LINEAR}
    columns = [("headmax", "plain"), ("headmax", "softmax"), ("fla", "plain"), ("fla", "softmax")]
    for metric, ratio, form in (("tokens per second", "time", ",.0f"), ("peak memory", "memory", ".1f")):
        rows = []
        for b in LINEAR:
            for case in cases[b] or [f"{b}-{SCALE} {MISSING}"]:
                values = [cell(found.get((case, impl, f"{variant}/{metric}")), form) for impl, variant in columns]
                place = case.split(" ", 1)[1]
                same = (found.get((f"{other}-{SCALE} {place}", "headmax", f"transformer/{metric}")) for other in LINEAR)
                gates = found.get((case, "headmax", f"softmax over plain/{ratio}"))
                rows.append([TITLES[b], place, *values[:2], cell(gates, ".3f"), *values[2:], cell(next(filter(None, same), None), form)])
        unit = {"time": "tokens/s", "memory": "peak memory, GiB"}[ratio]
        peers = [f"{PEER}, no gates", f"{PEER}, softmax by hand", TITLES["transformer"]]
        yield markdown([unit, "length x batch", "no gates", "softmax", f"{ratio}, softmax over no gates", *peers], rows)
        yield ""
    yield "Whole steps: float32 parameters, bfloat16 compute, fused AdamW." + where(r for r in found.values() if "/" in r.metric)
    times = [r.value for (_, _, metric), r in found.items() if metric == "softmax over plain/time"]
    memory = [r.value for (_, _, metric), r in found.items() if metric == "softmax over plain/memory"]
    if times and memory:
        yield f"What the gates cost over all settings measured ({len(times)}): {span(times)} in time, {span(memory)} in memory."


def decoding(results: Results) -> Iterator[str]:
    """Latency over decoded tokens, and of a token beside peers."""
    found = {(r.case, r.impl, r.metric): r for r in results.records if r.suite == "decode"}
    rows = []
    for b in LINEAR:
        pattern = re.compile(rf"{b}-{SCALE} (batch 1 context \d+ decoded (\d+))")
        counts = {int(match[2]): match[1] for case, _, _ in found if (match := pattern.fullmatch(case))}
        for count, place in sorted(counts.items()) or [(0, "")]:
            pair = [found.get((f"{gate}{b}-{SCALE} {place}", "headmax", "end to end")) for gate in ("", "softmax-")]
            gap = f"{pair[1].value / pair[0].value:.3f}" if pair[0] and pair[1] else MISSING
            rows.append([TITLES[b], f"{count:,}" if count else MISSING, *(cell(record, ".2f") for record in pair), gap])
    yield markdown(["seconds, one text", "decoded tokens", "no gates", "softmax", "softmax over no gates"], rows)
    yield ""
    place, token = "batch 1 context 1024", "latency per token"
    llama, ours = f"transformer-{SCALE}, static cache {place}", f"transformer-{SCALE} {place}"
    rows = []
    for b in LINEAR:
        pair = [found.get((f"{gate}{b}-{SCALE} {place}", "headmax", token)) for gate in ("", "softmax-")]
        gates = found.get((f"{b}-{SCALE} {place}", "headmax", "softmax over plain/latency"))
        rows.append([TITLES[b], *(cell(record, ".3f") for record in pair), cell(gates, ".3f"),
                     cell(found.get((f"{b}-{SCALE} {place}", "fla", token)), ".2f")])  # fmt: skip
    header = ["ms per token, batch 1 after 1,024 tokens", "no gates", "softmax", "softmax over no gates", f"{PEER}, `generate`"]
    yield markdown(header, rows)
    yield ""
    peers = [cell(found.get(key), ".2f") for key in ((ours, "headmax", token), (llama, "hf", token))]
    yield f"{TITLES['transformer']}: {peers[0]} ms in our engine, {peers[1]} ms as transformers' Llama with a static cache."
    yield "bfloat16 weights; whole texts were timed once." + where(r for r in found.values() if r.metric in (token, "end to end"))


def size(case: str) -> list[int]:
    """Length and batch."""
    return [int(number) for number in case.split(" ")[1].split("x")]


def cell(record: Record | None, form: str) -> str:
    if record is None:
        return MISSING
    interval = record.extra.get("interval")
    return f"{record.value:{form}}" + (f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else "")


def span(ratios: list[float]) -> str:
    low, high = (f"{100 * (ratio - 1):+.1f}%".replace("-", "−") for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def where(found: Iterator[Record]) -> str:
    """Devices and commits."""
    pairs = sorted({(record.device, record.commit) for record in found})
    devices, commits = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True)) if pairs else ([], [])
    return f" In brackets 95% intervals. {', '.join(devices)}; commits {', '.join(commits)}." if pairs else ""
