import pytest


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory: None) -> None:
    """Here all tests run so."""
