"""What a GPU would not say and the interpreter does not see: kernels that touch memory that is not theirs, and programs that race.

Every tensor of an interpreted launch gets addresses of its own, so far from all others that a pointer shows what tensor it began in,
however far it went. Loads and stores are checked against the elements that the tensor has (of a view: its own, not all between its first
and its last), and then go where it really is. What a load masks out without saying what is there instead is NaN, as it may be on a GPU.

The interpreter runs programs one after the other, a GPU in no order: what one program stores, no other of the launch may load, nor store
otherwise, and two lanes of one store agree. That is looked up element by element.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch

SPACE = 44
"""Bits of an address within a tensor's own space, in whose middle it begins."""
MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Of each axis of a grid."""
MANY = -1
"""Programs that load an element, where they are several."""


class MemoryFault(AssertionError):
    """A kernel touched memory that is not its own, or that another program of the launch writes."""


class Elements:
    """Who stored and who loaded each element of a stretch of memory in this launch: a program's number from 1 on, 0 for nobody."""

    def __init__(self, start: int, end: int, size: int) -> None:
        self.start, self.size, self.any_stored = start, size, False
        self.stored, self.loaded = (np.zeros((end - start) // size, np.int32) for _ in range(2))

    def at(self, addresses: np.ndarray, size: int) -> np.ndarray:
        first = (addresses - np.uint64(self.start)).astype(np.int64) // self.size
        return first if size <= self.size else (first[:, None] + np.arange(size // self.size)).ravel()


class Region:
    """A tensor of a launch."""

    def __init__(self, number: int, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor, self.size = name, tensor, tensor.element_size()
        self.real = tensor.data_ptr() if tensor.numel() else 0
        self.begin = ((number + 1) << SPACE) + (1 << SPACE - 1) + (self.real & 0xFFF)
        steps = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and step > 0]
        reach = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        self.end = self.begin + reach * self.size
        self.move = np.uint64((self.real - self.begin) % 2**64)
        self.has: np.ndarray | None = None
        if not tensor.is_meta and reach > int(np.prod([n for n, _ in steps])):  # a view with gaps
            has = torch.zeros(reach, dtype=torch.bool)
            has.as_strided(tensor.shape, tensor.stride()).fill_(True)
            self.has = has.numpy()
        self.elements: Elements | None = None

    def element(self, address: int) -> int:
        return (address - self.begin) // self.size


class Launch:
    """The tensors of the launch that is being interpreted."""

    def __init__(self, kernel: str, names: list[str], grid: tuple[int, ...]) -> None:
        self.kernel, self.names, self.grid = kernel, names, grid
        self.regions: list[Region] = []
        self.fault: str | None = None
        self.program = 0

    def place(self, tensor: torch.Tensor) -> int:
        """The address at which the kernel gets this tensor."""
        number = len(self.regions)
        self.regions.append(Region(number, self.names[number], tensor))
        return self.regions[-1].begin

    def watch(self) -> None:
        """Notes what programs load and store from here on; tensors that share memory share the notes."""
        shared: dict[int, list[Region]] = {}
        for region in self.regions:
            if region.end > region.begin:
                shared.setdefault(region.tensor.untyped_storage().data_ptr(), []).append(region)
        for together in shared.values():
            start, end = min(r.real for r in together), max(r.real + r.end - r.begin for r in together)
            elements = Elements(start, end, min(r.size for r in together))
            for region in together:
                region.elements = elements

    def fail(self, what: str, region: Region | None = None) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/triton/" in frame.f_code.co_filename):
            frame = frame.f_back
        line = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        of = "" if region is None else f" of {region.name} {list(region.tensor.shape)}"
        shapes = ", ".join(f"{r.name} {list(r.tensor.shape)}" for r in self.regions)
        self.fault = f"{self.kernel} ({line}): {what.format(of)} (program {self.program - 1} of grid {self.grid}; {shapes})"
        raise MemoryFault(self.fault)

    def owners(self, addresses: np.ndarray, what: str) -> list[tuple[Region, Any]]:
        """The tensors that these addresses are of, nearly always one, and which of the addresses are of each."""
        first, last = int(addresses.min()) >> SPACE, int(addresses.max()) >> SPACE
        if not 1 <= first <= last <= len(self.regions):
            self.fail(f"{what} an address of no tensor")
        owners: list[tuple[Region, Any]] = []
        for number in range(first, last + 1):
            lanes = slice(None) if first == last else np.flatnonzero(addresses >> np.uint64(SPACE) == number)
            if len(own := addresses[lanes]):
                self.check_bounds(self.regions[number - 1], own, what)
                owners.append((self.regions[number - 1], lanes))
        return owners

    def check_bounds(self, region: Region, addresses: np.ndarray, what: str) -> None:
        if int(addresses.min()) < region.begin or int(addresses.max()) + region.size > region.end:
            bad = addresses[(addresses < region.begin) | (addresses + np.uint64(region.size) > region.end)][0]
            self.fail(f"{what} element {region.element(int(bad))}{{}}", region)
        if region.has is not None:
            at = (addresses - np.uint64(region.begin)).astype(np.int64) // region.size
            if not region.has[at].all():
                self.fail(f"{what} element {at[~region.has[at]][0]}{{}}, which is between those of this view", region)

    def resolve(self, pointers: np.ndarray, mask: np.ndarray, stored: np.ndarray | None) -> tuple[np.ndarray, bool]:
        """Where the lanes that are not masked out really are, and whether there is anything: not on "meta"."""
        mask = mask.astype(bool, copy=False)  # the interpreter's comparisons of bits give integers
        what, whole = "loads" if stored is None else "stores", bool(mask.all())
        addresses = pointers.reshape(-1) if whole else pointers[mask]
        if not len(addresses):
            return pointers, True
        owners = self.owners(addresses, what)
        if any(region.tensor.is_meta for region, _ in owners):
            return pointers, False
        if owners[0][0].elements is not None:
            values = None if stored is None else np.broadcast_to(stored, pointers.shape)[mask]
            for region, lanes in owners:
                self.note(region, addresses[lanes] + region.move, None if values is None else values[lanes], what)
        if len(owners) == 1:
            return pointers + owners[0][0].move, True
        moves = np.empty_like(addresses)
        for region, lanes in owners:
            moves[lanes] = region.move
        real = np.zeros_like(pointers)
        real[mask] = addresses + moves
        return real, True

    def note(self, region: Region, addresses: np.ndarray, values: np.ndarray | None, what: str) -> None:
        elements, me = region.elements, self.program
        assert elements is not None
        at = elements.at(addresses, region.size)
        if elements.any_stored:
            before = elements.stored[at]
            others = (before != 0) & (before != me)
            if others.any() and (values is None or differ(addresses, values, others.reshape(len(addresses), -1).any(1))):
                self.race(region, at, before, others, f"{what} element {{}}, which {{}} stores")
        before = elements.loaded[at]
        others = (before != 0) & (before != me)
        if values is None:
            elements.loaded[at] = np.where(others, MANY, me)
            return
        if others.any():
            self.race(region, at, before, others, f"{what} element {{}}, which {{}} loads")
        elements.stored[at], elements.any_stored = me, True

    def race(self, region: Region, at: np.ndarray, before: np.ndarray, others: np.ndarray, what: str) -> None:
        assert region.elements is not None
        lane = np.flatnonzero(others)[0]
        element = (int(at[lane]) * region.elements.size + region.elements.start - region.real) // region.size
        who = "other programs" if before[lane] == MANY else f"program {before[lane] - 1}"
        self.fail("a race: " + what.format(f"{element}{{}}", who), region)


def read(addresses: np.ndarray, like: np.ndarray) -> np.ndarray:
    from triton._C.libtriton import interpreter

    return interpreter.load(addresses, np.ones(addresses.shape, bool), np.zeros_like(like), like.dtype)


def differ(addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> bool:
    """Whether these lanes' values are other than what is stored there."""
    given = np.ascontiguousarray(values[lanes])
    return read(np.ascontiguousarray(addresses[lanes]), given).tobytes() != given.tobytes()


def unknown(shape: tuple[int, ...], dtype: Any, bfloat16: bool) -> np.ndarray:
    """What a masked load may give that has no `other`."""
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(shape, 0x7FC0 if bfloat16 else True if dtype.kind == "b" else np.iinfo(dtype).max // 3, dtype)


class Checker:
    """How launches are interpreted from here on, and the one that is."""

    def __init__(self) -> None:
        self.dry: int | None = None
        self.launches = 0
        self.launch: Launch | None = None

    def begin(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        parts = ((name, x if isinstance(x := given.get(name), tuple) else (x,)) for name in executor.arg_names)
        names = [name for name, values in parts for x in values if hasattr(x, "data_ptr")]
        launch = Launch(executor.fn.__name__, names, executor.grid)
        if isinstance(launch.grid, tuple) and any(n > most for n, most in zip(launch.grid, MOST_PROGRAMS, strict=False)):
            launch.fail(f"a grid has at most {MOST_PROGRAMS} programs")
        self.launch, self.launches = launch, self.launches + 1
        return launch


CHECKER = Checker()


@contextmanager
def dry(fill: int = 0) -> Iterator[None]:
    """Only the programs at the corners of a grid are run in here, and tensors on "meta" are full of one number whatever is stored.

    So tensors can be as large as a GPU's, and an offset that leaves the range of its integers shows.
    """
    CHECKER.dry = fill
    try:
        yield
    finally:
        CHECKER.dry = None


def check_memory() -> None:
    """CHECKER sees every interpreted launch from here on."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    convert, run = interpreter._implicit_cvt, GridExecutor.__call__
    load, store, enter = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, InterpreterBuilder.set_grid_idx

    def placed(arg: Any) -> Any:
        made = convert(arg)
        if CHECKER.launch is not None and hasattr(arg, "data_ptr"):
            made.handle.data[:] = CHECKER.launch.place(arg)
        return made

    def run_corners(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.getcallargs(self.fn, *args, **{name: x for name, x in kwargs.items() if name in self.arg_names})
        grid, scope = (*self.grid, 1, 1)[:3], interpreter._patch_lang(self.fn)
        try:
            given = {name: x if name in self.constexprs else placed(x) for name, x in given.items()}
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for place in product(*({0, n - 1} for n in grid)):
                interpreter.interpreter_builder.set_grid_idx(*place)
                self.fn(**given)
        finally:
            scope.restore()

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        launch = CHECKER.begin(self, args, kwargs)
        try:
            run_corners(self, args, kwargs) if CHECKER.dry is not None else run(self, *args, **kwargs)
        except Exception:
            if launch.fault is not None:
                raise MemoryFault(launch.fault) from None
            raise
        finally:
            CHECKER.launch = None

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        enter(self, x, y, z)
        if (launch := CHECKER.launch) is not None:
            launch.program = (x * self.grid_dim[1] + y) * self.grid_dim[2] + z + 1
            if launch.program == 1 and CHECKER.dry is None:
                launch.watch()

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        element = ptrs.get_element_ty()
        dtype, there = interpreter._get_np_dtype(element), True
        if CHECKER.launch is not None:
            real, there = CHECKER.launch.resolve(ptrs.data, mask.data, None)
            ptrs = TensorHandle(real, ptrs.dtype)
        if other is None:  # of one number the interpreter takes `other=0.0` for none
            one = ptrs.data.size == 1
            other = TensorHandle(
                np.zeros(ptrs.data.shape, dtype) if one else unknown(ptrs.data.shape, dtype, element == tl.bfloat16), element
            )
        if there:
            return load(self, ptrs, mask, other, *options)
        return TensorHandle(np.where(mask.data, dtype.type(CHECKER.dry or 0), other.data), element)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
        launch = CHECKER.launch
        if launch is None:
            return store(self, ptrs, value, mask, *options)
        real, there = launch.resolve(ptrs.data, mask.data, value.data)
        if there:
            store(self, TensorHandle(real, ptrs.dtype), value, mask, *options)
            lanes = np.broadcast_to(mask.data, real.shape).astype(bool).ravel()
            if CHECKER.dry is None and differ(real.ravel(), np.broadcast_to(value.data, real.shape).ravel(), lanes):
                launch.fail("a race: one store has several values for one element")
        return None

    def silent_checked(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            checked(self, *args, **kwargs)

    interpreter._implicit_cvt = placed
    GridExecutor.__call__ = silent_checked  # type: ignore[method-assign]
    InterpreterBuilder.set_grid_idx = set_grid_idx  # type: ignore[method-assign]
    InterpreterBuilder.create_masked_load = create_masked_load  # type: ignore[method-assign]
    InterpreterBuilder.create_masked_store = create_masked_store  # type: ignore[method-assign]
