"""Measurements for our own pages, as far as a machine without a GPU can tell."""

import pickle
from importlib import import_module
from pathlib import Path

import pytest
import torch

from headmax import records
from headmax.bench.train import groups
from lab.bench.endure import Memory, equal
from lab.bench.train import kind_of, peers
from tests.command_line import Called


def test_a_steps_kernels_are_sorted_by_what_they_are_for() -> None:
    names = {
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "matrix products",
        "triton_poi_fused_add_mul_7": "compiled passes",
        "query_key_gradients_kernel": "headmax.ops",
        "split_gates_kernel": "headmax.ops",
        "cross_entropy_kernel": "headmax.layers",
        "short_conv_kernel": "headmax.layers",
        "Memset (Device)": "optimizer and others",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "optimizer and others",
    }
    pytest.importorskip("triton")
    for module in ("scalar", "gate", "loss", "conv"):  # a step has them
        import_module(f"headmax.ops.kernels.{module}")
    assert {name: kind_of(name) for name in names} == names


def test_models_reach_the_processes_that_measure_them() -> None:
    """They are pickled on the way, so that none may be a lambda."""
    processes = groups("gla-tiny", "fla") | peers("gla-tiny")
    assert list(processes) == ["headmax", "fla", "fla-compiled", "transformer", "fla-bfloat16", "fla-gates"]
    there = pickle.loads(pickle.dumps(processes))
    assert there["headmax"]["headmax", "softmax"]().config.head_gate is not None
    assert list(groups("gla-tiny", "none")) == ["headmax", "transformer"]


def test_drift_is_measured_after_a_sixteenth_and_every_doubling(lab: Called, tmp_path: Path) -> None:
    done = lab(
        "bench",
        "drift",
        "--recipe",
        "softmax-gla-tiny",
        "--tokens",
        "32",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--out",
        tmp_path / "r.jsonl",
    )
    assert done.returncode == 0, done.stderr
    found = list(records.read(tmp_path / "r.jsonl"))
    assert [record.case for record in found] == [f"softmax-gla-tiny after {n} tokens" for n in (2, 4, 8, 16, 32)]
    assert all(record.value > 0 for record in found)


def test_drift_of_a_prefix_is_measured_against_float64(lab: Called, tmp_path: Path) -> None:
    words = ("--recipe", "softmax-retnet-tiny", "--tokens", "100", "--piece", "30", "--device", "cpu", "--out", tmp_path / "r.jsonl")
    done = lab("bench", "drift", *words)
    assert done.returncode == 0, done.stderr
    found = {(record.case.split()[1], record.metric.split("/")[0]): record.value for record in records.read(tmp_path / "r.jsonl")}
    ways = ("float32, float32 state", "float32, bfloat16 state", "bfloat16, float32 state")
    assert list(found) == [(fed, way) for fed in ("30", "60", "100") for way in ways]
    for fed in ("30", "60", "100"):
        exact, state, model = (found[fed, way] for way in ways)
        assert 0 < exact < 1e-5 < 1e-4 < min(state, model)
        assert max(state, model) < 0.1


def test_growth_of_memory_is_told_from_its_beginning_and_from_noise() -> None:
    def memory(grows: float) -> Memory:
        seconds = [60.0 * n for n in range(60)]
        return Memory(None, seconds, [min(500.0, 5 * t) + grows * t / 3600 + (n * 7 % 5) / 5 for n, t in enumerate(seconds)])  # type: ignore[arg-type]

    for grows in (0.0, 30.0):
        slope, error = memory(grows).growth()
        assert abs(slope - grows) < 3 * error < 3


def test_checkpoints_are_compared_bit_for_bit() -> None:
    x = torch.tensor([1.0, 0.0, torch.nan])
    assert equal(x, x.clone())
    assert not equal(x, torch.tensor([1.0, -0.0, torch.nan]))
    assert not equal(x, x.double())
    assert not equal(x, x[None])
    assert not equal(x, 3)
    assert equal({"step": 3}, {"step": 3})


def test_the_hour_on_record_is_the_one_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    found = {record.case: record for record in records.read(root / "lab/results/long_runs.jsonl")}
    text = (root / "SECURITY.md").read_text()
    for part, done in (("serving", "requests"), ("evaluation", "evaluations"), ("training", "steps")):
        record = found[f"memory of {part}"]
        assert (record.extra["flat"], record.extra["seconds"], record.extra.get("failed", 0)) == (True, 3600, 0)
        growth = f"{record.value:.1f} ± {2 * record.extra['standard error']:.1f} MiB"
        assert f"{record.extra[done]:,} {done}" in text
        assert f"| {record.extra['MiB'][-1]:.0f} MiB | {growth} |" in text
    killed = found["training, killed"]
    assert (killed.value, killed.extra["kills"]) == (1, 30)
    assert f"all {killed.extra['tensors compared']:,} tensors of {killed.extra['checkpoints compared']} checkpoints" in text
    assert killed.commit.startswith("6df6618")
    assert "commit 6df6618" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_kills_beside_a_run_left_alone(lab: Called, tmp_path: Path) -> None:
    words = ("--seconds", "60", "--kills", "2", "--every", "5", "--device", "cpu", "--out", tmp_path / "r.jsonl")
    done = lab("bench", "endure", *words)
    assert done.returncode == 0, done.stderr
    found = {record.case: record for record in records.read(tmp_path / "r.jsonl")}
    assert list(found) == [*(f"memory of {part}" for part in ("serving", "evaluation", "training")), "training, killed"]
    assert found["training, killed"].value == 1
    assert found["training, killed"].extra["kills"] == 2
    assert found["memory of serving"].extra["failed"] == 0


def test_a_stack_of_released_shape_is_timed_beside_transformers(lab: Called, tmp_path: Path) -> None:
    small = ("--tiny", "--layers", "4", "--train", "40x1", "--prefill", "70", "--rounds", "1", "--device", "cpu", "--limit", "120")
    done = lab("bench", "released", "--out", tmp_path / "released.jsonl", *small, "--peers", "headmax,transformers")
    assert done.returncode == 0, done.stderr
    found = {(record.impl, record.case, record.metric): record.value for record in records.read(tmp_path / "released.jsonl")}
    cases = ("prefill 70x1", "training step 40x1", "layer, forward and backward 40x1")
    assert all(found[peer, case, "time"] > 0 for peer in ("headmax", "transformers") for case in cases)
    assert 0 < found["headmax", "70 tokens", "distance to transformers"] <= 1e-5
    done = lab("bench", "released", "--layers", "3")
    assert (done.returncode, done.stderr) == (2, "lab: --layers must be a multiple of 4\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_steps_need_a_gpu(lab: Called) -> None:
    done = lab("bench", "train")
    assert (done.returncode, done.stderr) == (2, "lab: python -m lab bench train needs a CUDA GPU: this machine has cpu\n")


def test_serving_is_measured_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model so small that only the bookkeeping is tested."""
    for package in ("starlette", "uvicorn", "prometheus_client", "httpx2"):
        pytest.importorskip(package)
    from lab.bench import serve
    from tests.generate.checkpoint import make_model

    monkeypatch.setattr(serve, "ours", lambda *_: make_model())
    monkeypatch.setattr(serve, "STEPS", 64)
    monkeypatch.setattr(serve, "LONG", 300)
    plan = serve.Plan("tiny", (2,), prompt=9, new=6, waves=2, piece=512, hit=512, device="cpu", dtype=torch.float32)
    found = {(r.case, r.metric): r for r in serve.measure(plan, ("static", "scheduler", "deterministic", "hit", "prefill"))}
    assert all(record.value > 0 for record in found.values())
    rates = {metric: record for (case, metric), record in found.items() if case == "tiny batch 2, 9 in 6 out"}
    assert set(rates) == {f"{name}/tokens per second" for name in ("static engine", "scheduler", "scheduler, deterministic")}
    assert rates["static engine/tokens per second"].extra["of the static engine"] == 1
    assert [case for case, metric in found if metric == "time to first token"] == [f"tiny hit of 512, {n} new" for n in (1, 16, 128)]
    assert found["tiny batch 2", "inter-token latency, others read p99"].extra["times"] > 0
