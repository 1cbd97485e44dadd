"""A GPU that is pretended: tensors have shapes and no numbers, and kernels are not launched but checked against their parameters.

Host code runs as it would on the card: a name that is gone, or a number read where nothing may wait for the device, is an error; and where
PyTorch is built for CUDA, so that tensors can say that they are there, a tensor on another device. Such a build has no gradients without a
GPU; one for CPUs has, and its tensors are on the CPU.
"""

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headmax.ops.kernels
from headmax.layers import fusion
from headmax.models import decoding
from headmax.ops import registry
from headmax.ops.kernels import launch, tiles

DEVICE = "cpu" if torch.version.cuda is None else "cuda:1"
"""Where pretended tensors are."""
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 * 1024)
OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl"}
WIDEST_GRID = (2**31 - 1, 65_535, 65_535)


class Stream:
    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index

    def wait_stream(self, other: "Stream") -> None:
        pass


class Card:
    """What torch.cuda says of two GPUs, and what was launched on them."""

    def __init__(self) -> None:
        self.current, self.capturing = 0, None
        self.launched: list[str] = []
        self.captured: list[tuple[int, list[str]]] = []
        """Of each graph its device, and the kernels in it."""
        self.events: list[int] = []
        """On which device's stream each event was recorded."""

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, Stream(device).index
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        device = 0 if stream is None else stream.index  # without a stream PyTorch takes that of the first capture in the process
        start = len(self.launched)
        with self.device(device):
            self.capturing = device
            yield
            self.capturing = None
        self.captured.append((device, self.launched[start:]))

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(self.current if device is None else device)

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """In the place of `launch`, whose second launch of a kernel relies on all of this."""
        parameters = inspect.signature(kernel.fn).parameters
        compiled = {name for name, p in parameters.items() if "constexpr" in str(p.annotation)}
        given, rest = list(parameters)[: len(args)], set(parameters) - set(list(parameters)[: len(args)])
        assert not compiled & set(given), f"{kernel}: arguments are the parameters that are no constants, in order"
        assert rest == compiled, f"{kernel}: all other parameters are constants"
        assert rest <= set(constants) <= rest | OPTIONS, f"{kernel}: constants are those parameters and options"
        assert all(type(n) is int and 0 <= n <= most for n, most in zip(grid, WIDEST_GRID, strict=False)), f"{kernel}: grid {grid}"
        assert all(x is None or type(x) in (int, float, bool) or isinstance(x, Tensor) for x in args), kernel
        devices = {x.device for x in args if isinstance(x, Tensor)}
        assert devices == {args[0].device}, f"{kernel}: tensors on {devices}"
        if self.capturing is not None:
            assert devices == {torch.device("cuda", self.capturing)}, (
                f"{kernel} on {devices} is not in the graph of device {self.capturing}"
            )
        self.launched.append(kernel.fn.__name__)

    def attributes(self) -> dict[str, Any]:
        """Of torch.cuda."""
        event = lambda **_: SimpleNamespace(record=lambda stream=None: self.events.append((stream or self.current_stream()).index))  # noqa: E731
        return {
            "device": self.device,
            "stream": lambda stream: self.device(stream.index),
            "graph": self.graph,
            "Stream": lambda device=None: self.current_stream(device),
            "current_stream": self.current_stream,
            "current_device": lambda: self.current,
            "Event": event,
            "CUDAGraph": lambda: SimpleNamespace(pool=lambda: (0, 0), replay=lambda: None),
            "graph_pool_handle": lambda: (0, 0),
            "get_device_properties": lambda device=None: H200,
            "get_device_capability": lambda device=None: (H200.major, H200.minor),
        }


class RealOnFake(TorchDispatchMode):
    """Runs each of headmax's operators as it is, launches aside: its results must be those that its fake implementation promises."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        promised = op(*args, **kwargs or {})
        if op.namespace != "headmax" or "linear_cross_entropy" in str(op):  # which is a custom_op, and reads labels on a CPU
            return promised
        self.seen.add(op._opname)
        found = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs or {})  # type: ignore[attr-defined]
        assert list(map(described, tree_leaves(found))) == list(map(described, tree_leaves(promised))), op
        memories = [x.untyped_storage()._cdata for x in tree_leaves((args, found)) if isinstance(x, Tensor)]
        own = [x.untyped_storage()._cdata for x in tree_leaves(found) if isinstance(x, Tensor)]
        assert all(memories.count(memory) == 1 for memory in own), f"{op}: an output is an input, or two outputs are one"
        return found


def described(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x


def move(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Makes the weights of a model pretended ones."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=DEVICE))


def forget() -> None:
    """What is kept of the machine's own devices, or of pretended ones."""
    for cached in (registry.kernel_obstacle, registry.compiles_in_16_bits, tiles.processors, tiles._shared_memory, launch.early):
        cached.cache_clear()
    tiles.forget()
    decoding.side_stream.cache_clear()


@contextlib.contextmanager
def pretended() -> Iterator[tuple[Card, RealOnFake]]:
    """A block in which the machine has two H200."""
    card, real, empty = Card(), RealOnFake(), torch.empty
    forget()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), real:
        for name, value in card.attributes().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        patch.setattr(registry, "kernel_obstacle", registry.functools.cache(lambda: None))  # type: ignore[attr-defined]
        patch.setattr(registry, "_chosen", {})
        patch.setattr(fusion, "nn", SimpleNamespace(Parameter=FakeTensor, Linear=nn.Linear))  # the type of a pretended weight
        for found in pkgutil.iter_modules(headmax.ops.kernels.__path__):
            module = importlib.import_module(f"headmax.ops.kernels.{found.name}")
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", card.launch)
        yield card, real
    forget()
