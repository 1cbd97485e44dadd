from collections.abc import Iterator

import pytest
import torch

for package in ("starlette", "uvicorn", "prometheus_client", "openai", "httpx2"):
    pytest.importorskip(package)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The models here are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
