"""The pace of reading beside decoding, by counted times: gaps of two steps at most, and no more of them unused than must be."""

from collections.abc import Callable

import pytest
import torch

from headmax.serve.pace import Pace


def simulate(cost: Callable[[int], float], step: float, layers: int, most: int, steps: int = 3000) -> tuple[list[float], float]:
    """The times between steps while prompts are read without end, sorted, and the tokens read a step; as the scheduler goes about it."""
    clock, gaps, read, left, size = [0.0], [], 0, 0, 0
    pace = Pace(256, most, torch.device("cpu"), lambda: clock[0])
    for _ in range(steps):
        begin, seconds, busy = clock[0], pace.budget, False
        while True:
            if not left:
                size, left = pace.tokens(), layers
            blocks, each = pace.blocks(size, seconds)
            if busy and not blocks:
                break
            blocks, busy = min(max(1, blocks), left), True
            watch = pace.start()
            clock[0] += blocks * cost(size)
            pace.read(watch, size, blocks)
            left, seconds = left - blocks, seconds - blocks * each
            read += 0 if left else size
            if left:
                break
        watch = pace.start()
        clock[0] += step
        pace.stepped(watch)
        gaps.append(clock[0] - begin)
    return sorted(gaps), read / steps


@pytest.mark.parametrize("launch", [5e-6, 10e-6])
@pytest.mark.parametrize(("most", "least_read"), [(1024, 100), (4096, 400)])
def test_a_step_of_64_rows_on_an_h200(launch: float, most: int, least_read: int) -> None:
    """softmax-gla-340m: 1.33 ms a step, 24 blocks of 25 launches each, a million tokens a second. A whole pass is launched in 3 to 6 ms."""
    gaps, read = simulate(lambda tokens: max(25 * launch, tokens / 1e6 / 24), 1.33e-3, 24, most)
    assert gaps[-1] <= 2 * 1.33e-3
    assert read >= least_read


@pytest.mark.parametrize("per_token", [0.0005, 0.001, 0.002, 0.0024])
def test_where_arithmetic_takes_the_time_pieces_are_smaller(per_token: float) -> None:
    gaps, read = simulate(lambda tokens: per_token * tokens, 1.0, 24, 4096)
    assert gaps[int(0.99 * len(gaps))] <= 2.05
    assert read * per_token * 24 >= 0.3, "of a step"


def test_compiling_a_kernel_is_not_taken_for_its_time() -> None:
    calls = []

    def cost(tokens: int) -> float:
        calls.append(tokens)
        return 50.0 if calls.count(tokens) == 1 else 0.1

    _, read = simulate(cost, 1.0, 24, 4096, steps=300)
    assert calls[-1] == 4096
    assert read > 500


def test_a_block_that_takes_longer_than_a_step_is_read_one_at_a_time() -> None:
    gaps, read = simulate(lambda tokens: 5.0, 1.0, 24, 1024)
    assert gaps[-1] == 6.0
    assert read == pytest.approx(256 / 24, rel=0.01), "the smallest pieces"
