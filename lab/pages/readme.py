"""Figures in the README and the docs, rendered from the committed records between `<!-- generated: name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headmax import durable, records
from headmax.demo import code, recall
from headmax.demo.variants import RIVALS, VARIANTS
from headmax.demo.verdict import Metric, mean_and_range
from headmax.records import Record
from headmax.tables import markdown
from lab import RESULTS
from lab.package import DEMO, seed_scores
from lab.pages import figures
from lab.study.earlier import LINEAR, TITLES, Results, Run, show


def kernels() -> str:
    """Forward + backward of the ops on the CPU against transformers' gated delta rule, and time per token over length."""
    found = list(records.read(RESULTS / "kernels_cpu.jsonl"))
    times = {(r.impl, r.metric.removesuffix("/forward+backward")): r for r in found if r.metric.endswith("/forward+backward")}
    per_token = {(r.metric.split("/")[0], r.case): r.value for r in found if r.metric.endswith("/time per token")}
    peer = times["hf", "gated_delta_rule"]
    columns = ["op, forward + backward", "ms", "speed-up over transformers", "time per token at 32,768 over 4,096 tokens"]
    rows = [["transformers, `torch_chunk_gated_delta_rule`", f"{peer.value:.0f}", "", ""]]
    for (impl, op), record in times.items():
        if impl == "headmax":
            short, long = (per_token[op, f"B1T{time}H4K128V256-soft"] for time in (4096, 32768))
            speedup = f"{peer.value / record.value:.1f}x" if op == "gated_delta_rule" else ""  # the peer's op; others do less
            rows.append([f"headmax, `{op}`", f"{record.value:.0f}", speedup, f"{long / short:.2f}"])
    return "\n".join([markdown(columns, rows), "", f"B=1 T=4096 H=4 K=128 V=256 float32, {peer.device}, commit {peer.commit[:7]}."])


def percent(ratio: float, low: float, high: float) -> str:
    """How far a ratio and its interval are above 1."""
    return "{:+.1f}% ({:+.1f} to {:+.1f})".format(*(100 * (x - 1) for x in (ratio, low, high)))


@dataclass(frozen=True)
class OpTimes:
    """An op on a GPU, forward and forward + backward in ms."""

    op: str
    case: str
    now: list[Record]
    gates: list[Record]
    """Time with gates over time without, a record per process."""
    beside: list[Record]
    """Ours in the last run that timed the peer."""
    peer: list[Record]

    def overhead(self) -> str:
        """Of gates: the median of processes, from the lowest edge of an interval to the highest."""
        low, high = min(r.extra["interval"][0] for r in self.gates), max(r.extra["interval"][1] for r in self.gates)
        return percent(statistics.median(r.value for r in self.gates), low, high)

    def speedup(self, n: int) -> str:
        return f"{self.peer[n].value / self.beside[n].value:.2f}x"


def op_times() -> Iterator[OpTimes]:
    found = list(records.read(RESULTS / "kernels_h200.jsonl"))
    now, ours = {(r.impl, *r.metric.split("/")): r for r in found}, {(r.metric, r.commit): r for r in found if r.impl == "headmax"}
    for op in dict.fromkeys(op for impl, op, _ in now if impl == "headmax"):
        last = now["headmax", op, "gated over plain"]
        gates = [r for r in found if (r.case, r.metric, r.commit) == (last.case, last.metric, last.commit)]
        peer = [now["fla", op, metric] for metric in ("forward", "forward+backward")]
        mine, beside = [now["headmax", op, r.metric.split("/")[1]] for r in peer], [ours[r.metric, r.commit] for r in peer]
        yield OpTimes(op, last.case, mine, gates, beside, peer)


def kernels_gpu() -> str:
    """The ops on a GPU: today's time, what gates add, and the speed-up over the peer in one run."""
    columns = ["op", "forward, ms", "forward + backward, ms", "gate overhead (95% interval)"]
    columns += ["speed-up over flash-linear-attention, forward", "forward + backward"]
    found = list(op_times())
    rows = [[f"`{x.op}`", *(f"{r.value:.2f}" for r in x.now), x.overhead(), x.speedup(0), x.speedup(1)] for x in found]
    return "\n".join([markdown(columns, rows), "", f"bfloat16, B=8 T=4096 H=4, {found[0].now[0].device}."])


def kernels_gpu_runs() -> str:
    """Where the figures of `kernels_gpu` come from."""
    columns = ["op, case", "processes for gate overhead", "commit"]
    columns += ["headmax, measured with the peer, ms", "flash-linear-attention, ms", "commit of that measurement"]
    rows = []
    for x in op_times():
        commits = ", ".join(dict.fromkeys(r.commit[:7] for r in (*x.now, *x.gates)))
        both = (" and ".join(f"{r.value:.2f}" for r in run) for run in (x.beside, x.peer))
        rows.append([f"`{x.op}`, {x.case}", str(len(x.gates)), commits, *both, x.peer[0].commit[:7]])
    note = (
        "Times are of forward, and of forward + backward. Gate overhead is the median over interleaved pairs of forward + backward; with\n"
    )
    return "\n".join([markdown(columns, rows), "", note + "several processes, the median over them and their widest interval."])


STEPS = ("gla-340m", "retnet-340m", "gdn-340m")


def steps() -> str:
    """Whole training steps on a GPU, ours and the peer's."""
    values = {(r.case, r.impl, r.metric): r for r in records.read(RESULTS / "train_h200.jsonl")}
    columns = ["tokens/s at 4096x8", "headmax, no gates", "headmax, softmax gates", "gate overhead (95% interval)"]
    columns += ["flash-linear-attention, no gates", "flash-linear-attention, softmax gates", "speed-up, softmax gates"]
    rows, speed = [], "tokens per second"
    for recipe in STEPS:
        case = f"{recipe} 4096x8"
        gates = values[case, "headmax", "softmax over plain/time"]
        ours, theirs = ([values[case, impl, f"{variant}/{speed}"] for variant in ("plain", "softmax")] for impl in ("headmax", "fla"))
        cells = [*(f"{r.value:,.0f}" for r in ours), percent(gates.value, *gates.extra["interval"]), *(f"{r.value:,.0f}" for r in theirs)]
        rows.append([recipe, *cells, f"{ours[1].value / theirs[1].value:.2f}x"])
    note = "Float32 parameters, bfloat16 compute, fused AdamW, CUDA graphs. headmax is compiled block by block; flash-linear-attention\n"
    return "\n".join([markdown(columns, rows), "", f"{note}is not compiled and has its gates in plain PyTorch. {gates.device}."])


def steps_runs() -> str:
    """Memory, use of the GPU and commits of `steps`."""
    found = list(records.read(RESULTS / "train_h200.jsonl"))
    values = {(r.case, r.impl, r.metric): r for r in found}
    rows = []
    for recipe in STEPS:
        for impl, name in {"headmax": "headmax", "fla": "flash-linear-attention"}.items():
            for variant, title in {"plain": "no gates", "softmax": "softmax gates"}.items():
                memory, used = (values[f"{recipe} 4096x8", impl, f"{variant}/{what}"] for what in ("peak memory", "MFU"))
                rows.append([recipe, name, title, f"{memory.value:.1f}", f"{used.value:.0%}", used.commit[:7]])
    other = next(r for r in found if r.metric == "transformer/tokens per second")
    cold = [r for r in found if r.metric.endswith("first step, empty caches")]
    first = ", ".join(f"{r.metric.split('/')[0]} {r.value:.0f} s" for r in cold)
    triton = values["gdn-340m 4096x8", "fla", "softmax/tokens per second"].extra["triton"]
    note = [
        f"flash-linear-attention's Gated DeltaNet ran under Triton {triton}, since it refuses 3.6 on this GPU.",
        f"Transformer++, timed with a shorter queue of kernel launches: {other.value:,.0f} tokens/s (commit {other.commit[:7]}).",
        f"First step of {cold[0].case.split()[0]} with empty caches: {first} (commit {cold[0].commit[:7]}).",
    ]
    columns = ["4096x8", "library", "gates", "GiB", "share of the matmul rate", "commit"]
    return "\n".join([markdown(columns, rows), "", *note])


def decoding() -> str:
    """Time of a decoded token over batch and context on a GPU, plain backbone and softmax twin."""
    found = list(records.read(RESULTS / "decode_h200.jsonl"))
    values = {(r.case, r.metric): r for r in found}
    columns = ["softmax-gla-340m, batch", "ms per token after 1,024 tokens", "after 65,536 tokens", "tokens/s"]
    columns += ["share of the bandwidth", "time relative to gla-340m"]
    rows = []
    for batch in (1, 8, 64, 256):
        near, far = (values[f"softmax-gla-340m batch {batch} context {context}", "latency per token"] for context in (1024, 65536))
        ratio = values[f"gla-340m batch {batch} context 1024", "softmax over plain/latency"].value
        share = near.extra["of the bandwidth"]
        cells = [f"{near.value:.3f}", f"{far.value:.3f}", f"{1e3 * batch / near.value:,.0f}", f"{share:.0%}", f"{ratio:.3f}"]
        rows.append([str(batch), *cells])
    whole = values["softmax-gla-340m batch 1 context 1024 decoded 16384", "end to end"]
    note = f"bfloat16 weights, float32 state, {whole.device}, commit {whole.commit[:7]}. Bandwidth is relative to\n"
    note += "a device copy. A step reads every weight once, and reads and writes every state. Generating 16,384 tokens after a prompt\n"
    note += f"of 1,024 takes {whole.value:.1f} s in all."
    others = []
    for recipe in ("retnet-340m", "gdn-340m"):
        first = values[f"softmax-{recipe} batch 1 context 1024", "latency per token"]
        ratios = [
            r.value for (case, metric), r in values.items() if case.startswith(f"{recipe} batch") and metric.startswith("softmax over")
        ]
        others.append(
            f"- softmax-{recipe}: {first.value:.3f} ms at batch 1, at most {max(ratios):.3f} times {recipe}'s (commit {first.commit[:7]})."
        )
    return "\n".join([markdown(columns, rows), "", note, "", *others])


def peers() -> str:
    """One sequence decoded by this engine and by others, in one run."""
    found = list(records.read(RESULTS / "decode_peers_h200.jsonl"))
    times = {(r.impl, r.case.removesuffix(" batch 1 context 1024")): r for r in found if r.metric == "latency per token"}
    mine = times["headmax", "softmax-gla-340m"]
    names = {
        ("headmax", "softmax-gla-340m"): "softmax-gla-340m, headmax's engine",
        ("headmax", "transformer-340m"): "transformer-340m, headmax's engine, static key-value cache",
        ("hf", "transformer-340m, static cache"): "Llama of that size, `generate`, static cache, compiled by transformers",
        ("hf", "softmax-gla-340m, compiled"): "softmax-gla-340m, an earlier form of `generate`, blocks compiled",
        ("fla", "gla-340m"): "flash-linear-attention's gla-340m, `generate`",
    }
    rows = [[name, f"{times[key].value:.3g}", f"{times[key].value / mine.value:.3g}x"] for key, name in names.items()]
    table = markdown(["one sequence after 1,024 tokens", "ms per token", "relative time"], rows)
    return "\n".join([table, "", f"One run, {mine.device}, commit {mine.commit[:7]}."])


def findings() -> str:
    """The contrasts that a reader asks for first, by backbone."""
    results = Results(RESULTS)
    contrasts = {
        "softmax gates vs. no gates": dict.fromkeys(LINEAR, ("softmax", "plain")),
        "softmax gates vs. gates frozen at 1/H: competition alone": {
            "gla": ("softmax", "uniform"),
            **dict.fromkeys(LINEAR[1:], ("softmax-after", "uniform-after")),
        },
    }
    rows = []
    for contrast, pairs in contrasts.items():
        rows.append([contrast, *(show(results.paired(*(Run(b, v) for v in pair)), 1, True) for b, pair in pairs.items())])
    note = "Lower is better. Mean ± standard deviation over three seeds; 36M to 37M parameters, 13M tokens. Seeds differ by up to 10%.\n"
    note += (
        "In the second row, the read gates of both models are on the query in GLA and after the norm in RetNet and GDN (Gated DeltaNet)."
    )
    return "\n".join([markdown(["change in perplexity, %", *(TITLES[b] for b in LINEAR)], rows), "", note])


def speed() -> str:
    """Training steps of one commit, and the peer's."""
    recipe, commit = figures.README_MODEL, figures.README_COMMIT
    found = [r for r in records.read(RESULTS / "train_h200.jsonl") if r.case == f"{recipe} 4096x8" and r.commit.startswith(commit)]
    values = {(r.impl, r.metric): r for r in found}
    rows = []
    names = {"headmax": "headmax, compiled", "fla": "flash-linear-attention, not compiled"}
    for variant in ("plain", "softmax"):
        for impl, name in names.items():
            rate, memory = (values[impl, f"{variant}/{metric}"] for metric in ("tokens per second", "peak memory"))
            gates = {"plain": "no gates", "softmax": "softmax gates" if impl == "headmax" else "softmax gates in plain PyTorch"}[variant]
            rows.append([f"{name}, {gates}", f"{rate.value:,.0f}", f"{memory.value:.1f}"])
    note = f"{found[0].device}, float32 parameters, bfloat16 compute, CUDA graphs, commit {commit}."
    figure = figures.FIGURES["speed"]
    chart = f"![{figure.finding(figures.collect(figure, Results(RESULTS)))}](docs/images/reproduction/speed.svg)"
    return "\n".join([chart, "", markdown([f"{recipe}, 8 x 4096 tokens a step", "tokens/s", "GiB"], rows), "", note])


def demo() -> str:
    """All recorded seeds of the demo."""
    columns = ["bits per byte on held-out files, mean (range)", "no gates", "gates frozen at 1/H", "softmax gates"]
    rows, notes = [], []
    for case, seeds in seed_scores(DEMO, code.METRIC).items():
        cells = [mean_and_range([scores[variant] for scores in seeds]) for variant in VARIANTS]
        rows.append([f"{case}, {len(seeds)} seeds", *cells])
        beaten = " and ".join(f"{NAMES[rival]} in {code.METRIC.wins(seeds, rival)} of {len(seeds)} seeds" for rival in RIVALS)
        notes.append(f"Lower is better. Softmax gates beat {beaten}; {_source(code.METRIC)}.")
    return "\n".join([markdown(columns, rows), "", *notes])


def recall_demo() -> str:
    """All recorded seeds of the recall demo."""
    columns = ["accuracy of associative recall", "seeds", "no gates", "frozen gates", "softmax gates"]
    columns += ["seeds with softmax above no gates", "seeds with softmax above frozen gates"]
    rows = []
    for case, seeds in seed_scores(DEMO, recall.METRIC).items():
        cells = [f"{statistics.fmean(scores[variant] for scores in seeds):.3f}" for variant in VARIANTS]
        rows.append([case, str(len(seeds)), *cells, *(str(recall.METRIC.wins(seeds, rival)) for rival in RIVALS)])
    note = f"Held-out accuracy, averaged over training (so that faster learning counts) and over seeds; {_source(recall.METRIC)}."
    return "\n".join([markdown(columns, rows), "", note])


NAMES = {"plain": "no gates", "uniform": "frozen gates"}


def _source(metric: Metric) -> str:
    """Commits, and Python versions where they matter, of a demo's records."""
    found = [r for r in records.read(DEMO) if r.metric == metric.record]
    versions = dict.fromkeys(r.extra["python"] for r in found if "python" in r.extra)
    return ", ".join([*versions, f"commit {', '.join(dict.fromkeys(r.commit[:7] for r in found))}"])


def training() -> str:
    """A real run, beside the step alone."""
    found = list(records.read(RESULTS / "training_h200.jsonl"))
    values = {r.metric: r for r in found}
    run, speed, alone = values["tokens"], values["tokens per second"], values["softmax/tokens per second"]
    entropy = {gate: values[f"{gate} gate entropy"] for gate in ("read", "write")}
    dead = [
        f"head {', '.join(map(str, heads))} of layer {where.split('/')[0]} ({where.split('/')[1]})"
        for r in entropy.values()
        for where, heads in r.extra["dead"].items()
    ]
    share = f"{speed.value / alone.value:.1%}"
    rows = {
        "tokens": f"{run.value:,.0f}",
        "steps": f"{run.extra['steps']:,}, of which {run.extra['skipped']} skipped",
        "tokens/s": f"{speed.value:,.0f}",
        "tokens/s of the step alone, on random tokens": f"{alone.value:,.0f}; the trainer reaches {share} of it",
        "validation perplexity": f"{values['validation perplexity'].value:.1f}",
        "loss spikes": f"{values['loss spikes'].value:.0f}",
        "gradient-norm peaks": f"{values['gradient peaks'].value:.0f}",
        "mean gate entropy (1 is an even split)": ", ".join(f"{gate} {r.value:.2f}" for gate, r in entropy.items()),
        "dead heads": ", ".join(dead) or "none",
    }
    return "\n".join(
        [
            markdown([run.case, "value"], list(rows.items())),
            "",
            f"{run.device}, commit {run.commit}, records in `lab/results/training_h200.jsonl`.",
        ]
    )


def gate_cost() -> str:
    """What gates add to each kernel."""
    found = list({r.metric: r for r in records.read(RESULTS / "kernels_h200.jsonl") if "gated" in r.extra}.values())
    rows = []
    for op in dict.fromkeys(r.metric.split("/")[0] for r in found):
        mine = [r for r in found if r.metric.startswith(f"{op}/")]
        mine = [r for r in mine if r.commit == mine[-1].commit]
        plain, gated = sum(r.value for r in mine), sum(r.extra["gated"] for r in mine)
        added = f"{gated - plain:+.0f} ({100 * (gated / plain - 1):+.1f}%)"
        rows.append([f"**{op}** ({mine[-1].commit[:7]})", "", f"{plain:.0f}", added])
        for r in mine:
            if (more := r.extra["gated"] - r.value) >= 1:
                rows.append([r.metric.split("/")[1], f"{r.extra['launches']:.0f}", f"{r.value:.0f}", f"{more:+.0f}"])
    note = f"Device time of a forward and a backward pass, B=8 T=4096 H=4, {found[-1].device}; commits in parentheses."
    table = markdown(["op, kernel", "launches", "us without gates", "us added by gates"], rows)
    return "\n".join([table, "", f"{note} Kernels to which gates add less than 1 us are included in the sums only."])


def profile() -> str:
    """How far each kernel of GLA uses the GPU."""
    found = list(records.read(RESULTS / "profile_h200.jsonl"))
    shown = {"DRAM bytes": "{:.0f}", "DRAM": "{:.0%}", "L2": "{:.0%}", "issue slots": "{:.0%}", "warps": "{:.1f}"}
    columns = ["kernel", "us", "DRAM traffic, MB", "share of DRAM bandwidth", "share of L2 bandwidth", "issue slots in use", "active warps"]
    rows = []
    for r in found:
        cells = [form.format(r.extra[name] / (1e6 if "bytes" in name else 1)) for name, form in shown.items()]
        rows.append([r.metric.split("/")[1], f"{r.value:.0f}", *cells])
    note = f"gla with gates, B=8 T=4096 H=4, {found[0].device}, commit {found[0].commit[:7]}, from Nsight Compute;"
    return "\n".join(
        [
            markdown(columns, rows),
            "",
            f"{note} issue\nslots and warps are per scheduler, of which a multiprocessor has four.",
        ]
    )


def step_time() -> str:
    """Where a training step's time goes, without gates and with."""
    found = [r for r in records.read(RESULTS / "train_h200.jsonl") if r.impl == "headmax" and "/device time/" in r.metric]
    times = {(r.case, *r.metric.split("/device time/")): r.value for r in found}
    recipes, kinds = (list(dict.fromkeys(key[n] for key in times)) for n in (0, 2))

    def row(name: str, of: Sequence[str]) -> list[str]:
        cells: list[str] = []
        for case in recipes:
            plain, gated = (sum(times.get((case, variant, kind), 0.0) for kind in of) for variant in ("plain", "softmax"))
            cells += [f"{plain:.1f}", f"{gated - plain:+.2f}".replace("-", "−")]
        return [name, *cells]

    rows = [row(f"`{kind}`" if "." in kind else kind, [kind]) for kind in kinds] + [row("**all kernels**", kinds)]
    table = markdown(["ms on the GPU", *(name for case in recipes for name in (case, "added by gates"))], rows)
    commits = ", ".join(dict.fromkeys(r.commit[:7] for r in found))
    return "\n".join([table, "", f"{found[0].device}, commit {commits}."])


SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "kernels_gpu": kernels_gpu,
    "kernels_gpu_runs": kernels_gpu_runs,
    "steps": steps,
    "steps_runs": steps_runs,
    "gate_cost": gate_cost,
    "profile": profile,
    "step_time": step_time,
    "decoding": decoding,
    "peers": peers,
    "findings": findings,
    "speed": speed,
    "demo": demo,
    "recall_demo": recall_demo,
    "training": training,
}


def render(text: str) -> str:
    """`text` with every generated section rendered anew."""

    def section(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n{SECTIONS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", section, text, flags=re.DOTALL)


def update(paths: Iterable[Path]) -> None:
    for path in paths:
        durable.write(path, render(durable.read_text(path)))
