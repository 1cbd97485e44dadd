"""The one loader of checkpoints: a folder that save_pretrained wrote, a run of `headmax train`, or a name on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from headmax import durable
from headmax.data.tokenizer import encode_text
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM
from headmax.models.configuration import parse_config
from headmax.models.weights import check_shapes, read_shapes, read_weights
from headmax.train import checkpoint

logger = logging.getLogger("headmax")

CONFIG, GENERATION, CHECKPOINTS = "config.json", "generation_config.json", "checkpoints"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
HUB_FILES = [CONFIG, GENERATION, "*.safetensors", "*.safetensors.index.json", *TOKENIZER]
"""All that is fetched from the hub: no code and no pickles."""
HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
RUN_FIELDS = {"model", "train", "data"}
"""What the config.json of a run holds."""


def find_source(source: str | Path) -> Path:
    """The folder of a source; a hub name `owner/name` or `owner/name@revision` that is no path here is downloaded."""
    folder, named = Path(source), HUB_NAME.fullmatch(str(source))
    if folder.exists() or named is None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named["name"], revision=named["revision"], allow_patterns=HUB_FILES))
    except Exception as error:  # whatever the hub's many layers raise
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(f"{source}: no such folder, and not found on the hub ({type(error).__name__}: {reason})") from error


def is_run(source: str | Path) -> bool:
    """Whether `headmax train` wrote there: its config.json, or the checkpoints it makes room for before that."""
    path = Path(source) / CONFIG
    if not path.is_file():
        return (path.parent / CHECKPOINTS).is_dir()
    try:
        return set(durable.read_json(path)) >= RUN_FIELDS
    except (ValueError, OSError):
        return False


def is_model(folder: Path) -> bool:
    """Whether its config.json is that of a headmax model."""
    return (folder / CONFIG).is_file() and durable.read_json(folder / CONFIG).get("model_type") == HeadmaxConfig.model_type


def load_config(source: str | Path) -> HeadmaxConfig:
    """Of a checkpoint; what is none, or another's, is refused in one line."""
    path = find_source(source) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{source}: no config.json there; give a folder that save_pretrained wrote, or a run of headmax train")
    fields = durable.read_json(path)
    fields = fields["model"] if set(fields) >= RUN_FIELDS else fields
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: its model must be a JSON object, got {fields!r}")
    if (kind := fields.get("model_type")) != HeadmaxConfig.model_type:
        raise ValueError(f"{source}: model_type is {kind!r}, not a headmax model; see `headmax convert`")
    return parse_config(fields, path)


def load_model(source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> HeadmaxForCausalLM:
    """The model of a checkpoint, whole or not at all; bfloat16 on a GPU and float32 on a CPU unless given."""
    folder, config = find_source(source), load_config(source)
    dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
    run = is_run(folder)
    weights = _weights_of_run(folder, config) if run else _weights_of_folder(folder, config)
    config.dtype = dtype
    with torch.device("meta"):
        model = HeadmaxForCausalLM(config)
    # Tensors of a safetensors file are the file itself: whoever writes to it later would change them, or crash this process.
    weights = {name: x.to(device, dtype, copy=not run) for name, x in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)  # the names are checked
    model.tie_weights()
    if run:  # in the data nothing ends a document but the first token of the next
        model.generation_config.eos_token_id = [x for x in (config.bos_token_id, config.eos_token_id) if in_vocabulary(x, config)] or None
    elif (folder / GENERATION).is_file():
        model.generation_config = _generation(folder / GENERATION, config)
    return model.eval()


def _weights_of_folder(folder: Path, config: HeadmaxConfig) -> dict[str, Tensor]:
    _check(folder, read_shapes(folder), config)
    return read_weights(folder)


def _weights_of_run(run: Path, config: HeadmaxConfig) -> dict[str, Tensor]:
    """Of the newest whole checkpoint; the run may be going on."""
    newest, _ = checkpoint.newest(run / CHECKPOINTS)
    if newest is None:
        raise ValueError(f"{run}: no whole checkpoint there yet")
    shapes = checkpoint.shapes(newest, "model")
    _check(newest, shapes, config)
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    checkpoint.load(newest, {"model": weights}, alone=True)
    logger.info("%s: the model of step %d", run, checkpoint.step_of(newest))
    return weights


def _check(folder: Path, shapes: dict[str, tuple[int, ...]], config: HeadmaxConfig) -> None:
    try:
        check_shapes(shapes, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _generation(path: Path, config: HeadmaxConfig) -> GenerationConfig:
    fields = durable.read_json(path)
    ends = fields.get("eos_token_id")
    if not all(in_vocabulary(end, config) for end in (ends if isinstance(ends, list) else [] if ends is None else [ends])):
        raise ValueError(f"{path}: eos_token_id must be one or more tokens of a vocabulary of {config.vocab_size}, got {ends!r}")
    try:
        return GenerationConfig.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def in_vocabulary(token: object, config: HeadmaxConfig) -> TypeGuard[int]:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < config.vocab_size


def has_tokenizer(source: str | Path) -> bool:
    """Whether there are a tokenizer's files, readable or not."""
    return any(any(find_source(source).glob(pattern)) for pattern in TOKENIZER)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a checkpoint, or of any folder with a tokenizer's files."""
    folder = find_source(source)
    try:
        if is_run(folder) and has_tokenizer(folder):
            return run_tokenizer(folder / "tokenizer.json", load_config(folder))
        ours = {"config": load_config(folder)} if is_model(folder) else {}  # transformers would read all of config.json
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **ours)
        encode_text(tokenizer, "a")  # some settings are looked at only then
        return tokenizer
    except Exception as error:  # such as plain Exception for a tokenizer.json that is none
        reason = f" ({' '.join(str(error).split())[:200]})" if has_tokenizer(folder) else ""
        raise ValueError(
            f"{source}: no tokenizer there that transformers can load{reason}; put tokenizer.json and tokenizer_config.json beside the "
            "model, or name a folder that has them with --tokenizer"
        ) from error


def run_tokenizer(file: Path, config: HeadmaxConfig) -> PreTrainedTokenizerFast:
    """A tokenizer.json, with the beginning and end of text that a model's configuration names."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    named = {name: tokenizer.id_to_token(number) for name, number in ids.items() if in_vocabulary(number, config)}
    template = file.with_name(CHAT_TEMPLATE)
    chat = {"chat_template": durable.read_text(template)} if template.is_file() else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **chat)
