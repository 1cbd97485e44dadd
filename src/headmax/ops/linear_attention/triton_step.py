"""One step of linear attention on a tile of the state."""

import triton
import triton.language as tl


@triton.jit
def linear_attention_step(state, q, k, v, decay, read, write):
    """S ← decay S + (write k)^T v ;  o = (read q) S.  state [K, V], q and k [K], v [V]; decay, read and write are numbers."""
    state = decay * state + (write * k)[:, None] * v[None, :]
    return state, read * tl.sum(q[:, None] * state, 0)
