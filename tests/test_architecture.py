"""The layers of the house: imports go downwards only, and the package needs its plain dependencies alone."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import headmax

SOURCE = Path(headmax.__file__).parent
LEVEL = {
    "ops": 0,
    "data": 1,
    "records": 0,
    "durable": 0,
    "fields": -1,
    "tables": 0,
    "layers": 1,
    "models": 2,
    "train": 3,
    "generate": 3,
    "recipes": 4,
}
LEVEL |= {"analysis": 5, "demo": 6, "bench": 7, "eval": 7, "plan": 7, "serve": 8, "cli": 9}
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


def test_the_package_never_imports_the_laboratory() -> None:
    for path in [*SOURCE.rglob("*.py"), *SOURCE.with_name("headmax_cli").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        assert not [name for name in names if name.split(".")[0] == "lab"], path


def test_the_benchmarks_stay_small() -> None:
    """They are for the user's own card; what only our pages show is measured in lab/bench."""
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE / "bench").glob("*.py")) <= 1000


MANY_PARAMETERS = {"row_kernel", "few_rows_kernel", "rows_kernel", "mixer_step_kernel", "query_key_gradients_channel_exact_kernel"}


def test_kernels_stay_readable() -> None:
    """Files that fit in the head, and kernels whose calls can be checked by eye; a decoding step's take all of a layer's weights."""
    found = set()
    for path in (SOURCE / "ops" / "kernels").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert ast.get_docstring(node), node.name
                found |= {node.name} if len(node.args.args) > 24 else set()
    assert found == MANY_PARAMETERS


def test_tables_have_one_renderer_and_checkpoints_one_loader() -> None:
    owners = {"import rich.table": "tables.py", '" & ".join': "tables.py", "---:": "tables.py", "' | '.join": "tables.py"}
    owners |= {"def load_model(": "train/loading.py", "def read_weights(": "models/weights.py"}
    for root in (SOURCE, SOURCE.parents[1] / "lab"):
        for path in root.rglob("*.py"):
            for words, owner in owners.items():
                assert words not in path.read_text() or str(path.relative_to(root)) == owner, f"{path}: {words}"


def installed(folder: Path) -> None:
    """Copies what a wheel holds: modules, and the package data that pyproject.toml names."""
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"where": ["src"]}
    for package in (SOURCE, SOURCE.with_name("headmax_cli")):
        patterns = ["**/*.py", *settings["package-data"].get(package.name, ())]
        for path in {path for pattern in patterns for path in package.glob(pattern)}:
            target = folder / path.relative_to(SOURCE.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def test_a_wheel_holds_all_data_and_works_without_the_repository(tmp_path: Path) -> None:
    installed(tmp_path)
    here, there = SOURCE.parent, tmp_path
    data, found = ({path.relative_to(root) for path in root.rglob("headmax/**/*") if path.is_file()} for root in (here, there))
    assert {path for path in data if path.suffix not in (".py", ".pyc")} == {path for path in found if path.suffix != ".py"}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = "import headmax; from headmax.demo import recall, verdict; print(headmax.__file__);"
    code += "print(len(verdict.recorded_seeds(recall.METRIC, 'mqar pairs=16 heads=4 key=8 steps=600')), 'seeds')"
    plan = ("efficiency 0.", "measured (softmax-gla-340m", "step predicted")
    for arguments, said in (
        (["-m", "headmax_cli", "plan", "softmax-gla-340m", "--gpu", "h200"], plan),
        (["-c", code], (str(tmp_path / "headmax"), "8 seeds")),
    ):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert all(words in done.stdout for words in said), done.stdout


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
