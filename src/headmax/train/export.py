"""A run becomes a folder that `AutoModelForCausalLM` loads."""

from __future__ import annotations

from pathlib import Path

from headmax import durable
from headmax.models import HeadmaxConfig, HeadmaxForCausalLM
from headmax.models.card import write_card
from headmax.train import checkpoint


def load_model(run: Path) -> HeadmaxForCausalLM:
    """The model of a run's newest whole checkpoint, on the CPU; the run may be going on."""
    if not (run / "config.json").is_file() or not (run / "checkpoints").is_dir():
        raise FileNotFoundError(f"{run}: no config.json and checkpoints there; give the --out folder of headmax train")
    folder, _ = checkpoint.newest(run / "checkpoints")
    if folder is None:
        raise ValueError(f"{run}: no whole checkpoint there yet")
    if not isinstance(described := durable.read_json(run / "config.json").get("model"), dict):
        raise ValueError(f"{run / 'config.json'}: no model in it; give the --out folder of headmax train")
    model = HeadmaxForCausalLM(HeadmaxConfig.from_dict(described))
    checkpoint.load(folder, {"model": model.state_dict()}, alone=True)
    return model


def to_hf(run: Path, out: Path) -> None:
    """Safetensors, config, tokenizer and model card of a run."""
    durable.claim(out)
    model = load_model(run)
    ends = [token for token in (model.config.bos_token_id, model.config.eos_token_id) if isinstance(token, int)]
    model.generation_config.eos_token_id = ends or None  # in the data nothing ends a document but the first token of the next
    with durable.new_folder(out) as unfinished:
        model.save_pretrained(unfinished)
        write_card(model, unfinished)
        if (run / "tokenizer.json").is_file():
            write_tokenizer(run / "tokenizer.json", model.config, unfinished)


def write_tokenizer(file: Path, config: HeadmaxConfig, out: Path) -> None:
    """The tokenizer, with the beginning and end of text that the model's configuration names."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(file))
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    named = {name: tokenizer.id_to_token(number) for name, number in ids.items() if isinstance(number, int)}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(out)
