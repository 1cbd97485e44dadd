"""docs/quickstart.ipynb: run, and as Markdown for the site."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path("docs/quickstart.ipynb")


def execute(path: Path) -> str:
    """The notebook with the outputs of a new kernel, in which every cell has run from top to bottom."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _tidy(cell.outputs)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.writes(notebook) + "\n"


def _tidy(outputs: list[Any]) -> list[Any]:
    """Without progress bars, and with what was printed in one piece."""
    kept = [output for output in outputs if output.get("name") != "stderr"]
    printed = [output for output in kept if output.output_type == "stream"]
    for output in printed[1:]:
        printed[0].text += output.text
    return [output for output in kept if output not in printed[1:]]


def to_markdown(text: str, pictures: str) -> tuple[str, dict[str, bytes]]:
    """Cells and their outputs as Markdown, and the pictures it links, whose names begin with `pictures`."""
    parts: list[str] = []
    drawn: dict[str, bytes] = {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{pictures}-{len(drawn) + 1}.png"
                drawn[name] = base64.b64decode(data["image/png"])
                parts.append(f"![{cell['metadata'].get('alt', '')}]({name})")
            elif said := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{said}\n```")
    return "\n\n".join(parts) + "\n", drawn
