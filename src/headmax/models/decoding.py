"""Decoding one token per sequence: which blocks run fused, and CUDA graphs of the whole model on slots that are lent to one cache."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from headmax.layers.block import Block
from headmax.layers.fusion import Fusion
from headmax.layers.head_gate import HeadGate
from headmax.layers.mixers.attention import Attention, AttentionSlots
from headmax.layers.mixers.state import RecurrentSlots, RecurrentState
from headmax.models.cache import HeadmaxCache
from headmax.ops.registry import autocast_dtype

if TYPE_CHECKING:
    from headmax.models.modeling import HeadmaxModel

logger = logging.getLogger("headmax")

Slots = RecurrentSlots | AttentionSlots


def make_slots(blocks: Iterable[nn.Module], number: int, dtype: torch.dtype, position: Tensor, length: int | None = None) -> list[Slots]:
    """Slots for `number` sequences in every layer: recurrent states in `dtype`, keys and values of up to `length` tokens."""
    slots: list[Slots] = []
    for block in blocks:
        if isinstance(block.mixer, Attention):
            if length is None:
                raise ValueError("length must be given: keys and values of attention layers grow with every token")
            slots.append(block.mixer.slots(number, length, position))
        else:
            slots.append(block.mixer.slots(number, dtype))  # type: ignore[union-attr, operator]
    return slots


class Watch:
    """What a decoding step depends on in a model, in a form that is cheap to compare at every token."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.children = [module._modules for module in modules if module._modules]
        self.parameters = [module._parameters for module in modules if module._parameters]
        self.hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.gates = [module for module in modules if isinstance(module, HeadGate)]

    def marks(self) -> list[Any]:
        """Differs when a module is replaced or hooked, a gate's settings change, or a weight moves in memory. Values of weights may
        change in place."""
        weights = [weight for own in self.parameters for weight in own.values()]
        return [
            *(id(child) for own in self.children for child in own.values()),
            *(weight.data_ptr() if type(weight) is nn.Parameter else id(weight) for weight in weights),
            *map(len, self.hooks),
            *((gate.temperature, gate.scale, gate.kind, gate.read, gate.write) for gate in self.gates),
        ]


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


class Replay:
    """A function as a CUDA graph on a device. The tensors it returned at capture hold its results after each call.

    Graphs that never run at the same time may share a `pool` of memory.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any = None) -> None:
        with torch.cuda.device(device):  # what runs on another device than its stream is not captured
            side = side_stream(torch.cuda.current_device())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # kernels are compiled and libraries set up outside the capture
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool, stream=side):
                self.results = function()
        self.pool = self.graph.pool()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.results


class Decoder:
    """A model's slots and CUDA graphs for decoding, and which blocks run fused. A copy of the model starts without any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watch: Watch | None = None
        self.seen: tuple[Any, ...] = ()
        self.obstacles: list[str | None] = []
        self.announced: set[str] = set()
        self.release()

    def __reduce__(self) -> tuple[type[Decoder], tuple[()]]:
        return Decoder, ()

    def release(self) -> None:
        """Frees slots and graphs."""
        self.slots: list[RecurrentSlots] = []
        self.tokens = self.positions = torch.empty(0)
        self.graphs: dict[int, Replay] = {}
        self.steps: dict[int, int] = {}
        self.lent: list[RecurrentSlots] = []
        self.borrower: weakref.ref[HeadmaxCache] | None = None

    def refresh(self, model: HeadmaxModel, x: Tensor) -> None:
        """Finds which blocks cannot run the fused step, and why; again whenever the model has changed."""
        if self.watch is None or self.seen != (self.watch.marks(), x.dtype):
            self.watch = Watch(model)
            self.seen = (self.watch.marks(), x.dtype)
            self.release()
            self.obstacles = [cast(Block, block).step_obstacle(x) for block in model.layers]
            if said := sorted({why for why in self.obstacles if why is not None}):
                logger.warning("decoding without fused kernels in some layers: %s", "; ".join(said))

    def fusion(self, model: HeadmaxModel, x: Tensor) -> tuple[Fusion, ...]:
        """What runs fused in each block for a step of x [rows, 1, hidden]."""
        self.refresh(model, x)
        pairs = zip(model.layers, self.obstacles, strict=True)
        return tuple(Fusion(step=True) if why is None else cast(Block, block).fusion(x) for block, why in pairs)

    def graphs_on(self, device: torch.device) -> bool:
        """Whether the device supports CUDA graphs."""
        return device.type == "cuda"

    @torch.compiler.disable(reason="a decoding step is a CUDA graph, which cannot be traced")
    def replay(
        self, model: HeadmaxModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: HeadmaxCache
    ) -> Tensor | None:
        """Advances the cache by one token and returns the last hidden state [rows, 1, hidden]; None if no graph can do it.

        A batch size is captured at its second step, and again after the model has changed.
        """
        with self.lock:
            rows, why = len(input_ids), self._obstacle(model, attention_mask, cache)
            if why is None:
                self.steps[rows] = self.steps.get(rows, 0) + 1
                if self.steps[rows] == 1:
                    return None
                why = self._lend(model, cache, rows)
            if why is not None:
                self.log_once(why)
                return None
            self.tokens[:rows] = input_ids[:, 0]
            self.positions[:rows] = cache.layers[0].tokens if position_ids is None else position_ids[:, 0]
            hidden = self.graphs[rows]().clone()
        for layer in cache.layers:
            layer.advance(layer.state, 1)
        return hidden

    def log_once(self, why: str) -> None:
        """Logs why a step is not a CUDA graph, each reason once."""
        if why not in self.announced:
            self.announced.add(why)
            logger.info("decoding without a CUDA graph: %s", why)

    def _obstacle(self, model: HeadmaxModel, attention_mask: Tensor | None, cache: HeadmaxCache) -> str | None:
        """Why a step of this cache cannot be a CUDA graph, or None."""
        if any(model.uses_attention):
            return "keys and values of attention layers grow with the sequence"
        if autocast_dtype(model.device) is not None:
            return "autocast is on"
        self.refresh(model, model.embed_tokens.weight)
        if any(self.watch.hooks):  # type: ignore[union-attr]
            return "a module has hooks"
        if (why := next((why for why in self.obstacles if why is not None), None)) is not None:
            return why
        if attention_mask is not None and not bool(attention_mask[:, -1:].all()):
            return "a row is padded in this step"
        borrower = None if self.borrower is None else self.borrower()
        if borrower is not None and borrower is not cache and self._holds(borrower):
            return "another cache is being continued with the model's slots"
        return None

    def _holds(self, cache: HeadmaxCache) -> bool:
        """Whether the cache still holds the slots that were lent to it."""
        return all(layer.state is lent for layer, lent in zip(cache.layers, self.lent, strict=True))

    def _lend(self, model: HeadmaxModel, cache: HeadmaxCache, rows: int) -> str | None:
        """Copies the states of a cache into the slots, unless they are there already; the reason if that is impossible, or None."""
        states = [layer.state for layer in cache.layers]
        if not all(isinstance(state, RecurrentState | RecurrentSlots) and len(state.recurrent) == rows for state in states):
            return "the cache holds another number of sequences"
        if rows not in self.graphs:
            self._capture(model, rows)
        if self.borrower is not None and self.borrower() is cache and self._holds(cache) and len(self.lent[0].recurrent) == rows:
            return None
        self.lent, self.borrower = [slots.rows(slice(0, rows)) for slots in self.slots], weakref.ref(cache)
        for layer, lent, state in zip(cache.layers, self.lent, states, strict=True):
            lent.store(state)  # type: ignore[arg-type]
            layer.state = lent
        return None

    def _capture(self, model: HeadmaxModel, rows: int) -> None:
        device = model.device
        with torch.inference_mode(False), torch.no_grad():  # memory of inference mode could not be written outside it
            if rows > len(self.tokens):
                steps = self.steps
                self.release()
                self.steps = steps
                self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
                self.tokens = torch.zeros_like(self.positions)
                self.slots = make_slots(model.layers, rows, torch.float32, self.positions)  # type: ignore[assignment]
            tokens, positions = self.tokens[:rows, None], self.positions[:rows, None]
            states = [slots.rows(slice(0, rows)) for slots in self.slots]
            self.graphs[rows] = Replay(
                lambda: model(tokens, position_ids=positions, past_key_values=HeadmaxCache.on(states), use_cache=True).last_hidden_state,
                device,
                next((graph.pool for graph in self.graphs.values()), None),
            )
