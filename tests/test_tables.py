"""One table, three ways to show it."""

import pytest
from rich.console import Console

from headmax.tables import Table, markdown


def test_markdown() -> None:
    assert markdown(["a", "b"], [["1", ""]]) == "| a | b |\n| --- | --- |\n| 1 |  |"
    table = Table(["a", "b"], [["x", "1"]], align="lr", title="T", notes=["n", "m"])
    assert table.markdown() == "### T\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nn  \nm  \n"


def test_latex_escapes_what_it_must() -> None:
    text = Table(["a_b", "%"], [["R&D", "−1 ± 2 †"]], align="lr", title="T", notes=["n"]).latex()
    assert r"\begin{tabular}{lr}" in text
    assert r"\caption{T. n}" in text
    assert r"a\_b & \% \\" in text
    assert r"R\&D & $-$1 $\pm$ 2 $^\dagger$ \\" in text


def test_a_terminal_gets_columns_and_bold_rows() -> None:
    table = Table(["name", "n"], [["one", "1"], ["ten", "10"]], align="lr", title="T", bold=[1])
    console = Console(width=40, force_terminal=True, color_system="standard")
    with console.capture() as said:
        console.print(table.terminal())
    plain, bold = said.get().splitlines()[-2:]
    assert plain == " one    1 "
    assert "\x1b[1m" in bold
    assert "\x1b[1m" not in plain


def test_a_letter_for_each_column() -> None:
    with pytest.raises(ValueError, match="align must have a letter for each of 2 columns, got 'lrr'"):
        Table(["a", "b"], align="lrr")
