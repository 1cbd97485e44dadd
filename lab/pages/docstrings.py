"""An extension of griffe: docstrings are plain text with code in backticks, and formulas in them are no markup."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

CODE = re.compile(r"(`[^`]*`)")


class PlainDocstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escape(obj.docstring.value)


def escape(text: str) -> str:
    """Without the marks that Markdown would read in `<q, w>` or `n*H`; code stays as it is."""
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"([*\[\]\\])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)
