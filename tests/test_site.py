"""The documentation site builds strictly and without a network, its links lead somewhere, and the notebook runs."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/quickstart.ipynb"
BUILD = """
import socket, sys
def refuse(*_): raise OSError("the site must build without a network")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--quiet", "--site-dir", sys.argv[1]])
"""
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class Tags(HTMLParser):
    """What a page links, what it loads, its anchors, and formulas such as <q_h, w_h> that were taken for tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.formulas: list[str] = []
        self.anchors: set[str] = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if not re.fullmatch("[a-z][a-z0-9-]*", tag):
            self.formulas.append(tag)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values.get("href", ""))
        if values.get(LOADED.get(tag, "")):
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocs", "mkdocstrings_handlers", "latex2mathml"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def problems(folder: Path) -> list[str]:
    """Dead links, dead anchors, lost formulas, and what pages load from other hosts."""
    pages = {path.resolve(): Tags(path.read_text()) for path in folder.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        found += [f"{path.name}: formula <{formula}> was lost" for formula in page.formulas]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{path.name} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                found.append(f"{path.name}: no {link}")
    return found


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert problems(site) == []
    assert not [path.name for path in site.rglob("*.css") if re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text())]


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">, <a href="#c">, <h1 id="d">, <a href="#d">, <img src="https://example.org/e.png"> <q_h, w_h>'
    )
    assert problems(tmp_path) == [
        "a.html: formula <q_h,> was lost",
        "a.html: no b.html",
        "a.html: no #c",
        "a.html loads https://example.org/e.png",
    ]


@pytest.mark.parametrize("module", ["headmax", "headmax.ops", "headmax.layers", "headmax.models", "headmax.train", "headmax.generate"])
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    anchors = {anchor.split(".")[-1] for path in (site / "reference").glob("*.html") for anchor in Tags(path.read_text()).anchors}
    internal = {"GREEDY", "LORA_TARGETS", "MIXERS", "HeadmaxPreTrainedModel", "recipes"}
    assert set(importlib.import_module(module).__all__) - anchors <= internal


def test_every_command_has_its_section(site: Path) -> None:
    from headmax_cli.commands import COMMANDS

    assert {f"headmax-{name.replace(' ', '-')}" for name in COMMANDS} <= Tags((site / "command-line.html").read_text()).anchors


def test_formulas_and_pages_from_outside_are_there(site: Path) -> None:
    assert "<math" in (site / "index.html").read_text()
    assert "value_decay" in (site / "source/tests/outside.html").read_text()
    assert (site / "images/quickstart-1.png").stat().st_size > 0


def test_llms_txt_names_every_page(site: Path) -> None:
    targets = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (site / "llms.txt").read_text(), flags=re.MULTILINE)
    assert {Path(target).stem for target in targets} >= {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / target).stat().st_size > 0 for target in targets)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """From top to bottom, with the outputs that do not depend on the Python version; the committed one has been run too."""
    for package in ("ipykernel", "matplotlib", "nbclient"):
        pytest.importorskip(package)
    shutil.copy(NOTEBOOK, tmp_path)
    command = [sys.executable, "-m", "lab", "notebook", "--path", str(tmp_path / NOTEBOOK.name)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    for path in (NOTEBOOK, tmp_path / NOTEBOOK.name):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
        said = "".join("".join(output.get("text", "")) for output in outputs)
        assert "unchanged: True" in said
        assert "same logits: True" in said


def test_workflow_and_issue_forms() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = workflow["jobs"]["test"]["strategy"]["matrix"]["command"]
    assert commands == ["make test", "make demo"]
    assert all(command.split()[1] in targets for command in commands)
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.stem == "config" or {"name", "description", "body"} <= set(form)
