"""What lets a saved folder be loaded where nobody has imported headmax: a module of one line, and where config.json names it."""

from __future__ import annotations

from pathlib import Path

from headmax import durable

NAME = "headmax_model"
TEXT = '''"""For trust_remote_code=True: the model's classes are those of the installed package (pip install headmax)."""

from headmax import HeadmaxConfig, HeadmaxForCausalLM, HeadmaxForSequenceClassification, HeadmaxForTokenClassification, HeadmaxModel
'''
AUTO_MAP = {
    "AutoConfig": f"{NAME}.HeadmaxConfig",
    "AutoModel": f"{NAME}.HeadmaxModel",
    "AutoModelForCausalLM": f"{NAME}.HeadmaxForCausalLM",
    "AutoModelForSequenceClassification": f"{NAME}.HeadmaxForSequenceClassification",
    "AutoModelForTokenClassification": f"{NAME}.HeadmaxForTokenClassification",
}
"""The entry of config.json."""


def write_stub(folder: Path) -> None:
    durable.write(folder / f"{NAME}.py", TEXT)
