"""What the records say of the paper's claims, and of the questions that they leave open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from headmax.eval import names
from headmax.tables import markdown
from lab.pages.figures import TITLES
from lab.study.runs import HEADS, LINEAR, SHORT, SIZES, STEPS, Run, comparable
from lab.study.statistics import (
    FEW,
    FLOOR,
    HELD,
    LOSS,
    MISSING,
    OPPOSITE,
    WORDS,
    Results,
    Seeds,
    interval,
    judge,
    less,
    perplexity,
    relative,
    show,
    told_apart,
)

AFTER = " after needles"
GUESS = -(2 * 7 * math.log(10) + 32 * math.log(16)) / 3
"""Mean log-probability of the needles' values by their form alone: numbers of 7 digits in S-NIAH-1 and 2, 32 hexadecimal ones in 3."""
PPL = "% of perplexity"


def needles(metric: str, after: str) -> list[str]:
    """A metric of all nine tasks."""
    return [f"niah_single_{task}_{length} {metric}{after}" for task in (1, 2, 3) for length in ("1k", "2k", "4k")]


def gain(results: Results, run: Run, plain: Run) -> dict[int | None, float]:
    """By how much the perplexity is lower, where both were trained on the same tokens."""
    found = less(perplexity(results.seeds(LOSS, plain)), perplexity(results.seeds(LOSS, run)))
    return {seed: found[seed] for seed in results.paired(LOSS, run, plain)}


def answers(results: Results) -> Iterator[str]:
    """What a reader wants to know first."""

    def losses(one: str, other: str) -> dict[str, Seeds]:
        return {b: relative(results.paired(LOSS, *comparable(Run(b, one), Run(b, other)))) for b in LINEAR}

    signs = [-told_apart(x) for x in losses("softmax", "uniform").values() if x]
    yield "With the read gate on the query, as in the paper, gates that compete were better than gates frozen at 1/H in"
    yield f"{signs.count(1)} of {len(signs)} backbones and worse in {signs.count(-1)}. Differences in {PPL} where nothing else is said:"
    yield ""
    questions = {
        "Do gates help a language model?": ("softmax", "plain"),
        "Or only the size of what a layer adds?": ("uniform-read-after", "plain"),
        "Is it the competition?": ("softmax", "uniform"),
        "And after the norm, which divides a gate on the query out?": ("softmax-after", "uniform-after"),
        "Do gates help there that do not compete?": ("sigmoid-after", "uniform-after"),
    }
    for question, (one, other) in questions.items():
        yield answer(question, f"{WORDS[one]} less {WORDS[other]}", -1, 1, losses(one, other))
    recalled: dict[str, Seeds] = {b: results.recall(b, "softmax", "plain") for b in LINEAR}
    what = "softmax less no gates, accuracy, mean of all settings, at the learning rate that is best without gates"
    yield answer("Do gates help recall?", what, 1, 3, recalled)
    for question, other in (("And at the rate that is best for each?", "plain"), ("Is it the competition there?", "uniform")):
        found: dict[str, Seeds] = {b: results.recall_at_own_rates(b, "softmax", other) for b in LINEAR}
        if any(map(interval, found.values())):
            yield answer(question, f"softmax less {WORDS[other]}, accuracy, 32 pairs, 4 heads", 1, 3, found)
    yield ""
    yield "Mean ± standard deviation over seeds; better, worse: the 95% interval of the mean difference leaves out zero. No gates, output x"
    yield "1/H: the plain model, whose mixers' output is divided by the number of heads. RetNet and GDN with a read gate after the norm are"
    yield f"from runs of {SHORT} steps, as is what they are compared with, other language models from {STEPS}."


def answer(question: str, what: str, wanted: int, digits: int, differences: Mapping[str, Seeds]) -> str:
    words = {1: "better", -1: "worse", 0: "no significant difference"}
    said = {b: words[told_apart(x) * wanted] if interval(x) else FEW for b, x in differences.items()}
    each = [f"{TITLES[b]} " + (f"{show(x, digits, True)} ({said[b]})" if x else MISSING) for b, x in differences.items()]
    return f"- **{question}** {what[0].upper()}{what[1:]}: {'; '.join(each)}."


def verdicts(results: Results) -> Iterator[str]:
    rows = []

    def add(claim: str, found: Seeds, wanted: int, unit: str, digits: int = 1, frozen: Seeds | None = None, floor: bool = False) -> None:
        """`frozen`: the same difference to gates frozen at 1/H; `floor`: where both models do no better than chance."""
        verdict = FLOOR if found and floor else judge(found, wanted)
        if verdict == HELD and frozen is not None and told_apart(frozen) != wanted:
            verdict += ", but not seen to be better than frozen gates"
        edges = interval(found)
        reach = f" ({edges[0]:+.{digits}f} to {edges[1]:+.{digits}f})".replace("-", "−") if edges else ""
        rows.append([claim, (f"{show(found, digits, True)}{reach} {unit}") if found else MISSING, verdict])

    def losses(one: Run, other: Run) -> Seeds:
        return relative(results.paired(LOSS, one, other))

    for b in LINEAR:
        less_plain, frozen = (losses(Run(b, "softmax"), Run(b, other)) for other in ("plain", "uniform"))
        add(f"The softmax over heads lowers the perplexity of {TITLES[b]}", less_plain, -1, PPL, frozen=frozen)
    for b in LINEAR:
        for control in ("uniform", "sigmoid"):
            add(f"{TITLES[b]}: it is the competition (softmax below {control})", losses(Run(b, "softmax"), Run(b, control)), -1, PPL)
    fewest, most = ({v: Run("gla", v, heads=n, steps=SHORT) for v in ("plain", "softmax", "uniform")} for n in (HEADS[0], HEADS[-1]))
    few, many = (gain(results, of["softmax"], of["plain"]) for of in (fewest, most))
    add(f"The gain of Softmax GLA grows from {HEADS[0]} to {HEADS[-1]} heads", less(many, few), 1, "in perplexity", 2)
    competing = losses(most["softmax"], most["uniform"])
    add(f"GLA at {HEADS[-1]} heads: it is the competition (softmax below uniform)", competing, -1, PPL)
    for size in SIZES:
        larger = losses(*(Run("gla", v, size, steps=SHORT) for v in ("softmax", "plain")))
        add(f"Softmax GLA is better at {size}", larger, -1, PPL)
    for b in LINEAR:
        frozen = results.recall(b, "softmax", "uniform")
        add(f"Softmax {TITLES[b]} recalls more (MQAR, all settings)", results.recall(b, "softmax", "plain"), 1, "accuracy", 3, frozen)
        add(f"{TITLES[b]}: more than uniform gates let it recall", frozen, 1, "accuracy", 3)
        plain, frozen = (results.recall_at_own_rates(b, "softmax", other) for other in ("plain", "uniform"))
        add(f"Softmax {TITLES[b]} recalls more (32 pairs, 4 heads, each at its best rate)", plain, 1, "accuracy", 3, frozen)
    scores = {
        "has a higher average on the zero-shot tasks": ([f"{task} acc" for task in names.COMMONSENSE[1:]], 100, "points"),
        "answers more questions (SQuAD subset)": (["squad_completion contains"], 100, "points"),
        "finds more needles, as trained (mean of 9 tasks)": (needles("acc", ""), 100, "points"),
        "finds more needles after training on needles": (needles("acc", AFTER), 100, "points"),
        "finds the needles' values likelier after training on needles": (needles("answer_logprob", AFTER), 1, "nats"),
    }
    for claim, (metrics, factor, unit) in scores.items():
        for b in LINEAR:
            softmax, plain, uniform = (
                {s: factor * x for s, x in results.average(metrics, Run(b, v)).items()} for v in ("softmax", "plain", "uniform")
            )
            floor = claim.startswith(("answers", "finds more")) and all(results.at_chance(metrics, Run(b, v)) for v in ("softmax", "plain"))
            add(f"Softmax {TITLES[b]} {claim}", less(softmax, plain), 1, unit, 2, less(softmax, uniform), floor)
    yield markdown(
        ["claim, the paper's or a control that it lacks", "ours, mean ± standard deviation over seeds (95% interval)", "verdict"], rows
    )
    yield ""
    judged = [verdict for _, _, verdict in rows]
    kinds = (HELD, OPPOSITE, MISSING, FLOOR, FEW)
    held, opposite, missing, chance, open_ = (sum(x.startswith(verdict) for x in judged) for verdict in kinds)
    unclear = len(rows) - held - opposite - missing - chance - open_
    yield f"Of {len(rows)} claims {held} held and {opposite} turned out the opposite; {unclear} show no significant difference,"
    yield f"{open_} have too few seeds, {chance} cannot be judged since both models do no better than chance, {missing} are not measured."
    yield "Held, or opposite:"
    yield "the 95% interval of the mean difference over three seeds leaves out zero. Each claim is judged by itself: where"
    yield "nothing differs, about one in twenty would be judged so all the same. An effect must be about 2.5 times its standard deviation"
    yield "to be seen; where it was not, nothing is decided."
    yield ""
    yield "Could not be tested here: the paper's size and 15B tokens of SlimPajama (these models see other texts and are judged early in"
    yield "training), SWDE and FDA (no data), contexts of 8K, and rates chosen by more than a seed. Where a table marks accuracies as"
    yield "chance, their differences are noise."
