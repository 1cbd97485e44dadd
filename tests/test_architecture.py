"""The layers of the house: imports go downwards only, and the package needs its plain dependencies alone."""

import ast
import subprocess
import sys
from pathlib import Path

import headmax

SOURCE = Path(headmax.__file__).parent
LEVEL = {"ops": 0, "data": 1, "records": 0, "durable": 0, "fields": 0, "layers": 1, "models": 2, "train": 3, "generate": 3, "recipes": 4}
LEVEL |= {"analysis": 5, "demo": 6, "bench": 7, "eval": 7, "reproduce": 8, "serve": 8, "cli": 9}
EXTRAS = [
    "matplotlib",
    "datasets",
    "mistral_common",
    "lm_eval",
    "fla",
    "triton",
    "jaxtyping",
    "pyarrow",
    "zstandard",
    "wonderwords",
    "peft",
    "accelerate",
]


def imported(path: Path) -> set[str]:
    """The parts of headmax a module imports: headmax.ops.gla → ops; names taken from headmax itself count as models."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"headmax.{alias.name}" for alias in node.names] if node.module == "headmax" else [node.module]
            names = [name if name.split(".")[1] in LEVEL else "headmax.models" for name in whole] if node.module[:7] == "headmax" else []
        parts |= {name.split(".")[1] for name in names if name.startswith("headmax.")}
    return parts


def test_imports_go_downwards_only() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in LEVEL]
    assert len(modules) > 40
    for path in modules:
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert part in LEVEL, f"{path}: give {part} a level"
        if part == "records":
            continue
        above = {other for other in imported(path) - {part} if LEVEL[other] >= LEVEL[part]}
        above -= {"data"} if LEVEL[part] > 0 else set()
        assert not above, f"{path.relative_to(SOURCE)} imports {above}"


def python(code: str, *, without: list[str]) -> subprocess.CompletedProcess:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({without!r}));"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)


def test_imports_without_the_extras() -> None:
    code = "import torch, headmax; from headmax import recipes; m = headmax.HeadmaxForCausalLM(recipes.get('softmax-gla-tiny').model);"
    done = python(code + "print(m(torch.ones(1, 5, dtype=torch.int64)).logits.shape)", without=EXTRAS)
    assert done.stdout.strip() == "torch.Size([1, 5, 32000])", done.stderr


def test_importing_headmax_registers_the_auto_classes() -> None:
    from transformers import AutoConfig

    assert type(AutoConfig.for_model("headmax")) is headmax.HeadmaxConfig
    assert (SOURCE / "py.typed").exists()
