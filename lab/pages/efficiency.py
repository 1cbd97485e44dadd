"""What gates cost at the paper's 340M configuration, from the records of `python -m lab bench train` and `headmax bench decode`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from headmax.records import Record
from headmax.tables import markdown
from lab.study.earlier import LINEAR, MISSING, TITLES, Results

SCALE, BESIDE = "340m", "4096x8"
PEER = "flash-linear-attention"
PLACE, TOKEN = "batch 1 context 1024", "latency per token"
Found = dict[tuple[str, str, str], Record]
"""By case, implementation and metric."""


def steps(results: Results) -> Found:
    """Whole training steps."""
    return {(r.case, r.impl, r.metric): r for r in results.records if r.suite == "train" and f"-{SCALE} " in r.case}


def decoded(results: Results) -> Found:
    return {(r.case, r.impl, r.metric): r for r in results.records if r.suite == "decode"}


def training(results: Results) -> Iterator[str]:
    """Throughput at one size, beside the peer."""
    found, rows, speed = steps(results), [], "tokens per second"
    for b in LINEAR:
        case = f"{b}-{SCALE} {BESIDE}"
        pairs = [
            cell(found.get((case, impl, f"{variant}/{speed}")), ",.0f") for impl in ("headmax", "fla") for variant in ("plain", "softmax")
        ]
        rows.append([TITLES[b], *pairs[:2], cell(found.get((case, "headmax", "softmax over plain/time")), ".3f"), *pairs[2:]])
    header = [
        f"tokens/s at {BESIDE}",
        "no gates",
        "softmax gates",
        "relative time with softmax gates",
        f"{PEER}, no gates",
        f"{PEER}, softmax gates",
    ]
    yield markdown(header, rows)
    yield ""
    other = [record for (_, impl, metric), record in found.items() if (impl, metric) == ("headmax", f"transformer/{speed}")]
    yield f"{TITLES['transformer']}: {cell(other[-1] if other else None, ',.0f')} tokens/s. {PEER}'s gates are plain PyTorch."
    yield "Float32 parameters, bfloat16 compute, fused AdamW; 95% intervals in parentheses." + where(
        record for key, record in found.items() if key[0].endswith(f" {BESIDE}")
    )
    costs = {
        kind: [r.value for (_, _, metric), r in found.items() if metric == f"softmax over plain/{kind}"] for kind in ("time", "memory")
    }
    if all(costs.values()):
        said = ", ".join(f"{span(ratios)} in {kind}" for kind, ratios in costs.items())
        yield f"Over all {len(costs['time'])} settings measured, gates cost {said}."


def sizes(results: Results) -> Iterator[str]:
    """Throughput and memory over length x batch."""
    found, rows = steps(results), []
    for b in LINEAR:
        for case in sorted({case for case, _, _ in found if case.startswith(f"{b}-{SCALE} ")}, key=size) or [f"{b}-{SCALE} {MISSING}"]:
            cells = [cell(found.get((case, "headmax", f"{variant}/tokens per second")), ",.0f") for variant in ("plain", "softmax")]
            cells.append(cell(found.get((case, "headmax", "softmax over plain/time")), ".3f"))
            cells += [cell(found.get((case, "headmax", f"{variant}/peak memory")), ".1f") for variant in ("plain", "softmax")]
            rows.append([TITLES[b], case.split(" ", 1)[1], *cells])
    header = ["backbone", "length x batch", "tokens/s, no gates", "tokens/s, softmax gates", "relative time with softmax gates"]
    yield markdown([*header, "GiB, no gates", "GiB, softmax gates"], rows)
    yield ""
    yield "Steps of 65,536 tokens were timed with gates only; 95% intervals in parentheses." + where(found.values())


def decoding(results: Results) -> Iterator[str]:
    """Latency of a token beside the peer."""
    found, rows = decoded(results), []
    for b in LINEAR:
        pair = [cell(found.get((f"{gate}{b}-{SCALE} {PLACE}", "headmax", TOKEN)), ".3f") for gate in ("", "softmax-")]
        gates = found.get((f"{b}-{SCALE} {PLACE}", "headmax", "softmax over plain/latency"))
        rows.append([TITLES[b], *pair, cell(gates, ".3f"), cell(found.get((f"{b}-{SCALE} {PLACE}", "fla", TOKEN)), ".2f")])
    yield markdown(["ms per token, batch 1", "no gates", "softmax gates", "relative time with softmax gates", f"{PEER}, `generate`"], rows)
    yield ""
    llama, ours = f"transformer-{SCALE}, static cache {PLACE}", f"transformer-{SCALE} {PLACE}"
    peers = [cell(found.get(key), ".2f") for key in ((ours, "headmax", TOKEN), (llama, "hf", TOKEN))]
    yield f"After 1,024 tokens. {TITLES['transformer']}: {peers[0]} ms in headmax's engine,"
    yield f"{peers[1]} ms as transformers' Llama with a static cache."
    yield "bfloat16 weights; 95% intervals in parentheses." + where(r for r in found.values() if r.metric == TOKEN)
    yield "These figures are of an earlier decoding step; the present one has not been timed on a GPU."


def texts(results: Results) -> Iterator[str]:
    """Seconds of one text over its decoded tokens."""
    found, rows = decoded(results), []
    for b in LINEAR:
        pattern = re.compile(rf"{b}-{SCALE} (batch 1 context \d+ decoded (\d+))")
        counts = {int(match[2]): match[1] for case, _, _ in found if (match := pattern.fullmatch(case))}
        for count, place in sorted(counts.items()) or [(0, "")]:
            pair = [found.get((f"{gate}{b}-{SCALE} {place}", "headmax", "end to end")) for gate in ("", "softmax-")]
            gap = f"{pair[1].value / pair[0].value:.3f}" if pair[0] and pair[1] else MISSING
            rows.append([TITLES[b], f"{count:,}" if count else MISSING, *(cell(record, ".2f") for record in pair), gap])
    yield markdown(["seconds, one text", "decoded tokens", "no gates", "softmax gates", "relative time with softmax gates"], rows)
    yield "\nEvery text was timed once." + where(r for r in found.values() if r.metric == "end to end")


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


def where(found: Iterable[Record]) -> str:
    """Devices and commits."""
    pairs = sorted({(record.device, record.commit[:7]) for record in found})
    devices, commits = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True)) if pairs else ([], [])
    return f" {', '.join(devices)}, commits {', '.join(commits)}." if pairs else ""
