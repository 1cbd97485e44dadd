"""Hooks of mkdocs.yml: files outside docs/ become pages, links to them work, notebook and formulas are rendered, llms.txt is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lab.pages.notebook import to_markdown

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "lab/study/plan.md": "study-plan.md",
}
"""Files of the repository that are pages of the site."""
MADE = {"docs/quickstart.ipynb": "quickstart.md", "tests/help.txt": "command-line.md"}
"""Pages made of files that are not Markdown; tests/help.txt is what the parser prints, which its own test checks."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"^\$\$(.+?)\$\$$", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}

written: dict[str, str] = {}
"""The Markdown of every page, by its place in the site, for llms.txt."""


def on_files(files: Files, config: Any) -> Files:
    written.clear()
    pages = {page: (ROOT / source).read_text() for source, page in OUTSIDE.items()}
    pages["quickstart.md"], pictures = to_markdown((ROOT / "docs/quickstart.ipynb").read_text(), "images/quickstart")
    pages["command-line.md"] = command_line((ROOT / "tests/help.txt").read_text())
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()} | pages
    linked = {target for page, text in texts.items() for target in _targets(page, text)}
    for target in sorted(linked):
        if place(target) == sources(target):
            pages[sources(target)] = listing(ROOT / target)
    for page, text in (pages | pictures).items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    parts = FENCE.split(markdown)
    parts[::2] = [_relinked(page.file.src_uri, part) for part in parts[::2]]
    written[page.file.src_uri] = "".join(parts)
    parts[::2] = [FORMULA.sub(_formula, part) for part in parts[::2]]
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """llms.txt: every page with its first sentence. Guides are linked as Markdown, which lies beside each page, the reference as HTML."""
    site, lines = Path(config["site_dir"]), [f"# {config['site_name']}", "", f"> {config['site_description']}.", ""]
    for (name, entries), *_ in (section.items() for section in config["nav"]):
        if isinstance(entries, str):
            lines.append(_entry(site, name, entries))
            continue
        lines += ["", f"## {name}", ""]
        lines += [_entry(site, title, uri) for entry in entries for title, uri in entry.items()]
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _entry(site: Path, title: str, uri: str) -> str:
    """A line of llms.txt; writes the Markdown it links."""
    if "::: " in written[uri]:
        uri, text = uri.replace(".md", ".html"), written[uri]
    else:
        text = written[uri]
        (site / uri).write_text(text)
    return f"- [{title}]({uri}): {first_sentence(text)}".rstrip(": ")


def command_line(text: str) -> str:
    """The help texts as a page with a section per command."""
    start, *commands = re.split(r"^=+\n", text, flags=re.MULTILINE)
    page = f"# Command line\n\nWhat `headmax --help` and `headmax COMMAND --help` print.\n\n```text\n{start.rstrip()}\n```\n"
    for command in commands:
        words = re.match(r"usage: (headmax(?: [a-z]+)*)", command)
        said = re.sub(r" +$", "", command, flags=re.MULTILINE).rstrip()
        page += f"\n## {words[1] if words else 'headmax'}\n\n```text\n{said}\n```\n"
    return page


def first_sentence(markdown: str) -> str:
    """Of the first paragraph, without links and emphasis; nothing where a page begins with a list or code."""
    for paragraph in FENCE.sub("", markdown).split("\n\n"):
        text = " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "").split())
        if text and text[0] not in "#-|<:!>":
            return re.split(r"(?<=[.?])\s", text)[0]
    return ""


def listing(path: Path) -> str:
    """A page that shows a file, or the files of a folder."""
    page = f"# {path.relative_to(ROOT)}\n"
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            page += f"\n## {file.relative_to(ROOT)}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n````\n"
    return page


def place(target: str) -> str:
    """Where the site has a file of the repository."""
    known = OUTSIDE | MADE
    if target in known:
        return known[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else sources(target)


def sources(target: str) -> str:
    return f"source/{target}.md"


def _relinked(page: str, text: str) -> str:
    def there(match: re.Match) -> str:
        to = place(_target(page, match[1]))
        return match[1] if to == page else relpath(to, str(Path(page).parent))  # the notebook's own page links its file

    return LINK.sub(there, text)


def _targets(page: str, text: str) -> Iterator[str]:
    for part in FENCE.split(text)[::2]:
        for target in LINK.findall(part):
            found = _target(page, target)
            if not (ROOT / found).exists() and place(found) == sources(found):
                raise FileNotFoundError(f"{page}: links to {target}, which is not in the repository")
            yield found


def _target(page: str, target: str) -> str:
    """The file of the repository that a link of a page means."""
    source = {made: source for source, made in (OUTSIDE | MADE).items()}.get(page, f"docs/{page}")
    return normpath(f"{Path(source).parent}/{target}")


def _formula(match: re.Match) -> str:
    return f'<div style="overflow-x: auto">{convert(match[1].strip(), display="block")}</div>'
