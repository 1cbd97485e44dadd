"""The weights of a model folder: read from safetensors alone, and exactly those that a configuration asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headmax import durable
from headmax.models.configuration import HeadmaxConfig
from headmax.models.modeling import HeadmaxForCausalLM

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What save_pretrained calls one file of weights, and the list of several."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
SHOWN = 20
"""Problems that a message names."""

Shape = tuple[int, ...]


def files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model: one, or those that its index lists."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: no {WHOLE} there, nor {INDEX}; save the model with save_pretrained")
    listed = durable.read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{folder / INDEX}: its weight_map must name the file of every tensor, got {str(listed)[:80]}")
    names = sorted({durable.file_name(name, folder / INDEX) for name in listed.values()})
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder}: no {absent[0]} there, which {INDEX} lists")
    return [folder / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Of every tensor, from the files' headers alone."""
    shapes: dict[str, Shape] = {}
    for file in files(folder):
        with _opened(file) as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def read_weights(folder: Path, part: str = "") -> dict[str, Tensor]:
    """Every tensor whose name has this part."""
    weights: dict[str, Tensor] = {}
    for file in files(folder):
        weights |= read_file(file, part)
    if others := [f"{name} is {x.dtype}" for name, x in weights.items() if not x.is_floating_point()]:
        raise ValueError(f"{folder}: weights must be of a floating dtype: {'; '.join(others[:SHOWN])}")
    return weights


def read_file(file: Path, part: str = "") -> dict[str, Tensor]:
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if part in name}  # noqa: SIM118


def read_metadata(file: Path) -> dict[str, str]:
    with _opened(file) as opened:
        return opened.metadata() or {}


def check_shapes(shapes: Mapping[str, Shape], config: HeadmaxConfig, left: Sequence[str] = ()) -> None:
    """Raises unless these are exactly the weights of a headmax model of this configuration; `left` are others that nothing takes."""
    layers = {int(match[1]) for name in shapes if (match := LAYER.match(name))}
    if config.num_hidden_layers > 2 * len(layers) + 2:  # before so many are built to be compared
        raise ValueError(f"weights do not map: they are of {len(layers)} layers, num_hidden_layers is {config.num_hidden_layers}")
    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in HeadmaxForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings and "lm_head.weight" not in shapes:
        expected.pop("lm_head.weight")
    problems = [f"{name}: not in the checkpoint" for name in expected if name not in shapes]
    problems += [f"{name}: nothing in headmax takes it" for name in [*left, *(name for name in shapes if name not in expected)]]
    problems += [
        f"{name}: is {list(shape)}, must be {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and tuple(shape) != expected[name]
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError(f"weights do not map: {'; '.join([*problems[:SHOWN], *more])}")
