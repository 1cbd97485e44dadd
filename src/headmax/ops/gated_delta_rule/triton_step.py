"""One step of the gated delta rule on a tile of the state."""

import triton
import triton.language as tl


@triton.jit
def gated_delta_rule_step(state, q, k, v, decay, beta, read, write):
    """S' = decay S ;  S ← S' + k^T beta (write v - k S') ;  o = (read q) S.  state [K, V], q and k [K], v [V]; the others are numbers."""
    state *= decay
    state += k[:, None] * (beta * (write * v - tl.sum(k[:, None] * state, 0)))[None, :]
    return state, tl.sum((read * q)[:, None] * state, 0)
