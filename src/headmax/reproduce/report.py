"""docs/reproduction.md out of records. What has no record is said to be missing."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import mean

from headmax.analysis import figures
from headmax.eval import names, tables
from headmax.eval.tables import PAPER
from headmax.recipes.language import BACKBONES, HEADS_STUDY, SCALES
from headmax.reproduce.efficiency import efficiency
from headmax.reproduce.gates import gates
from headmax.reproduce.needles import LENGTHS
from headmax.reproduce.recommend import recommendation
from headmax.reproduce.results import (
    HELD,
    LOSS,
    MISSING,
    OPPOSITE,
    Results,
    Seeds,
    judge,
    less,
    percent,
    perplexity,
    recall_run,
    show,
    table,
    told_apart,
)
from headmax.reproduce.run import chosen
from headmax.reproduce.runs import (
    BATCH,
    EPS,
    GATES,
    HEADS,
    KINDS,
    LENGTH,
    LINEAR,
    PAIRS,
    PARTS,
    PLACES,
    RATES,
    RECALL_HEADS,
    RECALL_KINDS,
    RECALL_STEPS,
    SIZES,
    STEPS,
    Run,
    runs,
)
from headmax.train.metrics import STABILITY

Lines = Iterator[str]
TITLES = figures.TITLES
WORDS = {
    "plain": "no gates",
    "softmax": "softmax",
    "uniform": "uniform",
    "sigmoid": "sigmoid",
    **{f"{kind}-after": f"{kind}, read gate after the norm" for kind in GATES},
    "uniform-read-after": "uniform, read alone, after the norm",
}
IMAGES = "images/reproduction"
AFTER = " after needles"
INTRODUCTION = (
    "The paper's tables and figures at a scale that fits a GPU for minutes, with the controls it lacks. Written by",
    "`headmax reproduce report` from the records in `benchmarks/results/`; no figure here is typed in.",
)


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
        best = MISSING
        if results.runs.issuperset(rates):
            lr = chosen(Run(backbone), results.records_of_runs)
            best = f"{lr:g}" + ", the edge of those tried" * (lr in (RATES["text"][0], RATES["text"][-1]))
        rows.append([TITLES[backbone], *(MISSING if one is None else f"{one.value:.3f}" for one in found), best])
    yield table(["learning rate, validation loss after fewer steps", *(f"{rate:g}" for rate in RATES["text"]), "taken"], rows)
    yield ""
    yield "The rate is chosen for the plain model, at this size with 4 heads and seed 0, and taken for all gates, sizes and numbers of"
    yield "heads of its backbone: where gates change the size of what a layer adds, another rate might suit them better."
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
        yield f"Zero-shot tasks: {MISSING} here.\n"
    *short, haystack = tables.grids(found, SIZES[1])
    yield from (grid.markdown() for grid in short)
    yield f"### {haystack.title}"
    yield ""
    yield f"As trained on text, and after a short training on needles, on answers alone, in prompts of up to {max(LENGTHS):,} tokens. Means"
    yield "over the nine tasks: S-NIAH-1, 2 and 3 at 1K, 2K and 4K. The log-probability of the values tells apart models that find none."
    yield ""
    models = {f"{TITLES[b]}, {WORDS[v]}": Run(b, v) for b in LINEAR for v in (*KINDS, "uniform-read-after")}
    models[TITLES["transformer"]] = Run("transformer")
    rows = []
    for name, run in models.items():
        hits = [percent(results.average(needles("acc", after), run)) for after in ("", AFTER)]
        likely = [results.average(needles("answer_logprob", after), run) for after in ("", AFTER)]
        rows.append([name, *(show(x, 1) for x in hits), *(show(x) for x in likely)])
    yield table(["model", "needles found, %", "after needles", "log-probability of the values, nats", "after needles"], rows)
    yield ""
    for when, grid in (("As trained", haystack), ("After needles", tables.grids(found, f"{SIZES[1]}-needles")[2])):
        yield f"<details><summary>{when}, task by task, beside the paper's figures</summary>\n"
        yield grid.markdown().split("\n", 2)[2]
        yield "</details>\n"


def needles(metric: str, after: str) -> list[str]:
    """A metric of all nine tasks."""
    return [f"niah_single_{task}_{length} {metric}{after}" for task in (1, 2, 3) for length in ("1k", "2k", "4k")]


def placement(results: Results) -> Lines:
    asked = set(runs(["language", "placement"]))
    for b in LINEAR:
        rows = []
        for v in PLACES:
            both = [Run(b, v, norm_eps=eps) for eps in EPS]
            found = [show(perplexity(results.seeds(LOSS, run))) if run in asked else "" for run in both]
            gained = [percent(results.paired(LOSS, run, run.twin)) for run in both]
            differences = [show(x, 1, sign=True) if run in asked and v != "plain" else "" for x, run in zip(gained, both, strict=True)]
            rows += [[WORDS[v], *found, *differences]] if asked & set(both) else []
        columns = (*(f"perplexity, eps {eps:g}" for eps in EPS), *(f"per cent less no gates, eps {eps:g}" for eps in EPS))
        yield table([TITLES[b], *columns], rows)
        yield ""
    yield "An empty cell was not asked for. The norm divides a constant factor out where what it gets is large beside the root of its eps."


def gain(results: Results, run: Run, plain: Run) -> dict[int | None, float]:
    """By how much the perplexity is lower."""
    return less(perplexity(results.seeds(LOSS, plain)), perplexity(results.seeds(LOSS, run)))


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
            [str(pairs), str(n), *(accuracy(results, recall_run(backbone, kind, pairs, n)) for kind in RECALL_KINDS)]
            for pairs in PAIRS
            for n in RECALL_HEADS
        ]
        yield table([f"{TITLES[backbone]}: pairs", "heads", *(WORDS[kind] for kind in RECALL_KINDS)], rows)
        yield ""
    others = ("plain", "uniform", "sigmoid")
    rows = [[TITLES[b], *(show(results.recall(b, "softmax", other), 3, True) for other in others)] for b in LINEAR]
    yield table(["accuracy of softmax, mean of all settings", *(f"less {WORDS[kind]}" for kind in others)], rows)
    yield f"\n† within {tables.ERRORS} standard errors of guessing among the values, or below. Mean ± standard deviation over seeds; the"
    yield "differences are taken seed by seed."


def accuracy(results: Results, run: Run) -> str:
    """On held-out sequences, marked where it is no more than chance."""
    task, found = run.task(), results.seeds("accuracy", run)
    assert task is not None
    answers = run.train(1.0).eval.sequences * task.num_pairs * len(found)
    error = math.sqrt(task.chance * (1 - task.chance) / max(1, answers))
    return show(found, 3) + " †" * bool(found and mean(found.values()) <= task.chance + tables.ERRORS * error)


def stability(results: Results) -> Lines:
    rows = []
    for b in LINEAR:
        for v in ("plain", "softmax"):
            counts = [results.seeds(metric, Run(b, v)) for metric in ("loss spikes", "gradient peaks", "skipped steps")]
            norm = show(results.seeds("largest gradient norm", Run(b, v)))
            rows.append([f"{TITLES[b]}, {WORDS[v]}", *(f"{sum(x.values()):g} in {len(x)} runs" if x else MISSING for x in counts), norm])
        larger = results.paired("largest gradient norm", Run(b, "softmax"), Run(b))
        rows.append([f"{TITLES[b]}, softmax less no gates", *[""] * 3, show(larger, sign=True)])
    yield table(["model", "loss spikes", "gradient peaks", "skipped steps", "largest gradient norm after the warm-up"], rows)
    yield ""
    yield "The paper: the loss of Softmax RetNet falls smoothly, without noticeable extra oscillations (a picture)."
    yield f"Loss spikes are {STABILITY['loss_spikes']}; gradient peaks are"
    yield f"{STABILITY['gradient_peaks']}."


def again(results: Results) -> Lines:
    yield "```"
    yield "headmax data prepare TEXT... --valid TEXT... --max-tokens 21M --out DATA    # tokens to train on"
    yield "headmax reproduce prepare DATA --eval-data TASKS                           # what the tasks ask, and needles; needs lm-eval"
    yield "headmax reproduce run rates --data DATA --out OUT"
    yield "headmax reproduce run language placement heads scaling --data DATA --out OUT --budget-seconds 540"
    yield "headmax reproduce run recall-rates --out OUT"
    yield "headmax reproduce run recall --out OUT --budget-seconds 540"
    yield "headmax reproduce collect OUT --data DATA --eval-data TASKS                # into benchmarks/results; needs lm-eval"
    yield "headmax reproduce report"
    yield "```"
    yield "`run` needs torch, transformers and minutes of a GPU. It takes all of one seed before the next, begins no run that would not end"
    yield "within `--budget-seconds`, and called again goes on with what neither OUT nor the repository has a record of. Small models do"
    yield "not fill a GPU; several processes can take a `--share` each: `for i in 0 1 2; do headmax reproduce run ... --share $i/3 & done`."


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
    yield "headmax reproduce tables --records runs/*/eval/records.jsonl"


def answers(results: Results) -> Lines:
    """What a reader wants to know first."""

    def say(question: str, what: str, wanted: int, digits: int, differences: dict[str, Seeds]) -> str:
        words = {1: "better", -1: "worse", 0: "not told apart"}
        each = (
            f"{TITLES[b]} " + (f"{show(x, digits, True)} ({words[told_apart(x) * wanted]})" if x else MISSING)
            for b, x in differences.items()
        )
        return f"- **{question}** {what}: {'; '.join(each)}."

    def losses(one: str, other: str) -> dict[str, Seeds]:
        return {b: percent(results.paired(LOSS, Run(b, one), Run(b, other))) for b in LINEAR}

    yield say("Do gates help a language model?", "Softmax less no gates, % of perplexity", -1, 1, losses("softmax", "plain"))
    yield say("Is it the competition?", "Softmax less gates frozen at 1/H", -1, 1, losses("softmax", "uniform"))
    yield say("Where does the read gate belong?", "After the norm less on the query, softmax", -1, 1, losses("softmax-after", "softmax"))
    yield say("And there?", "Softmax less gates frozen at 1/H, both after the norm", -1, 1, losses("softmax-after", "uniform-after"))
    recalled: dict[str, Seeds] = {b: results.recall(b, "softmax", "plain") for b in LINEAR}
    yield say("Do gates help recall?", "Softmax less no gates, accuracy, mean of all settings", 1, 3, recalled)
    yield ""
    yield "Mean ± standard deviation over seeds; better, worse: the 95% interval of the mean difference leaves out zero."


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
    add(f"The gain of Softmax GLA grows from {HEADS[0]} to {HEADS[-1]} heads", less(many, few), 1, "in perplexity", 2)
    at_most = [Run("gla", v, heads=HEADS[-1]) for v in ("softmax", "uniform")]
    add(f"GLA at {HEADS[-1]} heads: it is the competition (softmax below uniform)", losses(*at_most), -1, ppl)
    for size in SIZES:
        add(f"Softmax GLA is better at {size}", losses(Run("gla", "softmax", size), Run("gla", size=size)), -1, ppl)
    for b in LINEAR:
        add(f"Softmax {TITLES[b]} recalls more (MQAR, all settings)", results.recall(b, "softmax", "plain"), 1, "accuracy", 3)
        add(f"{TITLES[b]}: more than uniform gates let it recall", results.recall(b, "softmax", "uniform"), 1, "accuracy", 3)
    scores = {
        "has a higher average on the zero-shot tasks": ([f"{task} acc" for task in names.COMMONSENSE[1:]], 100, "points"),
        "answers more questions (SQuAD subset)": (["squad_completion contains"], 100, "points"),
        "finds more needles, as trained (mean of 9 tasks)": (needles("acc", ""), 100, "points"),
        "finds more needles after training on needles": (needles("acc", AFTER), 100, "points"),
        "finds the needles' values likelier after training on needles": (needles("answer_logprob", AFTER), 1, "nats"),
    }
    for claim, (metrics, factor, unit) in scores.items():
        for b in LINEAR:
            found = less(*(results.average(metrics, Run(b, v)) for v in ("softmax", "plain")))
            add(f"Softmax {TITLES[b]} {claim}", {seed: factor * value for seed, value in found.items()}, 1, unit, 2)
    yield table(["claim", "ours, mean ± standard deviation over seeds", "verdict"], rows)
    yield ""
    judged = [verdict for _, _, verdict in rows]
    held, opposite, missing = (judged.count(verdict) for verdict in (HELD, OPPOSITE, MISSING))
    unclear = len(rows) - held - opposite - missing
    yield f"Of {len(rows)} claims {held} held and {opposite} turned out the opposite; {unclear} were not told apart from chance, or have"
    yield f"one seed only; {missing} are not measured. Held, or the opposite: the 95% interval of the mean difference over seeds leaves out"
    yield "zero. Each claim is judged by itself: where nothing differs, about one in twenty would be judged so all the same. With three"
    yield "seeds an effect must be about 2.5 times its standard deviation to be seen; where it was not, nothing is decided."
    yield ""
    yield "Could not be tested here: the paper's size and 15B tokens of SlimPajama (these models see other texts and are judged early in"
    yield "training), SWDE and FDA (no data), contexts of 8K, and whether gated models want another learning rate than plain ones. Where a"
    yield "table below marks accuracies as chance, their differences are noise."


SECTIONS: dict[str, Callable[[Results], Lines]] = {
    "In short": answers,
    "What held": verdicts,
    "Recommended gates": recommendation,
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
            drawn = f"![{figure.title}]({IMAGES}/{name}.svg)"
            missing = f"Figure, {figure.title}: {MISSING}. What makes its records: {figure.needs}."
            lines += [drawn if figures.collect(figure, results.records)[0] else missing, ""]
    return "\n".join(lines).rstrip() + "\n"


def write(page: Path, folder: Path) -> None:
    """The page and its pictures, from the records in a folder."""
    results, images = Results(folder), page.parent / IMAGES
    page.write_text(render(results))
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as drawn:
        for name in chain(*FIGURES.values()):
            figures.draw(name, Path(drawn), results.records)
        for path in Path(drawn).glob("*.svg"):
            shutil.copy(path, images)
