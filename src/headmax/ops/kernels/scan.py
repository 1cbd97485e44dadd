"""States from chunk to chunk in Triton, and what is read out of them, once a chunk's keys, decays and scores are prepared.

    S' = 2^(b_C) S + 2^h keys^T values         `scan`, for every chunk in turn
    o  = readers 2^h S + scores values         `combine` from states that a scan stored, or the scan itself, which then stores none

Forwards keys are scaled_k and readers scaled_q (scalar.py, channel.py); backwards, with gradients for values, the other way round, and
scores are transposed. With a decay per channel, h is half of the chunk's log-decay b_C in factored chunks, else 0; with others it is 0.
What is stored is 2^h S.

Sequences too few to keep the GPU busy are cut into segments, which run at the same time: once from nothing, to know what each ends with;
then `carry` hands the states on from segment to segment; and again, each from what it begins with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headmax.ops.kernels.common import (
    Layout,
    channel_block,
    chunk_span,
    scan_index,
    segment_span,
    shape_arguments,
    state_block,
    state_tile,
    tile,
)
from headmax.ops.kernels.launch import launch
from headmax.ops.kernels.tiles import cdiv, processors, reads_in_scan, tile_arguments


@triton.jit
def load_decay(decays, index, m_index, k_start, K: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """The log-decays of a block of state number `index`, [BK] or one for all; 0 where `m_index` is off."""
    if CHANNEL:
        o_k = k_start + tl.arange(0, BK)
        return tl.load(decays + index * K + o_k, mask=(o_k < K) & m_index, other=0.0)  # [BK]
    else:
        return tl.load(decays + index, mask=m_index, other=0.0)


@triton.jit
def load_half_decay(chunk_decay, factored, index, m_index, k_start, K: tl.constexpr, BK: tl.constexpr):
    """h of a chunk [BK], and whether it is factored, so that 2 h is all its decay."""
    is_factored = tl.load(factored + index, mask=m_index, other=1) != 0
    return tl.where(is_factored, 0.5 * load_decay(chunk_decay, index, m_index, k_start, K, BK, True), 0.0), is_factored


@triton.jit
def decayed(b_s, log_decay, CHANNEL: tl.constexpr):
    """2^log_decay S"""
    if CHANNEL:
        return b_s * tl.exp2(log_decay)[:, None]
    else:
        return b_s * tl.exp2(log_decay)


@triton.jit
def scan_kernel(
    keys, values, readers, scores, chunk_decay, factored, initial, states, out, final, decays, table, starts, segments, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the state through one segment of a sequence, backwards if REVERSE, from `initial`, what segments begin with, or zeros.

    In: keys, readers [B,T,H,K], values [B,T,H,V], scores [B,T,H,C]. Out, where they are given: `states` gets 2^h S of each chunk [chunks,
    H, K, V], `out` what is read out [B,T,H,V], for which a block has all key channels, `final` the states at the segments' ends, and
    `decays` the segments' log-decays. A chunk's decay is fetched one chunk ahead: no step waits for it.
    """
    CHANNEL: tl.constexpr = factored is not None
    k_start, v_start, segment, head = state_block(H, K, V, BK, BV)
    first_chunk, chunks, first, end = segment_span(segment, segments, table, starts, T, C)
    o_segment = segment.to(tl.int64) * H + head
    b_s = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        p_i, m_i = state_tile(initial, o_segment, k_start, v_start, K, V, BK, BV)
        b_s += tl.load(p_i, mask=m_i, other=0.0).to(tl.float32)  # [BK, BV]
    o_chunk = (first_chunk + scan_index(0, chunks, REVERSE)).to(tl.int64) * H + head
    if CHANNEL:
        half, is_factored = load_half_decay(chunk_decay, factored, o_chunk, chunks > 0, k_start, K, BK)
        b_s, total = decayed(b_s, half, CHANNEL), tl.zeros([BK], tl.float32)
    else:
        decay, total = load_decay(chunk_decay, o_chunk, chunks > 0, k_start, K, BK, CHANNEL), 0.0
    for i in range(chunks):
        n = scan_index(i, chunks, REVERSE)
        token = first + n * C
        count = tl.minimum(C, end - token).to(tl.int32)
        index, o_next = (
            (first_chunk + n).to(tl.int64) * H + head,
            (first_chunk + scan_index(i + 1, chunks, REVERSE)).to(tl.int64) * H + head,
        )
        p_k, m_k = tile(keys, token, count, head, k_start, H, K, C, BK)
        p_v, m_v = tile(values, token, count, head, v_start, H, V, C, BV)
        b_k, b_v = tl.load(p_k, mask=m_k, other=0.0), tl.load(p_v, mask=m_v, other=0.0)  # [C, BK], [C, BV]
        if CHANNEL:
            next_half, next_is_factored = load_half_decay(chunk_decay, factored, o_next, i + 1 < chunks, k_start, K, BK)
        else:
            next_decay = load_decay(chunk_decay, o_next, i + 1 < chunks, k_start, K, BK, CHANNEL)
        if states is not None:
            p_s, m_s = state_tile(states, index, k_start, v_start, K, V, BK, BV)
            tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s)
        if out is not None:
            p_r, m_r = tile(readers, token, count, head, k_start, H, K, C, BK)
            p_a, m_a = tile(scores, token, count, head, 0, H, C, C, C)
            b_r, b_a = tl.load(p_r, mask=m_r, other=0.0), tl.load(p_a, mask=m_a, other=0.0)  # [C, BK], [C, C]
            b_o = tl.dot(b_r, b_s.to(b_r.dtype), input_precision=PRECISION)
            b_o = tl.dot(b_a, b_v, b_o, input_precision=PRECISION)
            p_o, m_o = tile(out, token, count, head, v_start, H, V, C, BV)
            tl.store(p_o, b_o.to(out.dtype.element_ty), mask=m_o)
        if CHANNEL:
            if not is_factored:
                exact = load_decay(chunk_decay, index, True, k_start, K, BK, CHANNEL)
                b_s, total = decayed(b_s, exact, CHANNEL), total + exact
            b_s = tl.dot(tl.trans(b_k), b_v, b_s, input_precision=PRECISION)
            total += 2 * half
            b_s = decayed(decayed(b_s, half, CHANNEL), next_half, CHANNEL)  # both at once may be no number of float32
            half, is_factored = next_half, next_is_factored
        else:
            b_s = tl.dot(tl.trans(b_k), b_v, decayed(b_s, decay, CHANNEL), input_precision=PRECISION)
            total += decay
            decay = next_decay
    if final is not None:
        p_f, m_f = state_tile(final, o_segment, k_start, v_start, K, V, BK, BV)
        tl.store(p_f, b_s, mask=m_f)
    if decays is not None:
        if CHANNEL:
            o_k = k_start + tl.arange(0, BK)
            tl.store(decays + o_segment * K + o_k, total, mask=o_k < K)
        else:
            tl.store(decays + o_segment, total)


@triton.jit
def carry_kernel(
    boundaries, decays, initial, final, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """`boundaries` [sequences * segments, H, K, V]: what each segment would end with, had it begun with nothing, becomes what it begins
    with, S' = 2^decay S + end; and the last state of each sequence, `final`."""
    k_start, v_start, sequence, head = state_block(H, K, V, BK, BV)
    b_s = tl.zeros([BK, BV], tl.float32)
    o_sequence = (sequence * H + head).to(tl.int64)
    if initial is not None:
        p_i, m_i = state_tile(initial, o_sequence, k_start, v_start, K, V, BK, BV)
        b_s += tl.load(p_i, mask=m_i, other=0.0).to(tl.float32)  # [BK, BV]
    for i in range(segments):
        segment = sequence * segments + scan_index(i, segments, REVERSE)
        index = segment.to(tl.int64) * H + head
        p_e, m_e = state_tile(boundaries, index, k_start, v_start, K, V, BK, BV)
        b_e = tl.load(p_e, mask=m_e, other=0.0)  # [BK, BV]
        tl.store(p_e, b_s, mask=m_e)
        b_s = decayed(b_s, load_decay(decays, index, True, k_start, K, BK, CHANNEL), CHANNEL) + b_e
    p_f, m_f = state_tile(final, o_sequence, k_start, v_start, K, V, BK, BV)
    tl.store(p_f, b_s, mask=m_f)


@triton.jit
def combine_kernel(
    readers, scores, values, states, out, table, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = scores values + readers states [B,T,H,V], the second term only if STATES.

    Both are one loop over tokens and then key channels, so that tiles of the second are on their way during the first.
    """
    tl.static_assert(C % BK == 0)
    v_start, chunk, head = channel_block(H, V, BV)
    first, count = chunk_span(chunk, table, T, C)
    o_c, o_i, o_v = tl.arange(0, C)[:, None], tl.arange(0, BK), v_start + tl.arange(0, BV)[None, :]
    o_t, o_state = first * H + head, (chunk.to(tl.int64) * H + head) * (K * V)
    b_o = tl.zeros([C, BV], tl.float32)
    for start in range(0, C + K if STATES else C, BK):
        in_scores, channel = start < C, start - C
        p_l = tl.where(in_scores, scores + o_t * C + start, readers + o_t * K + channel)
        p_r = tl.where(in_scores, values + (o_t + start * H) * V, states + o_state + channel * V)
        b_l = tl.load(
            p_l + o_c * tl.where(in_scores, H * C, H * K) + o_i[None, :],
            mask=(o_c < count) & (in_scores | (o_i < K - channel))[None, :],
            other=0.0,
        )  # [C, BK]
        b_r = tl.load(
            p_r + o_i[:, None] * tl.where(in_scores, H * V, V) + o_v,
            mask=(o_i < tl.where(in_scores, count - start, K - channel))[:, None] & (o_v < V),
            other=0.0,
        )  # [BK, BV]
        b_o = tl.dot(b_l, b_r, b_o, input_precision=PRECISION)
    p_o, m_o = tile(out, first, count, head, v_start, H, V, C, BV)
    tl.store(p_o, b_o.to(out.dtype.element_ty), mask=m_o)


def state_blocks(tiles: dict[str, int], keys: Tensor, values: Tensor) -> int:
    """Into how many blocks these tiles cut the states of one sequence."""
    _, _, heads, value = values.shape
    return heads * cdiv(keys.shape[3], tiles["BK"]) * cdiv(value, tiles["BV"])


def scan_tiles(kernel: str, keys: Tensor, values: Tensor, layout: Layout, narrowest: int = 64) -> tuple[dict[str, int], int]:
    """A scan's tiles, and into how many segments it cuts each sequence, to give each processor a block.

    Segments do some of the work twice, so blocks of half the width come first, where there are enough of those and they are not too narrow;
    they have no more warps than give each thread 32 numbers of the state.
    """
    tiles, available = tile_arguments(kernel, keys, keys.shape[3], values.shape[3]), processors(values.device)
    blocks, half = state_blocks(tiles, keys, values), tiles["BV"] // 2
    enough = 3 * blocks * layout.sequences < 2 * available <= 6 * blocks * layout.sequences
    if enough and half >= narrowest and values.element_size() < 4:
        return tiles | {"BV": half, "num_warps": max(4, min(tiles["num_warps"], tiles["BK"] * half // 1024))}, 1
    return tiles, layout.segments(blocks, available)


def boundaries_shape(keys: Tensor, values: Tensor, layout: Layout, segments: int | None = None) -> tuple[int, ...]:
    """What each segment of each sequence begins with, [sequences * segments, H, K, V]; empty where sequences stay whole."""
    if segments is None:
        _, segments = scan_tiles("read_scan" if reads_in_scan(keys) else "scan", keys, values, layout)
    return (layout.sequences * segments, values.shape[2], keys.shape[3], values.shape[3]) if segments > 1 else (0,)


class Scanned(NamedTuple):
    """What a scan gives; states and out are None where they were not asked for."""

    states: Tensor
    """2^h times the state each chunk begins with (ends with, if reversed) [chunks, H, K, V], in the values' dtype."""
    out: Tensor
    """What was read out, as the values lie."""
    final: Tensor
    """The last state, in float32; of use only if no `boundaries` were given."""
    boundaries: Tensor


def scan(
    keys: Tensor, values: Tensor, chunk_decay: Tensor, factored: Tensor | None, initial: Tensor | None, layout: Layout, *,
    reverse: bool = False, boundaries: Tensor | None = None, store: bool = True, readers: Tensor | None = None,
    scores: Tensor | None = None,
) -> Scanned:  # fmt: skip
    """Stores all states, or reads out with `readers` and `scores`, or both; `boundaries`, if they are known, is what segments begin
    with."""
    (_, _, heads, value), key, sequences, read = values.shape, keys.shape[3], layout.sequences, readers is not None
    known, final = boundaries is not None, values.new_empty((sequences, heads, key, value), dtype=torch.float32)
    tiles, segments = scan_tiles("read_scan" if read else "scan", keys, values, layout)
    if boundaries is None:
        boundaries = final.new_empty(boundaries_shape(keys, values, layout, segments))
    segments = len(boundaries) // sequences or 1
    states = values.new_empty((layout.chunks, heads, key, value)) if store else None
    out = torch.empty_like(values) if read else None
    shape = shape_arguments(keys, layout) | {"V": value, "REVERSE": reverse}
    span = layout.table, layout.starts, segments, layout.length

    def run(begin: Tensor | None, outputs: tuple[Tensor | None, ...], tiles: dict[str, int]) -> None:
        grid = (sequences * segments * state_blocks(tiles, keys, values),)
        given = (keys, values, readers, scores, chunk_decay, factored, begin)
        launch(scan_kernel, grid, (*given, *outputs, *span), shape | tiles)

    if segments > 1 and not known:
        decays = final.new_empty(sequences * segments, heads, *chunk_decay.shape[2:])
        run(None, (None, None, boundaries, decays), scan_tiles("scan", keys, values, layout)[0])
        few = {"H": heads, "K": key, "V": value, "REVERSE": reverse, "CHANNEL": factored is not None, "BK": 16, "BV": 64}
        launch(
            carry_kernel, (sequences * heads * cdiv(key, 16) * cdiv(value, 64),), (boundaries, decays, initial, final, segments), few
        )  # fmt: skip
    if segments == 1:
        run(initial, (states, out, final, None), tiles)
    else:
        run(boundaries, (states, out, None, None), tiles)
    return Scanned(states, out, final, boundaries)  # type: ignore[arg-type]


def combine(readers: Tensor, scores: Tensor, values: Tensor, states: Tensor | None, layout: Layout) -> Tensor:
    """scores values + readers states for every chunk."""
    (_, _, heads, value), out = values.shape, torch.empty_like(values)
    tiles = tile_arguments("combine", readers, readers.shape[3], value)
    launch(
        combine_kernel, (cdiv(value, tiles["BV"]) * layout.chunks * heads,),
        (readers, scores, values, values if states is None else states, out, layout.table, layout.length),
        {**shape_arguments(readers, layout), "V": value, "STATES": states is not None, **tiles, "BK": min(tiles["BK"], layout.chunk)},
    )  # fmt: skip
    return out


def scan_and_read(
    keys: Tensor, readers: Tensor, scores: Tensor, values: Tensor, chunk_decay: Tensor, factored: Tensor | None, initial: Tensor | None,
    layout: Layout, reverse: bool = False,
) -> Scanned:  # fmt: skip
    """A scan and what is read out of it, in one kernel where states are small enough. States are stored if `reverse`, else where needed."""
    given = keys, values, chunk_decay, factored, initial, layout
    if reads_in_scan(keys):
        return scan(*given, reverse=reverse, store=reverse, readers=readers, scores=scores)
    scanned = scan(*given, reverse=reverse)
    return scanned._replace(out=combine(readers, scores, values, scanned.states, layout))
