"""Every command by its name, and what becomes of errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from headmax.cli import bench, checkpoints, data, recipes, reproduce, train

Commands = dict[str, Callable[..., None]]
DATA: Commands = {"prepare": data.prepare, "check": data.check}
BENCH: Commands = {
    "kernels": bench.kernels,
    "train": bench.train,
    "decode": bench.decode,
    "eval": bench.evaluation,
    "tune": bench.tune,
}
REPRODUCE: Commands = {
    "readme": reproduce.readme,
    "tables": reproduce.tables,
    "theory": reproduce.theory,
    "figures": reproduce.figures,
    "prepare": reproduce.prepare,
    "run": reproduce.run,
    "collect": reproduce.collect,
    "report": reproduce.report,
}


def commands(arguments: list[str]) -> dict[str, Callable[..., None] | tuple[str, Commands]]:
    """By name, in the order of use: a function, or a group with what it is about."""
    return {
        "recipes": recipes.recipes,
        "plan": recipes.plan,
        "demo": train.demo,
        "data": ("Turn text into token shards to train on, and check them.", DATA),
        "train": train.train_command(arguments),
        "curves": train.curves,
        "convert": checkpoints.convert,
        "generate": checkpoints.generate,
        "eval": checkpoints.evaluate,
        "inspect": checkpoints.inspect,
        "bench": ("Time kernels, training, decoding and evaluation beside peers; find the kernels' block shapes.", BENCH),
        "reproduce": ("The paper again: its theory, its experiments at small scale, and every table and figure from records.", REPRODUCE),
    }


def app(arguments: list[str]) -> Any:
    import tyro

    whole = tyro.extras.SubcommandApp()
    for name, command in commands(arguments).items():
        if isinstance(command, tuple):
            about, members = command
            group = tyro.extras.SubcommandApp()
            for member, function in members.items():
                group.command(name=member)(function)
            whole.command(group, name=name, help=about)
        else:
            whole.command(name=name)(command)
    return whole


def main() -> None:
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as missing:
        sys.exit(f"headmax: the command line needs {missing.name}: pip install '.[train,plot]' in a checkout of headmax")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headmax").setLevel(logging.INFO)
    try:
        app(sys.argv[1:]).cli(prog="headmax", description="Softmax Linear Attention: a softmax over heads.")
    except (ValueError, OSError) as error:
        status, said = 2, str(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "exit_status"):
            raise
        status, said = error.exit_status, str(error)
    else:
        return
    print(f"headmax: {said}", file=sys.stderr)
    sys.exit(status)
