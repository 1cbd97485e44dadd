"""Commands that train: a recipe, and the demonstration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any


def train_command(arguments: list[str]) -> Callable[..., None]:
    """`headmax train`, its defaults those of the recipe that the arguments name first, and there alone."""
    import tyro

    from headmax import HeadmaxConfig
    from headmax import recipes as book
    from headmax.train import TrainConfig

    first = arguments[1] if arguments[:1] == ["train"] and len(arguments) > 1 else "--help"
    if first.startswith("-") and first not in ("-h", "--help"):
        raise ValueError(f"the recipe comes first, as in `headmax train softmax-gla-340m {first} ...`, got {first} in its place")
    named = book.get("softmax-gla-340m" if first.startswith("-") else first)
    # All fields of the model; a plain backbone gets its gates by taking the softmax recipe.
    fields = {name: getattr(named.model, name) for name in HeadmaxConfig.__annotations__}
    hints = HeadmaxConfig.__annotations__ | {"head_gate": type(fields["head_gate"])}
    options = make_dataclass(
        "Model", [(name, hints[name], value) for name, value in fields.items() if value is not None or name != "head_gate"]
    )

    def train(recipe: str, /, out: Path, data: Path | None, config: TrainConfig, model: Any, task: Any) -> None:
        """Train a recipe's model, on all processes under torchrun; the same command again goes on from the last checkpoint.

        Args:
            recipe: a model and how it is trained, of those that `headmax recipes` lists.
            out: the run's folder, for checkpoints, metrics.jsonl and summary.json.
            data: the folder that `headmax data prepare` wrote; recall tasks need none.
            task: what to recall; the model's vocabulary and the numbers of tokens follow.
        """
        from headmax.train.live import Live
        from headmax.train.trainer import fit

        chosen = replace(book.get(recipe), model=HeadmaxConfig(**vars(model)), train=config)
        if task is not None and task != chosen.task:
            chosen = chosen.on(task)
        if data is not None:
            chosen = chosen.speaking(data)
        source, validation = chosen.sources(data)
        with Live(chosen.train.steps, config.log.print_every) as live:
            fit(chosen.model, chosen.train, source, out, validation=validation, tokenizer=data, show=live)

    train.__defaults__ = (None, named.train, options(), named.task)
    train.__annotations__ |= {
        "config": Annotated[TrainConfig, tyro.conf.arg(name="")],
        "model": options,
        "task": type(named.task) if named.task else Annotated[None, tyro.conf.Suppress],
    }
    return train


def curves(run: Path, /, out: Path = Path("curves"), name: str | None = None, record: Path | None = None) -> None:
    """Draw a finished run: loss, validation, gradient norm, speed, gates.

    Args:
        run: the --out folder of headmax train.
        out: where the picture goes, as PNG and SVG.
        name: what the run is called; its folder's name unless given.
        record: also append what is drawn to this file, as records.
    """
    from headmax import records
    from headmax.analysis.curves import digest, draw

    found = list(digest(run, name))
    if record is not None:
        records.append(record, found)
    for path in draw(found, out, found[0].case):
        print(f"headmax: wrote {path}")


def demo(
    seed: int = 0,
    heads: int = 4,
    pairs: int = 16,
    key: int = 8,
    steps: int = 600,
    out: Path = Path("runs/demo"),
    record: Path | None = None,
) -> None:
    """Train one tiny backbone three times on associative recall: plain, with uniform gates, with softmax gates.

    Args:
        seed: of initialisation and data.
        heads: of the linear-attention layers.
        pairs: key-value pairs to remember.
        key: width of a head's query and key.
        steps: training steps of each model.
        out: where the picture and the records go.
        record: also append the records to this file.
    """
    from headmax.demo.recall import run

    run(seed=seed, heads=heads, pairs=pairs, key=key, steps=steps, out=out, record=record)
