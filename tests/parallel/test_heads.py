"""Tensor parallelism: logits, gates, loss and all gradients are those of one process, in float64."""

import pytest

from tests.parallel.processes import run

pytestmark = pytest.mark.distributed


def check(found: dict) -> None:
    over = {
        case: {key: x for key, x in errors.items() if not x <= (1e-6 if "float32" in key or key == "logits_loss" else 1e-8)}
        for case, errors in found.items()
    }
    assert not {case: errors for case, errors in over.items() if errors}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_with_its_heads_shared_is_the_model(ranks: int) -> None:
    found = run("heads", ranks, False)
    check(found["errors"])
    assert len(found["errors"]) == 23
    numbers = {"the heads of GatedLinearAttention": 1, "the key heads of Mamba2": 1, "the key heads of Attention": 1}
    numbers |= {"vocab_size": 41, "intermediate_size": 33}
    divided = [f"parallel.tensor {ranks} must divide {name}, got {number}" for name, number in numbers.items()]
    kept = "use_cache: ranks with a share of the heads keep no states: pass use_cache=False and no past_key_values"
    assert found["refusals"] == [*divided, kept]
    tokens, layers, sent = 2 * 48, 2, found["sent"]
    more = {kind: (number - sent["plain"]) / (tokens * layers) for kind, number in sent.items()}
    assert more == {"plain": 0, "joint": 2, "softmax": 6, "after-norm": 6, "hidden-heads": 6, "write": 3, "sigmoid": 0, "uniform": 0}
    width, shared = 32, layers * 16 * 32  # GLA's narrow matrix
    embedding, loss = width * tokens, (3 + width) * tokens
    assert sent["plain"] == layers * 4 * width * tokens + shared + embedding + loss


@pytest.mark.slow
def test_compiled_blocks_share_their_heads() -> None:
    check(run("heads", 2, True, seconds=600)["errors"])
