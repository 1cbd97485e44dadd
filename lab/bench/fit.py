"""Do the kernels fit a GPU that is not at hand? `python -m lab bench fit 89` compiles them for sm_89.

For Hopper it also looks for loops that fill a tile anew while a product may still read it (see `wait_for_dot` in ops/kernels/common.py).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headmax import HeadmaxForCausalLM, recipes
from headmax.bench.kernels import SPECS
from headmax.bench.tune import WIDTHS
from headmax.layers.block import Block
from headmax.layers.block_step import block_step
from headmax.layers.log_decay import log_sigmoid, softplus_decay
from headmax.layers.norm import WIDEST
from headmax.models.decoding import make_slots
from headmax.ops import head_gate, registry
from headmax.ops.gated_delta_rule import WIDE_DELTA
from headmax.ops.head_gate import split_gates
from headmax.ops.kernels import linear, mixer_step, scan, tiles
from headmax.ops.kernels.common import MIN_SEGMENT
from headmax.ops.kernels.conv import short_conv, unit_conv
from headmax.ops.kernels.loss import cross_entropy_rows
from headmax.ops.kernels.norm import read_out, rms_norm
from headmax.ops.kernels.rotary import split_rotary
from headmax.ops.kernels.swiglu import swiglu
from headmax.ops.packing import LONG_CHUNK
from headmax.ops.spec import Case
from headmax.ops.step import Op, step

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory a block may have, by compute capability."""
FEW = {"narrow": 9, "wide": 20}
"""Between one and a half and three times as many processors as one head has blocks of states, which then are halved where they may be."""


LARGEST = {"linear_attention": "wide", "gla": "narrow", "gated_delta_rule": "narrow", "kda": "narrow"}
"""The heads for which an op's kernels take the most shared memory on Hopper."""


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


class Compiled(NamedTuple):
    shared: int
    """Bytes of shared memory."""
    overtaken: int
    """Tiles that are filled anew while a product may still read them."""


def overtaken(ir: str) -> int:
    """Of a kernel in Triton's GPU form: in how many buffers of pipelined loops the next tile overtakes a product that is under way.

    A loop fetches its tiles some turns ahead into a ring of buffers. If the ring has no place more than that, the tile that is fetched
    goes where the product of this very turn reads, which Hopper's matrix units may not have finished.
    """
    places: dict[str, int] = {}
    views: dict[str, str] = {}
    ahead: Counter[str] = Counter()
    loops: list[tuple[int, set[str]]] = []
    found, pending = set[str](), 0
    for line in ir.splitlines():
        depth = len(line) - len(line.lstrip())
        if loops and line.lstrip().startswith("}") and depth == loops[-1][0]:
            loops.pop()
        if "scf.for" in line:
            loops.append((depth, set()))
            pending = 0
        elif made := re.search(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", line):
            places[made[1]] = int(made[2])
        elif seen := re.search(r"(%\S+) = ttg\.memdesc_\w+ (%\w+)", line):
            views[seen[1]] = views.get(seen[2], seen[2])
        elif (read := re.search(r"warp_group_dot (%\w+), (%\w+),.*isAsync = true", line)) and loops:
            loops[-1][1].update(views.get(x, x) for x in read.groups())
        elif wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            pending = int(wait[1])
        elif fetched := re.search(r"async_copy_global_to_local %\S+, (%\w+)", line):
            buffer = views.get(fetched[1], fetched[1])
            if not loops or buffer not in loops[-1][1]:
                ahead[buffer] += 1
            elif pending and ahead[buffer] % places[buffer] == 0:
                found.add(buffer)
    return len(found)


def compile_only(capability: int) -> dict[str, Compiled]:
    """From here on this process compiles kernels for that capability and runs none; the dictionary fills with what they take."""
    found: dict[str, Compiled] = {}
    launch = JITFunction.run

    def compile_it(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        compiled = launch(self, *args, **kwargs | {"warmup": True})
        before = found.get(self.__name__, Compiled(0, 0))
        found[self.__name__] = Compiled(max(before.shared, compiled.metadata.shared), before.overtaken + overtaken(compiled.asm["ttgir"]))
        return compiled

    triton.runtime.driver.set_active(Absent(capability))
    JITFunction.run = compile_it
    registry.Lazy.unavailable = lambda *_: None  # type: ignore[method-assign]
    entry = max(size for size in map(int, tiles.TABLE) if size <= SHARED[capability])
    tiles.entry_for = lambda _: str(entry)  # type: ignore[assignment]
    scan.processors = many_processors  # type: ignore[assignment]
    if capability >= 90:
        linear.early = mixer_step.early = lambda _: {"EARLY": True, "launch_pdl": True}  # type: ignore[assignment]
    return found


def many_processors(_: torch.device) -> int:
    """So many that sequences are cut into segments."""
    return 10_000


def on_few(processors: int, call: Callable[[], object]) -> None:
    """On so many processors, `FEW`."""
    scan.processors = lambda _: processors  # type: ignore[assignment]
    call()
    scan.processors = many_processors  # type: ignore[assignment]


class Call(NamedTuple):
    """A call that launches kernels."""

    name: str
    run: Callable[[], object]
    once: bool = False
    """Whether it is among the few that together launch every kernel."""


def calls(dtype: torch.dtype, shared: int) -> Iterator[Call]:
    """Every kernel of the package, called once or more, forward and backward."""
    yield from op_calls(dtype, shared)
    yield from gate_calls(dtype)
    yield from layer_calls(dtype)
    yield from decoding_calls(dtype)


def op_calls(dtype: torch.dtype, shared: int) -> Iterator[Call]:
    for op, spec in SPECS.items():
        for width, (key, value) in WIDTHS.items():
            if op in ("gated_delta_rule", "kda") and dtype == torch.float32 and width == "wide" and shared < WIDE_DELTA:
                continue  # refused there, see its __init__
            function = functools.partial(spec.function, return_state=True, backend="triton")
            times = (70, 2 * MIN_SEGMENT * LONG_CHUNK)[op == "kda" :]  # the second is cut into segments; KDA's kernels take long to compile
            for time, decay in product(times, ("soft", "head", "none") if op == "linear_attention" else ("soft",)):
                case = Case(time=time, heads=1, key=key, value=value, decay=decay, gates="both", initial_state=True)
                call = functools.partial(spec.evaluate, spec.inputs(case, dtype), function)
                yield Call(f"{op} {width}", call, once=LARGEST[op] == width and time == times[-1] and decay == "soft")
                if time == times[0]:
                    yield Call(f"{op} {width}, few processors", functools.partial(on_few, FEW[width], call))
        packed = Case(time=70, heads=1, key=128, value=256, lengths=(30, 40))
        yield Call(f"{op} packed, no gates", functools.partial(spec.evaluate, spec.inputs(packed, dtype), function))
        inputs = spec.inputs(Case(time=2, heads=1, key=128, value=256, gates="both", initial_state=True), dtype)
        yield Call(f"step of {op}", functools.partial(stepped, spec.function, inputs), once=op == "kda")


def gate_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Head gates, and the convolutions that may score for them."""
    x, weight, taps = torch.ones(1, 70, 4, 128, dtype=dtype), torch.ones(4, 128), torch.ones(128, 4)
    yield Call("head_gate", lambda: head_gate(x.requires_grad_(), weight.requires_grad_(), backend="triton").sum().backward(), once=True)
    row = torch.ones(1, 70, 128, dtype=dtype, requires_grad=True)
    yield Call("split_gates", lambda: torch.stack(split_gates(row[..., :8], 2, backend="triton")).sum().backward(), once=True)
    yield Call("short_conv", functools.partial(trained, short_conv, row, taps.requires_grad_(), None, None))
    bias = torch.ones(128, requires_grad=True)
    yield Call("packed short_conv with a bias", functools.partial(trained, short_conv, row, taps, bias, torch.arange(70)), once=True)
    for scorer in (None, weight[:, :64], weight[:2, :64]):
        yield Call("unit_conv", functools.partial(trained, unit_conv, row, taps, None, scorer, 2))
    yield Call("packed unit_conv", functools.partial(trained, unit_conv, row, taps, torch.arange(70), None, 2))


def layer_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Norms, the gated read-out, decays, SwiGLU, rotation and loss."""
    for size in (96, 1024, WIDEST):
        wide = torch.ones(70, 1, size, dtype=dtype, requires_grad=True)
        for delta in (wide, None):
            yield Call(f"rms_norm {size}", functools.partial(trained, rms_norm, wide, delta, torch.ones(size), 1e-6))
    o, gates = torch.ones(1, 70, 4, 256, dtype=dtype, requires_grad=True), torch.ones(1, 70, 4)
    swish, out = torch.ones(1, 70, 1024, dtype=dtype), torch.ones(8, 1024, dtype=dtype)
    for given in ((None, None), (swish, gates)):
        read = functools.partial(trained, read_out, o, *given, torch.ones(256), out, 1e-6)
        yield Call("read_out", read, once=given[0] is not None)
    yield Call("log_sigmoid", functools.partial(trained, log_sigmoid, o, 16.0, "triton"), once=True)
    rows = torch.ones(1, 70, 256, dtype=dtype, requires_grad=True)
    yield Call("softplus_decay", functools.partial(trained, softplus_decay, rows, torch.ones(2), torch.ones(256), "triton"), once=True)
    joint = torch.ones(1, 70, 640, dtype=dtype, requires_grad=True)
    yield Call("swiglu", functools.partial(trained, swiglu, joint, out[:, :320]), once=True)
    angles = torch.ones(1, 70, 1, 32)
    for further in (0, 8):
        product_ = torch.ones(1, 70, 256 + further, dtype=dtype, requires_grad=True)
        yield Call("split_rotary", functools.partial(trained, split_rotary, product_, angles, angles, 2, 64), once=further > 0)
    yield Call("loss", lambda: cross_entropy_rows(torch.ones(3, 32_000, dtype=dtype), torch.arange(3)), once=True)


def decoding_calls(dtype: torch.dtype) -> Iterator[Call]:
    for mixer in ("retnet", "gla", "gdn", "kda", "mamba2"):
        config = recipes.get(f"softmax-{mixer}-340m").model
        config.num_hidden_layers, config.vocab_size = 1, 8
        block = HeadmaxForCausalLM(config).model.layers[0].to(dtype).requires_grad_(False)
        for rows in (1, 8, 64):
            once = (mixer == "kda" and rows != 8) or (mixer == "gdn" and rows == 8)
            yield Call(f"decoding {rows} {mixer}", functools.partial(decode, block, rows), once)


def trained(function: Callable[..., Any], *arguments: Any) -> None:
    """Forward and backward."""
    made = function(*arguments)
    sum(x.sum() for x in (made if isinstance(made, tuple) else (made,)) if x is not None).backward()


def stepped(op: Op, inputs: Mapping[str, Any]) -> None:
    """`headmax.ops.step` of a recurrence."""
    by_position = [inputs[name] for name in ("q", "k", "v", "log_decay", "beta") if name in inputs]
    step(op, *by_position, state=inputs["initial_state"], backend="triton")


def decode(block: Block, rows: int) -> None:
    """One step of a block, on kernels."""
    settings, position = getattr(block.mixer, "rotary", None), torch.zeros(rows, dtype=torch.int64)
    slots = make_slots([block], rows, torch.float32, position)[0]
    x = torch.zeros(rows, block.mlp.down_proj.weight.shape[0], dtype=block.mlp.down_proj.weight.dtype)
    block_step(block, x, slots, settings and settings.at(position[:, None]), None)


def check(capability: int, dtypes: Sequence[torch.dtype], once: bool = False) -> bool:
    """Compiles every kernel, for one shape or, unless `once`, for all that matter, and prints what it takes; whether all fit."""
    found, fits = compile_only(capability), True
    for dtype in dtypes:
        for call in calls(dtype, SHARED[capability]):
            if once and not call.once:
                continue
            found.clear()
            call.run()
            for kernel, (size, refilled) in found.items():
                over = size > 1024 * SHARED[capability]
                fits = fits and not over and not refilled
                wrong = "  too much" if over else f"  {refilled} tiles are filled anew under a product" if refilled else ""
                print(f"sm_{capability} {dtype} {call.name} {kernel}: {size / 1024:.0f} KiB{wrong}", flush=True)
    return fits
