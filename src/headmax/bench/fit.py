"""Do the kernels fit a GPU that is not at hand? `python -m headmax.bench.fit 89` compiles them for sm_89 and exits with 1 if not."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headmax.bench.kernels import SPECS
from headmax.bench.tune import WIDTHS
from headmax.ops import registry, triton_tiles
from headmax.ops.spec import Case

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory a block may have, by compute capability."""


class Absent:
    """Stands for a GPU of that capability, as far as the compiler asks."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(capability: int) -> dict[str, int]:
    """From here on this process compiles kernels for that capability and runs none; the dictionary fills with their shared memory."""
    found: dict[str, int] = {}
    launch = JITFunction.run

    def compile_it(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        compiled = launch(self, *args, **kwargs | {"warmup": True})
        found[self.__name__] = max(compiled.metadata.shared, found.get(self.__name__, 0))
        return compiled

    triton.runtime.driver.set_active(Absent(capability))
    JITFunction.run = compile_it
    registry.Lazy.unavailable = lambda *_: None  # type: ignore[method-assign]
    entry = max(size for size in map(int, triton_tiles.TABLE) if size <= SHARED[capability])
    triton_tiles.entry_for = lambda _: str(entry)  # type: ignore[assignment]
    return found


def main(capability: int) -> int:
    found, fits = compile_only(capability), True
    for op, spec in SPECS.items():
        for width, (key, value) in WIDTHS.items():
            for dtype in (torch.bfloat16, torch.float32):
                case = Case(time=70, heads=1, key=key, value=value, gates="both", initial_state=True)
                found.clear()
                spec.evaluate(spec.inputs(case, dtype), lambda **x: spec.function(**x, return_state=True, backend="triton"))  # noqa: B023
                for kernel, size in found.items():
                    over = size > 1024 * SHARED[capability]
                    fits = fits and not over
                    print(f"sm_{capability} {op} {width} {dtype} {kernel}: {size / 1024:.0f} KiB{'  too much' * over}", flush=True)
    return not fits


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
