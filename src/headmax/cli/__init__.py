"""The command line: thin, one function a command, and imports of torch and the like inside them."""

from headmax.cli.app import main

__all__ = ["main"]
