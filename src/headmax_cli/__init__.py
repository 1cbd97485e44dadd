"""The console script `headmax`. It lists commands by name, and imports headmax, and so torch, only to run one."""

from headmax_cli.main import main

__all__ = ["main"]
