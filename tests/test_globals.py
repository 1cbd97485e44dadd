"""Settings of the whole process stay as the caller has them: the library changes them inside a block at most."""

import ast
import warnings
from pathlib import Path

import pytest
import torch

import headmax
from headmax.train.loading import load_model
from tests.process import state
from tests.train.small import train

SOURCE = Path(headmax.__file__).parent
SETTINGS = ("os.environ", "torch.backends.", "torch._dynamo.config.", "torch._inductor.config.", "torch.multiprocessing.", "np.", "plt.")
NAMES = {
    "torch": ("set_num_threads", "set_default_dtype", "set_default_device", "set_grad_enabled", "set_float32_matmul_precision"),
    "os": ("putenv", "chdir", "umask", "environ.update", "environ.setdefault"),
    "warnings": ("filterwarnings", "simplefilter"),
    "logging": ("basicConfig", "disable"),
    "matplotlib": ("use", "rc"),
    "plt": ("rcParams.update",),
    "np": ("seterr",),
}
CALLS = {f"{module}.{name}" for module, names in NAMES.items() for name in names}
OWN_PROCESS = {"data/encoder.py", "bench/isolated.py", "bench/train.py"}
"""What these change is that of a process which they are alone in."""


def changes(path: Path) -> list[str]:
    """Lines that set what is the process's, outside context managers."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "contextlib.contextmanager" for mark in node.decorator_list):
            node.body = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        found += [ast.unparse(node) for target in targets if ast.unparse(target).startswith(SETTINGS)]
        if isinstance(node, ast.Call) and (ast.unparse(node.func) in CALLS or ast.unparse(node.func).endswith(".setLevel")):
            found.append(ast.unparse(node))
    return found


def test_only_the_command_line_and_processes_of_its_own_change_what_is_global() -> None:
    modules = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    assert set(modules) >= OWN_PROCESS
    inside = [name for name in modules if not name.startswith("cli/") and name not in OWN_PROCESS]
    assert {name: found for name in inside if (found := changes(modules[name]))} == {}
    assert all(changes(modules[name]) for name in OWN_PROCESS)  # the search finds something


def test_training_and_loading(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as `train` has it
    before = state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(tmp_path, max_steps=2, checkpoint_every=1)
        load_model(tmp_path)
    assert not [warning for warning in said if "torch.distributed is disabled" in str(warning.message)]
    assert state() == before


def test_figures(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from headmax.analysis import curves

    train(tmp_path / "run", max_steps=3)
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    curves.draw(list(curves.digest(tmp_path / "run")), tmp_path / "pictures", "run")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend() == backend
