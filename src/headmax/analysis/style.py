"""A common style for all figures, as PNG and SVG."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headmax import durable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc6fa3", "#56b4e9", "#d55e00", "#7d7f86")
"""Told apart with any colour vision; the report's too."""
WIDTH = 5.2
"""Inches of a figure, so that its letters can be read where a page shows it at half width."""
SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a8f98",
    "axes.grid": True,
    "axes.prop_cycle": None,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 9,
    "grid.color": "#e8e6e0",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "headmax",
}


PICTURES = durable.Owner(
    "only pictures and records",
    lambda folder: all(
        path.is_dir() or Path(path.name.removesuffix(durable.UNFINISHED)).suffix in (".png", ".svg", ".jsonl") for path in folder.iterdir()
    ),
)


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install '.[plot]' in a checkout of headmax")


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Applies the style to a block or, as a decorator, to a function that draws and saves figures."""
    require_matplotlib()
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(SETTINGS | {"axes.prop_cycle": cycler(color=COLOURS)}):
        yield


def subplots(rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes; without pyplot, which would choose a GUI backend for the whole process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Saves the figure as PNG and SVG, deterministically."""
    durable.claim(folder, PICTURES)
    paths = [folder / durable.file_name(f"{name}.{kind}", "the picture's name") for kind in ("png", "svg")]
    for path in paths:
        draw(figure, path)
    return paths


def draw(figure: Figure, path: Path) -> None:
    """Saves the figure in the format of the file's suffix."""
    content, kind = io.BytesIO(), path.suffix.removeprefix(".")
    figure.savefig(content, format=kind, dpi=130 if kind == "png" else "figure", metadata={"Date": None} if kind == "svg" else None)
    durable.write(path, content.getvalue())
