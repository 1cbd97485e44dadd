"""One step of gated linear attention on a tile of the state."""

import triton
import triton.language as tl


@triton.jit
def gla_step(state, q, k, v, decay, read, write):
    """S ← diag(decay) S + (write k)^T v ;  o = (read q) S.  state [K, V], q, k and decay [K], v [V]; read and write are numbers."""
    state = decay[:, None] * state + (write * k)[:, None] * v[None, :]
    return state, read * tl.sum(q[:, None] * state, 0)
