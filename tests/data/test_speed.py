"""What preparation and reading must reach: measured beside the bare library, on the same cores, in turns."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headmax.data.dataset import TokenShards
from headmax.data.prepare import PrepareConfig, prepare
from headmax.data.tokenizer import mistral
from tests.data.corpus import documents, write


@pytest.mark.slow
def test_preparation_is_as_fast_as_the_bare_library_and_reading_is_faster_than_training(tmp_path: Path) -> None:
    texts = documents(4000, lines=60)
    path = write(tmp_path / "a.txt", texts)
    tokenizer = mistral().tokenizer
    bare, ours = [], []
    for turn in range(3):
        begin = time.perf_counter()
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        bare.append(sum(len(one.ids) for one in encoded) / (time.perf_counter() - begin))
        begin = time.perf_counter()
        index = prepare(PrepareConfig((str(path),)), tmp_path / f"out{turn}")
        ours.append(index.tokens("train") / (time.perf_counter() - begin))
    print(f"{len(os.sched_getaffinity(0))} cores: bare library {max(bare):,.0f} tokens/s, preparation {max(ours):,.0f} tokens/s")
    assert max(ours) > 0.8 * max(bare)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for how in ("concatenate", "separate"):
            source = TokenShards(tmp_path / "out0", length=4096, seed=0, documents=how)
            rates = []
            for _ in range(5):  # the first warms the pages
                begin = time.perf_counter()
                for step in range(100):
                    source.batch(range(8 * step, 8 * step + 8))
                rates.append(100 * 8 * 4096 / (time.perf_counter() - begin))
            print(f"reading, documents {how}: {max(rates):,.0f} tokens/s")
            assert max(rates) > 20e6
    finally:
        torch.set_num_threads(threads)


def resident(root: int) -> int:
    """Bytes that a process and its children hold."""
    total, family = 0, {root}
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if int(process.name) == root or int(status["PPid"]) in family:
            family.add(int(process.name))
            total += 1024 * int(status.get("VmRSS", "0 kB").split()[0])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("separated", [False, True])
def test_memory_does_not_grow_with_the_input(separated: bool, tmp_path: Path) -> None:
    some = "\n<|doc|>\n".join(documents(500, 60)) if separated else "\n".join(documents(500, 60))
    with (tmp_path / "a.txt").open("w") as file:
        while file.tell() < 200e6:
            file.write(some + "\n")
    command = [sys.executable, "-m", "headmax", "data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    process, peak = subprocess.Popen(command), 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.1)
    print(f"200 MB, one document {not separated}: peak {peak / 2**20:.0f} MiB over all processes")
    assert process.returncode == 0
    assert peak < 1.2e9
