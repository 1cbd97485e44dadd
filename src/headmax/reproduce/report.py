"""docs/reproduction.md out of records. What has no record is said to be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from headmax.analysis import figures
from headmax.bench import readme
from headmax.eval import tables
from headmax.eval.tables import PAPER
from headmax.recipes.language import BACKBONES, HEADS_STUDY, SCALES
from headmax.reproduce.results import MISSING, Results, Seeds, judge, perplexity, show, table
from headmax.reproduce.run import chosen
from headmax.reproduce.runs import (
    BATCH,
    EPS,
    HEADS,
    KINDS,
    LENGTH,
    LINEAR,
    PAIRS,
    PARTS,
    RATES,
    RECALL_HEADS,
    RECALL_STEPS,
    SEEDS,
    SIZES,
    STEPS,
    Run,
    runs,
)
from headmax.train.metrics import STABILITY

Lines = Iterator[str]
LOSS = "validation loss"
TITLES = figures.TITLES
WORDS = {
    "plain": "no gates",
    "softmax": "softmax",
    "uniform": "uniform",
    "sigmoid": "sigmoid",
    "uniform-read-after": "uniform, read alone, after the norm",
}
IMAGES = "images/reproduction"
INTRODUCTION = (
    "The paper's tables and figures at a scale that fits a GPU for minutes, with the controls it lacks. Written by",
    "`headmax reproduce report` from the records in `benchmarks/results/`; no figure here is typed in.",
)


def percent(differences: Seeds) -> dict[int | None, float]:
    """Differences of loss as per cent of perplexity."""
    return {seed: 100 * value for seed, value in differences.items()}


def setup(results: Results) -> Lines:
    budget = f"{STEPS * LENGTH * BATCH / 1e6:.1f}M tokens, {STEPS} steps of {BATCH} sequences of {LENGTH}"
    yield f"Models of {SIZES[1]} (layers x hidden size: about 20M parameters beside 16M of embeddings) with 4 heads are trained on"
    yield f"{budget}. All models of a seed see the same tokens in the same order and start from the"
    yield "same values of the parameters that they have in common. AdamW and schedule are the paper's. The"
    yield "controls uniform (gates frozen at 1/H) and sigmoid (gates that do not compete) have the softmax's place and mean."
    yield ""
    rows = []
    for backbone in BACKBONES:
        rates = Run(backbone).rates()
        found = [results.record(LOSS, rate) for rate in rates]
        best = f"{chosen(Run(backbone), results.records_of_runs):g}" if results.runs.issuperset(rates) else MISSING
        rows.append([TITLES[backbone], *(MISSING if one is None else f"{one.value:.3f}" for one in found), best])
    yield table(["learning rate, validation loss after fewer steps", *(f"{rate:g}" for rate in RATES["text"]), "taken"], rows)
    yield ""
    for part in PARTS:
        wanted = runs([part])
        yield f"- {part}: {len([run for run in wanted if run in results.runs])} of {len(wanted)} runs are recorded."
    done = [record for record in results.records_of_runs if record.metric == "seconds"]
    if done:
        devices, commits = (sorted({getattr(record, name) for record in done}) for name in ("device", "commit"))
        hours = sum(record.value for record in done) / 3600
        yield f"- {hours:.1f} hours of {', '.join(devices)}; commits {', '.join(commits)}."
    for record in results.records_of_runs:
        if record.metric == "failed":
            yield f"- {record.case}, seed {record.seed}, could not be trained: {record.extra['error']}"


def language(results: Results) -> Lines:
    variants = [*KINDS, "uniform-read-after"]
    rows = [
        [TITLES[b], *(show(perplexity(results.seeds(LOSS, Run(b, v)))) if b != "transformer" or v == "plain" else "" for v in variants)]
        for b in BACKBONES
    ]
    yield table(["validation perplexity", *(WORDS[v] for v in variants)], rows)
    yield ""
    pairs = [("softmax", "plain"), ("uniform", "plain"), ("sigmoid", "plain"), ("uniform-read-after", "plain")]
    pairs += [("softmax", "uniform"), ("softmax", "sigmoid")]
    header = ["per cent of perplexity", "paper, WikiText, softmax less no gates", *(f"{WORDS[a]} less {WORDS[b]}" for a, b in pairs)]
    rows = []
    for b in LINEAR:
        wiki = [PAPER["tables"][0]["values"][name][0] for name in (f"softmax-{b}", b)]
        found = [percent(results.paired(LOSS, Run(b, one), Run(b, other))) for one, other in pairs]
        rows.append([TITLES[b], f"{100 * math.log(wiki[0] / wiki[1]):+.1f}".replace("-", "−"), *(show(x, 1, sign=True) for x in found)])
    yield table(header, rows)
    yield ""
    yield "Differences seed by seed, mean ± standard deviation; negative is better. 100 times a difference of losses."


def paper_tables(results: Results) -> Lines:
    found = [path for path in [results.folder / "eval.jsonl"] if path.is_file()]
    if not found:
        yield f"Zero-shot tasks: {MISSING} here."
    for grid in tables.grids(found, SIZES[1]):
        yield grid.markdown()
    yield "After a short training on needles, on answers alone:"
    yield ""
    yield tables.grids(found, f"{SIZES[1]}-needles")[2].markdown()
    yield "The log-probability of the needles' values, in nats, which tells models apart where none finds them; mean over the nine tasks:"
    yield ""
    tasks = [f"niah_single_{task}_{length}" for task in (1, 2, 3) for length in ("1k", "2k", "4k")]

    def likelihood(run: Run, after: str) -> dict[int | None, float]:
        each = [results.seeds(f"{task} answer_logprob{after}", run) for task in tasks]
        return {seed: mean(one[seed] for one in each) for seed in each[0] if all(seed in one for one in each)}

    rows = [
        [f"{TITLES[b]}, {WORDS[v]}", *(show(likelihood(Run(b, v), after)) for after in ("", " after needles"))]
        for b in LINEAR
        for v in (*KINDS, "uniform-read-after")
    ]
    rows.append([TITLES["transformer"], *(show(likelihood(Run("transformer"), after)) for after in ("", " after needles"))])
    yield table(["model", "as trained", "after needles"], rows)


def placements(eps: float) -> dict[str, Run]:
    """GLA's variants by name."""
    made = {WORDS[kind]: Run("gla", kind, norm_eps=eps) for kind in KINDS}
    return made | {f"{kind}, read gate after the norm": Run("gla", f"{kind}-after", norm_eps=eps) for kind in KINDS[1:]}


def placement(results: Results) -> Lines:
    found = {(name, eps): results.seeds(LOSS, run) for eps in EPS for name, run in placements(eps).items()}
    rows = []
    for name in placements(EPS[0]):
        gained = [percent(results.paired(LOSS, placements(eps)[name], Run("gla", norm_eps=eps))) for eps in EPS]
        differences = [""] * len(EPS) if name == WORDS["plain"] else [show(one, 1, sign=True) for one in gained]
        rows.append([name, *(show(perplexity(found[name, eps])) for eps in EPS), *differences])
    yield table(["GLA", *(f"perplexity, eps {eps:g}" for eps in EPS), *(f"per cent less no gates, eps {eps:g}" for eps in EPS)], rows)
    if all(found.values()):
        name, eps = min(found, key=lambda key: mean(found[key].values()))
        yield ""
        yield f"The lowest mean loss of these: {name}, eps {eps:g}."


def gain(results: Results, run: Run, plain: Run) -> dict[int | None, float]:
    """By how much the perplexity is lower."""
    one, other = perplexity(results.seeds(LOSS, run)), perplexity(results.seeds(LOSS, plain))
    return {seed: other[seed] - one[seed] for seed in one if seed in other}


def heads(results: Results) -> Lines:
    paper = PAPER["figures"]["heads"]["gain"]
    rows = [
        [str(n), *(show(perplexity(results.seeds(LOSS, Run("gla", v, heads=n)))) for v in KINDS[:3]),
         *(show(gain(results, Run("gla", v, heads=n), Run("gla", heads=n)), sign=True) for v in ("softmax", "uniform")),
         str(paper.get(str(n), "not given"))]
        for n in HEADS
    ]  # fmt: skip
    yield table(["heads", *(WORDS[v] for v in KINDS[:3]), "gain of softmax", "gain of uniform", "paper's gain of softmax, 110M"], rows)
    yield "\nValidation perplexity of GLA at a fixed number of parameters (the paper: WikiText)."


def scaling(results: Results) -> Lines:
    rows = []
    for size in SIZES:
        record = results.record(LOSS, Run("gla", size=size))
        count = MISSING if record is None else f"{record.extra['parameters'] / 1e6:.1f}M"
        both = [Run("gla", v, size) for v in ("plain", "softmax")]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in both]
        rows.append([size, count, *found, show(percent(results.paired(LOSS, both[1], both[0])), 1, True)])
    yield table(["size", "parameters", "GLA", "Softmax GLA", "per cent of perplexity, difference"], rows)
    paper = PAPER["figures"]["scaling"]
    yield f"\nThe paper: Softmax GLA at 170M ({paper['softmax-gla-170m']}) comes close to GLA at 340M ({paper['gla-340m']}), WikiText."


def recall(results: Results) -> Lines:
    yield f"MQAR, 2 layers x 128 with short convolutions, {RECALL_STEPS} steps of 64 sequences; accuracy on held-out ones."
    yield ""
    for backbone in LINEAR:
        rows = [
            [str(pairs), str(n), *(show(results.seeds("accuracy", run), 3) for run in recall_runs(backbone, pairs, n).values())]
            for pairs in PAIRS
            for n in RECALL_HEADS
        ]
        yield table([f"{TITLES[backbone]}: pairs", "heads", *(WORDS[kind] for kind in KINDS)], rows)
        yield ""
    rows = [
        [TITLES[b], *(show(recall_difference(results, b, other), 3, True) for other in ("plain", "uniform", "sigmoid"))] for b in LINEAR
    ]
    yield table(["accuracy of softmax, mean of all settings", *(f"less {WORDS[kind]}" for kind in ("plain", "uniform", "sigmoid"))], rows)


def recall_runs(backbone: str, pairs: int, n: int) -> dict[str, Run]:
    return {kind: Run(backbone, kind, "2x128", n, steps=RECALL_STEPS, pairs=pairs) for kind in KINDS}


def recall_difference(results: Results, backbone: str, other: str) -> dict[int | None, float]:
    """Softmax less another kind of gates, averaged over the settings of a seed if all are there."""
    each = [recall_runs(backbone, pairs, n) for pairs in PAIRS for n in RECALL_HEADS]
    found = [results.paired("accuracy", kinds["softmax"], kinds[other]) for kinds in each]
    return {seed: mean(one[seed] for one in found) for seed in found[0] if all(seed in one for one in found)}


def stability(results: Results) -> Lines:
    rows = []
    for b in LINEAR:
        for v in ("plain", "softmax"):
            counts = [results.seeds(metric, Run(b, v)) for metric in ("loss spikes", "gradient peaks", "skipped steps")]
            norm = show(results.seeds("largest gradient norm", Run(b, v)))
            rows.append([f"{TITLES[b]}, {WORDS[v]}", *(f"{sum(x.values()):g} in {len(x)} runs" if x else MISSING for x in counts), norm])
    yield table(["model", "loss spikes", "gradient peaks", "skipped steps", "largest gradient norm after the warm-up"], rows)
    yield ""
    yield f"Loss spikes are {STABILITY['loss_spikes']}; gradient peaks are"
    yield f"{STABILITY['gradient_peaks']}."


def entropy(gates: Sequence[dict[str, Any]]) -> str:
    """Of a layer's gate, and its largest share; means over seeds."""
    return f"{mean(x['entropy'] for x in gates):.2f} ({mean(max(x['share']) for x in gates):.2f})" if gates else MISSING


def gates(results: Results) -> Lines:
    layers = range(int(SIZES[1].split("x")[0]))
    rows = []
    for b in LINEAR:
        for v in ("softmax", "sigmoid"):
            found = [record for seed in SEEDS if (record := results.record("gate entropy", Run(b, v, seed=seed)))]
            for gate in ("read", "write"):
                per_layer = [[record.extra["gates"][f"{n}/{gate}"] for record in found] for n in layers]
                dead = str(sum(len(x["dead"]) for one in per_layer for x in one)) if found else MISSING
                rows.append([f"{TITLES[b]}, {v}, {gate}", *map(entropy, per_layer), dead])
    yield table(["gate", *(f"layer {n}" for n in layers), "dead heads"], rows)
    yield ""
    yield "Entropy of the gate over 4 heads (1: an even split, 0: one head takes all) and, in brackets, the largest mean share of a head."


def efficiency(results: Results) -> Lines:
    if not (results.folder / "train_h200.jsonl").is_file():
        yield f"Training steps: {MISSING}."
        return
    yield readme.steps()
    yield ""
    for record in results.records:
        if record.suite == "train" and record.metric.startswith("softmax over plain/"):
            what, interval = record.metric.split("/")[1], record.extra.get("interval")
            between = f" (95% interval {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
            yield f"- {record.case}: {what} with gates over {what} without: {record.value:.3f}{between}."


def again(results: Results) -> Lines:
    yield "```"
    yield "headmax data prepare TEXT... --valid TEXT... --max-tokens 21M --out DATA    # tokens to train on"
    yield "headmax reproduce prepare DATA --eval-data TASKS                           # what the tasks ask, and needles; needs lm-eval"
    yield "headmax reproduce run rates language placement heads scaling --data DATA --out OUT --budget-seconds 540"
    yield "headmax reproduce run recall-rates --out OUT && headmax reproduce run recall --out OUT"
    yield "headmax reproduce collect OUT --data DATA --eval-data TASKS                # into benchmarks/results; needs lm-eval"
    yield "headmax reproduce report"
    yield "```"
    yield "`run` needs torch, transformers and minutes of a GPU. It takes all of one seed before the next, begins no run that would not end"
    yield "within `--budget-seconds`, and called again goes on with what neither OUT nor the repository has a record of. Recall models are"
    yield "too small to fill a GPU: let several processes take a `--share` each."


def full_scale(results: Results) -> Lines:
    yield "On 8 GPUs, after `headmax data prepare` as in [data](data.md); `headmax plan RECIPE --gpu h100` says how long each takes."
    yield ""
    yield "```"
    yield from commands()
    yield "```"


def commands() -> Lines:
    """One for each study of the paper."""
    studies = {
        "the three tables": [f"{gate}{b}-340m" for b in BACKBONES for gate in ("", "softmax-") if gate + b != "softmax-transformer"],
        "scaling": [f"{gate}gla-{scale}" for scale in SCALES if scale not in ("tiny", "340m") for gate in ("", "softmax-")],
        "heads": [f"{gate}gla-110m-h{n}" for n in HEADS_STUDY for gate in ("", "softmax-")],
    }
    for study, names in studies.items():
        yield f"# {study}"
        train = "torchrun --nproc-per-node 8 -m headmax train $r --data data/slimpajama --out runs/$r"
        yield f"for r in {' '.join(names)}; do {train} && headmax convert runs/$r --to hf && headmax eval runs/$r/hf --name $r; done"


def verdicts(results: Results) -> Lines:
    rows = []

    def add(claim: str, differences: Seeds, wanted: int, unit: str, digits: int = 1) -> None:
        rows.append([claim, (show(differences, digits, True) + f" {unit}") if differences else MISSING, judge(differences, wanted)])

    def losses(one: Run, other: Run) -> Seeds:
        return percent(results.paired(LOSS, one, other))

    ppl = "% of perplexity"
    for b in LINEAR:
        add(f"The softmax over heads lowers the perplexity of {TITLES[b]}", losses(Run(b, "softmax"), Run(b)), -1, ppl)
    for b in LINEAR:
        for control in ("uniform", "sigmoid"):
            add(f"{TITLES[b]}: it is the competition (softmax below {control})", losses(Run(b, "softmax"), Run(b, control)), -1, ppl)
    few, many = (gain(results, Run("gla", "softmax", heads=n), Run("gla", heads=n)) for n in (HEADS[0], HEADS[-1]))
    growth = {seed: many[seed] - few[seed] for seed in many if seed in few}
    add(f"The gain of Softmax GLA grows from {HEADS[0]} to {HEADS[-1]} heads", growth, 1, "in perplexity", 2)
    for size in SIZES:
        add(f"Softmax GLA is better at {size}", losses(Run("gla", "softmax", size), Run("gla", size=size)), -1, ppl)
    for b in LINEAR:
        add(f"Softmax {TITLES[b]} recalls more (MQAR, all settings)", recall_difference(results, b, "plain"), 1, "accuracy", 3)
        add(f"{TITLES[b]}: more than uniform gates let it recall", recall_difference(results, b, "uniform"), 1, "accuracy", 3)
    for b in LINEAR:
        metric = "squad_completion contains"
        add(
            f"Softmax {TITLES[b]} answers more questions (SQuAD subset)",
            percent(results.paired(metric, Run(b, "softmax"), Run(b))),
            1,
            "points",
        )
    yield table(["claim", "ours, mean ± standard deviation over seeds", "verdict"], rows)
    yield ""
    yield "Held, or the opposite: the 95% interval of the mean difference over seeds leaves out zero. With three seeds that asks for a"
    yield "clear effect; where there is none, nothing is decided. Not tested here: the paper's size and 15B tokens, SWDE and FDA (no data),"
    yield "contexts of 8K."


SECTIONS: dict[str, Callable[[Results], Lines]] = {
    "What held": verdicts,
    "Setup": setup,
    "Language modelling": language,
    "The paper's tables": paper_tables,
    "Where the read gate is, and the norm's eps": placement,
    "Heads": heads,
    "Sizes": scaling,
    "Recall": recall,
    "Stability": stability,
    "Gates": gates,
    "Efficiency": efficiency,
    "Again": again,
    "At the paper's scale": full_scale,
}
FIGURES = {
    "Heads": ("small_heads", "heads"),
    "Sizes": ("small_scaling", "scaling"),
    "Recall": ("recall_gla", "recall_retnet", "recall_gdn"),
    "Stability": ("training_loss",),
    "Efficiency": ("memory", "throughput", "latency"),
}
"""Of analysis/figures.py, by section."""


def render(results: Results) -> str:
    """The page. Its pictures are those of analysis/figures.py that have records."""
    lines = ["# Reproduction", "", *INTRODUCTION, ""]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", *section(results), ""]
        for name in FIGURES.get(title, ()):
            figure = figures.FIGURES[name]
            drawn = f"![{figure.title}]({IMAGES}/{name}.png)"
            missing = f"Figure, {figure.title}: {MISSING}. What makes its records: {figure.needs}."
            lines += [drawn if figures.collect(figure, results.records)[0] else missing, ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, folder: Path) -> None:
    """The page and its pictures, from the records in a folder."""
    results = Results(folder)
    page.write_text(render(results))
    for names in FIGURES.values():
        for name in names:
            figures.draw(name, page.parent / IMAGES, results.records)
