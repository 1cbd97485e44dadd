"""Pages are easy to read: short paragraphs, narrow tables, one quantity per column, the words of the field."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").rglob("*.md"))
LINE = 140
ODD = ("not told apart", "hardly to be seen", "again, it resumes", "time of gates", "in a run with", "what comes to")
"""Words that a colleague asks about; lab pages had them."""


def prose(page: Path) -> list[str]:
    """Paragraphs, items of lists and tables; without code and what mkdocstrings fills in."""
    text = re.sub(r"^(```).*?^\1$|^:::[^\n]*$|^<!--.*?-->$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [block.strip("\n") for block in blocks if block.strip() and not block.startswith("    ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_easy_to_read(page: Path) -> None:
    for block in prose(page):
        if block.startswith("|"):
            header = re.split(r"(?<!\\)\|", block.splitlines()[0])[1:-1]
            assert len(header) <= 7, f"{len(header)} columns: {block[:80]}"
            assert not [cell for cell in header if ";" in cell], f"two quantities in a column: {block[:80]}"
        else:
            seen = re.sub(r"\]\([^)]*\)", "]", block)
            assert len(seen) <= 6 * LINE, f"{len(seen) / LINE:.1f} lines of {LINE}: {block[:80]}"
        assert not [words for words in ODD if words in block]
