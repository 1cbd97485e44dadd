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
"""Files fetched from the hub: no code and no pickles."""
HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
RUN_FIELDS = {"model", "train", "data"}
"""Fields of a run's config.json."""


def find_source(source: str | Path) -> Path:
    """The folder of a source; `owner/name` or `owner/name@revision`, unless it is a local path, is downloaded from the hub."""
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
    """Whether `headmax train` wrote the folder: it has a run's config.json or, earlier, the folder for checkpoints."""
    path = Path(source) / CONFIG
    if not path.is_file():
        return (path.parent / CHECKPOINTS).is_dir()
    try:
        return set(durable.read_json(path)) >= RUN_FIELDS
    except (ValueError, OSError):
        return False


def is_model(folder: Path) -> bool:
    """Whether the folder's config.json is that of a headmax model."""
    return (folder / CONFIG).is_file() and durable.read_json(folder / CONFIG).get("model_type") == HeadmaxConfig.model_type


def load_config(source: str | Path) -> HeadmaxConfig:
    """The configuration of a checkpoint; an error for anything but a headmax model."""
    path = find_source(source) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{source}: no config.json there; give a folder that save_pretrained wrote, or a run of headmax train")
    fields = durable.read_json(path)
    fields = fields["model"] if set(fields) >= RUN_FIELDS else fields
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: model must be a JSON object, got {fields!r}")
    if (kind := fields.get("model_type")) != HeadmaxConfig.model_type:
        raise ValueError(f"{source}: model_type is {kind!r}, not a headmax model; see `headmax convert`")
    return parse_config(fields, path)


def load_model(source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> HeadmaxForCausalLM:
    """The model of a checkpoint, whose tensors must all be there; bfloat16 on a GPU and float32 on a CPU, unless given."""
    folder, config = find_source(source), load_config(source)
    dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
    run = is_run(folder)
    weights = _weights_of_run(folder, config) if run else _weights_of_folder(folder, config)
    config.dtype = dtype
    with torch.device("meta"):
        model = HeadmaxForCausalLM(config)
    # Tensors of a safetensors file are the file itself: whoever writes to it later would change them, or crash this process.
    weights = {name: x.to(device, dtype, copy=not run) for name, x in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)  # tied weights may be stored once; _check has compared the names
    model.tie_weights()
    if run:  # in training data a document ends where the first token of the next begins
        model.generation_config.eos_token_id = [x for x in (config.bos_token_id, config.eos_token_id) if in_vocabulary(x, config)] or None
    elif (folder / GENERATION).is_file():
        model.generation_config = _generation(folder / GENERATION, config)
    return model.eval()


def _weights_of_folder(folder: Path, config: HeadmaxConfig) -> dict[str, Tensor]:
    _check(folder, read_shapes(folder), config)
    return read_weights(folder)


def _weights_of_run(run: Path, config: HeadmaxConfig) -> dict[str, Tensor]:
    """Weights of the newest intact checkpoint; the run may still be training."""
    newest, _ = checkpoint.newest(run / CHECKPOINTS)
    if newest is None:
        raise ValueError(f"{run}: no complete checkpoint yet; wait for the first one (--checkpoint-every)")
    shapes = checkpoint.tensor_shapes(newest, "model")
    _check(newest, shapes, config)
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    checkpoint.load(newest, {"model": weights}, single_process=True)
    logger.info("%s: loaded the model of step %d", run, checkpoint.step_of(newest))
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
        raise ValueError(f"{path}: eos_token_id must be one or more ids below vocab_size {config.vocab_size}, got {ends!r}")
    try:
        return GenerationConfig.from_dict(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def in_vocabulary(token: object, config: HeadmaxConfig) -> TypeGuard[int]:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < config.vocab_size


def has_tokenizer(source: str | Path) -> bool:
    """Whether the source has files of a tokenizer, readable or not."""
    return any(any(find_source(source).glob(pattern)) for pattern in TOKENIZER)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a checkpoint, or of any folder with a tokenizer's files."""
    folder = find_source(source)
    try:
        if is_run(folder) and has_tokenizer(folder):
            return run_tokenizer(folder / "tokenizer.json", load_config(folder))
        config = {"config": load_config(folder)} if is_model(folder) else {}  # else transformers parses config.json itself
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **config)
        encode_text(tokenizer, "a")  # some settings are only checked when encoding
        return tokenizer
    except Exception as error:  # a malformed tokenizer.json raises plain Exception
        reason = f" ({' '.join(str(error).split())[:200]})" if has_tokenizer(folder) else ""
        raise ValueError(
            f"{source}: no tokenizer there that transformers can load{reason}; put tokenizer.json and tokenizer_config.json beside the "
            "model, or name a folder that has them with --tokenizer"
        ) from error


def run_tokenizer(file: Path, config: HeadmaxConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of a tokenizer.json, with the special tokens of a model's configuration."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    named = {name: tokenizer.id_to_token(number) for name, number in ids.items() if in_vocabulary(number, config)}
    template = file.with_name(CHAT_TEMPLATE)
    chat = {"chat_template": durable.read_text(template)} if template.is_file() else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **chat)
