"""The report in a real browser: pytest -m browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headmax.analysis import gates, report
from tests.analysis.browser import Browser
from tests.analysis.conftest import TEXT, make_model

pytestmark = pytest.mark.browser
SHOWN = "[...document.querySelectorAll('{} [data-gate={}] [data-head]')].map(x => x.textContent)"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as page:
        yield page
        assert page.errors == []


@pytest.fixture(scope="module")
def traces(trained: Path, checkpoints: dict[str, Path]) -> list[gates.Trace]:
    """Of a model after training and before."""
    return [gates.of_checkpoint(folder, TEXT, name=folder.name, most=700) for folder in (trained, checkpoints["even"])]


def digits(gate: gates.Gate, token: int) -> list[str]:
    return [f"{share:.4f}" for share in gate.shares[token].tolist()]


def test_layers_switch_and_tokens_show_the_models_gates(browser: Browser, traces: list[gates.Trace], tmp_path: Path) -> None:
    report.write(tmp_path / "report.html", traces[:1])
    browser.open(tmp_path / "report.html")
    layers = traces[0].layers
    browser.click("#next")
    assert "Layer 1" in browser("document.querySelector('#layer').textContent")
    browser.mouse('.t[data-i="23"]')
    assert browser("getComputedStyle(document.querySelector('#tip')).display") != "none"
    assert browser(SHOWN.format("#tip", "read")) == digits(layers[1].read, 23)
    assert browser(SHOWN.format(".inspector", "write")) == digits(layers[1].write, 23)
    browser.key("j")
    browser.key("w")
    browser.mouse('.t[data-i="24"]')
    assert browser(SHOWN.format("#tip", "write")) == digits(layers[2].write, 24)
    browser.key("n")
    numbers = browser("[...document.querySelectorAll('.chunk:first-child .t')].map(x => x.dataset.w)")
    assert [int(n) for n in numbers] == layers[2].write.winners[: len(numbers)].tolist()
    fills = browser("[...document.querySelectorAll('.chunk:first-child .t')].map(x => getComputedStyle(x).backgroundColor.split('/')[0])")
    assert len(set(fills)) == 4  # one colour per head


def test_the_keyboard_alone_is_enough(browser: Browser, traces: list[gates.Trace], tmp_path: Path) -> None:
    report.write(tmp_path / "report.html", traces[:1])
    browser.open(tmp_path / "report.html")
    browser("document.querySelector('.words').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowDown"):
        browser.key(key)
    assert browser(SHOWN.format(".inspector", "read")) == digits(traces[0].layers[1].read, 2)
    assert browser("document.querySelector('#said').textContent").startswith("Layer 1, token 2")
    browser.key("End")
    box = browser("(r => [r.top, r.bottom])(document.querySelector('.t.at').getBoundingClientRect())")
    words = browser("(r => [r.top, r.bottom])(document.querySelector('.words').getBoundingClientRect())")
    assert words[0] <= box[0] < box[1] <= words[1]  # the selected token was brought into view
    browser("document.querySelector('.square canvas').focus()")
    browser.key("ArrowUp")
    browser.key("ArrowRight")
    query, key = len(traces[0].tokens) - 2, len(traces[0].tokens) - 63
    assert browser("document.querySelector('.readout').textContent").startswith(f"{query} ")
    shown = float(browser("document.querySelector('.readout b').textContent"))
    assert shown == pytest.approx(float(traces[0].layers[1].agreement()[query, key]), abs=3e-4)  # of gates with four digits
    controls = "document.querySelectorAll('button, select, canvas[tabindex], .words')"
    unnamed = browser(f"[...{controls}].filter(x => !(x.ariaLabel || x.textContent.trim())).length")
    assert unnamed == 0


def test_two_checkpoints_side_by_side(browser: Browser, traces: list[gates.Trace], tmp_path: Path) -> None:
    report.write(tmp_path / "report.html", traces)
    browser.open(tmp_path / "report.html")
    browser.click('.pane:nth-child(2) .t[data-i="30"]')
    for n, found in enumerate(traces, 1):
        assert browser(SHOWN.format(f".pane:nth-child({n}) .inspector", "read")) == digits(found.layers[0].read, 30)
    left, right = (browser(f"document.querySelector('.pane:nth-child({n})').getBoundingClientRect().x") for n in (1, 2))
    assert left < right
    browser.key("c")
    assert (
        browser("document.querySelectorAll('.pane:first-child .chunk:first-child .t.out').length") > 0
    )  # tokens after it cannot be reached


def test_ten_thousand_tokens_answer_within_two_seconds(browser: Browser, tmp_path: Path) -> None:
    model = make_model(hidden_size=32, num_hidden_layers=24, intermediate_size=32)
    ids = torch.randint(512, (10_000,), generator=torch.Generator().manual_seed(0))
    found = gates.trace(model, ids, [f" {n}" for n in ids.tolist()], "long")
    report.write(tmp_path / "report.html", [found])
    assert (tmp_path / "report.html").stat().st_size < 15_000_000
    browser.open(tmp_path / "report.html")
    browser.settle()
    assert browser("performance.now()") < 2_000
    before = browser("performance.now()")
    browser.key("j")
    browser.settle()
    assert "Layer 1" in browser("document.querySelector('#layer').textContent")
    assert browser("performance.now()") - before < 500
    browser("document.querySelector('.words').focus()")
    browser.key("End")
    browser.settle()
    assert browser(SHOWN.format(".inspector", "read")) == digits(found.layers[1].read, 9_999)
    assert browser("getComputedStyle(document.querySelector('.t[data-i=\"9999\"]')).backgroundColor") != "rgba(0, 0, 0, 0)"
