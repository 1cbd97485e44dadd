"""Every command: its name, the function that runs it, and a one-line description, the first line of that function's docstring."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    name: str
    """One word, or two in a family such as `bench`."""
    target: str
    """module:function"""
    about: str
    built: bool = False
    """Whether the function builds the command from the arguments, as defaults of `train` depend on the recipe."""


class Program(NamedTuple):
    """A command line: `headmax`, and in a checkout of the repository `python -m lab`."""

    name: str
    """As typed."""
    about: str
    groups: dict[str, tuple[Command, ...]]
    families: dict[str, str]
    """Descriptions of families of commands, by their first word."""
    options: dict[str, str]
    """Options of the program itself."""

    @property
    def short(self) -> str:
        """The prefix of its errors."""
        return self.name.split()[-1]

    @property
    def commands(self) -> dict[str, Command]:
        return {command.name: command for group in self.groups.values() for command in group}

    def members(self, family: str) -> list[Command]:
        return [command for name, command in self.commands.items() if name.split()[0] == family]


GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (
        Command(
            "train",
            "headmax.cli.train:build_train",
            "Train the model of a recipe, with torchrun on several GPUs; rerun to resume.",
            built=True,
        ),
        Command("data prepare", "headmax.cli.data:prepare", "Turn text into token shards to train on; rerun to resume."),
        Command("data merge", "headmax.cli.data:merge", "Merge the parts of `headmax data prepare --part`."),
        Command("data check", "headmax.cli.data:check", "Compare every file of a prepared folder with its checksum."),
        Command("curves", "headmax.cli.train:curves", "Plot a training run: loss, validation, gradient norm, speed, gates."),
    ),
    "Use a model": (
        Command(
            "generate",
            "headmax.cli.generate:generate",
            "Continue a text and stream the result; without a prompt, read lines from standard input.",
        ),
        Command("chat", "headmax.cli.chat:chat", "Chat with a checkpoint or a server, in the terminal."),
        Command("serve", "headmax.cli.serve:serve", "Serve a model over HTTP, with an OpenAI-compatible API."),
        Command("eval", "headmax.cli.evaluate:evaluate", "Run the paper's benchmarks on a model; rerun to resume."),
        Command("eval tables", "headmax.cli.evaluate:tables", "Render the paper's three tables with your results next to the paper's."),
        Command("inspect", "headmax.cli.inspect:inspect", "Show which head wins each token of a text, as one HTML file."),
        Command("convert", "headmax.cli.convert:convert", "Convert a run, or a flash-linear-attention checkpoint, to a model folder."),
    ),
    "Plan and measure": (
        Command("recipes", "headmax.cli.recipes:recipes", "List the recipes with parameter counts and state sizes."),
        Command(
            "plan",
            "headmax.cli.recipes:plan",
            "Estimate memory, step time and GPU-hours of a training run; find the best mesh.",
        ),
        Command("bench kernels", "headmax.cli.bench:kernels", "Time the ops, forward and backward, against another library."),
        Command("bench train", "headmax.cli.bench:train", "Time whole training steps on this GPU, against another library."),
        Command("bench decode", "headmax.cli.bench:decode", "Time decoding, against another library."),
        Command(
            "bench serve",
            "headmax.cli.bench_serve:serve",
            "Time a server under a trace of requests, against transformers' generate in batches.",
        ),
        Command("bench eval", "headmax.cli.bench:evaluation", "Time evaluation against lm-evaluation-harness's own Hugging Face class."),
        Command("bench tune", "headmax.cli.bench:tune", "Find the fastest kernel block sizes on this GPU."),
        Command("demo", "headmax.cli.demo:demo", "Train three small language models on Python's own source and compare them."),
        Command("demo recall", "headmax.cli.demo:recall", "Train three tiny models on associative recall and compare them."),
        Command("env", "headmax.cli.env:env", "Print versions, devices and backends, for bug reports."),
    ),
}

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
FAMILIES = {
    "data": "Turn text into token shards, and check them.",
    "bench": "Time kernels, training, decoding, serving and evaluation on your machine.",
    "demo": COMMANDS["demo"].about,
    "eval": COMMANDS["eval"].about,
}
"""Families of commands, by their first word."""
HEADMAX = Program(
    "headmax",
    "Softmax Linear Attention: a softmax over heads that makes the heads of a linear-attention layer compete.",
    GROUPS,
    FAMILIES,
    {
        "-h, --help": "print this text; after a command, its options",
        "--version": "print the version",
        "--completion SHELL": 'print completions for bash, zsh or fish: eval "$(headmax --completion bash)"',
        "--config FILE": "after a command: read its options from a YAML file; options on the command line win",
        "--dump-config": "after a command: print its options as such a YAML file and exit",
        "--debug": "show the traceback of an error",
    },
)
