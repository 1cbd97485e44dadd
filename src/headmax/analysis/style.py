"""One look for all figures, as PNG and SVG."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc6fa3", "#56b4e9", "#d55e00", "#7d7f86")
"""Told apart with any colour vision; the report's too."""
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
    "svg.fonttype": "none",
    "svg.hashsalt": "headmax",
}


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install '.[plot]' in a checkout of headmax")


def pyplot() -> Any:
    """matplotlib.pyplot without a window, in this style."""
    require_matplotlib()
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS | {"axes.prop_cycle": cycler(color=COLOURS)})
    return plt


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG, the same bytes each time; it is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=130)
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot().close(figure)
    return paths
