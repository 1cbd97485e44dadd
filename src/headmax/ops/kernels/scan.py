"""States from chunk to chunk in Triton, and what is read out of them, once a chunk's keys, decays and scores are prepared.

    S' = 2^whole S + 2^half keys^T values      `scan`, for every chunk in turn
    o  = readers 2^half S + scores values      `combine` from states that a scan stored, or the scan itself, which then stores none

Forwards keys are `writing` and readers `reading`; backwards, with gradients for values, the other way round, and scores are transposed.
What is kept on the way is 2^half S: with a decay per channel `half` is half of `whole` in most chunks, else 0 (channel.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import (
    Layout,
    channel_block,
    chunk_span,
    dot_precision,
    nth,
    segment_span,
    state_block,
    state_tile,
    tile,
)
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, processors, reads_in_scan, tile_arguments


@triton.jit
def load_decays(decays, index, there, k_start, K: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """Log-decays of a [BK, ...] block of state number `index`, [BK] or one for all; 0 unless it is `there`."""
    if CHANNEL:
        channels = k_start + tl.arange(0, BK)
        return tl.load(decays + index * K + channels, mask=(channels < K) & there, other=0.0)
    else:
        return tl.load(decays + index, mask=there, other=0.0)


@triton.jit
def load_half(whole, mild, index, there, k_start, K: tl.constexpr, BK: tl.constexpr):
    """`half` of a chunk [BK], and whether it is all there is to its decay, so that whole = 2 half."""
    alike = tl.load(mild + index, mask=there, other=1) != 0
    return tl.where(alike, 0.5 * load_decays(whole, index, there, k_start, K, BK, True), 0.0), alike


@triton.jit
def scaled(state, log_factor, CHANNEL: tl.constexpr):
    """2^log_factor state"""
    if CHANNEL:
        return state * tl.exp2(log_factor)[:, None]
    else:
        return state * tl.exp2(log_factor)


@triton.jit
def scan_kernel(
    keys, values, readers, scores, whole, mild, initial, states, result, final, decays, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE: tl.constexpr, READ: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the state through one segment of a sequence, backwards if REVERSE.

    STORE keeps 2^half S for each chunk, READ gives what is read out, for which a block has all key channels; LAST keeps the state at the
    end. Where nothing is kept on the way, `decays` is the log-decay of the segment. A chunk's decay is fetched one chunk ahead: no step
    waits for it.
    """
    k_start, v_start, run, head = state_block(H, K, V, BK, BV)
    first_chunk, chunks, token, end = segment_span(run, segments, table, starts, T, C, PACKED)
    place = run.to(tl.int64) * H + head
    state = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, place, k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    beginning = (first_chunk + nth(0, chunks, REVERSE)).to(tl.int64) * H + head
    if CHANNEL:
        half, alike = load_half(whole, mild, beginning, chunks > 0, k_start, K, BK)
        state, total = scaled(state, half, CHANNEL), tl.zeros([BK], tl.float32)
    else:
        decay, total = load_decays(whole, beginning, chunks > 0, k_start, K, BK, CHANNEL), 0.0
    for i in range(chunks):
        n = nth(i, chunks, REVERSE)
        at = token + n * C
        count = tl.minimum(C, end - at).to(tl.int32)
        index, following = (first_chunk + n).to(tl.int64) * H + head, (first_chunk + nth(i + 1, chunks, REVERSE)).to(tl.int64) * H + head
        p_k, in_k = tile(keys, at, count, head, k_start, H, K, C, BK)
        p_v, in_v = tile(values, at, count, head, v_start, H, V, C, BV)
        t_k, t_v = tl.load(p_k, mask=in_k, other=0.0), tl.load(p_v, mask=in_v, other=0.0)
        if CHANNEL:
            next_half, next_alike = load_half(whole, mild, following, i + 1 < chunks, k_start, K, BK)
        else:
            next_decay = load_decays(whole, following, i + 1 < chunks, k_start, K, BK, CHANNEL)
        if STORE:
            p_s, in_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
            tl.store(p_s, state.to(states.dtype.element_ty), mask=in_s)
        if READ:
            p_r, in_r = tile(readers, at, count, head, k_start, H, K, C, BK)
            p_a, in_a = tile(scores, at, count, head, 0, H, C, C, C)
            t_r, t_a = tl.load(p_r, mask=in_r, other=0.0), tl.load(p_a, mask=in_a, other=0.0)
            out = tl.dot(t_r, state.to(t_r.dtype), input_precision=PRECISION)
            out = tl.dot(t_a, t_v, out, input_precision=PRECISION)
            p_o, in_o = tile(result, at, count, head, v_start, H, V, C, BV)
            tl.store(p_o, out.to(result.dtype.element_ty), mask=in_o)
        if CHANNEL:
            if not alike:
                steep = load_decays(whole, index, True, k_start, K, BK, CHANNEL)
                state, total = scaled(state, steep, CHANNEL), total + steep
            state = tl.dot(tl.trans(t_k), t_v, state, input_precision=PRECISION)
            total += 2 * half
            state = scaled(scaled(state, half, CHANNEL), next_half, CHANNEL)  # both at once may be no number of float32
            half, alike = next_half, next_alike
        else:
            state = tl.dot(tl.trans(t_k), t_v, scaled(state, decay, CHANNEL), input_precision=PRECISION)
            total += decay
            decay = next_decay
    if LAST:
        p_final, in_final = state_tile(final, place, k_start, v_start, K, V, BK, BV)
        tl.store(p_final, state, mask=in_final)
    if not (STORE or READ):
        if CHANNEL:
            channels = k_start + tl.arange(0, BK)
            tl.store(decays + place * K + channels, total, mask=channels < K)
        else:
            tl.store(decays + place, total)


@triton.jit
def carry_kernel(
    ends, decays, initial, final, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """What each segment of a sequence would end with, had it begun with nothing, becomes what it begins with; and the last state."""
    k_start, v_start, sequence, head = state_block(H, K, V, BK, BV)
    state = tl.zeros([BK, BV], tl.float32)
    place = (sequence * H + head).to(tl.int64)
    if HAS_INITIAL:
        p_initial, in_initial = state_tile(initial, place, k_start, v_start, K, V, BK, BV)
        state += tl.load(p_initial, mask=in_initial, other=0.0).to(tl.float32)
    for i in range(segments):
        run = sequence * segments + nth(i, segments, REVERSE)
        index = run.to(tl.int64) * H + head
        p_s, in_s = state_tile(ends, index, k_start, v_start, K, V, BK, BV)
        end = tl.load(p_s, mask=in_s, other=0.0)
        tl.store(p_s, state, mask=in_s)
        state = scaled(state, load_decays(decays, index, True, k_start, K, BK, CHANNEL), CHANNEL) + end
    p_final, in_final = state_tile(final, place, k_start, v_start, K, V, BK, BV)
    tl.store(p_final, state, mask=in_final)


@triton.jit
def combine_kernel(
    readers, scores, values, states, result, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATES: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result = scores values + readers states, the second term only if STATES.

    Both are one loop over tokens and then key channels, so that tiles of the second are on their way during the first.
    """
    tl.static_assert(C % BK == 0)
    v_start, chunk, head = channel_block(H, V, BV)
    first, count = chunk_span(chunk, table, T, C, PACKED)
    rows, inner, columns = tl.arange(0, C)[:, None], tl.arange(0, BK), v_start + tl.arange(0, BV)[None, :]
    at, place = first * H + head, (chunk.to(tl.int64) * H + head) * (K * V)
    total = tl.zeros([C, BV], tl.float32)
    for start in range(0, C + K if STATES else C, BK):
        within, channel = start < C, start - C
        left = tl.where(within, scores + at * C + start, readers + at * K + channel)
        right = tl.where(within, values + (at + start * H) * V, states + place + channel * V)
        t_l = tl.load(
            left + rows * tl.where(within, H * C, H * K) + inner[None, :],
            mask=(rows < count) & (within | (inner < K - channel))[None, :],
            other=0.0,
        )
        t_r = tl.load(
            right + inner[:, None] * tl.where(within, H * V, V) + columns,
            mask=(inner < tl.where(within, count - start, K - channel))[:, None] & (columns < V),
            other=0.0,
        )
        total = tl.dot(t_l, t_r, total, input_precision=PRECISION)
    p_o, in_o = tile(result, first, count, head, v_start, H, V, C, BV)
    tl.store(p_o, total.to(result.dtype.element_ty), mask=in_o)


def shape_arguments(q: Tensor, layout: Layout) -> dict[str, Any]:
    """What all kernels are specialised to."""
    _, _, heads, key = q.shape
    return {"H": heads, "K": key, "C": layout.chunk, "PACKED": layout.packed, "PRECISION": dot_precision(q.dtype)}


def state_blocks(tiles: dict[str, int], keys: Tensor, values: Tensor) -> int:
    """Into how many blocks these tiles cut the states of one sequence."""
    _, _, heads, value = values.shape
    return heads * cdiv(keys.shape[3], tiles["BK"]) * cdiv(value, tiles["BV"])


def spread(kernel: str, keys: Tensor, values: Tensor, layout: Layout, narrowest: int = 64) -> tuple[dict[str, int], int]:
    """A scan's tiles, and into how many segments it cuts each sequence, to give each processor a block.

    Segments do some of the work twice, so blocks of half the width come first, where there are enough of those and they are not too narrow;
    they have no more warps than give each thread 32 numbers of the state.
    """
    tiles, there = tile_arguments(kernel, keys, keys.shape[3], values.shape[3]), processors(values.device)
    blocks, half = state_blocks(tiles, keys, values), tiles["BV"] // 2
    if 3 * blocks * layout.sequences < 2 * there <= 6 * blocks * layout.sequences and half >= narrowest and values.element_size() < 4:
        return tiles | {"BV": half, "num_warps": max(4, min(tiles["num_warps"], tiles["BK"] * half // 1024))}, 1
    return tiles, layout.segments(blocks, there)


def begins_shape(keys: Tensor, values: Tensor, layout: Layout, segments: int | None = None) -> tuple[int, ...]:
    """What each segment of each sequence begins with, [sequences * segments, H, K, V]; empty where sequences stay whole."""
    if segments is None:
        _, segments = spread("read_scan" if reads_in_scan(keys) else "scan", keys, values, layout)
    return (layout.sequences * segments, values.shape[2], keys.shape[3], values.shape[3]) if segments > 1 else (0,)


class Scanned(NamedTuple):
    """What a scan gives; states and result are None where they were not asked for."""

    states: Tensor
    """2^half times the state each chunk begins with (ends with, if reversed) [chunks, H, K, V], in the values' dtype."""
    result: Tensor
    """What was read out, as the values lie."""
    final: Tensor
    """The last state, in float32; of use only if no `begins` were given."""
    begins: Tensor


def scan(
    keys: Tensor, values: Tensor, whole: Tensor, mild: Tensor | None, initial: Tensor | None, layout: Layout, *, reverse: bool = False,
    begins: Tensor | None = None, store: bool = True, readers: Tensor | None = None, scores: Tensor | None = None,
) -> Scanned:  # fmt: skip
    """Stores all states, or reads out with `readers` and `scores`, or both.

    Sequences too few to keep the GPU busy are cut into segments, which run at the same time: once from nothing, to know what each ends
    with, and again from what the segments before it hand on, `begins`.
    """
    (_, _, heads, value), key, runs, read = values.shape, keys.shape[3], layout.sequences, readers is not None
    known, final = begins is not None, values.new_empty((runs, heads, key, value), dtype=torch.float32)
    tiles, segments = spread("read_scan" if read else "scan", keys, values, layout)
    if begins is None:
        begins = final.new_empty(begins_shape(keys, values, layout, segments))
    segments = len(begins) // runs or 1
    states = values.new_empty((layout.chunks, heads, key, value)) if store else None
    result = torch.empty_like(values) if read else None
    shape = shape_arguments(keys, layout) | {"V": value, "CHANNEL": whole.ndim == 3, "REVERSE": reverse}

    def run(begin: Tensor | None, end: Tensor, decays: Tensor, tiles: dict[str, int], *, store: bool, read: bool, last: bool) -> None:
        launch(
            scan_kernel, (runs * segments * state_blocks(tiles, keys, values),),
            (keys, values, readers, scores, whole, mild, begin, states, result, end, decays, layout.table, layout.starts, segments,
             layout.length),
            {**shape, **tiles, "HAS_INITIAL": begin is not None, "STORE": store, "READ": read, "LAST": last},
        )  # fmt: skip

    if segments > 1 and not known:
        decays = final.new_empty(runs * segments, heads, *whole.shape[2:])
        run(None, begins, decays, spread("scan", keys, values, layout)[0], store=False, read=False, last=True)
        few = {name: shape[name] for name in ("H", "K", "V", "CHANNEL", "REVERSE")} | {"BK": 16, "BV": 64}
        launch(
            carry_kernel, (runs * heads * cdiv(key, 16) * cdiv(value, 64),), (begins, decays, initial, final, segments),
            few | {"HAS_INITIAL": initial is not None},
        )  # fmt: skip
    uncut = segments == 1
    run(initial if uncut else begins, final, final, tiles, store=store, read=read, last=uncut)
    return Scanned(states, result, final, begins)  # type: ignore[arg-type]


def combine(readers: Tensor, scores: Tensor, values: Tensor, states: Tensor | None, layout: Layout) -> Tensor:
    """scores values + readers states for every chunk."""
    (_, _, heads, value), result = values.shape, torch.empty_like(values)
    tiles = tile_arguments("combine", readers, readers.shape[3], value)
    launch(
        combine_kernel, (cdiv(value, tiles["BV"]) * layout.chunks * heads,),
        (readers, scores, values, values if states is None else states, result, layout.table, layout.length),
        {**shape_arguments(readers, layout), "V": value, "STATES": states is not None, **tiles, "BK": min(tiles["BK"], layout.chunk)},
    )  # fmt: skip
    return result


def scan_and_read(
    keys: Tensor, readers: Tensor, scores: Tensor, values: Tensor, whole: Tensor, mild: Tensor | None, initial: Tensor | None,
    layout: Layout, reverse: bool = False,
) -> Scanned:  # fmt: skip
    """A scan and what is read out of it, in one kernel where states are small enough. States are stored if `reverse`, else where needed."""
    given = keys, values, whole, mild, initial, layout
    if reads_in_scan(keys):
        return scan(*given, reverse=reverse, store=reverse, readers=readers, scores=scores)
    scanned = scan(*given, reverse=reverse)
    return scanned._replace(result=combine(readers, scores, values, scanned.states, layout))
