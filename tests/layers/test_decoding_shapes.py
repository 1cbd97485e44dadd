"""Decoding steps in kernels over sizes of batches and heads, under the checks of tests/memory.py."""

from typing import Any

import pytest

from headmax import HeadGateConfig
from headmax.layers.mixers import MIXERS

from .test_decoding import GPU, RECURRENT, assert_equal_to_plain, here, make, quick

pytest.importorskip("triton")
__all__ = ["quick"]
GATES = {
    "query": HeadGateConfig(init_std=1.0),
    "after": HeadGateConfig(read_position="after_norm", source="hidden", init_std=1.0),
    "none": None,
}
SIZES = (33, 65, 16, 2, 17, 7, 1)
"""Of batches: at each of them products are cut in another way."""
HEADS = ((3, 6, 9), (1, 8, 8), (41, 4, 4), (2, 256, 24), (1, 40, 200))
"""How many, and the channels of their keys and values."""


def all_or_few(few: bool, *case: Any) -> Any:
    """A case, of which a `few` run where kernels are interpreted."""
    return pytest.param(*case, marks=[] if few or GPU else pytest.mark.slow, id="-".join(map(str, case)))


@here
@pytest.mark.parametrize(
    ("mixer", "rows", "gate", "conv_size"),
    [
        all_or_few(m == n, mixer, rows, list(GATES)[(m + n) % 3], (4, 0, 2)[(m + 2 * n) % 3])
        for m, mixer in enumerate((*RECURRENT, "attention"))
        for n, rows in enumerate(SIZES)
    ],
)
def test_every_mixer_and_size_of_batch(mixer: str, rows: int, gate: str, conv_size: int) -> None:
    """With a gate and a convolution of every kind in turn."""
    options = {} if mixer == "attention" else {"head_gate": GATES[gate], "conv_size": conv_size}
    assert_equal_to_plain(make(mixer, **options), rows)


@here
@pytest.mark.parametrize(
    ("mixer", "heads", "key", "value"), [all_or_few(name == "kda" and sizes[0] == 3, name, *sizes) for name in RECURRENT for sizes in HEADS]
)
def test_every_number_and_width_of_heads(mixer: str, heads: int, key: int, value: int) -> None:
    for rows, gate in ((1, "after"), (5, "query")):
        block = make(MIXERS[mixer](head_k_dim=key, head_v_dim=value), num_heads=heads, head_gate=GATES[gate])
        assert_equal_to_plain(block, rows)
