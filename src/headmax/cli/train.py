"""Commands about training runs: train a recipe, plot a run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from headmax import HeadmaxConfig
from headmax import recipes as book
from headmax.cli.config_file import config_file, read_config
from headmax.cli.options import COUNT, File, Folder, Name, OutFolder, Recipe, metavar, shown_default
from headmax.train import ParallelConfig, TrainConfig

RENAMED = {"token_budget": "tokens", "sequence_length": "length"}
"""Fields of TrainConfig that other commands' options name otherwise; the field's own name goes on working."""


def attribute_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): str(doc.value.value)
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def train_options(defaults: TrainConfig) -> type:
    """TrainConfig as options: counts of tokens as 15B or 15e9, and the names that other commands use."""
    docs, hints, options = attribute_docs(TrainConfig), get_type_hints(TrainConfig), []
    for field in fields(TrainConfig):
        marks: list[Any] = []
        aliases = (f"--{field.name.replace('_', '-')}",) if field.name in RENAMED else None
        if field.name in docs:
            name = RENAMED.get(field.name)
            marks.append(tyro.conf.arg(help=docs[field.name], help_behavior_hint=shown_default, name=name, aliases=aliases))
        if "token" in field.name:
            marks.append(COUNT)
        hint, value = hints[field.name], getattr(defaults, field.name)
        if field.name == "parallel":
            hint = parallel_options(value)
            value = hint()
        options.append((field.name, Annotated[(hint, *marks)] if marks else hint, value))
    return make_dataclass("Training", options)


def parallel_options(defaults: ParallelConfig) -> type:
    """ParallelConfig as options; 0.1 had --parallel for its strategy."""
    docs, hints, options = attribute_docs(ParallelConfig), get_type_hints(ParallelConfig), []
    for field in fields(ParallelConfig):
        aliases = ("--parallel",) if field.name == "strategy" else None
        mark = tyro.conf.arg(help=docs[field.name], help_behavior_hint=shown_default, aliases=aliases)
        options.append((field.name, Annotated[hints[field.name], mark], getattr(defaults, field.name)))
    return make_dataclass("Parallel", options, namespace={"__doc__": ParallelConfig.__doc__}, frozen=True)


def model_options(defaults: HeadmaxConfig) -> type:
    """All fields of the model; a plain backbone gets its gates by taking the softmax recipe."""
    docs = attribute_docs(HeadmaxConfig)
    hints = HeadmaxConfig.__annotations__ | {"head_gate": type(defaults.head_gate)}
    options = []
    for name, hint in hints.items():
        value = getattr(defaults, name)
        if name == "head_gate":
            if value is not None:
                options.append((name, hint, value))
        else:
            options.append((name, Annotated[hint, tyro.conf.arg(help=docs[name], help_behavior_hint=shown_default)], value))
    return make_dataclass("Model", options)


def recipe_name(arguments: list[str]) -> str:
    """The recipe that the first argument names, or the configuration file; for the help of `train`, the flagship."""
    first = arguments[0] if arguments else "--help"
    if not first.startswith("-"):
        return first
    if (path := config_file(arguments)) is not None and "recipe" in (options := read_config(path)):
        return str(options["recipe"])
    if first not in ("-h", "--help"):
        raise ValueError(f"train: the recipe comes first, as in `headmax train softmax-gla-340m {first} ...`, got {first} in its place")
    return "softmax-gla-340m"


def build_train(arguments: list[str]) -> Callable[..., None]:
    """`headmax train`, its defaults those of the recipe that the first argument names."""
    named = book.get(recipe_name(arguments))

    def train(recipe: Recipe, /, out: OutFolder, data: Folder = None, config: Any = None, model: Any = None, task: Any = None) -> None:
        """Train a recipe's model, under torchrun on all GPUs; rerun to resume.

        Args:
            recipe: a model and how it is trained; `headmax recipes` lists them.
            out: folder of the run, for checkpoints, metrics.jsonl and summary.json.
            data: folder that `headmax data prepare` wrote; recall tasks need none.
            task: size of the recall task; the vocabulary and the numbers of tokens follow.
        """
        from headmax.train.live import Live
        from headmax.train.trainer import fit

        settings = vars(config) | {"parallel": ParallelConfig(**vars(config.parallel))}
        chosen = replace(book.get(recipe), model=HeadmaxConfig(**vars(model)), train=TrainConfig(**settings))
        if task is not None and task != chosen.task:
            chosen = chosen.on(task)
        if data is not None:
            chosen = chosen.speaking(data)
        source, validation = chosen.sources(data)
        with Live(chosen.train.steps, chosen.train.log.print_every) as live:
            fit(chosen.model, chosen.train, source, out, validation=validation, tokenizer=data, show=live)

    training, architecture = train_options(named.train), model_options(named.model)
    train.__defaults__ = (None, training(), architecture(), named.task)
    train.__annotations__ = {
        "recipe": Recipe,
        "out": OutFolder,
        "data": Folder,
        "config": Annotated[training, tyro.conf.arg(name="")],
        "model": architecture,
        "task": type(named.task) if named.task else Annotated[None, tyro.conf.Suppress],
    }
    return train


def curves(run: Annotated[Path, metavar("RUN")], /, out: OutFolder = Path("curves"), name: Name = None, record: File = None) -> None:
    """Plot a run: loss, validation, gradient norm, speed, gates.

    Args:
        run: folder that `headmax train` wrote.
        out: folder for the plot, as PNG and SVG.
        name: title of the plot; the run's folder unless given.
        record: also append what is plotted to this file, as records.
    """
    from headmax import records
    from headmax.analysis.curves import digest, draw

    found = list(digest(run, name))
    if record is not None:
        records.append(record, found)
    for path in draw(found, out, found[0].case):
        print(f"headmax: wrote {path}")
