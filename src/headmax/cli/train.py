"""Commands about training runs: train a recipe, plot a run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from headmax import recipes as book
from headmax.cli.config_file import config_file, read_config
from headmax.cli.options import COUNT, COUNT_OR_ZERO, File, Folder, Name, OutFolder, Recipe, metavar, shown_default
from headmax.train.config import ParallelConfig

RENAMED = {"token_budget": "tokens", "sequence_length": "length"}
"""Fields with another name on the command line, the same for all commands; the field's own name keeps working."""
ALIASES = {"strategy": ("--parallel",)}
"""What 0.1 called the option."""
COUNTS = {"token_budget": COUNT, "batch_tokens": COUNT, "warmup_tokens": COUNT_OR_ZERO}
"""Fields that may be written as 15B or 15e9."""
HINTS: dict[str, Any] = {"mixer": str | list[str]}
"""Fields that take less on the command line: a mixer's name, not its settings."""
METAVARS = {
    "device": "{auto,cpu,cuda}",
    "wandb": "PROJECT",
    "mixer": "MIXER [MIXER ...]",
    "feature_map": "MAP",
    "output_norm": "{head,joint,none}",
    "backend": "BACKEND",
    "eos_token_id": "INT [INT ...]",
}


Mix = Annotated[tuple[str, ...], metavar("FOLDER=SHARE [FOLDER=SHARE ...]")]
Checkpoint = Annotated[Path | None, tyro.conf.arg(name="from", metavar="CHECKPOINT", help_behavior_hint=shown_default)]


def shares(mix: Sequence[str]) -> dict[Path, float]:
    """What --mix names."""
    found = {}
    for word in mix:
        folder, _, share = word.rpartition("=")
        try:
            found[Path(folder)] = float(share)
        except ValueError:
            raise ValueError(f"--mix takes FOLDER=SHARE, as in books=0.3, got {word!r}") from None
    if not all(share > 0 for share in found.values()) or not sum(found.values()) < 1 or len(found) < len(mix):
        raise ValueError(f"--mix: shares of different folders must be above 0 and below 1 in all, got {', '.join(mix)}")
    return found


def read_data(chosen: Any, data: Path | None, mix: dict[Path, float], words: Path | None) -> tuple[Any, Any, dict[str, Any]]:
    """The recipe, what it trains on, and what else the trainer must know of the data."""
    from headmax.train.loading import find_source, load_tokenizer

    if data is not None and data.suffix == ".jsonl":
        if words is None or mix:
            raise ValueError("--data: conversations need --from or --tokenizer for their chat template, and take no --mix")
        return chosen, chosen.chats(data, load_tokenizer(words)), {"tokenizer": find_source(words)}
    if data is None and mix:
        raise ValueError("--mix: --data must name the folder that has the rest of the samples")
    chosen = chosen if data is None else chosen.speaking(data)
    source, validation = chosen.sources(data) if data is None or not mix else chosen.mixture(data, mix)
    return chosen, source, {"validation": validation, "tokenizer": data}


def attribute_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): str(doc.value.value)
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def as_options(defaults: Any) -> Any:
    """A configuration as tyro shall see it: the same fields and values, nested ones too, with help and metavars; `build` turns it back."""
    kind = type(defaults)
    docs = attribute_docs(kind)
    options: list[tuple[str, Any, Any]] = []
    for name, hint in inspect.get_annotations(kind, eval_str=True).items():
        value = getattr(defaults, name, None)
        if is_dataclass(value):
            nested = as_options(value)
            options.append((name, type(nested), nested))
        elif name in docs and name != "head_gate":  # a plain backbone gets its gates from the softmax recipe
            options.append((name, Annotated[HINTS.get(name, hint), *marks(name, docs[name])], value))
    return make_dataclass(kind.__name__, options, frozen=True, namespace={"__doc__": kind.__doc__, "built": kind})()


def marks(name: str, doc: str) -> list[Any]:
    text = " ".join(doc.split())
    first = text.split()[0]
    text = text if not first[1:].islower() else first.lower() + text[len(first) :]  # as the options of other commands begin
    aliases = (f"--{name.replace('_', '-')}",) if name in RENAMED else ALIASES.get(name)
    shown, other = METAVARS.get(name), RENAMED.get(name)
    arg: Any = tyro.conf.arg(help=text, help_behavior_hint=shown_default, metavar=shown, name=other, aliases=aliases)
    return [arg, COUNTS[name]] if name in COUNTS else [arg]


def build(options: Any) -> Any:
    """The configuration that `as_options` made options of."""
    return options.built(**{name: build(value) if is_dataclass(value) else value for name, value in vars(options).items()})


def configured(recipe: Any, config: Any, model: Any, task: Any) -> Any:
    """The recipe with these options. How it is parallelized comes last: the task sets the length of the sequences to split."""
    chosen = replace(recipe, model=build(model), train=build(replace(config, parallel=as_options(ParallelConfig()))))
    if task is not None and build(task) != chosen.task:
        chosen = chosen.on(build(task))
    return replace(chosen, train=replace(chosen.train, parallel=build(config.parallel)))


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

    def train(
        recipe: Recipe,
        /,
        out: OutFolder,
        data: Folder = None,
        mix: Mix = (),
        checkpoint: Checkpoint = None,
        tokenizer: Folder = None,
        config: Any = None,
        model: Any = None,
        task: Any = None,
    ) -> None:
        """Train the model of a recipe, with torchrun on several GPUs; rerun to resume.

        Args:
            recipe: a model with its training settings; `headmax recipes` lists them.
            out: folder of the run, for checkpoints, metrics.jsonl and summary.json.
            data: folder that `headmax data prepare` wrote, or a .jsonl of conversations; recipes of recall tasks need none.
            mix: further folders with their shares of the samples, as in books=0.3; --data provides the rest.
            checkpoint: start from a trained model or run; a softmax recipe adds gates, which start as 1, to a model without.
            tokenizer: folder with a tokenizer whose chat template formats conversations; that of the --from checkpoint unless given.
            task: size of the recall task, which sets the vocabulary and the numbers of tokens.
        """
        from headmax.train.live import Live
        from headmax.train.trainer import training

        chosen = configured(book.get(recipe), config, model, task)
        start: Any = {}
        if checkpoint is not None:
            chosen, start = chosen.after(checkpoint)
        chosen, source, options = read_data(chosen, data, shares(mix), tokenizer or checkpoint)
        with (
            Live(chosen.train.steps, chosen.train.log.print_every) as live,
            training(chosen.model, chosen.train, source, out, show=live, start=start, **options) as trainer,
        ):
            trainer.run()

    config, model, task = as_options(named.train), as_options(named.model), named.task and as_options(named.task)
    train.__defaults__ = (None, (), None, None, config, model, task)
    train.__annotations__ = {
        "recipe": Recipe,
        "out": OutFolder,
        "data": Folder,
        "mix": Mix,
        "checkpoint": Checkpoint,
        "tokenizer": Folder,
        "config": Annotated[type(config), tyro.conf.arg(name="")],
        "model": type(model),
        "task": type(task) if task else Annotated[None, tyro.conf.Suppress],
    }
    return train


def curves(run: Annotated[Path, metavar("RUN")], /, out: OutFolder = Path("curves"), name: Name = None, record: File = None) -> None:
    """Plot a training run: loss, validation, gradient norm, speed, gates.

    Args:
        run: folder that `headmax train` wrote.
        out: folder for the plot, as PNG and SVG.
        name: title of the plot; the name of the run's folder unless given.
        record: also append the plotted figures to this file, as records.
    """
    from headmax import records
    from headmax.analysis.curves import digest, draw

    found = list(digest(run, name))
    if record is not None:
        records.append(record, found)
    for path in draw(found, out, found[0].case):
        print(f"headmax: wrote {path}")
