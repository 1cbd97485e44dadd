"""Names of tasks and groups of tasks."""

from __future__ import annotations

from headmax.ops.registry import suggest

COMMONSENSE = ("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
RETRIEVAL = ("swde", "squad_completion", "fda")
LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192}
NIAH = {f"niah_single_{task}_{name}": (task, length) for task in (1, 2, 3) for name, length in LENGTHS.items()}
"""(number of the S-NIAH task, tokens)"""
MQAR = {f"mqar_{pairs}": pairs for pairs in (4, 8, 16, 32, 64, 128, 256)}
GROUPS: dict[str, tuple[str, ...]] = {
    "commonsense": COMMONSENSE,
    "retrieval": RETRIEVAL,
    "niah": tuple(NIAH),
    **{f"niah_single_{n}": tuple(name for name, (task, _) in NIAH.items() if task == n) for n in (1, 2, 3)},
    "mqar": tuple(MQAR),
}
TASKS = (*COMMONSENSE, *RETRIEVAL, *NIAH, *MQAR)
RETRIEVAL_LENGTH = 4096
"""Tokens of a retrieval task's input and answer together, as in the paper."""


def expand(tasks: str, vocab_size: int) -> tuple[list[str], list[str]]:
    """(tasks named by a comma-separated list of tasks and groups, one line for each name that is unknown).

    Of the whole group mqar, those tasks that the vocabulary has enough keys for.
    """
    selected: dict[str, None] = {}
    unknown = []
    for name in filter(None, (name.strip() for name in tasks.split(","))):
        if name in GROUPS or name in TASKS:
            selected |= dict.fromkeys(task for task in GROUPS.get(name, (name,)) if name != "mqar" or MQAR[task] <= vocab_size // 2)
        else:
            unknown.append(f"unknown task {name!r}{suggest(name, [*GROUPS, *TASKS])}")
    if not selected and not unknown:
        raise ValueError(f"--tasks names no task; known: {', '.join([*GROUPS, *TASKS])}")
    return list(selected), unknown
