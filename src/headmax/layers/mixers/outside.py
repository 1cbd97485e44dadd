"""Mixers of other packages."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

logger = logging.getLogger("headmax")


def import_outside_mixers() -> None:
    """Imports the modules that installed packages name as entry points "headmax.mixers"; each adds its own to `MIXERS`.

    One that fails leaves a warning: it must not take headmax with it.
    """
    for entry in entry_points(group="headmax.mixers"):
        try:
            entry.load()
        except Exception as error:
            logger.warning("mixer %s of another package is not available: %s: %s", entry.value, type(error).__name__, error)
