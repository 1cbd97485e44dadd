"""A run becomes a folder that `AutoModelForCausalLM` loads."""

from __future__ import annotations

from pathlib import Path

from headmax.models.card import write_card
from headmax.train.loading import has_tokenizer, is_run, load_model, load_tokenizer


def to_hf(run: Path, out: Path) -> None:
    """Safetensors, config, tokenizer and model card of a run."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    if not is_run(run):
        raise FileNotFoundError(f"{run}: no config.json and checkpoints there; give the --out folder of headmax train")
    model = load_model(run)
    model.save_pretrained(out)
    write_card(model, out)
    if has_tokenizer(run):
        load_tokenizer(run).save_pretrained(out)
