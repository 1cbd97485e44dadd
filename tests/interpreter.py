"""Triton's interpreter, made to round as a GPU's matrix units do: bfloat16 operands, and float32 ones cut to 10 bits in "tf32" mode.

And as silent about overflow and zeros: GLA's chunks are first done as if their decays and gates were mild; where they are not, over again.
"""

from typing import Any

import numpy as np


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as the interpreter stores it."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_like_a_gpu() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(bfloat16_bits(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(from_bfloat16(source.data), tl.float32)
        return cast(self, source, target)

    def operand(x: Any, precision: Any) -> np.ndarray:
        if x.dtype.scalar == tl.bfloat16:
            return from_bfloat16(x.data)
        data = x.data.astype(np.float32)
        if x.dtype.scalar == tl.float32 and "TF32x3" not in str(precision) and "IEEE" not in str(precision):
            return (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return data

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        a, b = (operand(x, input_precision).astype(np.float64) for x in (a, b))  # BLAS sums in an order that depends on the width
        product = np.matmul(a, b)
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    run = GridExecutor.__call__

    def silently(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    GridExecutor.__call__ = silently  # type: ignore[method-assign]
    InterpreterBuilder.cast_impl = cast_impl  # type: ignore[method-assign]
    InterpreterBuilder.create_dot = create_dot  # type: ignore[method-assign]
