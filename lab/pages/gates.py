"""What the gates of the trained models do: how evenly they split, dead heads, and which heads win what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from headmax.tables import markdown
from headmax.train.evaluate import DEAD
from lab.pages.figures import TITLES
from lab.study.runs import LINEAR, SEEDS, SIZES, Run
from lab.study.score import WINS
from lab.study.statistics import MISSING, Results, show
from lab.study.wins import KINDS, information

LAYERS = range(int(SIZES[1].split("x")[0]))
GATES = ("read", "write")


def gates(results: Results) -> Iterator[str]:
    rows = []
    for b in LINEAR:
        for v in ("softmax", "sigmoid"):
            found = [record for seed in SEEDS if (record := results.record("gate entropy", Run(b, v, seed=seed)))]
            for gate in GATES:
                per_layer = [[record.extra["gates"][f"{n}/{gate}"] for record in found] for n in LAYERS]
                dead = f"{sum(len(x['dead']) for one in per_layer for x in one)} in {len(found)} runs" if found else MISSING
                rows.append([f"{TITLES[b]}, {v}, {gate}", *map(entropy, per_layer), dead])
    yield markdown(["gate", *(f"layer {n}" for n in LAYERS), "dead heads"], rows)
    yield ""
    yield "Entropy of the gate over 4 heads (1: an even split, 0: one head takes all) and, in brackets, the largest mean share of a head;"
    yield f"means over seeds, on validation text. Dead: a mean share below {DEAD:g} of an even one. Read gates here are on"
    yield "the query: under the norm of GLA and RetNet they change the output only where a share is so small that the norm's eps counts."
    yield from ("", "### Which heads win what", "")
    yield from winners(results)


def entropy(found: Sequence[Mapping[str, Any]]) -> str:
    """Of a layer's gate, and its largest share; means over seeds."""
    return f"{mean(x['entropy'] for x in found):.2f} ({mean(max(x['share']) for x in found):.2f})" if found else MISSING


def winners(results: Results) -> Iterator[str]:
    """How much kinds of tokens tell, for all seeds; and for the first seed that was run, the head of each gate that they tell most of."""
    rows = []
    for b in LINEAR:
        for v in ("softmax", "sigmoid"):
            found: dict[int | None, Any] = {s: r.extra for s in SEEDS if (r := results.record(WINS, Run(b, v, seed=s)))}
            cells = []
            for gate in GATES:
                after = {s: mean(information(x["gates"][f"{n}/{gate}"]["kinds"]) for n in LAYERS) for s, x in found.items()}
                before = {s: mean(x["untrained"][f"{n}/{gate}"] for n in LAYERS) for s, x in found.items()}
                cells += [show(after, 3), show(before, 3)]
            rows.append([f"{TITLES[b]}, {v}", *cells])
    columns = [f"{gate} gate{when}" for gate in GATES for when in ("", ", before training")]
    yield markdown(["bits that a token's kind tells of the winner, mean of layers", *columns], rows)
    yield ""
    yield f"Kinds: {', '.join(KINDS)}. 0 bits: every head wins the same part of every kind;"
    yield "at most a kind tells as many bits as its own entropy has. Gates before training have winners too, by a hair, hence the"
    yield "comparison. Below, of each gate the head and kind that depart most from an even part and the tokens that the head wins most"
    yield "often beyond its part (▁: a space). Heads have no names that hold across seeds, so this is one seed:"
    for b in LINEAR:
        record = next(filter(None, (results.record(WINS, Run(b, "softmax", seed=seed)) for seed in SEEDS)), None)
        yield ""
        if record is None:
            yield f"Softmax {TITLES[b]}: {MISSING}."
            continue
        rows = [[str(n), *(most_telling(**record.extra["gates"][f"{n}/{gate}"]) for gate in GATES)] for n in LAYERS]
        yield markdown([f"Softmax {TITLES[b]}, seed {record.seed}, layer", *(f"{gate} gate" for gate in GATES)], rows)


def most_telling(kinds: Sequence[Sequence[int]], tokens: Sequence[Sequence[str]]) -> str:
    """The head and kind of token that depart most from independence."""
    total, by_kind = sum(map(sum, kinds)), [sum(column) for column in zip(*kinds, strict=True)]
    beyond = {(h, k): n - sum(row) * by_kind[k] / total for h, row in enumerate(kinds) for k, n in enumerate(row) if total}
    if not beyond:
        return "no head leads"
    head, k = max(beyond, key=lambda pair: beyond[pair])
    part, whole = kinds[head][k] / by_kind[k], sum(kinds[head]) / total
    return f"head {head} wins {part:.0%} of {KINDS[k]}, {whole:.0%} of all: {' '.join(map(code, tokens[head]))}"


def code(token: str) -> str:
    """As Markdown's table cells take it."""
    return f"`` {token} ``" if "`" in token else f"`{token}`".replace("|", "\\|")
