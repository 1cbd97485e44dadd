"""Exports a run to a folder that `AutoModelForCausalLM` loads."""

from __future__ import annotations

from pathlib import Path

from headmax import durable
from headmax.models.card import write_card
from headmax.train.loading import has_tokenizer, is_run, load_model, load_tokenizer


def to_hf(run: Path, out: Path) -> None:
    """Writes safetensors, config, tokenizer and model card of a run to `out`."""
    durable.claim(out)
    if not is_run(run):
        raise FileNotFoundError(f"{run}: not a run of headmax train; give its --out folder")
    model = load_model(run)
    tokenizer = load_tokenizer(run) if has_tokenizer(run) else None
    with durable.new_folder(out) as unfinished:
        model.save_pretrained(unfinished)
        write_card(model, unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
