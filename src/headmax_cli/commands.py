"""Every command: its name, the function that runs it, and what it does in one line (the first of that function's docstring)."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    name: str
    """One word, or two for a member of a family such as `bench`."""
    target: str
    """module:function"""
    about: str
    built: bool = False
    """Whether the function returns the command, given the arguments: the defaults of `train` are those of the recipe it names."""


GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (
        Command(
            "train",
            "headmax.cli.train:build_train",
            "Train the model of a recipe, with torchrun on several GPUs; rerun to resume.",
            built=True,
        ),
        Command("data prepare", "headmax.cli.data:prepare", "Turn text into token shards to train on; rerun to resume."),
        Command("data check", "headmax.cli.data:check", "Compare every file of a prepared folder with its checksum."),
        Command("curves", "headmax.cli.train:curves", "Plot a run: loss, validation, gradient norm, speed, gates."),
    ),
    "Use a model": (
        Command(
            "generate",
            "headmax.cli.generate:generate",
            "Continue a text and stream the result; without a prompt, read lines from standard input.",
        ),
        Command("serve", "headmax.cli.serve:serve", "Answer requests over HTTP as OpenAI's interface does, many at a time."),
        Command("eval", "headmax.cli.evaluate:evaluate", "Run the paper's benchmarks on a model; rerun to resume."),
        Command("inspect", "headmax.cli.inspect:inspect", "Show which head wins each token of a text, as one HTML file."),
        Command("convert", "headmax.cli.convert:convert", "Turn a run, or a model of flash-linear-attention, into a model folder."),
    ),
    "Plan and measure": (
        Command("recipes", "headmax.cli.recipes:recipes", "List the recipes with parameter counts and state sizes."),
        Command("plan", "headmax.cli.recipes:plan", "Estimate memory, step time, days and GPU-hours of a training run."),
        Command("bench kernels", "headmax.cli.bench:kernels", "Time the ops, forward and backward, against another library."),
        Command("bench train", "headmax.cli.bench:train", "Time whole training steps on this GPU, against another library."),
        Command("bench decode", "headmax.cli.bench:decode", "Time decoding, against another library."),
        Command("bench eval", "headmax.cli.bench:evaluation", "Time evaluation against lm-evaluation-harness's own Hugging Face class."),
        Command("bench tune", "headmax.cli.bench:tune", "Find the fastest kernel block sizes on this GPU."),
        Command("demo", "headmax.cli.demo:demo", "Train three small language models on Python's own source and compare them."),
        Command("demo recall", "headmax.cli.demo:recall", "Train three tiny models on associative recall and compare them."),
        Command("env", "headmax.cli.env:env", "Print versions, devices and backends, for bug reports."),
    ),
    "This repository": (
        Command("reproduce readme", "headmax.cli.reproduce:readme", "Render the generated sections of the README and the docs."),
        Command("reproduce tables", "headmax.cli.reproduce:tables", "Render the paper's three tables with our own results."),
        Command("reproduce theory", "headmax.cli.reproduce:theory", "Run the paper's proposition and theorems as experiments."),
        Command("reproduce figures", "headmax.cli.reproduce:figures", "Draw the paper's figures from records."),
        Command("reproduce prepare", "headmax.cli.reproduce:prepare", "Prepare requests and needles for machines without lm-eval."),
        Command("reproduce run", "headmax.cli.reproduce:run", "Train and evaluate the models of some parts of the reproduction."),
        Command("reproduce collect", "headmax.cli.reproduce:collect", "Add the results of finished runs to the repository's records."),
        Command("reproduce report", "headmax.cli.reproduce:report", "Write the page of the reproduction from records."),
    ),
}

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
FAMILIES = {
    "data": "Turn text into token shards, and check them.",
    "bench": "Time kernels, training, decoding and evaluation on your machine.",
    "demo": COMMANDS["demo"].about,
    "reproduce": "Run the paper's experiments at small scale; render every table and figure from records.",
}
"""Commands with members, by their first word."""


def members(family: str) -> list[Command]:
    return [command for name, command in COMMANDS.items() if name.split()[0] == family]
