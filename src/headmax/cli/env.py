"""`headmax env`."""

from __future__ import annotations

PACKAGES = (
    *("headmax", "torch", "triton", "transformers", "tokenizers", "safetensors"),
    *("flash-linear-attention", "accelerate", "peft", "lm-eval"),
)


def env() -> None:
    """Print versions, devices and backends, for bug reports."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from headmax.ops import registry
    from headmax.records import current_commit, describe_device

    commit = current_commit()

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    rows = {name: installed(name) for name in PACKAGES}
    if not commit.startswith("headmax "):
        rows["headmax"] += f" (commit {commit})"
    rows["torch"] += f" (CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'})"
    print(f"{'Python':24}{platform.python_version()} on {platform.platform()}")
    for name, text in rows.items():
        print(f"{name:24}{text}")
    print(f"{'CPU':24}{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores")
    for n in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(n)
        print(f"{f'GPU {n}':24}{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
    if torch.backends.mps.is_available():
        print(f"{'GPU':24}Apple MPS")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    for op in ("head_gate", "linear_attention", "gla", "gated_delta_rule", "kda"):
        reasons = registry.obstacles(op, kind)
        chosen = next(name for name, reason in reasons.items() if reason is None)
        passed = "".join(f"; not {name}: {reason}" for name, reason in reasons.items() if reason is not None)
        print(f"{op:24}auto takes {chosen} on {kind}{passed}")
