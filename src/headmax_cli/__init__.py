"""The console script `headmax`. It knows the commands by name and imports headmax, and with it torch, only to run one."""

from headmax_cli.main import main

__all__ = ["main"]
