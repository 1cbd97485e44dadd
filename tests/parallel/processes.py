"""Modules of this package in gloo processes: `run("ops", 3)` calls `tests.parallel.ops.main` in three and returns what the first gives."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(module: str, ranks: int, *arguments: Any, seconds: float = 240) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        plan = json.dumps([module, ranks, folder, arguments])
        command = [sys.executable, "-m", "tests.parallel.processes", plan]
        output = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        processes = []
        for rank, path in enumerate(output):
            with path.open("w") as file:
                processes.append(subprocess.Popen([*command, str(rank)], env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * ranks, "\n".join(path.read_text() for path in output)
        return json.loads(Path(folder, "result.json").read_text())


def everywhere(errors: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The largest over all ranks, by case and name."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, errors)
    return {case: {name: max(part[case][name] for part in box) for name in named} for case, named in errors.items()}


if __name__ == "__main__":
    (module, ranks, folder, arguments), rank = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    result = importlib.import_module(f"tests.parallel.{module}").main(*arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
