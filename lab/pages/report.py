"""docs/reproduction.md out of records. What has no record is said to be missing."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean

from headmax import durable
from headmax.eval import tables
from headmax.eval.tables import PAPER
from headmax.recipes.language import HEADS_STUDY, SCALES
from headmax.records import Record
from headmax.tables import Table, markdown
from headmax.train.metrics import STABILITY
from lab.pages import figures
from lab.pages.claims import AFTER, GUESS, answers, gain, needles, verdicts
from lab.pages.efficiency import efficiency
from lab.pages.gates import gates
from lab.pages.recommend import recommendation
from lab.study.needles import LENGTHS
from lab.study.run import best
from lab.study.runs import (
    BACKBONES,
    BATCH,
    EPS,
    HEADS,
    KINDS,
    LENGTH,
    LINEAR,
    PARTS,
    PLACES,
    RATE_STEPS,
    RECALL_SETTINGS,
    RECALL_STEPS,
    SEEDS,
    SHORT,
    SIZES,
    STEPS,
    Run,
    runs,
)
from lab.study.statistics import LOSS, MISSING, WORDS, Results, Seeds, percent, perplexity, recall_run, relative, show

Lines = Iterator[str]
TITLES = figures.TITLES
IMAGES = "images/reproduction"
INTRODUCTION = (
    "The paper's tables and figures at a scale that fits a GPU for minutes, with the controls it lacks. Written by",
    "`python -m lab report` from the records in `lab/results/`; no figure here is typed in.",
)


CONTROLS = {"uniform": "Uniform", "sigmoid": "Sigmoid", "uniform-read-after": "No gates, output x 1/H,"}
"""Gates that do not compete, by what stands before the backbone in a model's name."""
PAPER_GAINS, PAPER_SIZES = {4: 2.37, 16: 6.71}, (29.8, 29.0)
"""What the paper's text says of its figures: the gain by heads, the perplexities of Softmax GLA at 170M and of GLA at 340M."""
MOMENTS = [n * STEPS * LENGTH * BATCH // 8 for n in (1, 2, 4, 8)]
"""Tokens after which leads are looked at."""


RIVALS = [("softmax", other) for other in ("plain", "uniform", "sigmoid")]
RIVALS += [("softmax-after", other) for other in ("plain", "uniform-after")]
"""Whose recall is compared."""


def setup(results: Results) -> Lines:
    budget = f"{STEPS * LENGTH * BATCH / 1e6:.1f}M tokens, {STEPS} steps of {BATCH} sequences of {LENGTH}"
    yield f"Models of {SIZES[1]} (layers x hidden size: about 20M parameters beside 16M of embeddings) with 4 heads are trained on"
    yield f"{budget}. All models of a seed see the same tokens in the same order and start from the"
    yield "same values of the parameters that they have in common. The texts are English Wikipedia, old books and textbooks, in Mistral's"
    yield f"tokens; {8 * BATCH * LENGTH:,} tokens of other articles and textbooks are for validation. AdamW and the shape of the schedule"
    yield "are the paper's; warm-up is a tenth of the run (there a thirtieth). The controls uniform (gates frozen at 1/H) and sigmoid"
    yield "(gates that do not compete) have the softmax's place and, sigmoid at the start only, its mean. No gates, output x 1/H, is"
    yield "a frozen read gate after the norm and no write gate: the plain model, whose mixers' output is divided by the number of heads."
    yield f"Runs of {SHORT} steps (heads, sizes, and RetNet and GDN with a read gate after the norm) have plain models of their own, since"
    yield "they may have read other texts, as the checksum in their records says; nothing is compared across texts but the learning rates."
    yield ""
    rates = {TITLES[b]: Run(b).rates() for b in BACKBONES}
    rates |= {f"{TITLES[b]}, {WORDS[v]}": Run(b).rates(v) for b in LINEAR for v in KINDS[1:3]}
    yield tried(results, rates)
    yield ""
    yield f"After {RATE_STEPS} steps. The rate that is best for the plain model, at this size with 4 heads and seed 0, is taken for all"
    yield "gates, sizes and numbers of heads of its backbone. Rows with gates say whether gates would have chosen another; they may have"
    yield "read other texts and are not to be compared with those without. One seed cannot tell rates apart whose losses are close."
    found = {b: [best(Run(b).rates(v), results.records_of_runs) for v in ("softmax", "uniform")] for b in LINEAR}
    if all(all(pair) for pair in found.values()):
        losses = {b: [record.value for run in pair if run and (record := results.record(LOSS, run))] for b, pair in found.items()}
        each = "; ".join(f"{TITLES[b]} {100 * math.expm1(one - two):+.1f}".replace("-", "−") for b, (one, two) in losses.items())
        yield f"Each at its own best rate, softmax less uniform in % of perplexity, one seed: {each}."
    yield ""
    for part in PARTS:
        wanted = runs([part])
        yield f"- {part}: {len([run for run in wanted if run in results.runs])} of {len(wanted)} runs are recorded."
    done = [record for record in results.records_of_runs if record.metric == "seconds"]
    if done:
        devices, commits = (sorted({getattr(record, name) for record in done}) for name in ("device", "commit"))
        hours = sum(record.value for record in done) / 3600
        yield f"- {hours:.1f} hours of processes, of which several share a GPU: {', '.join(devices)}; commits {', '.join(commits)}."
    for record in results.records_of_runs:
        if record.metric == "failed":
            yield f"- {record.case}, seed {record.seed}, could not be trained: {record.extra['error']}"


def tried(results: Results, of: Mapping[str, Sequence[Run]]) -> str:
    """The losses of learning rates by model, and the best rate of each; of gates only where some were tried."""
    rows = []
    for name, rates in of.items():
        if rates[0].variant == "plain" or results.runs.intersection(rates):
            lr = found.lr if (found := best(rates, results.records_of_runs)) else None
            word = MISSING if lr is None else f"{lr:g}" + ", the edge of those tried" * (lr in (rates[0].lr, rates[-1].lr))
            rows.append([name, *(three(results.record(LOSS, rate)) for rate in rates), word])
    return markdown(["learning rate, validation loss", *(f"{rate.lr:g}" for rate in rates), "best"], rows)


def three(record: Record | None) -> str:
    """With three digits."""
    return MISSING if record is None else f"{record.value:.3f}"


def language(results: Results) -> Lines:
    variants = [*KINDS, "uniform-read-after"]
    rows = [
        [TITLES[b], *(show(perplexity(results.seeds(LOSS, Run(b, v)))) if b != "transformer" or v == "plain" else "" for v in variants)]
        for b in BACKBONES
    ]
    yield markdown(["validation perplexity", *(WORDS[v] for v in variants)], rows)
    yield ""
    pairs = [("softmax", "plain"), ("uniform", "plain"), ("sigmoid", "plain"), ("uniform-read-after", "plain")]
    pairs += [("softmax", "uniform"), ("softmax", "sigmoid")]
    header = ["per cent of perplexity", "paper, WikiText, softmax less no gates", *(f"{WORDS[a]} less {WORDS[b]}" for a, b in pairs)]
    rows = []
    for b in LINEAR:
        wiki = [PAPER["tables"][0]["values"][name][0] for name in (f"softmax-{b}", b)]
        found = [relative(results.paired(LOSS, Run(b, one), Run(b, other))) for one, other in pairs]
        rows.append([TITLES[b], f"{100 * (wiki[0] / wiki[1] - 1):+.1f}".replace("-", "−"), *(show(x, 1, sign=True) for x in found)])
    yield markdown(header, rows)
    yield ""
    yield "Differences seed by seed, mean ± standard deviation; negative is better. Validation perplexity is per token."
    yield from ("", "### How the lead of a smaller output comes and goes", "")
    yield from lead(results)
    yield from ("", "### What mixers add before training", "")
    yield from start(results)


def lead(results: Results) -> Lines:
    """The training loss of constant factors less that of no gates, over the run."""

    def curve(run: Run) -> dict[int, float]:
        record = results.record("training loss", run)
        return {} if record is None else dict(record.extra["curve"])

    rows = []
    for b in LINEAR:
        for v in ("uniform", "uniform-read-after"):
            pairs = {seed: (curve(Run(b, v, seed=seed)), curve(Run(b, seed=seed))) for seed in SEEDS}
            leads: list[Seeds] = [
                {seed: mine[t] - plain[t] for seed, (mine, plain) in pairs.items() if t in mine and t in plain} for t in MOMENTS
            ]
            rows.append([f"{TITLES[b]}: {WORDS[v]} less {WORDS['plain']}", *(show(relative(x), 0, True) for x in leads)])
    yield markdown(["% of perplexity, training", *(f"{moment / 1e6:.1f}M tokens" for moment in MOMENTS)], rows)


def start(results: Results) -> Lines:
    found = {(r.case, r.metric): r for r in results.records if r.case.startswith("before training, ")}
    rows = []
    for b in LINEAR:
        for v in ("plain", "uniform", "uniform-read-after"):
            pair = [found.get((f"before training, {b}, {v}", metric)) for metric in ("norm's input", "mixer's output")]
            rows.append([f"{TITLES[b]}, {WORDS[v]}", *(f"{one.value:.1e}" if one else MISSING for one in pair)])
    yield markdown(["root mean square", "what the norm of a head gets", "what the mixer adds"], rows)
    yield ""
    yield f"The norm divides a constant factor out where what it gets is large beside the root of its eps, {math.sqrt(EPS[0]):g}; where"
    yield "it is not, frozen gates on the query make the mixer's output smaller, as a factor after the norm does. Embeddings start at 0.02."


def paper_tables(results: Results) -> Lines:
    found = [path for path in [results.folder / "eval.jsonl"] if path.is_file()]
    if not found:
        yield f"Zero-shot tasks: {MISSING} here.\n"
    zero_shot, questions, haystack = tables.grids(found, SIZES[1], CONTROLS)
    yield zero_shot.markdown()
    yield "WikiText's perplexity is per word.\n"
    yield f"### {questions.title}\n"
    yield from folded("All models beside the paper's figures", questions)
    yield f"### {haystack.title}"
    yield ""
    yield f"As trained on text, and after a short training on needles, on answers alone, in prompts of up to {max(LENGTHS):,} tokens. Means"
    yield "over the nine tasks: S-NIAH-1, 2 and 3 at 1K, 2K and 4K. The log-probability of the values may tell apart models that find"
    yield f"none; one that knows the form of a value and guesses its digits has {GUESS:.1f}.".replace("-", "−")
    yield ""
    models = {f"{TITLES[b]}, {WORDS[v]}": Run(b, v) for b in LINEAR for v in (*KINDS, "uniform-read-after")}
    models[TITLES["transformer"]] = Run("transformer")
    rows = []
    for name, run in models.items():
        hits = [percent(results.average(needles("acc", after), run)) for after in ("", AFTER)]
        likely = [results.average(needles("answer_logprob", after), run) for after in ("", AFTER)]
        rows.append([name, *(show(x, 1) for x in hits), *(show(x) for x in likely)])
    yield markdown(["model", "needles found, %", "after needles", "log-probability of the values, nats", "after needles"], rows)
    yield ""
    for when, grid in (("As trained", haystack), ("After needles", tables.grids(found, f"{SIZES[1]}-needles", CONTROLS)[2])):
        yield from folded(f"{when}, task by task, beside the paper's figures", grid)


def folded(summary: str, grid: Table) -> Lines:
    """A table to be opened, without its title."""
    yield f"<details><summary>{summary}</summary>\n"
    yield grid.markdown().split("\n", 2)[2]
    yield "</details>\n"


def placement(results: Results) -> Lines:
    asked = set(runs(["language", "placement", "after"]))
    for b in LINEAR:
        rows, tried = [], EPS if b == LINEAR[0] else EPS[:1]
        for v in PLACES:
            both = [Run(b, v, norm_eps=eps, steps=STEPS if b == LINEAR[0] else SHORT) for eps in tried]
            found = [show(perplexity(results.seeds(LOSS, run))) if run in asked else "" for run in both]
            gained = [relative(results.paired(LOSS, run, run.twin)) for run in both]
            differences = [show(x, 1, sign=True) if run in asked and v != "plain" else "" for x, run in zip(gained, both, strict=True)]
            rows += [[WORDS[v], *found, *differences]] if asked & set(both) else []
        columns = (*(f"perplexity, eps {eps:g}" for eps in tried), *(f"per cent less no gates, eps {eps:g}" for eps in tried))
        yield markdown([TITLES[b], *columns], rows)
        yield ""
    yield f"GLA: {STEPS} steps; the others: {SHORT}."


def heads(results: Results) -> Lines:
    rows = [
        [str(n), *(show(perplexity(results.seeds(LOSS, replace(run, variant=v)))) for v in KINDS[:3]),
         *(show(gain(results, replace(run, variant=v), run), sign=True) for v in ("softmax", "uniform")),
         str(PAPER_GAINS.get(n, "not given"))]
        for n in HEADS
        for run in [Run("gla", heads=n, steps=SHORT)]
    ]  # fmt: skip
    yield markdown(["heads", *(WORDS[v] for v in KINDS[:3]), "gain of softmax", "gain of uniform", "paper's gain of softmax, 110M"], rows)
    yield "\nValidation perplexity of GLA at a fixed number of parameters (the paper: WikiText)."


def scaling(results: Results) -> Lines:
    rows = []
    for size in SIZES:
        record = results.record(LOSS, Run("gla", size=size, steps=SHORT))
        count = MISSING if record is None else f"{record.extra['parameters'] / 1e6:.1f}M"
        both = [Run("gla", v, size, steps=SHORT) for v in ("plain", "softmax")]
        found = [show(perplexity(results.seeds(LOSS, run))) for run in both]
        rows.append([size, count, *found, show(relative(results.paired(LOSS, both[1], both[0])), 1, True)])
    yield markdown(["size", "parameters", "GLA", "Softmax GLA", "per cent of perplexity, difference"], rows)
    smaller, larger = PAPER_SIZES
    yield f"\nThe paper: Softmax GLA at 170M ({smaller}) comes close to GLA at 340M ({larger}), WikiText."


def recall(results: Results) -> Lines:
    yield f"MQAR, 2 layers x 128 with short convolutions, {RECALL_STEPS} steps of 64 sequences; accuracy on held-out ones. In hard"
    yield "settings it still rises at the end, so that this measures how fast models learn as well; the mean over training does so more."
    yield ""
    rates = {(b, v): recall_run(b, "plain", 32, 4).rates(v) for b in LINEAR for v in PLACES}
    yield tried(results, {f"{TITLES[b]}, {WORDS[v]}": each for (b, v), each in rates.items()})
    yield ""
    yield "Of 32 pairs, 4 heads and seed 0. A model often learns the task or does not within the steps there are, so rate and seed decide"
    if apart := results.repeats():
        yield f"much, and so does chance: {len(apart)} models were trained twice with the same seed and rate, and their accuracies lie"
        yield f"{mean(apart):.2f} apart on average, at most {max(apart):.2f} (sums in another order, by kernels of another commit)."
    whole = set(SEEDS).intersection(*(results.rates_seeds(b, v) for b in LINEAR for v in PLACES))
    yield "Below, accuracies at the rate whose mean loss is the lowest for each model; it is chosen and scored on the same seeds"
    yield f"(those that tried all rates: {', '.join(map(str, sorted(whole))) or 'none'}):"
    yield ""
    own = {(b, v): results.at_own_rate(b, v) for b in LINEAR for v in PLACES}
    cells = {key: MISSING if run is None else f"{accuracy(results, run)} at {run.lr:g}" for key, run in own.items()}
    yield markdown(
        ["accuracy at the best rate", *(WORDS[v] for v in PLACES)], [[TITLES[b], *(cells[b, v] for v in PLACES)] for b in LINEAR]
    )
    yield ""
    rows = [[TITLES[b], *(show(results.recall_at_own_rates(b, *pair), 3, True) for pair in RIVALS)] for b in LINEAR]
    yield markdown(["accuracy, each at its best rate", *(f"{WORDS[one]} less {WORDS[other]}" for one, other in RIVALS)], rows)
    yield ""
    yield "All that follows is at the rate that is best for the plain model of the backbone with seed 0, not at what gates would choose."
    yield ""
    for backbone in LINEAR:
        rows = [
            [str(pairs), str(n), *(accuracy(results, recall_run(backbone, kind, pairs, n)) for kind in PLACES)]
            for pairs, n in RECALL_SETTINGS
        ]
        yield markdown([f"{TITLES[backbone]}: pairs", "heads", *(WORDS[kind] for kind in PLACES)], rows)
        yield ""
    for metric in ("accuracy", "mean accuracy over training"):
        rows = [[TITLES[b], *(show(results.recall(b, *pair, metric), 3, True) for pair in RIVALS)] for b in LINEAR]
        yield markdown([f"{metric}, mean of all settings", *(f"{WORDS[one]} less {WORDS[other]}" for one, other in RIVALS)], rows)
        yield ""
    yield "Mean ± standard deviation over seeds; the differences are taken seed by seed."


def accuracy(results: Results, run: Run) -> str:
    """On held-out sequences, and whether it is no more than chance."""
    task, found = run.task(), results.seeds("accuracy", run)
    assert task is not None
    answers = run.train(1.0).eval.sequences * task.num_pairs * len(found)
    error = math.sqrt(task.chance * (1 - task.chance) / max(1, answers))
    return show(found, 3) + ", chance" * bool(found and mean(found.values()) <= task.chance + tables.ERRORS * error)


def stability(results: Results) -> Lines:
    rows = []
    for b in LINEAR:
        for v in ("plain", "softmax"):
            counts = [results.seeds(metric, Run(b, v)) for metric in ("loss spikes", "gradient peaks", "skipped steps")]
            norm = show(results.seeds("largest gradient norm", Run(b, v)))
            rows.append([f"{TITLES[b]}, {WORDS[v]}", *(f"{sum(x.values()):g} in {len(x)} runs" if x else MISSING for x in counts), norm])
        larger = results.paired("largest gradient norm", Run(b, "softmax"), Run(b))
        rows.append([f"{TITLES[b]}, softmax less no gates", *[""] * 3, show(larger, sign=True)])
    yield markdown(["model", "loss spikes", "gradient peaks", "skipped steps", "largest gradient norm after the warm-up"], rows)
    yield ""
    yield "The paper: the loss of Softmax RetNet falls smoothly, without noticeable extra oscillations (a picture)."
    yield f"Loss spikes are {STABILITY['loss_spikes']}; gradient peaks are"
    yield f"{STABILITY['gradient_peaks']}."


def again(results: Results) -> Lines:
    yield "```"
    yield "headmax data prepare TEXT... --valid TEXT... --max-tokens 21M --out DATA    # tokens to train on"
    yield "python -m lab prepare DATA --eval-data TASKS --haystack TEXT               # what the tasks ask, and needles; needs lm-eval"
    yield "python -m lab run rates --data DATA --out OUT"
    yield "python -m lab run language placement --data DATA --out OUT --budget-seconds 540"
    yield "python -m lab run after heads scaling gate-rates --data DATA --out OUT --budget-seconds 540   # or other texts"
    yield "python -m lab run recall-rates --out OUT"
    yield "python -m lab run recall recall-gate-rates --out OUT --budget-seconds 540"
    yield "python -m lab collect OUT --data DATA --eval-data TASKS --haystack TEXT  # into lab/results; needs lm-eval"
    yield "python -m lab report"
    yield "```"
    yield "`run` needs torch, transformers and minutes of a GPU. It takes all of one seed before the next, begins no run that would not end"
    yield "within `--budget-seconds`, and called again goes on with what neither OUT nor the repository has a record of. Small models do"
    yield "not fill a GPU; several processes can take a `--share` each: `for i in 0 1 2; do python -m lab run ... --share $i/3 & done`."


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
    for study, recipes in studies.items():
        yield f"# {study}"
        train = "torchrun --nproc-per-node 8 -m headmax train $r --data data/slimpajama --out runs/$r"
        examine = "headmax convert runs/$r --to hf && headmax eval runs/$r/hf --name $r --work runs/$r/eval"
        yield f"for r in {' '.join(recipes)}; do {train} && {examine}; done"
    yield "# beside the paper's figures"
    yield "headmax eval tables runs/*/eval/records.jsonl"


SECTIONS: dict[str, Callable[[Results], Lines]] = {
    "In short": answers,
    "Setup": setup,
    "Language modelling": language,
    "Where the read gate is, and the norm's eps": placement,
    "What held": verdicts,
    "Recommended gates": recommendation,
    "The paper's tables": paper_tables,
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
            drawn = f"![{figure.title}]({IMAGES}/{name}.svg)"
            missing = f"Figure, {figure.title}: {MISSING}. What makes its records: {figure.needs}."
            lines += [drawn if figures.collect(figure, results.records)[0] else missing, ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, folder: Path) -> None:
    """The page and its pictures, from the records in a folder."""
    results, images = Results(folder), page.parent / IMAGES
    durable.write(page, render(results))
    with tempfile.TemporaryDirectory() as drawn:
        for name in chain(*FIGURES.values()):
            figures.draw(name, Path(drawn), results.records)
        for path in Path(drawn).glob("*.svg"):
            durable.write(images / path.name, path.read_bytes())
