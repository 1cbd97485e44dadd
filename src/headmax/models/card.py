"""A model card, from the model itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headmax import durable
from headmax.layers import HeadGateConfig
from headmax.models.modeling import HeadmaxForCausalLM
from headmax.tables import markdown

FIELDS = ("mixer", "hidden_size", "num_hidden_layers", "num_heads", "head_k_dim", "head_v_dim", "conv_size", "vocab_size", "output_norm")


def card(model: HeadmaxForCausalLM) -> str:
    """What the model is and how to load it; what it was trained on is for its author to add."""
    config = model.config
    gates = dataclasses.asdict(config.head_gate) if isinstance(config.head_gate, HeadGateConfig) else {}
    gate = ", ".join(f"{name}={value}" for name, value in gates.items()) or "none: a plain backbone"
    rows = [[name, str(getattr(config, name))] for name in FIELDS if getattr(config, name) is not None]
    rows += [["parameters", f"{model.num_parameters():,}"], ["head_gate", gate]]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [headmax, linear-attention]",
            "---",
            "",
            "# A headmax model",
            "",
            "Softmax Linear Attention: a softmax over heads that lets the heads of a linear-attention layer compete.",
            "",
            markdown(["setting", "value"], rows),
            "",
            "```python",
            "import headmax  # `pip install .` in a checkout of headmax; registers the model with the Auto classes, no remote code",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("this folder")',
            "```",
            "",
        ]
    )


def write_card(model: HeadmaxForCausalLM, folder: Path | str) -> None:
    """Writes README.md into a model's folder; FileExistsError if one is there."""
    path = Path(folder) / "README.md"
    if path.exists():
        raise FileExistsError(f"{path} is there already: move it away to have a new one")
    durable.write(path, card(model))
