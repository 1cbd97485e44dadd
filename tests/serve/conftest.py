import importlib.util
from collections.abc import Iterator

import pytest
import torch

NEEDED = ("starlette", "uvicorn", "prometheus_client", "pydantic", "openai", "httpx2")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
"""Without the extra `serve` there is nothing to test."""


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The models here are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
