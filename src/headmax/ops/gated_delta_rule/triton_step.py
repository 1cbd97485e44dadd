"""One step of the gated delta rule on a tile of the state."""

import triton
import triton.language as tl


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def gated_delta_rule_step(state, q, k, v, decay, beta, read, write):
    """S' = decay S ;  S ← S' + k^T u, u = beta (write v - k S') ;  o = (read q) S.  state [K, V], q and k [K], v [V]; the rest numbers.

    o = read (q S' + <q, k> u), so that both sums over the state are taken at once, and the gates are not waited for.
    """
    state *= decay
    kept, seen = tl.reduce((k[:, None] * state, q[:, None] * state), 0, add_both)
    u = beta * (write * v - kept)
    return state + k[:, None] * u[None, :], read * (seen + tl.sum(q * k, 0) * u)
